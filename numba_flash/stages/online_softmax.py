"""Stage `online_softmax`: one pass over S gives each row's maximum m and sum l; the product forms P as it goes.

Deletes P and two of the three passes of softmax: while a row of S streams by, a running maximum m and sum l are kept,
and l is rescaled when m grows (Milakov & Gimelshein 2018, arXiv:1805.02867). The product needs no P in HBM: it forms
exp(S − m) / l of a tile in shared memory. For one head, N queries, N_k keys:

    scores       as in `tiled`: loads Q Nd⌈N_k/T⌉, K N_k·d⌈N/T⌉                  stores S N·N_k
    statistics   loads S N·N_k                                                   stores m N, l N
    output       loads S N·N_k⌈d/T⌉, V N_k·d⌈N/T⌉, m and l NT⌈d/T⌉ each         stores O Nd

S is still stored once, and loaded for the statistics and for the product. With dropout, Z is drawn with each tile of P
(⌈d/T⌉ times), and not stored.
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import numba_type
from .naive import ROWS
from .tiled import make_load_or_zero, scores


@cache
def make_statistics(real):
    """m_i = max_j S_ij and l_i = Σ_j exp(S_ij − m_i) in one pass: one thread a row."""
    weight = make_weight(real)

    @cuda.jit
    def statistics(S, m, l):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < S.shape[1]:
            m_i = real(-math.inf)
            l_i = real(0)
            for j in range(S.shape[2]):
                s = S[h, i, j]
                m_new = max(m_i, s)
                l_i = l_i * weight(m_i, m_new) + weight(s, m_new)
                m_i = m_new
            m[h, i] = m_i
            l[h, i] = l_i

    return statistics


@cache
def make_output(T, real, keep):
    """O = softmax(S) V from S, m and l: one T×T tile of O a block; P exists one tile at a time, in shared memory."""
    load_or_zero, weight = make_load_or_zero(real), make_weight(real)

    @cuda.jit
    def output(S, m, l, V, O, seed, p_drop):
        P_ij = cuda.shared.array((T, T), real)
        V_j = cuda.shared.array((T, T), real)
        h = cuda.blockIdx.z
        g = h * V.shape[0] // S.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # query of this thread
        col = cuda.blockIdx.x * T + tx                       # column of this thread
        m_i = m[h, row] if row < S.shape[1] else real(0)
        l_i = l[h, row] if row < S.shape[1] else real(1)
        if l_i == real(0):                                   # no key to attend to: P is 0
            l_i = real(1)
        acc = real(0)
        for j0 in range(0, S.shape[2], T):                   # walk along the keys, one tile at a time
            P_ij[ty, tx] = real(0)
            if row < S.shape[1] and j0 + tx < S.shape[2]:
                p = weight(S[h, row, j0 + tx], m_i) / l_i
                P_ij[ty, tx] = p * keep(seed, p_drop, h, row, j0 + tx)
            V_j[ty, tx] = load_or_zero(V, g, j0 + ty, col)
            cuda.syncthreads()
            for j in range(T):
                acc += P_ij[ty, j] * V_j[j, tx]
            cuda.syncthreads()
        if row < O.shape[1] and col < O.shape[2]:
            O[h, row, col] = acc

    return output


@cache
def make_logsumexp(real):
    """L = m + log l: one thread a row. No keys: m = −∞ and l = 0 give L = −∞."""

    @cuda.jit
    def logsumexp(m, l, L):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < L.shape[1]:
            m_i, l_i = m[h, i], l[h, i]
            L[h, i] = m_i if l_i == real(0) else m_i + math.log(l_i)

    return logsumexp


def lse(m, l, real, device):
    """The log-sum-exp of each row from its m and l, as one more launch."""
    H, N = m.shape
    L = empty((H, N), m.dtype, device)
    launch(make_logsumexp(real), (tiles(N, ROWS), H), ROWS, m, l, L, device=device)
    return L


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N) or None.

    blocks: the side T of the tiles, or (T, T). Raises ValueError or SharedMemoryError for a tile that does not fit.
    """
    T, _ = fitting_blocks("online_softmax", blocks, d=Q.shape[2], dtype=Q.dtype)
    O, _, m, l = forward_Sml(Q, K, V, scale, mask or no_mask(device), T, device=device)
    return O, lse(m, l, numba_type(Q.dtype), device) if return_lse else None


def forward_Sml(Q, K, V, scale, mask, T, *, device=None):
    """The three steps -> O (H, N, d), and what the backward pass keeps: S (H, N, N_k), m (H, N) and l (H, N)."""
    real = numba_type(Q.dtype)
    H, N, d = Q.shape
    S = scores(Q, K, scale, mask, T, device=device)
    m, l = empty((H, N), Q.dtype, device), empty((H, N), Q.dtype, device)
    O = empty((H, N, d), Q.dtype, device)
    launch(make_statistics(real), (tiles(N, ROWS), H), ROWS, S, m, l, device=device)
    kernel, grid = make_output(T, real, mask.keep(real)), (tiles(d, T), tiles(N, T), H)
    launch(kernel, grid, (T, T), S, m, l, V, O, mask.seed, mask.p_drop, device=device)
    return O, S, m, l
