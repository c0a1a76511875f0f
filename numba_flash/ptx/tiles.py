"""Tiles: of 2-byte elements in shared memory, known by the address where they begin, and of results in registers.

A tile in shared memory has rows of d elements, swizzled. The rows of a tile of results are shared out among the warps:
each has 16·ROWS of them, as a local array C[u, n, e] of float32, with u the block of 16 rows, n the block of 8 columns
and e one of the four elements that `fragments` gives a thread.
"""

from functools import cache

from numba import cuda, int32, uint32

from . import fragments, swizzle
from .copies import ELEMENTS, LOADS, address_of, count, cp_async_4, cp_async_16, store_pair
from .inline import device
from .mma import ldmatrix, ldmatrix_transposed, make_mma
from .numbers import make_pack

place = device(swizzle.place)
row_of = device(fragments.row_of)
column_of = device(fragments.column_of)


@device
def clear(C):
    """C = 0."""
    for u in range(C.shape[0]):
        for n in range(C.shape[1]):
            for e in range(4):
                C[u, n, e] = 0


@device
def clear_row(C, u, r):
    """Row r (0 or 1) of this thread in block u of C = 0."""
    for n in range(C.shape[1]):
        C[u, n, 2 * r] = 0
        C[u, n, 2 * r + 1] = 0


@cache
def make_load_tile(rows, d, threads):
    """load_tile(tile, M, h, first, end): begin to copy rows `first`, … of M[h] into a tile; zeros from row `end` on.

    All threads of the block take part.
    """
    CHUNKS = d // ELEMENTS
    AT_ONCE = threads // CHUNKS  # rows
    ROW_BYTES = 2 * d

    @device
    def load_tile(tile, M, h, first, end):
        row, chunk = cuda.threadIdx.x // CHUNKS, cuda.threadIdx.x % CHUNKS
        start = tile + place(row, chunk, ROW_BYTES)
        address = address_of(M, (h, first, 0)) + uint32(row * ROW_BYTES + chunk * 16)  # all threads' + its own
        there = int32(end - first) - int32(row)  # rows from this thread's on
        for r in range(0, rows, AT_ONCE):
            count(M, LOADS, ELEMENTS if r < there else 0)
            cp_async_16(start, address, r * ROW_BYTES, r, there)

    return load_tile


@device
def load_row(row, L, h, first, end, count_of):
    """Begin to copy L[h, first], …, `count_of` numbers of 4 bytes, to `row` in shared memory; zeros from `end` on."""
    n = cuda.threadIdx.x
    if n < count_of:
        is_there = first + n < end
        count(L, LOADS, 1 if is_there else 0)
        cp_async_4(row + 4 * n, address_of(L, (h, first + n)), 4 if is_there else 0)


@cache
def make_store_row(kind, d):
    """store_row(M, h, row, C, u, r, factor): M[h, row] = factor · row r (0, 1) of block u of C, this thread's part."""
    pack = make_pack(kind)

    @device
    def store_row(M, h, row, C, u, r, factor):
        for n in range(d // 8):
            pair = pack(C[u, n, 2 * r] * factor, C[u, n, 2 * r + 1] * factor)
            store_pair(M, h, row, 8 * n + column_of(cuda.laneid, 0), pair)

    return store_row


@cache
def make_products(kind, ROWS, others, d):
    """Products of tiles, by each warp for its 16·ROWS rows. kind: "f16" or "bf16".

    rows_by_rows(C, A, row, B): C += A Bᵀ; A is a tile in shared memory, of which the warp has rows `row` on, and B one
    of `others` rows. rows_by_columns(C, A, B): C += A B; A is a tile of results in registers with `others` columns,
    rounded to `kind`, and B a tile in shared memory of `others` rows.
    """
    mma, pack = make_mma(kind), make_pack(kind)
    ROW_BYTES = 2 * d
    STEPS, OTHERS, COLUMNS = d // 16, others // 16, d // 16

    @device
    def rows_by_rows(C, A, row, B):
        lane = cuda.laneid
        a = cuda.local.array((ROWS, 4), uint32)
        b = cuda.local.array((2, 2), uint32)
        A_start = A + place(row + lane % 16, lane // 16, ROW_BYTES)
        B_start = B + place(lane // 16 * 8 + lane % 8, lane // 8 % 2, ROW_BYTES)
        for k in range(STEPS):
            for u in range(ROWS):
                ldmatrix(a[u], A_start, 32 * k, 16 * u * ROW_BYTES)
            for n in range(OTHERS):
                ldmatrix(b, B_start, 32 * k, 16 * n * ROW_BYTES)
                for u in range(ROWS):
                    mma(C[u, 2 * n], a[u], b[0])
                    mma(C[u, 2 * n + 1], a[u], b[1])

    @device
    def rows_by_columns(C, A, B):
        lane = cuda.laneid
        a = cuda.local.array((ROWS, 4), uint32)
        b = cuda.local.array((2, 2), uint32)
        B_start = B + place(lane % 16, lane // 16, ROW_BYTES)
        for k in range(OTHERS):
            for u in range(ROWS):
                for q in range(4):  # what two results hold is what one operand A wants
                    a[u, q] = pack(A[u, 2 * k + q // 2, q % 2 * 2], A[u, 2 * k + q // 2, q % 2 * 2 + 1])
            for n in range(COLUMNS):
                ldmatrix_transposed(b, B_start, 32 * n, 16 * k * ROW_BYTES)
                for u in range(ROWS):
                    mma(C[u, 2 * n], a[u], b[0])
                    mma(C[u, 2 * n + 1], a[u], b[1])

    return rows_by_rows, rows_by_columns
