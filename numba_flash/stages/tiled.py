"""Stage `tiled`: the same three steps; the operands of both products pass through shared T×T tiles.

Deletes the re-reads of Q, K, V and P: a block of T×T threads loads each element of its operands once and uses it T
times. For one head, N queries, N_k keys:

    scores     loads Q Nd⌈N_k/T⌉, K N_k·d⌈N/T⌉      stores S N·N_k
    softmax    loads S 3N·N_k                       stores P N·N_k
    output     loads P N·N_k⌈d/T⌉, V N_k·d⌈N/T⌉     stores O Nd

S and P still make the round trip through HBM, as in the paper's Algorithm 0 (arXiv:2205.14135).
"""

import math
from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import no_mask
from . import launch_if_any, numba_type
from .naive import ROWS, dropped, lse, make_softmax


@cache
def make_load_or_zero(real):
    """X[h, i, t], or 0 outside the matrix: what is not there adds nothing to a product."""

    @cuda.jit(device=True)
    def load_or_zero(X, h, i, t):
        if i < X.shape[1] and t < X.shape[2]:
            return X[h, i, t]
        return real(0)

    return load_or_zero


@cache
def make_scores(T, real, allowed):
    """S = scale · QKᵀ, and −∞ where a mask hides the key: one T×T tile of S per block.

    K_j[tx, t] is read down a column: in float32, 8-way bank conflicts at T = 16, 32-way at T = 32.
    """
    load_or_zero = make_load_or_zero(real)

    @cuda.jit
    def scores(Q, K, mask, S, scale):
        Q_i = cuda.shared.array((T, T), real)
        K_j = cuda.shared.array((T, T), real)
        h = cuda.blockIdx.z
        g = h * K.shape[0] // Q.shape[0]
        b = h * mask.shape[0] // Q.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # query of this thread
        col = cuda.blockIdx.x * T + tx                       # key of this thread
        N, N_k = S.shape[1], S.shape[2]
        acc = real(0)
        for t0 in range(0, Q.shape[2], T):                   # walk along d, one tile at a time
            # tx along the last axis: a warp reads neighbouring addresses
            Q_i[ty, tx] = load_or_zero(Q, h, row, t0 + tx)
            K_j[ty, tx] = load_or_zero(K, g, cuda.blockIdx.x * T + ty, t0 + tx)
            cuda.syncthreads()                               # both tiles are complete
            for t in range(T):
                # rows of K_j lie T elements apart and share banks
                acc += Q_i[ty, t] * K_j[tx, t]
            cuda.syncthreads()                               # nobody still reads what the next step overwrites
        if row < N and col < N_k:
            is_allowed = allowed(mask, b, row + N_k - N, col)
            S[h, row, col] = acc * scale if is_allowed else real(-math.inf)  # Alg. 0, l. 1

    return scores


@cache
def make_output(T, real):
    """O = PV: one T×T tile of O per block."""
    load_or_zero = make_load_or_zero(real)

    @cuda.jit
    def output(P, V, O):
        P_ij = cuda.shared.array((T, T), real)
        V_j = cuda.shared.array((T, T), real)
        h = cuda.blockIdx.z
        g = h * V.shape[0] // P.shape[0]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * T + ty                       # query of this thread
        col = cuda.blockIdx.x * T + tx                       # column of this thread
        acc = real(0)
        for j0 in range(0, P.shape[2], T):                   # walk along the keys, one tile at a time
            # tx along the last axis: a warp reads neighbouring addresses
            P_ij[ty, tx] = load_or_zero(P, h, row, j0 + tx)
            V_j[ty, tx] = load_or_zero(V, g, j0 + ty, col)
            cuda.syncthreads()                               # both tiles are complete
            for j in range(T):
                acc += P_ij[ty, j] * V_j[j, tx]
            cuda.syncthreads()                               # nobody still reads what the next step overwrites
        if row < O.shape[1] and col < O.shape[2]:
            O[h, row, col] = acc                             # Alg. 0, l. 3

    return output


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N) or None.

    blocks: the side T of the tiles, or (T, T). Raises ValueError or SharedMemoryError for a tile that does not fit.
    """
    T, _ = fitting_blocks("tiled", blocks, d=Q.shape[2], dtype=Q.dtype)
    O, S, _ = forward_SP(Q, K, V, scale, mask or no_mask(device), T, device=device)
    return O, lse(S, numba_type(Q.dtype), device) if return_lse else None


def forward_SP(Q, K, V, scale, mask, T, *, device=None):
    """The three steps -> O (H, N, d), S (H, N, N_k), and P with what `dropped` makes of it, for the backward pass."""
    real = numba_type(Q.dtype)
    H, N, d = Q.shape
    S = scores(Q, K, scale, mask, T, device=device)
    P, O = empty(S.shape, Q.dtype, device), empty((H, N, d), Q.dtype, device)
    launch(make_softmax(real), (tiles(N, ROWS), H), ROWS, S, P, device=device)
    P_dropped, Z = dropped(P, mask, device=device)
    launch(make_output(T, real), (tiles(d, T), tiles(N, T), H), (T, T), P_dropped, V, O, device=device)
    return O, S, (P, P_dropped, Z)


def scores(Q, K, scale, mask, T, *, device=None):
    """S (H, N, N_k) = scale · QKᵀ, −∞ where a key is hidden."""
    H, N, N_k = Q.shape[0], Q.shape[1], K.shape[1]
    S = empty((H, N, N_k), Q.dtype, device)
    kernel = make_scores(T, numba_type(Q.dtype), mask.allowed)
    grid = tiles(N_k, T), tiles(N, T), H
    launch_if_any(kernel, grid, (T, T), Q, K, mask.keys, S, scale, device=device)
    return S
