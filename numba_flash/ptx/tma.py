"""TMA: one thread has a whole box of a tensor copied between global and shared memory.

PTX ISA manual, "Data Movement and Conversion Instructions: cp.async.bulk.tensor" and, for the order of the accesses,
"Async Proxy". What the tensor and the box are says a tensor map, made on the host (tensor_map.py): here a tensor
(heads, N, d) of 2-byte numbers and boxes of 64 columns and some rows of one head. Rows past N arrive as 0 and are not
stored.
In shared memory a row is 128 bytes, a box begins at a multiple of 1024, and eight pieces of 16 bytes are permuted in
each row: piece c of row r lies where piece c XOR r % 8 would (the 128-byte swizzle).

The functions take the array beside its map: in a ledger's twin kernel they count what lies inside the tensor.
"""

from functools import cache

from llvmlite import ir
from numba.cuda.extending import intrinsic
from numba.cuda.types import void

from ..engine.gpu import LOADS, STORES, Counted, add_count, plain_array
from .inline import i32, instruction, u32
from .tensor_map import COLUMNS

I32, I64 = ir.IntType(32), ir.IntType(64)


def _copy(context, builder, sig, args, column, rows, text, constraints):
    """Count the box, then inline `text`: $0 address of the map, $1 to $3 column, row, head, then the others."""
    array, tensor_map = sig.args[:2]
    if isinstance(array, Counted):
        shape = plain_array(context, builder, array, args[0]).shape
        N = builder.trunc(builder.extract_value(shape, 1), I32)
        inside = builder.sub(N, args[3])
        for bound, keep in ((rows, "<"), (0, ">")):
            inside = builder.select(builder.icmp_signed(keep, inside, I32(bound)), inside, I32(bound))
        elements = builder.zext(builder.mul(inside, I32(COLUMNS)), I64)
        add_count(context, builder, array, args[0], column, elements)
    _issue(context, builder, tensor_map, args[1], args[2:], text, constraints)
    return context.get_dummy_value()


def _issue(context, builder, tensor_map, value, operands, text, constraints):
    """Inline `text` with the address of the tensor map `value`, and then `operands`."""
    address = builder.ptrtoint(plain_array(context, builder, tensor_map, value).data, I64)
    function = ir.FunctionType(ir.VoidType(), [I64, *(operand.type for operand in operands)])
    builder.call(ir.InlineAsm(function, text, constraints + ",~{memory}", side_effect=True), [address, *operands])


@intrinsic
def fence_map(typingctx, tensor_map):
    """fence_map(tensor_map): TMA will see a map that lies in global memory; once a block, before its first use.

    fence.proxy.tensormap::generic.acquire.sys. PTX ISA manual, "membar, fence".
    """

    def build(context, builder, sig, args):
        _issue(context, builder, sig.args[0], args[0], (), "fence.proxy.tensormap::generic.acquire.sys [$0], 128;", "l")
        return context.get_dummy_value()

    return void(tensor_map), build


@cache
def make_load(rows):
    """load(array, tensor_map, column, row, head, address, barrier): a box, to shared memory.

    cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes. tensor_map: 16 uint64. The bytes of the
    box (outside of the tensor too) arrive at the mbarrier. rows: of the box.
    """
    text = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [$4], [$0, {$1, $2, $3}], [$5];"

    @intrinsic
    def load(typingctx, array, tensor_map, column, row, head, address, barrier):
        def build(context, builder, sig, args):
            return _copy(context, builder, sig, args, LOADS, rows, text, "l,r,r,r,r,r")

        return void(array, tensor_map, i32, i32, i32, u32, u32), build

    return load


@cache
def make_store(rows):
    """store(array, tensor_map, column, row, head, address): a box, from shared memory; what lies inside the tensor.

    cp.async.bulk.tensor.3d.global.shared::cta.bulk_group: belongs to the group that this thread commits next. Before
    it, the threads that wrote the box call fence_async, and synchronise with this one.
    """
    text = "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$0, {$1, $2, $3}], [$4];"

    @intrinsic
    def store(typingctx, array, tensor_map, column, row, head, address):
        def build(context, builder, sig, args):
            return _copy(context, builder, sig, args, STORES, rows, text, "l,r,r,r,r")

        return void(array, tensor_map, i32, i32, i32, u32), build

    return store


@instruction("cp.async.bulk.commit_group;")
def commit():
    """The stores that this thread has issued become a group."""


@instruction("cp.async.bulk.wait_group.read 0;")
def wait_read():
    """Until this thread's groups have read their shared memory, which may then be written again."""


@instruction("cp.async.bulk.wait_group 0;")
def wait_done():
    """Until this thread's groups are in global memory."""


@instruction("fence.proxy.async.shared::cta;")
def fence_async():
    """What this thread has written to shared memory, TMA and wgmma will see."""
