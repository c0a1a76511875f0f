"""Backward pass of stage `flash2`: FlashAttention-2's Algorithm 2 (Dao 2023, arXiv:2307.08691), split by owner.

Deletes the round trips of dQ: one kernel owns tiles of dK and dV and walks through the queries, another owns tiles of
dQ and walks through the keys. Each result is summed on chip by one thread and stored once, so there are no atomics, and
the same bits come out of every run. The price: both kernels compute S, P and dP, seven products where Algorithm 2
has five. D = rowsum(dO ∘ O) comes first. For one head, N queries, N_k keys, Tr = ⌈N/Br⌉, Tc = ⌈N_k/Bc⌉:

    rowsum         loads dO Nd, O Nd                                              stores D N
    backward_dKdV  loads K N_k·d, V N_k·d, Q TcNd, dO TcNd, L TcN, D TcN          stores dK N_k·d, dV N_k·d
    backward_dQ    loads Q Nd, dO Nd, L N, D N, K Tr·N_k·d, V Tr·N_k·d            stores dQ Nd
"""

import math
from functools import cache

from numba import cuda

from ..blocks import STREAM, fitting_blocks, stream, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import launch_if_any, numba_type
from .flash2 import forward
from .naive import ROWS


@cache
def make_rowsum(real):
    """D = rowsum(dO ∘ O): one thread a row."""

    @cuda.jit
    def rowsum(dO, O, D):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < D.shape[1]:
            D_i = real(0)
            for t in range(O.shape[2]):
                D_i += dO[h, i, t] * O[h, i, t]
            D[h, i] = D_i                                    # Alg. 2, l. 4

    return rowsum


