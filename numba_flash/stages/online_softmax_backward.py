"""Backward pass of stage `online_softmax`: it never stored P, so it forms P first, then goes on as `tiled` does.

What it kept is S, m and l. For one head, N queries, N_k keys:

    form_P         loads S N·N_k, m N·N_k, l N·N_k     stores P N·N_k
    and then backward_dV, backward_dP, backward_dS, backward_dQ and backward_dK as in `tiled`

To delete P from the forward pass alone saves nothing in training: Algorithm 3 (arXiv:2205.14135) asks for it.
"""

from functools import cache

from numba import cuda

from ..blocks import fitting_blocks, tiles
from ..engine.launch import empty
from ..masks import make_weight, no_mask
from . import launch_if_any, numba_type
from .naive import dropped
from .naive_backward import probabilities
from .online_softmax import forward_Sml
from .tiled import scores
from .tiled_backward import gradients


@cache
def make_P(real):
    """P = exp(S − m) / l: one thread per element."""
    weight = make_weight(real)

    @cuda.jit
    def form_P(S, m, l, P):
        j, i = cuda.grid(2)
        h = cuda.blockIdx.z
        if i < S.shape[1] and j < S.shape[2]:
            p, l_i = weight(S[h, i, j], m[h, i]), l[h, i]
            P[h, i, j] = p / l_i if l_i != real(0) else real(0)

    return form_P


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None):
    """Q, dO (H, N, d), K and V (G, N_k, d) on the device, N > 0 -> dQ (H, N, d), dK and dV (G, N_k, d).

    Without O and L (H, N) it runs the forward pass first and keeps S, m and l; with them it forms S again. blocks: the
    side T of the tiles, or (T, T). Raises ValueError or SharedMemoryError for a tile that does not fit.
    """
    T, _ = fitting_blocks("online_softmax", blocks, d=Q.shape[2], dtype=Q.dtype, direction="backward")
    mask = mask or no_mask(device)
    if L is None:
        _, S, m, l = forward_Sml(Q, K, V, scale, mask, T, device=device)
        P = empty(S.shape, S.dtype, device)
        grid = tiles(S.shape[2], T), tiles(S.shape[1], T), S.shape[0]
        launch_if_any(make_P(numba_type(S.dtype)), grid, (T, T), S, m, l, P, device=device)
    else:
        P = probabilities(scores(Q, K, scale, mask, T, device=device), L, device=device)
    return gradients(Q, K, V, dO, P, *dropped(P, mask, device=device), scale, mask, T, device=device)
