"""Decoding by stage `flash2`: one query and a long cache of keys, which many blocks share (`split_kv`).

This is Flash-Decoding (Dao, Haziza, Massa & Sizov 2023). With one query there is one tile of queries, so `flash2` would
run one block per head and leave most of a GPU idle. Here each split of the keys gets a block of its own, which leaves
its m_s, l_s and O_s, not yet divided, in HBM; a second kernel merges them, m = max m_s, l = Σ_s exp(m_s − m) l_s and
O = Σ_s exp(m_s − m) O_s / l: pieces of a softmax can be put together in any order (Milakov & Gimelshein 2018,
arXiv:1805.02867). For one head, N queries, N_k keys, in n splits:

    flash2_split   loads Q nNd, K N·N_k·d, V N·N_k·d     stores O_s nNd, m_s nN, l_s nN
    merge_splits   loads O_s nNd, m_s 2nNd, l_s nNd      stores O Nd, L N

A block has one query, so here a thread has a key, and then a column of V and O. Heads of Q that share a head of K and V
each load it (flash-attn puts such a group into one tile of queries, and loads it once). Nothing is dropped.
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import numba_type

COLUMNS = 64  # threads of a block of merge_splits


@cache
def make_split(Bc, d, real, allowed, seen):
    """One query and one split of its keys a block: thread r has key r of each tile, and columns r, r + Bc, … of O."""
    padded = d | 1                                           # odd, so that rows begin in different banks
    weight = make_weight(real)

    @cuda.jit
    def flash2_split(Q, K, V, mask, O_s, m_s, l_s, scale, length):
        K_j = cuda.shared.array((Bc, padded), real)
        Q_i = cuda.shared.array(d, real)
        O_i = cuda.shared.array(d, real)
        S_j = cuda.shared.array(Bc, real)
        P_j = cuda.shared.array(Bc, real)
        i, h, split = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        r = cuda.threadIdx.x
        N, N_k = Q.shape[1], K.shape[1]
        for t in range(r, d, Bc):
            Q_i[t] = Q[h, i, t]
            O_i[t] = real(0)
        l_i = real(0)
        m_i = real(-math.inf)
        end = min((split + 1) * length, seen(i + N_k - N, N_k))
        for j in range(split * length, end, Bc):
            for e in range(r, min(Bc, end - j) * d, Bc):
                K_j[e // d, e % d] = K[g, j + e // d, e % d]
            cuda.syncthreads()                               # K_j is complete, and so is Q_i
            S_j[r] = real(-math.inf)
            if j + r < end and allowed(mask, b, i + N_k - N, j + r):
                s = real(0)
                for t in range(d):
                    s += Q_i[t] * K_j[r, t]
                S_j[r] = s * scale
            cuda.syncthreads()                               # S_j is complete, and K_j has been read
            m_new = m_i
            for c in range(min(Bc, end - j)):
                m_new = max(m_new, S_j[c])
            P_j[r] = weight(S_j[r], m_new)
            cuda.syncthreads()                               # P_j is complete
            old = weight(m_i, m_new)                         # rescales what earlier tiles gave
            l_i *= old
            for c in range(min(Bc, end - j)):
                l_i += P_j[c]
            for t in range(r, d, Bc):
                acc = O_i[t] * old
                for c in range(min(Bc, end - j)):
                    acc += P_j[c] * V[g, j + c, t]
                O_i[t] = acc
            m_i = m_new
        for t in range(r, d, Bc):
            O_s[split, h, i, t] = O_i[t]
        if r == 0:
            m_s[split, h, i] = m_i
            l_s[split, h, i] = l_i

    return flash2_split


@cache
def make_merge(real):
    """O = Σ_s exp(m_s − m) O_s / l and L = m + log l: one thread per element of O. An empty split has m_s = −∞."""
    weight = make_weight(real)

    @cuda.jit
    def merge_splits(O_s, m_s, l_s, O, L):
        i, h = cuda.blockIdx.x, cuda.blockIdx.z
        t = cuda.blockIdx.y * COLUMNS + cuda.threadIdx.x     # column of this thread
        if t < O.shape[2]:
            m = real(-math.inf)
            for split in range(m_s.shape[0]):
                m = max(m, m_s[split, h, i])
            l = real(0)
            acc = real(0)
            for split in range(m_s.shape[0]):
                w = weight(m_s[split, h, i], m)
                l += w * l_s[split, h, i]
                acc += w * O_s[split, h, i, t]
            O[h, i, t] = acc / l if l != real(0) else real(0)
            if t == 0:
                L[h, i] = m + math.log(l) if l != real(0) else m

    return merge_splits


def forward(Q, K, V, scale, splits, *, mask=None, blocks=None, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N).

    splits: how many blocks share the keys of a query. blocks: (1, Bc). Raises ValueError or SharedMemoryError for tiles
    that do not fit.
    """
    H, N, d = Q.shape
    N_k = K.shape[1]
    _, Bc = fitting_blocks("flash2", blocks, d=d, dtype=Q.dtype, direction="split")
    real = numba_type(Q.dtype)
    mask = mask or no_mask(device)
    O_s = empty((splits, H, N, d), Q.dtype, device)
    m_s, l_s = empty((splits, H, N), Q.dtype, device), empty((splits, H, N), Q.dtype, device)
    O, L = empty((H, N, d), Q.dtype, device), empty((H, N), Q.dtype, device)
    length = tiles(tiles(N_k, Bc), splits) * Bc              # keys of a split: whole tiles
    kernel = make_split(Bc, d, real, mask.allowed, mask.seen)
    launch(kernel, (N, H, splits), Bc, Q, K, V, mask.keys, O_s, m_s, l_s, scale, length, device=device)
    launch(make_merge(real), (N, tiles(d, COLUMNS), H), COLUMNS, O_s, m_s, l_s, O, L, device=device)
    return O, L
