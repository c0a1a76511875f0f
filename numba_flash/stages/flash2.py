"""Stage `flash2`: the loops exchanged, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1.

Deletes the re-reads of Q, O, l and m: Q is the outer loop, one tile a block of threads; O, m and l stay in registers
until the last key, O is divided by l once, and what leaves is O and L = m + log l. K and V are read by each of the Tr
tiles of queries. For one head, N queries, N_k keys, Tr = ⌈N/Br⌉:

    flash2       loads Q Nd, K Tr·N_k·d, V Tr·N_k·d                                 stores O Nd, L N

Many blocks work on one head, since tiles of queries have nothing to do with each other. Column r of S_ij belongs to
thread r alone. The paper prints an inverse on the factor of line 10 that does not belong there.

A block mask leaves out whole tiles, as in Algorithm 5 of the FlashAttention paper: what is not visited is not loaded.
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empties, launch
from ..masks import make_weight, no_mask
from . import numba_type


@cache
def make_forward(Br, Bc, d, real, allowed, seen, visited, keep):
    """One tile of Q a block; thread r has row r of Q, of O and of m and l."""
    weight = make_weight(real)

    @cuda.jit
    def flash2(Q, K, V, mask, block_mask, O, L, scale, seed, p_drop):
        K_j = cuda.shared.array((Bc, d), real)
        V_j = cuda.shared.array((Bc, d), real)
        S_ij = cuda.shared.array((Bc, Br), real)
        Q_i = cuda.local.array(d, real)                      # one row: that of this thread
        O_i = cuda.local.array(d, real)
        h = cuda.blockIdx.y
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        r = cuda.threadIdx.x
        i = cuda.blockIdx.x * Br + r                         # Alg. 1, l. 3
        N, N_k = Q.shape[1], K.shape[1]
        keys = seen(min(cuda.blockIdx.x * Br + Br, N) - 1 + N_k - N, N_k)  # what the last query of this tile sees
        for t in range(d):
            Q_i[t] = Q[h, i, t] if i < N else real(0)        # Alg. 1, l. 4
            O_i[t] = real(0)                                 # Alg. 1, l. 5
        l_i = real(0)
        m_i = real(-math.inf)
        for j in range(0, keys, Bc):                         # Alg. 1, l. 6
            if not visited(block_mask, cuda.blockIdx.x * Br, j):  # Alg. 5 of the paper, l. 8
                continue
            for e in range(r, min(Bc, keys - j) * d, Br):
                K_j[e // d, e % d] = K[g, j + e // d, e % d]  # Alg. 1, l. 7
                V_j[e // d, e % d] = V[g, j + e // d, e % d]
            cuda.syncthreads()                               # K_j and V_j are complete
            if i < N:
                m_new = m_i
                for c in range(min(Bc, keys - j)):
                    s = real(0)
                    for t in range(d):
                        s += Q_i[t] * K_j[c, t]
                    s = s * scale if allowed(mask, b, i + N_k - N, j + c) else real(-math.inf)  # Alg. 1, l. 8
                    S_ij[c, r] = s
                    m_new = max(m_new, s)                    # Alg. 1, l. 9
                old = weight(m_i, m_new)                     # rescales what earlier tiles gave
                l_i *= old
                for t in range(d):
                    O_i[t] *= old                            # Alg. 1, l. 10
                for c in range(min(Bc, keys - j)):
                    p = weight(S_ij[c, r], m_new)
                    l_i += p                                 # Alg. 1, l. 9
                    p *= keep(seed, p_drop, h, i, j + c)     # Alg. 2 of the paper, l. 14
                    for t in range(d):
                        O_i[t] += p * V_j[c, t]              # Alg. 1, l. 10
                m_i = m_new
            cuda.syncthreads()                               # nobody still reads what the next step overwrites
        if i < N:
            for t in range(d):
                O[h, i, t] = O_i[t] / l_i if l_i != real(0) else real(0)  # Alg. 1, l. 12 and 14
            L[h, i] = m_i + math.log(l_i) if l_i != real(0) else m_i  # Alg. 1, l. 13 and 15

    return flash2


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N).

    blocks: (Br, Bc). L costs N stores whether it is asked for or not. Raises ValueError or SharedMemoryError for tiles
    that do not fit.
    """
    H, N, d = Q.shape
    Br, Bc = fitting_blocks("flash2", blocks, d=d, dtype=Q.dtype)
    O, L = empties((H, N, d), (H, N), dtype=Q.dtype, device=device)
    mask = mask or no_mask(device)
    real = numba_type(Q.dtype)
    kernel = make_forward(Br, Bc, d, real, mask.allowed, mask.seen, mask.visited, mask.keep(real))
    arguments = Q, K, V, mask.keys, mask.blocks, O, L, scale, mask.seed, mask.p_drop
    launch(kernel, (tiles(N, Br), H), Br, *arguments, device=device)
    return O, L
