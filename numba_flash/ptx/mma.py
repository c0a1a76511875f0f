"""Tensor cores of Ampere and later: `mma.sync`, and `ldmatrix`, which brings its operands from shared memory.

A warp multiplies together: its 32 threads hold the operands and the result, a few registers each. `fragments` says
which element lies where.
"""

from functools import cache

from .inline import f32, immediate, instruction, reads, u32, updates, writes


@cache
def make_mma(kind):
    """mma(C, A, B): C += A B, with A 16 × 16, B 16 × 8 and C 16 × 8. kind: "f16" or "bf16", that of A and B.

    C: 4 float32 a thread; A: 4 registers of two elements each, B: 2. PTX ISA, "mma.sync.aligned.m16n8k16". Compute
    capability 8.0 and later.
    """

    @instruction(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 $C, $A, $B, $C;", pure=True)
    def mma(C: updates(f32, 4), A: reads(u32, 4), B: reads(u32, 2)):
        """C += A B, by a warp."""

    return mma


@instruction(
    "{ .reg .b32 place; xor.b32 place, $start, $along; ldmatrix.sync.aligned.m8n8.x4.shared.b16 $to, [place + $down]; }"
)
def ldmatrix(to: writes(u32, 4), start: u32, along: u32, down: immediate):
    """Four 8 × 8 matrices of 2-byte elements: thread 8q + r of the warp gives the address of row r of matrix q.

    The address is (start XOR along) + down: in a swizzled tile, `along` bytes along the row, a multiple of 16, and
    `down` bytes for a multiple of 8 rows, see `swizzle`. to[q] becomes elements 2(lane % 4) and the next, of row
    lane // 4 of matrix q. PTX ISA, "ldmatrix". Compute capability 7.5 and later.
    """


@instruction(
    "{ .reg .b32 place; xor.b32 place, $start, $along; "
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 $to, [place + $down]; }"
)
def ldmatrix_transposed(to: writes(u32, 4), start: u32, along: u32, down: immediate):
    """`ldmatrix` of the transposed matrices: to[q] becomes rows 2(lane % 4) and the next, of column lane // 4."""
