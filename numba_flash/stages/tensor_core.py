"""Stage `tensor_core`: flash2 with its two products on tensor cores (Ampere and later), for elements of 2 bytes.

Deletes most of the time that arithmetic takes: a warp multiplies a 16 × 16 by a 16 × 8 matrix in one instruction. A
thread holds its share of S_ij, O_i and P_ij in registers, as the instruction lays them out: of each block of 16 × 8
results two neighbours in row lane // 4 and two in row lane // 4 + 8. P_ij goes from the result of one product to the
operand of the next without leaving the thread. Q_i, K_j and V_j lie in shared memory, swizzled, and come there by
cp.async: V_j while S_ij is computed, K_j+1 while it is turned into P_ij and multiplied by V_j. HBM sees what it saw of
flash2: for one head, N queries, N_k keys, Tr = ⌈N/Br⌉:

    tensor_core  loads Q Nd, K Tr·N_k·d, V Tr·N_k·d                                 stores O Nd, L N

Q, K, V, O and P are float16 or bfloat16; S, m, l, O before its last step, and L are float32.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint16

from ..blocks import tiles
from ..engine.launch import empty, launch
from ..masks import make_allowed, no_mask

WARPS = 4
SMALLEST = np.finfo(np.float32).smallest_subnormal  # instead of a scale of 0, since 0 · −∞ is no number
DEFAULT = {64: (128, 64), 128: (128, 64)}  # d -> (Br, Bc)


def shared_bytes(Br, Bc, d):
    """Bytes of shared memory that a block takes: Q_i, K_j and V_j."""
    return (Br + 2 * Bc) * d * 2


@cache
def make_softmax(ROWS, Bc):
    """softmax(S_ij, scale, m_i, l_i, O_i): S_ij becomes P_ij, and m_i, l_i, O_i what they are with this tile.

    scale > 0: the largest of the products is the largest score, and one multiply-add makes s − m of a product.
    """
    from ..ptx.inline import device
    from ..ptx.numbers import exp, larger

    @device
    def softmax(S_ij, scale, m_i, l_i, O_i):
        for u in range(ROWS):
            for r in range(2):
                m_new = float32(-math.inf)
                for n in range(Bc // 8):
                    m_new = larger(m_new, larger(S_ij[u, n, 2 * r], S_ij[u, n, 2 * r + 1]))
                m_new = larger(m_new, cuda.shfl_xor_sync(0xFFFFFFFF, m_new, 1))
                m_new = larger(m_new, cuda.shfl_xor_sync(0xFFFFFFFF, m_new, 2))
                m_new = larger(m_i[u, r], m_new * scale)     # Alg. 1, l. 9
                m_finite = m_new if m_new > float32(-math.inf) else float32(0)  # −∞ − −∞ is no number
                old = exp(m_i[u, r] - m_finite)              # rescales what earlier tiles gave
                m_i[u, r] = m_new
                l_i[u, r] *= old
                for n in range(Bc // 8):
                    for e in range(2 * r, 2 * r + 2):
                        S_ij[u, n, e] = exp(S_ij[u, n, e] * scale - m_finite)
                        l_i[u, r] += S_ij[u, n, e]           # Alg. 1, l. 9, this thread's columns
                for n in range(O_i.shape[1]):
                    for e in range(2 * r, 2 * r + 2):
                        O_i[u, n, e] *= old                  # Alg. 1, l. 10

    return softmax


@cache
def make_masking(ROWS, Bc, masked, seen):
    """What a warp does about keys that are not to be seen; i: its first query, aligned as in `masks`.

    is_whole(i, j, keys): whether query i, and so each after it, sees all of tile j.
    mask_tile(S_ij, value, mask, b, i, j, keys): `value` for what is not seen; of `keys` and on, nothing is.
    """
    from ..ptx.inline import device
    from ..ptx.tiles import column_of, row_of

    key_allowed = make_allowed(0, masked)

    @device
    def is_whole(i, j, keys):
        return masked == 0 and seen(i - j, keys - j) >= Bc

    @device
    def mask_tile(S_ij, value, mask, b, i, j, keys):
        column = int32(column_of(cuda.laneid, 0))
        for u in range(ROWS):
            for r in range(2):
                end = int32(seen(i - j + 16 * u + row_of(cuda.laneid, 2 * r), keys - j)) - column
                for n in range(Bc // 8):
                    for e in range(2):
                        if not (8 * n + e < end and key_allowed(mask, b, 0, j + column + 8 * n + e)):
                            S_ij[u, n, 2 * r + e] = value

    return is_whole, mask_tile


@cache
def make_forward(Br, Bc, d, kind, masked, seen, sign=1, warps=WARPS):
    """One tile of Q a block, each warp has 16·ROWS rows. kind: "f16" or "bf16". sign: the scale's, 1 or −1."""
    from ..ptx.copies import cp_async_commit, cp_async_wait
    from ..ptx.inline import shared_address
    from ..ptx.tiles import clear, make_load_tile, make_products, make_store_row, row_of

    THREADS = 32 * warps
    ROWS, KEYS, COLUMNS = Br // (16 * warps), Bc // 8, d // 8
    Q_BYTES, K_BYTES = 2 * Br * d, 2 * Bc * d
    load_Q, load_K = make_load_tile(Br, d, THREADS), make_load_tile(Bc, d, THREADS)
    rows_by_rows, rows_by_columns = make_products(kind, ROWS, Bc, d)
    softmax, (is_whole, mask_tile) = make_softmax(ROWS, Bc), make_masking(ROWS, Bc, masked, seen)
    store_row = make_store_row(kind, d)

    @cuda.jit(launch_bounds=THREADS)
    def tensor_core(Q, K, V, mask, O, L, scale):
        Q_i = shared_address(cuda.shared.array(0, uint16))
        K_j = Q_i + Q_BYTES
        V_j = K_j + K_BYTES
        S_ij = cuda.local.array((ROWS, KEYS, 4), float32)    # what this thread has of the tiles of results
        O_i = cuda.local.array((ROWS, COLUMNS, 4), float32)
        m_i = cuda.local.array((ROWS, 2), float32)
        l_i = cuda.local.array((ROWS, 2), float32)
        h = cuda.blockIdx.y
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        N, N_k = Q.shape[1], K.shape[1]
        i = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br      # Alg. 1, l. 3; with causal order the longest first
        keys = seen(min(i + Br, N) - 1 + N_k - N, N_k)       # what the last query of this tile sees
        first = cuda.threadIdx.x // 32 * 16 * ROWS           # of the rows of this warp
        load_Q(Q_i, Q, h, i, N)                              # Alg. 1, l. 4
        load_K(K_j, K, g, 0, keys)
        cp_async_commit()
        clear(O_i)                                           # Alg. 1, l. 5
        for u in range(ROWS):
            for r in range(2):
                l_i[u, r] = 0
                m_i[u, r] = -math.inf
        for j in range(0, keys, Bc):                         # Alg. 1, l. 6
            cp_async_wait(0)
            cuda.syncthreads()                               # K_j is complete, nobody still reads V_j-1
            load_K(V_j, V, g, j, keys)                       # Alg. 1, l. 7
            cp_async_commit()
            clear(S_ij)
            rows_by_rows(S_ij, Q_i, first, K_j)              # Alg. 1, l. 8
            for u in range(ROWS):
                for n in range(KEYS):
                    for e in range(4):
                        S_ij[u, n, e] *= float32(sign)       # 1 is left out by the compiler
            if not is_whole(i + first + N_k - N, j, keys):
                mask_tile(S_ij, float32(-math.inf), mask, b, i + first + N_k - N, j, keys)
            cp_async_wait(0)
            cuda.syncthreads()                               # V_j is complete, nobody still reads K_j
            load_K(K_j, K, g, j + Bc, keys)                  # Alg. 1, l. 7, for the next step
            cp_async_commit()
            softmax(S_ij, scale, m_i, l_i, O_i)              # Alg. 1, l. 9 and 10
            rows_by_columns(O_i, S_ij, V_j)                  # Alg. 1, l. 10
        cp_async_wait(0)                                     # nothing arrives after the block has gone
        for u in range(ROWS):
            for r in range(2):
                l = l_i[u, r]
                l += cuda.shfl_xor_sync(0xFFFFFFFF, l, 1)    # the four threads of a row
                l += cuda.shfl_xor_sync(0xFFFFFFFF, l, 2)
                row = i + first + 16 * u + row_of(cuda.laneid, 2 * r)
                inverse = float32(1) / l if l != float32(0) else float32(0)
                if row < N:
                    store_row(O, h, row, O_i, u, r, inverse)  # Alg. 1, l. 12 and 14
                    if cuda.laneid % 4 == 0:                 # Alg. 1, l. 13 and 15
                        L[h, row] = m_i[u, r] + math.log(l) if l != float32(0) else float32(-math.inf)

    return tensor_core


