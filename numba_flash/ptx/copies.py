"""Copies between global memory and a block: asynchronous ones, loads of 16 bytes and stores of two elements.

Stores and loads take the array and the indices of the element that they begin with, and count the elements that are
moved where a ledger is open; who copies by `cp_async_16` counts. Addresses in shared memory are those of
`inline.shared_address`.
"""

from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from ..engine.gpu import LOADS, STORES, add_count, plain_array
from .inline import device, f32, i32, immediate, instruction, u32, u64, vector

ELEMENTS = 8  # of 2 bytes in 16 bytes


@intrinsic
def count(typingctx, M, column, elements):
    """Where M is counted, count `elements` more in `column`, LOADS or STORES of engine.gpu; otherwise do nothing."""

    def codegen(context, builder, sig, values):
        add_count(context, builder, sig.args[0], *values)
        return context.get_dummy_value()

    return types.void(M, types.int64, types.int64), codegen


@intrinsic
def address_of(typingctx, M, indices):
    """The address of M[indices] in global memory, where it would be even if there is no such element."""

    def codegen(context, builder, sig, values):
        ty, value = plain_array(context, builder, sig.args[0], values[0])
        array = context.make_array(ty)(context, builder, value)
        address = builder.ptrtoint(array.data, context.get_value_type(types.int64))
        strides = cgutils.unpack_tuple(builder, array.strides)
        for index, stride in zip(cgutils.unpack_tuple(builder, values[1]), strides):
            address = builder.add(address, builder.mul(index, stride))
        return address

    return u64(M, types.UniTuple(types.int64, M.ndim)), codegen


@instruction(
    "{ .reg .pred there; .reg .b32 bytes; setp.lt.s32 there, $row, $end; selp.b32 bytes, 16, 0, there; "
    "cp.async.cg.shared.global [$shared + $offset], [$address + $offset], 16, bytes; }"
)
def cp_async_16(shared: u32, address: u64, offset: immediate, row: immediate, end: i32):
    """Begin to copy 16 bytes from `address` + `offset` in global memory to `shared` + `offset`; zeros if row >= end.

    The bytes pass neither registers nor the first-level cache. They are there once their group has been waited for, by
    the thread that began to copy them. PTX ISA, "cp.async". Compute capability 8.0 and later.
    """


@instruction("cp.async.ca.shared.global [$shared], [$address], 4, $bytes;")
def cp_async_4(shared: u32, address: u64, bytes: u32):
    """Begin to copy 4 bytes, of which `bytes` (0 or 4) are read and the others are zeros."""


@instruction("cp.async.commit_group;")
def cp_async_commit():
    """What this thread has begun to copy since the last commit becomes a group. PTX ISA, "cp.async.commit_group"."""


@instruction("cp.async.wait_group $pending;")
def cp_async_wait(pending: immediate):
    """Wait until at most `pending` (a constant) groups of this thread are not complete: the oldest are waited for.

    Other threads see the copies after a barrier. PTX ISA, "cp.async.wait_group".
    """


@instruction("st.global.b32 [$address], $pair;")
def _store_4(address: u64, pair: u32):
    """4 bytes."""


@instruction("ld.global.v4.b32 $result, [$address];")
def _load_16(address: u64) -> vector(u32, 4):
    """16 bytes."""


@instruction("ld.shared.v2.f32 $result, [$address + $offset];")
def load_shared_floats(address: u32, offset: immediate) -> vector(f32, 2):
    """Two neighbours, float32, from shared memory. PTX ISA, "ld"."""


@device
def store_pair(M, h, i, t, pair):
    """M[h, i, t] and M[h, i, t + 1] = the two elements, of 2 bytes, in `pair`; t is even. PTX ISA, "st"."""
    count(M, STORES, 2)
    _store_4(address_of(M, (h, i, t)), pair)


@device
def load_16(M, h, i, t):
    """M[h, i, t] and the 7 next elements, of 2 bytes, as four registers; t is a multiple of 8. PTX ISA, "ld"."""
    count(M, LOADS, ELEMENTS)
    return _load_16(address_of(M, (h, i, t)))
