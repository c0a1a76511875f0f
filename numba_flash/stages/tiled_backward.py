"""Backward pass of stage `tiled`: Algorithm 3 again; the operands of the four products pass through shared T×T tiles.

For one head, N queries, N_k keys:

    backward_dV    loads P N·N_k⌈d/T⌉, dO Nd⌈N_k/T⌉      stores dV N_k·d
    backward_dP    loads dO Nd⌈N_k/T⌉, V N_k·d⌈N/T⌉      stores dP N·N_k
    backward_dS    loads P 2N·N_k, dP 2N·N_k             stores dS N·N_k
    backward_dQ    loads dS N·N_k⌈d/T⌉, K N_k·d⌈N/T⌉     stores dQ Nd
    backward_dK    loads dS N·N_k⌈d/T⌉, Q Nd⌈N_k/T⌉      stores dK N_k·d

P, dP and dS still make the round trip through HBM, as in the paper's Algorithm 3 (arXiv:2205.14135).
"""

from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import no_mask
from . import launch_if_any, numba_type
from .naive import ROWS, dropped
from .naive_backward import drop, make_dS, probabilities
from .tiled import forward_SP, make_load_or_zero, scores


@cache
def make_dV(T, real):
    """dV = PᵀdO: one T×T tile of dV a block; the heads of Q that share a head of V add up."""
    load_or_zero = make_load_or_zero(real)

    @cuda.jit
    def backward_dV(P, dO, dV):
        P_ij = cuda.shared.array((T, T), real)
        dO_i = cuda.shared.array((T, T), real)
        g = cuda.blockIdx.z
        group = P.shape[0] // dV.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # key of this thread
        col = cuda.blockIdx.x * T + tx                       # column of this thread
        acc = real(0)
        for h in range(g * group, (g + 1) * group):
            for i0 in range(0, P.shape[1], T):               # walk along the queries, one tile at a time
                P_ij[ty, tx] = load_or_zero(P, h, i0 + ty, cuda.blockIdx.y * T + tx)
                dO_i[ty, tx] = load_or_zero(dO, h, i0 + ty, col)
                cuda.syncthreads()                           # both tiles are complete
                for i in range(T):
                    acc += P_ij[i, ty] * dO_i[i, tx]
                cuda.syncthreads()                           # nobody still reads what the next step overwrites
        if row < dV.shape[1] and col < dV.shape[2]:
            dV[g, row, col] = acc                            # Alg. 3, l. 1

    return backward_dV


@cache
def make_dP(T, real):
    """dP = dO Vᵀ: one T×T tile of dP a block."""
    load_or_zero = make_load_or_zero(real)

    @cuda.jit
    def backward_dP(dO, V, dP):
        dO_i = cuda.shared.array((T, T), real)
        V_j = cuda.shared.array((T, T), real)
        h = cuda.blockIdx.z
        g = h * V.shape[0] // dO.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # query of this thread
        col = cuda.blockIdx.x * T + tx                       # key of this thread
        acc = real(0)
        for t0 in range(0, V.shape[2], T):                   # walk along d, one tile at a time
            dO_i[ty, tx] = load_or_zero(dO, h, row, t0 + tx)
            V_j[ty, tx] = load_or_zero(V, g, cuda.blockIdx.x * T + ty, t0 + tx)
            cuda.syncthreads()
            for t in range(T):
                acc += dO_i[ty, t] * V_j[tx, t]
            cuda.syncthreads()
        if row < dP.shape[1] and col < dP.shape[2]:
            dP[h, row, col] = acc                            # Alg. 3, l. 2

    return backward_dP


