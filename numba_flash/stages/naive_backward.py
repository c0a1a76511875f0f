"""Backward pass of stage `naive`: Algorithm 3 of the paper (Dao et al. 2022, arXiv:2205.14135), five kernels.

P is kept from the forward pass; dP and dS are written to HBM and read again. One thread per element of the result,
every operand from HBM each time it is used. For one head, N queries, N_k keys:

    backward_dV    loads P N·N_k·d, dO N·N_k·d     stores dV N_k·d
    backward_dP    loads dO N·N_k·d, V N·N_k·d     stores dP N·N_k
    backward_dS    loads P 2N·N_k, dP 2N·N_k       stores dS N·N_k
    backward_dQ    loads dS N·N_k·d, K N·N_k·d     stores dQ Nd
    backward_dK    loads dS N·N_k·d, Q N·N_k·d     stores dK N_k·d

Where only O and L were kept, P has to be formed again: S as in the forward pass, then

    probabilities  loads S N·N_k, L N·N_k          stores P N·N_k

With dropout, dV comes from P_dropped, and before dS

    dropout_backward  loads Z N·N_k bytes, dP N·N_k   stores dP N·N_k
"""

from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import launch_if_any, numba_type
from .naive import ROWS, SIDE, dropped, forward_SP, scores


@cache
def make_dV(real):
    """dV = PᵀdO: one thread per element; the heads of Q that share a head of V add up."""

    @cuda.jit
    def backward_dV(P, dO, dV):
        t, j = cuda.grid(2)                                  # column, key
        g = cuda.blockIdx.z
        group = P.shape[0] // dV.shape[0]
        if j < dV.shape[1] and t < dV.shape[2]:
            acc = real(0)
            for h in range(g * group, (g + 1) * group):
                for i in range(P.shape[1]):
                    acc += P[h, i, j] * dO[h, i, t]
            dV[g, j, t] = acc                                # Alg. 3, l. 1

    return backward_dV


@cache
def make_dP(real):
    """dP = dO Vᵀ: one thread per element."""

    @cuda.jit
    def backward_dP(dO, V, dP):
        j, i = cuda.grid(2)                                  # key, query
        h = cuda.blockIdx.z
        g = h * V.shape[0] // dO.shape[0]
        if i < dP.shape[1] and j < dP.shape[2]:
            acc = real(0)
            for t in range(V.shape[2]):
                acc += dO[h, i, t] * V[g, j, t]
            dP[h, i, j] = acc                                # Alg. 3, l. 2

    return backward_dP


@cache
def make_dropout_backward(real):
    """dP = Z ∘ dP, in place: one thread per element. Z holds 1 for a weight that was kept."""

    @cuda.jit
    def dropout_backward(Z, dP, p_drop):
        j, i = cuda.grid(2)
        h = cuda.blockIdx.z
        if i < dP.shape[1] and j < dP.shape[2]:
            z = real(1 / (1 - p_drop)) if Z[h, i, j] != 0 else real(0)
            dP[h, i, j] *= z

    return dropout_backward


@cache
def make_dS(real):
    """dS_ij = P_ij (dP_ij − D_i), where D_i = Σ_j P_ij dP_ij: one thread per row, two passes over it."""

    @cuda.jit
    def backward_dS(P, dP, dS):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < dS.shape[1]:
            D_i = real(0)
            for j in range(dS.shape[2]):
                D_i += P[h, i, j] * dP[h, i, j]
            for j in range(dS.shape[2]):
                dS[h, i, j] = P[h, i, j] * (dP[h, i, j] - D_i)  # Alg. 3, l. 3

    return backward_dS


@cache
def make_dQ(real):
    """dQ = scale · dS K: one thread per element."""

    @cuda.jit
    def backward_dQ(dS, K, dQ, scale):
        t, i = cuda.grid(2)                                  # column, query
        h = cuda.blockIdx.z
        g = h * K.shape[0] // dS.shape[0]
        if i < dQ.shape[1] and t < dQ.shape[2]:
            acc = real(0)
            for j in range(dS.shape[2]):
                acc += dS[h, i, j] * K[g, j, t]
            dQ[h, i, t] = acc * scale                        # Alg. 3, l. 4

    return backward_dQ