@cache
def make_dKdV(Br, Bc, d, real, allowed, first, visited, keep):
    """One tile of keys a block; thread c has key c, with its rows of dK_j and dV_j."""
    padded = d | 1                                           # odd, so that rows begin in different banks
    weight = make_weight(real)

    @cuda.jit
    def backward_dKdV(Q, K, V, mask, block_mask, dO, L, D, dK, dV, scale, seed, p_drop):
        K_j = cuda.shared.array((Bc, padded), real)
        V_j = cuda.shared.array((Bc, padded), real)
        Q_i = cuda.shared.array((Br, d), real)
        dO_i = cuda.shared.array((Br, d), real)
        L_i = cuda.shared.array(Br, real)
        D_i = cuda.shared.array(Br, real)
        dK_j = cuda.local.array(d, real)                     # one row: that of this thread
        dV_j = cuda.local.array(d, real)
        g = cuda.blockIdx.y
        group = Q.shape[0] // K.shape[0]
        c = cuda.threadIdx.x
        j = cuda.blockIdx.x * Bc                             # Alg. 2, l. 5
        N, N_k = Q.shape[1], K.shape[1]
        for e in range(c, min(Bc, N_k - j) * d, Bc):
            K_j[e // d, e % d] = K[g, j + e // d, e % d]     # Alg. 2, l. 6
            V_j[e // d, e % d] = V[g, j + e // d, e % d]
        for t in range(d):
            dK_j[t] = real(0)                                # Alg. 2, l. 7
            dV_j[t] = real(0)
        for h in range(g * group, (g + 1) * group):
            b = h * mask.shape[0] // Q.shape[0]
            for i in range(first(j + N - N_k), N, Br):       # Alg. 2, l. 8
                if not visited(block_mask, i, j):
                    continue
                for e in range(c, min(Br, N - i) * d, Bc):
                    Q_i[e // d, e % d] = Q[h, i + e // d, e % d]  # Alg. 2, l. 9
                    dO_i[e // d, e % d] = dO[h, i + e // d, e % d]
                for r in range(c, min(Br, N - i), Bc):
                    L_i[r] = L[h, i + r]
                    D_i[r] = D[h, i + r]
                cuda.syncthreads()                           # the tiles are complete
                if j + c < N_k:
                    for r in range(min(Br, N - i)):
                        s = real(0)
                        dp = real(0)
                        for t in range(d):
                            s += Q_i[r, t] * K_j[c, t]       # Alg. 2, l. 10
                            dp += dO_i[r, t] * V_j[c, t]     # Alg. 2, l. 13
                        is_allowed = allowed(mask, b, i + r + N_k - N, j + c)
                        s = s * scale if is_allowed else real(-math.inf)
                        p = weight(s, L_i[r])                # Alg. 2, l. 11
                        z = keep(seed, p_drop, h, i + r, j + c)  # Alg. 4 of the paper, l. 14, 15 and 18
                        ds = p * (dp * z - D_i[r])           # Alg. 2, l. 14
                        p *= z
                        for t in range(d):
                            dV_j[t] += p * dO_i[r, t]        # Alg. 2, l. 12
                            dK_j[t] += ds * Q_i[r, t]        # Alg. 2, l. 16
                cuda.syncthreads()                           # nobody still reads what the next step overwrites
        if j + c < N_k:
            for t in range(d):
                dK[g, j + c, t] = dK_j[t] * scale            # Alg. 2, l. 18
                dV[g, j + c, t] = dV_j[t]

    return backward_dKdV


@cache
def make_dQ(Br, Bc, d, real, allowed, seen, visited, keep):
    """One tile of queries a block; thread r has query r, with its rows of Q_i, dO_i and dQ_i."""
    weight = make_weight(real)

    @cuda.jit
    def backward_dQ(Q, K, V, mask, block_mask, dO, L, D, dQ, scale, seed, p_drop):
        K_j = cuda.shared.array((Bc, d), real)
        V_j = cuda.shared.array((Bc, d), real)
        Q_i = cuda.local.array(d, real)                      # one row: that of this thread
        dO_i = cuda.local.array(d, real)
        dQ_i = cuda.local.array(d, real)
        h = cuda.blockIdx.y
        g = h * K.shape[0] // Q.shape[0]
        r = cuda.threadIdx.x
        i = cuda.blockIdx.x * Br + r
        b = h * mask.shape[0] // Q.shape[0]
        N, N_k = Q.shape[1], K.shape[1]
        keys = seen(min(cuda.blockIdx.x * Br + Br, N) - 1 + N_k - N, N_k)  # what the last query of this tile sees
        for t in range(d):
            Q_i[t] = Q[h, i, t] if i < N else real(0)
            dO_i[t] = dO[h, i, t] if i < N else real(0)
            dQ_i[t] = real(0)
        L_i = L[h, i] if i < N else real(0)
        D_i = D[h, i] if i < N else real(0)
        for j in range(0, keys, Bc):
            if not visited(block_mask, cuda.blockIdx.x * Br, j):
                continue
            for e in range(r, min(Bc, keys - j) * d, Br):
                K_j[e // d, e % d] = K[g, j + e // d, e % d]
                V_j[e // d, e % d] = V[g, j + e // d, e % d]
            cuda.syncthreads()                               # K_j and V_j are complete
            if i < N:
                for c in range(min(Bc, keys - j)):
                    s = real(0)
                    dp = real(0)
                    for t in range(d):
                        s += Q_i[t] * K_j[c, t]              # Alg. 2, l. 10
                        dp += dO_i[t] * V_j[c, t]            # Alg. 2, l. 13
                    s = s * scale if allowed(mask, b, i + N_k - N, j + c) else real(-math.inf)
                    dp *= keep(seed, p_drop, h, i, j + c)
                    ds = weight(s, L_i) * (dp - D_i)         # Alg. 2, l. 11 and 14
                    for t in range(d):
                        dQ_i[t] += ds * K_j[c, t]            # Alg. 2, l. 15
            cuda.syncthreads()                               # nobody still reads what the next step overwrites
        if i < N:
            for t in range(d):
                dQ[h, i, t] = dQ_i[t] * scale

    return backward_dQ


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O (H, N, d) and L (H, N) it runs the forward pass first. blocks: (Br, Bc), the queries that a block of
    backward_dQ owns and the keys that a block of backward_dKdV owns; the other side passes in tiles of up to STREAM
    rows. Raises ValueError or SharedMemoryError for tiles that do not fit.
    """
    H, N, d = Q.shape
    G, N_k, _ = K.shape
    Br, Bc = fitting_blocks("flash2", blocks, d=d, dtype=Q.dtype, direction="backward")
    real = numba_type(Q.dtype)
    mask = mask or no_mask(device)
    if L is None:
        O, L = forward(Q, K, V, scale, mask=mask, blocks=mask.sides, device=device)
    D = row_sums(dO, O, device=device)
    dQ, dK, dV = (empty(shape, Q.dtype, device) for shape in (Q.shape, K.shape, V.shape))
    given, numbers = (Q, K, V, mask.keys, mask.blocks, dO, L, D), (scale, mask.seed, mask.p_drop)
    rows, keys = (stream(Br), stream(Bc)) if mask.sides else (STREAM, STREAM)  # none may lie in two tiles of the mask
    kernel = make_dKdV(rows, Bc, d, real, mask.allowed, mask.first(rows), mask.visited, mask.keep(real))
    launch_if_any(kernel, (tiles(N_k, Bc), G), Bc, *given, dK, dV, *numbers, device=device)
    kernel = make_dQ(Br, keys, d, real, mask.allowed, mask.seen, mask.visited, mask.keep(real))
    launch(kernel, (tiles(N, Br), H), Br, *given, dQ, *numbers, device=device)
    return dQ, dK, dV


def row_sums(dO, O, *, device=None):
    """D (H, N) = rowsum(dO ∘ O)."""
    H, N, _ = O.shape
    D = empty((H, N), O.dtype, device)
    launch(make_rowsum(numba_type(O.dtype)), (tiles(N, ROWS), H), ROWS, dO, O, D, device=device)
    return D
