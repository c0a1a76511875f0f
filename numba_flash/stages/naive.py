"""Stage `naive`: attention as its formula reads, S = scale·QKᵀ, P = softmax(S), O = PV, each a kernel of its own.

One thread per output element; every operand comes from HBM each time it is used. For one head, N queries, N_k keys:

    scores     loads Q N·N_k·d, K N·N_k·d     stores S N·N_k
    softmax    loads S 3N·N_k                 stores P N·N_k
    output     loads P N·N_k·d, V N·N_k·d     stores O Nd

With dropout, `output` reads what one more kernel makes of P, and the backward pass will want both, and Z:

    dropout    loads P N·N_k                  stores P_dropped N·N_k, Z N·N_k bytes

The steps are those of the paper's Algorithm 0 (arXiv:2205.14135), which would read each operand of a product once.
"""

import math
from functools import cache

import numpy as np
from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty, launch
from ..masks import make_weight, no_mask
from . import launch_if_any, numba_type


@cache
def make_scores(real, allowed):
    """S = scale · QKᵀ, and −∞ where a mask hides the key: one thread per score.

    x runs along the last axis of S, so that a warp's stores are neighbours; its loads of K lie d elements apart.
    """

    @cuda.jit
    def scores(Q, K, mask, S, scale):
        j, i = cuda.grid(2)                                  # key, query
        h = cuda.blockIdx.z
        g = h * K.shape[0] // Q.shape[0]                     # several query heads may share one head of K and V
        b = h * mask.shape[0] // Q.shape[0]
        N, N_k = S.shape[1], S.shape[2]
        if i < N and j < N_k:
            acc = real(0)
            for t in range(Q.shape[2]):
                acc += Q[h, i, t] * K[g, j, t]
            S[h, i, j] = acc * scale if allowed(mask, b, i + N_k - N, j) else real(-math.inf)  # Alg. 0, l. 1

    return scores


@cache
def make_softmax(real):
    """P = softmax(S), row by row: one thread per row, three passes over it.

    Neighbouring threads read rows of S that lie N_k elements apart: uncoalesced (lesson 12).
    """
    weight = make_weight(real)

    @cuda.jit
    def softmax(S, P):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < S.shape[1]:
            m = real(-math.inf)
            for j in range(S.shape[2]):
                m = max(m, S[h, i, j])
            l = real(0)
            for j in range(S.shape[2]):
                l += weight(S[h, i, j], m)
            if l == real(0):                                 # no key to attend to: P is 0
                l = real(1)
            for j in range(S.shape[2]):
                P[h, i, j] = weight(S[h, i, j], m) / l       # Alg. 0, l. 2

    return softmax


@cache
def make_dropout(real, keep):
    """P_dropped = Z ∘ P, and what of Z is random: one thread per element."""

    @cuda.jit
    def dropout(P, Z, P_dropped, seed, p_drop):
        j, i = cuda.grid(2)
        h = cuda.blockIdx.z
        if i < P.shape[1] and j < P.shape[2]:
            z = keep(seed, p_drop, h, i, j)
            Z[h, i, j] = 1 if z != real(0) else 0
            P_dropped[h, i, j] = P[h, i, j] * z

    return dropout


@cache
def make_output(real):
    """O = PV: one thread per element of O.

    x runs along the last axis of O and V, so that a warp's stores of O and loads of V are neighbours.
    """

    @cuda.jit
    def output(P, V, O):
        t, i = cuda.grid(2)                                  # column, query
        h = cuda.blockIdx.z
        g = h * V.shape[0] // P.shape[0]
        if i < O.shape[1] and t < O.shape[2]:
            acc = real(0)
            for j in range(P.shape[2]):
                acc += P[h, i, j] * V[g, j, t]
            O[h, i, t] = acc                                 # Alg. 0, l. 3

    return output


@cache
def make_logsumexp(real):
    """L = m + log l, the logarithm of each row's softmax denominator: one thread per row. No keys: L = −∞.

    Neighbouring threads read rows of S that lie N_k elements apart: uncoalesced (lesson 12).
    """
    weight = make_weight(real)

    @cuda.jit
    def logsumexp(S, L):
        i = cuda.grid(1)
        h = cuda.blockIdx.y
        if i < S.shape[1]:
            m = real(-math.inf)
            for j in range(S.shape[2]):
                m = max(m, S[h, i, j])
            l = real(0)
            for j in range(S.shape[2]):
                l += weight(S[h, i, j], m)
            L[h, i] = m if l == real(0) else m + math.log(l)

    return logsumexp


SIDE = 16  # threads along each side of a block
ROWS = 64  # threads of a block of kernels with one thread per row


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None):
    """Q (H, N, d), K and V (G, N_k, d) on the device, N > 0, H a multiple of G -> O (H, N, d) and L (H, N) or None.

    Raises ValueError for any `blocks`: this stage has no tiles.
    """
    fitting_blocks("naive", blocks, d=Q.shape[2], dtype=Q.dtype)
    O, S, _ = forward_SP(Q, K, V, scale, mask or no_mask(device), device=device)
    return O, lse(S, numba_type(Q.dtype), device) if return_lse else None


def forward_SP(Q, K, V, scale, mask, *, device=None):
    """The three steps -> O (H, N, d), S (H, N, N_k), and P with what `dropped` makes of it, for the backward pass."""
    real = numba_type(Q.dtype)
    H, N, d = Q.shape
    S = scores(Q, K, scale, mask, device=device)
    P, O = empty(S.shape, Q.dtype, device), empty((H, N, d), Q.dtype, device)
    launch(make_softmax(real), (tiles(N, ROWS), H), ROWS, S, P, device=device)
    P_dropped, Z = dropped(P, mask, device=device)
    launch(make_output(real), (tiles(d, SIDE), tiles(N, SIDE), H), (SIDE, SIDE), P_dropped, V, O, device=device)
    return O, S, (P, P_dropped, Z)


def scores(Q, K, scale, mask, *, device=None):
    """S (H, N, N_k) = scale · QKᵀ, −∞ where a key is hidden."""
    H, N, N_k = Q.shape[0], Q.shape[1], K.shape[1]
    S = empty((H, N, N_k), Q.dtype, device)
    kernel = make_scores(numba_type(Q.dtype), mask.allowed)
    grid = tiles(N_k, SIDE), tiles(N, SIDE), H
    launch_if_any(kernel, grid, (SIDE, SIDE), Q, K, mask.keys, S, scale, device=device)
    return S


def dropped(P, mask, *, device=None):
    """Z ∘ P (H, N, N_k), and Z (H, N, N_k) as 0 or 1, one byte each; without dropout P itself, and None."""
    if not mask.drops:
        return P, None
    H, N, N_k = P.shape
    real = numba_type(P.dtype)
    Z, P_dropped = empty(P.shape, np.uint8, device), empty(P.shape, P.dtype, device)
    grid = tiles(N_k, SIDE), tiles(N, SIDE), H
    kernel = make_dropout(real, mask.keep(real))
    launch_if_any(kernel, grid, (SIDE, SIDE), P, Z, P_dropped, mask.seed, mask.p_drop, device=device)
    return P_dropped, Z


def lse(S, real, device):
    """The log-sum-exp of each row of S, as one more launch."""
    H, N, _ = S.shape
    L = empty((H, N), S.dtype, device)
    launch(make_logsumexp(real), (tiles(N, ROWS), H), ROWS, S, L, device=device)
    return L