@cache
def make_dQ(T, real):
    """dQ = scale · dS K: one T×T tile of dQ a block."""
    load_or_zero = make_load_or_zero(real)

    @cuda.jit
    def backward_dQ(dS, K, dQ, scale):
        dS_ij = cuda.shared.array((T, T), real)
        K_j = cuda.shared.array((T, T), real)
        h = cuda.blockIdx.z
        g = h * K.shape[0] // dS.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # query of this thread
        col = cuda.blockIdx.x * T + tx                       # column of this thread
        acc = real(0)
        for j0 in range(0, dS.shape[2], T):                  # walk along the keys, one tile at a time
            dS_ij[ty, tx] = load_or_zero(dS, h, row, j0 + tx)
            K_j[ty, tx] = load_or_zero(K, g, j0 + ty, col)
            cuda.syncthreads()
            for j in range(T):
                acc += dS_ij[ty, j] * K_j[j, tx]
            cuda.syncthreads()
        if row < dQ.shape[1] and col < dQ.shape[2]:
            dQ[h, row, col] = acc * scale                    # Alg. 3, l. 4

    return backward_dQ


@cache
def make_dK(T, real):
    """dK = scale · dSᵀQ: one T×T tile of dK a block; the heads of Q that share a head of K add up."""
    load_or_zero = make_load_or_zero(real)

    @cuda.jit
    def backward_dK(dS, Q, dK, scale):
        dS_ij = cuda.shared.array((T, T), real)
        Q_i = cuda.shared.array((T, T), real)
        g = cuda.blockIdx.z
        group = dS.shape[0] // dK.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # key of this thread
        col = cuda.blockIdx.x * T + tx                       # column of this thread
        acc = real(0)
        for h in range(g * group, (g + 1) * group):
            for i0 in range(0, dS.shape[1], T):              # walk along the queries, one tile at a time
                dS_ij[ty, tx] = load_or_zero(dS, h, i0 + ty, cuda.blockIdx.y * T + tx)
                Q_i[ty, tx] = load_or_zero(Q, h, i0 + ty, col)
                cuda.syncthreads()
                for i in range(T):
                    acc += dS_ij[i, ty] * Q_i[i, tx]
                cuda.syncthreads()
        if row < dK.shape[1] and col < dK.shape[2]:
            dK[g, row, col] = acc * scale                    # Alg. 3, l. 5

    return backward_dK


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O and L (H, N) it runs the forward pass first and keeps P; with them it forms P again. blocks: the side T
    of the tiles, or (T, T). Raises ValueError or SharedMemoryError for a tile that does not fit.
    """
    T, _ = fitting_blocks("tiled", blocks, d=Q.shape[2], dtype=Q.dtype, direction="backward")
    mask = mask or no_mask(device)
    if L is None:
        P, P_dropped, Z = forward_SP(Q, K, V, scale, mask, T, device=device)[2]
    else:
        P = probabilities(scores(Q, K, scale, mask, T, device=device), L, device=device)
        P_dropped, Z = dropped(P, mask, device=device)
    return gradients(Q, K, V, dO, P, P_dropped, Z, scale, mask, T, device=device)


def gradients(Q, K, V, dO, P, P_dropped, Z, scale, mask, T, *, device=None):
    """Algorithm 3 -> dQ (H, N, d), dK and dV (G, N_k, d)."""
    real = numba_type(Q.dtype)
    H, N, d = Q.shape
    G, N_k, _ = K.shape
    over_queries, over_keys = (tiles(d, T), tiles(N, T), H), (tiles(d, T), tiles(N_k, T), G)
    over_scores = (tiles(N_k, T), tiles(N, T), H)
    block = (T, T)
    dQ, dK, dV = (empty(shape, Q.dtype, device) for shape in (Q.shape, K.shape, V.shape))
    dP, dS = empty((H, N, N_k), Q.dtype, device), empty((H, N, N_k), Q.dtype, device)
    launch_if_any(make_dV(T, real), over_keys, block, P_dropped, dO, dV, device=device)
    launch_if_any(make_dP(T, real), over_scores, block, dO, V, dP, device=device)
    drop(dP, Z, mask, device=device)
    launch(make_dS(real), (tiles(N, ROWS), H), ROWS, P, dP, dS, device=device)
    launch(make_dQ(T, real), over_queries, block, dS, K, dQ, scale, device=device)
    launch_if_any(make_dK(T, real), over_keys, block, dS, Q, dK, scale, device=device)
    return dQ, dK, dV
