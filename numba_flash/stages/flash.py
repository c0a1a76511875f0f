"""Stage `flash`: FlashAttention, Algorithm 1 of the paper (Dao et al. 2022, arXiv:2205.14135), line by line.

Deletes S: one kernel does it all, and a tile of S lives and dies in shared memory. K and V are walked through once, in
the outer loop; O, l and m are read and written again at each of its Tc steps. For one head, N queries, N_k keys,
Tc = ⌈N_k/Bc⌉:

    initialise                                                                   stores O Nd, l N, m N
    flash        loads Q TcNd, K N_k·d, V N_k·d, O TcNd, l TcN, m TcN            stores O TcNd, l TcN, m TcN

A block of Br threads works on one head. Each thread has a row of Q_i and O_i in registers; K_j, V_j and S_ij are
shared. S_ij is kept as [key, query], so that neighbouring threads touch neighbouring addresses; its column r belongs to
thread r alone, so that no barrier is needed before it is read. Neighbouring threads read and write rows of Q and O that
lie d elements apart: uncoalesced (lesson 12).

With masks and dropout it is Algorithm 2, whose line 14 is named as such: Z is drawn where it is needed, and not stored.
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import numba_type
from .naive import ROWS
from .online_softmax import lse


@cache
def make_initialise(real):
    """O = 0, l = 0, m = −∞: one thread a row."""

    @cuda.jit
    def initialise(O, l, m):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < O.shape[1]:
            for t in range(O.shape[2]):
                O[h, i, t] = real(0)                         # Alg. 1, l. 2
            l[h, i] = real(0)
            m[h, i] = real(-math.inf)

    return initialise


@cache
def make_forward(Br, Bc, d, real, allowed, first, keep):
    """One block a head, K/V in the outer loop; thread r has row r of each tile of Q and O."""
    weight = make_weight(real)

    @cuda.jit
    def flash(Q, K, V, mask, O, l, m, scale, seed, p_drop):
        K_j = cuda.shared.array((Bc, d), real)
        V_j = cuda.shared.array((Bc, d), real)
        S_ij = cuda.shared.array((Bc, Br), real)
        Q_i = cuda.local.array(d, real)                      # one row: that of this thread
        O_i = cuda.local.array(d, real)
        h = cuda.blockIdx.x
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        r = cuda.threadIdx.x
        N, N_k = Q.shape[1], K.shape[1]
        for j in range(0, N_k, Bc):                          # Alg. 1, l. 5
            for e in range(r, min(Bc, N_k - j) * d, Br):
                K_j[e // d, e % d] = K[g, j + e // d, e % d]  # Alg. 1, l. 6
                V_j[e // d, e % d] = V[g, j + e // d, e % d]
            cuda.syncthreads()                               # K_j and V_j are complete
            for i in range(first(j + N - N_k) + r, N, Br):   # Alg. 1, l. 7
                for t in range(d):
                    Q_i[t] = Q[h, i, t]                      # Alg. 1, l. 8
                    O_i[t] = O[h, i, t]
                l_i = l[h, i]
                m_i = m[h, i]
                m_tile = real(-math.inf)
                for c in range(min(Bc, N_k - j)):
                    s = real(0)
                    for t in range(d):
                        s += Q_i[t] * K_j[c, t]
                    s = s * scale if allowed(mask, b, i + N_k - N, j + c) else real(-math.inf)  # Alg. 1, l. 9
                    S_ij[c, r] = s
                    m_tile = max(m_tile, s)                  # Alg. 1, l. 10
                l_tile = real(0)
                for c in range(min(Bc, N_k - j)):
                    p = weight(S_ij[c, r], m_tile)
                    S_ij[c, r] = p
                    l_tile += p
                if l_tile != real(0):                        # else every key of this tile is hidden
                    m_new = max(m_i, m_tile)                 # Alg. 1, l. 11
                    l_old = weight(m_i, m_new) * l_i         # the sum of earlier tiles, rescaled
                    new = weight(m_tile, m_new)              # rescales what this tile gives
                    l_i = l_old + new * l_tile
                    m_i = m_new
                    for t in range(d):
                        O_i[t] *= l_old                      # Alg. 1, l. 12
                    for c in range(min(Bc, N_k - j)):
                        p = new * S_ij[c, r] * keep(seed, p_drop, h, i, j + c)  # Alg. 2, l. 14
                        for t in range(d):
                            O_i[t] += p * V_j[c, t]          # Alg. 1, l. 12
                    for t in range(d):
                        O_i[t] /= l_i
                for t in range(d):
                    O[h, i, t] = O_i[t]                      # Alg. 1, l. 12
                l[h, i] = l_i                                # Alg. 1, l. 13
                m[h, i] = m_i
            cuda.syncthreads()                               # nobody still reads what the next step overwrites

    return flash


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N) or None.

    blocks: (Br, Bc). Raises ValueError or SharedMemoryError for tiles that do not fit.
    """
    O, l, m = forward_lm(Q, K, V, scale, mask or no_mask(device), blocks=blocks, device=device)
    return O, lse(m, l, numba_type(Q.dtype), device) if return_lse else None


def forward_lm(Q, K, V, scale, mask, *, blocks=None, device=None):
    """What Algorithm 1 returns -> O (H, N, d), l (H, N) and m (H, N)."""
    H, N, d = Q.shape
    Br, Bc = fitting_blocks("flash", blocks, d=d, dtype=Q.dtype)
    real = numba_type(Q.dtype)
    O = empty((H, N, d), Q.dtype, device)
    l, m = empty((H, N), Q.dtype, device), empty((H, N), Q.dtype, device)
    launch(make_initialise(real), (tiles(N, ROWS), H), ROWS, O, l, m, device=device)
    kernel = make_forward(Br, Bc, d, real, mask.allowed, mask.first(), mask.keep(real))
    launch(kernel, H, Br, Q, K, V, mask.keys, O, l, m, scale, mask.seed, mask.p_drop, device=device)
    return O, l, m
