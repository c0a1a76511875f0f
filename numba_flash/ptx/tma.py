"""TMA: one thread has a whole box of a tensor copied between global and shared memory.

PTX ISA manual, "Data Movement and Conversion Instructions: cp.async.bulk.tensor" and, for the order of the accesses,
"Async Proxy". What the tensor and the box are says a tensor map, made on the host (tensor_map.py): here a tensor
(heads, N, d) of 2-byte numbers and boxes of 64 columns and some rows of one head. Rows past N arrive as 0 and are not
stored. In shared memory a row is 128 bytes, a box begins at a multiple of 1024, and the eight pieces of 16 bytes are
permuted in each row: piece c of row r lies where piece c XOR r % 8 would (the 128-byte swizzle).

`tensor_map` is an array of 16 uint64 in global memory. Loads and stores take the tensor beside its map, to count where
a ledger is open what lies inside of it.
"""

from functools import cache

from llvmlite import ir
from numba.cuda.extending import intrinsic

from ..engine.gpu import LOADS, STORES, plain_array
from .copies import count
from .inline import device, i32, instruction, u32, u64
from .tensor_map import COLUMNS


@intrinsic
def start_of(typingctx, array):
    """The address of an array in global memory."""

    def build(context, builder, sig, args):
        ty, value = plain_array(context, builder, sig.args[0], args[0])
        return builder.ptrtoint(context.make_array(ty)(context, builder, value).data, ir.IntType(64))

    return u64(array), build


@instruction("fence.proxy.tensormap::generic.acquire.sys [$address], 128;")
def _fence_map(address: u64):
    """PTX ISA manual, "membar, fence"."""


@instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$shared], [$tensor_map, {$column, $row, $head}], [$barrier];"
)
def _load(tensor_map: u64, column: i32, row: i32, head: i32, shared: u32, barrier: u32):
    """From global to shared memory; the bytes arrive at the mbarrier, those outside of the tensor too."""


@instruction("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$tensor_map, {$column, $row, $head}], [$shared];")
def _store(tensor_map: u64, column: i32, row: i32, head: i32, shared: u32):
    """From shared to global memory, in the group that this thread commits next."""


@device
def fence_map(tensor_map):
    """TMA will see a map that lies in global memory; once a block, before its first use."""
    _fence_map(start_of(tensor_map))


@cache
def make_load(rows):
    @device
    def load(tensor, tensor_map, column, row, head, shared, barrier):
        """A box of `rows` rows, to shared memory; its bytes arrive at the mbarrier `barrier`."""
        count(tensor, LOADS, COLUMNS * max(0, min(rows, tensor.shape[1] - row)))
        _load(start_of(tensor_map), column, row, head, shared, barrier)

    return load


@cache
def make_store(rows):
    @device
    def store(tensor, tensor_map, column, row, head, shared):
        """A box of `rows` rows, from shared memory. Before it, the threads that wrote the box call fence_async, and
        synchronise with this one; after it comes `commit`.
        """
        count(tensor, STORES, COLUMNS * max(0, min(rows, tensor.shape[1] - row)))
        _store(start_of(tensor_map), column, row, head, shared)

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
