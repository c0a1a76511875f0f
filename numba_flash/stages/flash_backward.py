"""Backward pass of stage `flash`: Algorithm 4 of the paper (Dao et al. 2022, arXiv:2205.14135), line by line.

S and P are computed again, a tile at a time, from Q, K, l and m; nothing of N × N_k is read or written. K and V are
walked through once, in the outer loop, and dK and dV leave once; Q, O, dO, l and m are read at each of the Tc steps,
and dQ is read and written at each. For one head, N queries, N_k keys, Tc = ⌈N_k/Bc⌉:

    initialise_dQ                                                               stores dQ Nd
    flash_backward  loads Q TcNd, O TcNd, dO TcNd, l TcN, m TcN, dQ TcNd,
                          K N_k·d, V N_k·d                                      stores dQ TcNd, dK N_k·d, dV N_k·d

Where only O and L were kept, m = L and l = 1 serve as well, since P = exp(S − m) / l (kernel `split_lse`).

D is computed at each step again, as the algorithm has it, by Br of the threads; FlashAttention-2 computes it once.

A block of Bc threads works on one head of K and V. Each thread has a key, with its rows of dK_j and dV_j in registers,
and its scores one query at a time. Only dQ_i needs the scores of all keys: dS_ij is shared.
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import numba_type
from .flash import forward_lm
from .naive import ROWS


@cache
def make_initialise_dQ(real):
    """dQ = 0: one thread a row."""

    @cuda.jit
    def initialise_dQ(dQ):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < dQ.shape[1]:
            for t in range(dQ.shape[2]):
                dQ[h, i, t] = real(0)                        # Alg. 4, l. 5; FlashAttention-2: Alg. 2, l. 3

    return initialise_dQ


@cache
def make_split_lse(real):
    """m = L and l = 1, for which m + log l = L: one thread a row."""

    @cuda.jit
    def split_lse(L, l, m):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < L.shape[1]:
            m[h, i] = L[h, i]
            l[h, i] = real(1)

    return split_lse


@cache
def make_backward(Br, Bc, d, real, allowed, first, keep):
    """One block a head of K and V, keys in the outer loop; thread c has key c of each tile."""
    padded = d | 1                                           # odd, so that rows begin in different banks
    weight = make_weight(real)

    @cuda.jit
    def flash_backward(Q, K, V, mask, O, l, m, dO, dQ, dK, dV, scale, seed, p_drop):
        K_j = cuda.shared.array((Bc, padded), real)
        V_j = cuda.shared.array((Bc, padded), real)
        Q_i = cuda.shared.array((Br, d), real)
        dO_i = cuda.shared.array((Br, d), real)
        dS_ij = cuda.shared.array((Br, Bc), real)
        l_i = cuda.shared.array(Br, real)
        m_i = cuda.shared.array(Br, real)
        D_i = cuda.shared.array(Br, real)
        dK_j = cuda.local.array(d, real)                     # one row: that of this thread
        dV_j = cuda.local.array(d, real)
        g = cuda.blockIdx.x
        group = Q.shape[0] // K.shape[0]
        c = cuda.threadIdx.x
        N, N_k = Q.shape[1], K.shape[1]
        for j in range(0, N_k, Bc):                          # Alg. 4, l. 6
            for e in range(c, min(Bc, N_k - j) * d, Bc):
                K_j[e // d, e % d] = K[g, j + e // d, e % d]  # Alg. 4, l. 7
                V_j[e // d, e % d] = V[g, j + e // d, e % d]
            for t in range(d):
                dK_j[t] = real(0)                            # Alg. 4, l. 8
                dV_j[t] = real(0)
            for h in range(g * group, (g + 1) * group):
                b = h * mask.shape[0] // Q.shape[0]
                for i in range(first(j + N - N_k), N, Br):   # Alg. 4, l. 9
                    for e in range(c, min(Br, N - i) * d, Bc):
                        Q_i[e // d, e % d] = Q[h, i + e // d, e % d]  # Alg. 4, l. 10
                        dO_i[e // d, e % d] = dO[h, i + e // d, e % d]
                    cuda.syncthreads()                       # K_j, Q_i and dO_i are complete
                    for r in range(c, min(Br, N - i), Bc):
                        l_i[r] = l[h, i + r]                 # 0 for a row with no key, whose weights are 0
                        if l_i[r] == real(0):
                            l_i[r] = real(1)
                        m_i[r] = m[h, i + r]
                        D_i[r] = real(0)
                        for t in range(d):
                            D_i[r] += dO_i[r, t] * O[h, i + r, t]  # Alg. 4, l. 19
                    cuda.syncthreads()                       # so are l_i, m_i and D_i
                    if j + c < N_k:
                        for r in range(min(Br, N - i)):
                            s = real(0)
                            dp = real(0)
                            for t in range(d):
                                s += Q_i[r, t] * K_j[c, t]   # Alg. 4, l. 11
                                dp += dO_i[r, t] * V_j[c, t] # Alg. 4, l. 17
                            is_allowed = allowed(mask, b, i + r + N_k - N, j + c)
                            s = s * scale if is_allowed else real(-math.inf)  # Alg. 4, l. 12
                            p = weight(s, m_i[r]) / l_i[r]   # Alg. 4, l. 13
                            z = keep(seed, p_drop, h, i + r, j + c)  # Alg. 4, l. 14
                            ds = p * (dp * z - D_i[r])       # Alg. 4, l. 18 and 20
                            p *= z                           # Alg. 4, l. 15
                            dS_ij[r, c] = ds
                            for t in range(d):
                                dV_j[t] += p * dO_i[r, t]    # Alg. 4, l. 16
                                dK_j[t] += ds * Q_i[r, t]    # Alg. 4, l. 22
                    cuda.syncthreads()                       # dS_ij is complete
                    for e in range(c, min(Br, N - i) * d, Bc):
                        r, t = e // d, e % d
                        acc = real(0)
                        for k in range(min(Bc, N_k - j)):
                            acc += dS_ij[r, k] * K_j[k, t]
                        dQ[h, i + r, t] += acc * scale       # Alg. 4, l. 21
            if j + c < N_k:
                for t in range(d):
                    dK[g, j + c, t] = dK_j[t] * scale        # Alg. 4, l. 24
                    dV[g, j + c, t] = dV_j[t]
            cuda.syncthreads()                               # nobody still reads K_j

    return flash_backward


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O (H, N, d) and L (H, N) it runs the forward pass first and keeps O, l and m. blocks: (Br, Bc) of the
    backward pass. Raises ValueError or SharedMemoryError for tiles that do not fit.
    """
    H, N, d = Q.shape
    Br, Bc = fitting_blocks("flash", blocks, d=d, dtype=Q.dtype, direction="backward")
    real = numba_type(Q.dtype)
    rows = (tiles(N, ROWS), H)
    mask = mask or no_mask(device)
    if L is None:
        O, l, m = forward_lm(Q, K, V, scale, mask, device=device)
    else:
        l, m = empty((H, N), Q.dtype, device), empty((H, N), Q.dtype, device)
        launch(make_split_lse(real), rows, ROWS, L, l, m, device=device)
    dQ, dK, dV = (empty(shape, Q.dtype, device) for shape in (Q.shape, K.shape, V.shape))
    launch(make_initialise_dQ(real), rows, ROWS, dQ, device=device)
    kernel = make_backward(Br, Bc, d, real, mask.allowed, mask.first(), mask.keep(real))
    arguments = Q, K, V, mask.keys, O, l, m, dO, dQ, dK, dV, scale, mask.seed, mask.p_drop
    launch(kernel, K.shape[0], Bc, *arguments, device=device)
    return dQ, dK, dV