@cache
def make_dK(real):
    """dK = scale · dSᵀQ: one thread per element; the heads of Q that share a head of K add up."""

    @cuda.jit
    def backward_dK(dS, Q, dK, scale):
        t, j = cuda.grid(2)                                  # column, key
        g = cuda.blockIdx.z
        group = dS.shape[0] // dK.shape[0]
        if j < dK.shape[1] and t < dK.shape[2]:
            acc = real(0)
            for h in range(g * group, (g + 1) * group):
                for i in range(dS.shape[1]):
                    acc += dS[h, i, j] * Q[h, i, t]
            dK[g, j, t] = acc * scale                        # Alg. 3, l. 5

    return backward_dK


@cache
def make_probabilities(real):
    """P = exp(S − L): one thread per element."""
    weight = make_weight(real)

    @cuda.jit
    def probabilities(S, L, P):
        j, i = cuda.grid(2)
        h = cuda.blockIdx.z
        if i < S.shape[1] and j < S.shape[2]:
            P[h, i, j] = weight(S[h, i, j], L[h, i])

    return probabilities


def probabilities(S, L, *, device=None):
    """P (H, N, N_k) from S and L (H, N), for stages that did not keep it."""
    H, N, N_k = S.shape
    P = empty(S.shape, S.dtype, device)
    kernel = make_probabilities(numba_type(S.dtype))
    launch_if_any(kernel, (tiles(N_k, SIDE), tiles(N, SIDE), H), (SIDE, SIDE), S, L, P, device=device)
    return P


def drop(dP, Z, mask, *, device=None):
    """Multiply dP (H, N, N_k) by Z in place, where there is dropout."""
    if Z is not None:
        H, N, N_k = dP.shape
        grid = tiles(N_k, SIDE), tiles(N, SIDE), H
        kernel = make_dropout_backward(numba_type(dP.dtype))
        launch_if_any(kernel, grid, (SIDE, SIDE), Z, dP, mask.p_drop, device=device)


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O and L (H, N) it runs the forward pass first and keeps P. Raises ValueError for any `blocks`.
    """
    fitting_blocks("naive", blocks, d=Q.shape[2], dtype=Q.dtype, direction="backward")
    mask = mask or no_mask(device)
    if L is None:
        P, P_dropped, Z = forward_SP(Q, K, V, scale, mask, device=device)[2]
    else:
        P = probabilities(scores(Q, K, scale, mask, device=device), L, device=device)
        P_dropped, Z = dropped(P, mask, device=device)
    real = numba_type(Q.dtype)
    H, N, d = Q.shape
    G, N_k, _ = K.shape
    over_queries, over_keys = (tiles(d, SIDE), tiles(N, SIDE), H), (tiles(d, SIDE), tiles(N_k, SIDE), G)
    over_scores = (tiles(N_k, SIDE), tiles(N, SIDE), H)
    block = (SIDE, SIDE)
    dQ, dK, dV = (empty(shape, Q.dtype, device) for shape in (Q.shape, K.shape, V.shape))
    dP, dS = empty((H, N, N_k), Q.dtype, device), empty((H, N, N_k), Q.dtype, device)
    launch_if_any(make_dV(real), over_keys, block, P_dropped, dO, dV, device=device)
    launch_if_any(make_dP(real), over_scores, block, dO, V, dP, device=device)
    drop(dP, Z, mask, device=device)
    launch(make_dS(real), (tiles(N, ROWS), H), ROWS, P, dP, dS, device=device)
    launch(make_dQ(real), over_queries, block, dS, K, dQ, scale, device=device)
    launch_if_any(make_dK(real), over_keys, block, dS, Q, dK, scale, device=device)
    return dQ, dK, dV