def kind_of(array):
    """How PTX calls the type of an array's elements."""
    return "f16" if array.dtype == np.float16 else "bf16"


def empty_like(array, device):
    """A new array of 2-byte elements, all NaN: of float16 and of bfloat16 alike, since every bit is 1."""
    return empty(array.shape, np.float16, device).view(array.dtype)


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G, d 64 or 128 -> O (H, N, d), L (H, N).

    Q, K, V: float16, or bfloat16 as `np.dtype("V2")`; O is as they are, L float32. blocks: (Br, Bc), Br a multiple of
    64 and Bc of 16.
    """
    H, N, d = Q.shape
    Br, Bc = blocks or DEFAULT[d]
    mask = mask or no_mask(device)
    O, L = empty_like(Q, device), empty((H, N), np.float32, device)
    kernel = make_forward(Br, Bc, d, kind_of(Q), int(mask.masked), mask.seen, -1 if scale < 0 else 1)
    scale = max(np.float32(abs(scale)), SMALLEST)
    Q_bits, K_bits, V_bits, O_bits = (array.view(np.uint16) for array in (Q, K, V, O))
    arguments = Q_bits, K_bits, V_bits, mask.keys, O_bits, L, scale
    launch(kernel, (tiles(N, Br), H), 32 * WARPS, *arguments, shared_bytes=shared_bytes(Br, Bc, d), device=device)
    return O, L
