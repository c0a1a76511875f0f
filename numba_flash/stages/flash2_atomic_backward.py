"""Backward pass of stage `flash2` with atomics: FlashAttention-2's Algorithm 2 (Dao 2023, arXiv:2307.08691).

One kernel: blocks own tiles of keys, and all of them add to dQ in HBM, as in the CUDA package. That is five products,
not seven. The additions happen in the order in which the blocks happen to run, and a floating-point sum depends on its
order: two runs may differ in the last bits of dQ. For one head, N queries, N_k keys, Tc = ⌈N_k/Bc⌉:

    initialise_dQ                                                                stores dQ Nd
    rowsum           loads dO Nd, O Nd                                           stores D N
    backward_atomic  loads K N_k·d, V N_k·d, Q TcNd, dO TcNd, L TcN, D TcN       stores dK N_k·d, dV N_k·d
                     atomics dQ TcNd
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import launch_if_any, numba_type
from .flash2 import forward
from .flash2_backward import row_sums
from .flash_backward import make_initialise_dQ
from .naive import ROWS


@cache
def make_backward(Br, Bc, d, real, allowed, first, visited, keep):
    """One tile of keys a block; thread c has key c, with its rows of dK_j and dV_j."""
    padded = d | 1                                           # odd, so that rows begin in different banks
    weight = make_weight(real)

    @cuda.jit
    def backward_atomic(Q, K, V, mask, block_mask, dO, L, D, dQ, dK, dV, scale, seed, p_drop):
        K_j = cuda.shared.array((Bc, padded), real)
        V_j = cuda.shared.array((Bc, padded), real)
        Q_i = cuda.shared.array((Br, d), real)
        dO_i = cuda.shared.array((Br, d), real)
        dS_ij = cuda.shared.array((Br, Bc), real)
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
                        dS_ij[r, c] = ds
                        for t in range(d):
                            dV_j[t] += p * dO_i[r, t]        # Alg. 2, l. 12
                            dK_j[t] += ds * Q_i[r, t]        # Alg. 2, l. 16
                cuda.syncthreads()                           # dS_ij is complete
                for e in range(c, min(Br, N - i) * d, Bc):
                    r, t = e // d, e % d
                    acc = real(0)
                    for k in range(min(Bc, N_k - j)):
                        acc += dS_ij[r, k] * K_j[k, t]
                    cuda.atomic.add(dQ, (h, i + r, t), acc * scale)  # Alg. 2, l. 15
        if j + c < N_k:
            for t in range(d):
                dK[g, j + c, t] = dK_j[t] * scale            # Alg. 2, l. 18
                dV[g, j + c, t] = dV_j[t]

    return backward_atomic


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O (H, N, d) and L (H, N) it runs the forward pass first. blocks: (Br, Bc); a block owns Bc keys. Raises
    ValueError or SharedMemoryError for tiles that do not fit.
    """
    H, N, d = Q.shape
    G, N_k, _ = K.shape
    Br, Bc = fitting_blocks("flash2", blocks, d=d, dtype=Q.dtype, direction="atomic")
    real = numba_type(Q.dtype)
    mask = mask or no_mask(device)
    if L is None:
        O, L = forward(Q, K, V, scale, mask=mask, blocks=mask.sides, device=device)
    D = row_sums(dO, O, device=device)
    dQ, dK, dV = (empty(shape, Q.dtype, device) for shape in (Q.shape, K.shape, V.shape))
    launch(make_initialise_dQ(real), (tiles(N, ROWS), H), ROWS, dQ, device=device)
    kernel = make_backward(Br, Bc, d, real, mask.allowed, mask.first(Br), mask.visited, mask.keep(real))
    arguments = Q, K, V, mask.keys, mask.blocks, dO, L, D, dQ, dK, dV, scale, mask.seed, mask.p_drop
    launch_if_any(kernel, (tiles(N_k, Bc), G), Bc, *arguments, device=device)
    return dQ, dK, dV
