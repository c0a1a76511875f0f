"""The truth: attention and its gradients in plain NumPy, float64, the whole N × N score matrix at once.

Nothing here is fast or small: it uses O(N_q · N_k) memory a head, which is what the stages learn to avoid. Every
kernel of the course is compared with these two functions. The names are those of the paper (Dao et al. 2022,
arXiv:2205.14135); the mathematics is that of its Algorithm 0 (forward) and Algorithm 4 (backward), without tiles.
"""

import math

import numpy as np

from . import dropout
from .dtypes import widened
from .masks import to_dense


def attention(q, k, v, scale=None, **masks):
    """Softmax attention, O = softmax(scale · Q Kᵀ) V, and the logarithm L of each row's sum.

    q: (N, d), (H, N, d) or (B, H, N, d). k, v: the same rank and batch, any length N_k, and as many heads as q or a
    divisor of that (GQA: head h of q uses head h // (H / H_kv) of k and v). scale: default 1/√d. masks: the keywords of
    `weights`. A row that sees no key has out = 0 and lse = −∞.
    Returns (out, lse): out is shaped like q, lse like q without its last axis, L_i = log Σ_j exp(S_ij), natural
    logarithm, so that the rows of exp(S − L) sum to 1. Both are float64; complex input gives complex128 (and
    longdouble stays longdouble).
    Raises ValueError when the shapes do not fit.
    """
    Q, K, V = _at_least_float64(q, k, v)
    _check_shapes(Q, K, V)
    P, L, Z = weights(scores(Q, K, scale), **masks)
    return (P * Z) @ _repeat_heads(V, Q), L


def attention_backward(q, k, v, dout, scale=None, **masks):
    """Gradients of Σ(out ∘ dout) with respect to q, k and v, by the formulas of Algorithm 4.

    dout: shaped like out; the rest as for `attention`. Returns (dq, dk, dv), shaped like q, k and v, float64 (or
    complex128). In a GQA group, dk and dv are sums over the query heads that share the key head.
    A row of queries with no keys has no influence: its gradients are 0. Raises ValueError when the shapes do not fit.
    """
    Q, K, V, dO = _at_least_float64(q, k, v, dout)
    _check_shapes(Q, K, V)
    if dO.shape != Q.shape[:-1] + V.shape[-1:]:
        raise ValueError(f"dout has shape {dO.shape}: give it the shape of out, {Q.shape[:-1] + V.shape[-1:]}")
    K, V = _repeat_heads(K, Q), _repeat_heads(V, Q)
    tau = _scale(Q, scale)

    P, _, Z = weights(scores(Q, K, tau), **masks)  # Alg. 4, l. 11–14
    dV = _transpose(P * Z) @ dO  # Alg. 4, l. 15 and 16
    dP = dO @ _transpose(V) * Z  # Alg. 4, l. 17 and 18
    D = (dO * ((P * Z) @ V)).sum(axis=-1, keepdims=True)  # Alg. 4, l. 19: rowsum(dO ∘ O), the same as rowsum(P ∘ dP)
    dS = P * (dP - D)  # Alg. 4, l. 20
    dQ = tau * (dS @ K)  # Alg. 4, l. 21
    dK = tau * (_transpose(dS) @ Q)  # Alg. 4, l. 22
    return dQ, _sum_heads(dK, np.shape(k)), _sum_heads(dV, np.shape(v))


def scores(q, k, scale=None):
    """S = scale · Q Kᵀ for every head of q, (…, N, N_k); scale defaults to 1/√d. Shapes are not checked."""
    return _scale(q, scale) * (q @ _transpose(_repeat_heads(k, q)))


def weights(S, *, causal=False, key_mask=None, dropout_p=0.0, seed=0, first=(0, 0), block_mask=None, blocks=None):
    """The softmax of S (…, N, N_k) -> P, shaped like S, L without its last axis, and Z of dropout, to multiply P by.

    causal: query i sees key j where j ≤ i + N_k − N, aligned at the bottom right. key_mask: (N_k,), or (B, N_k) for
    four axes, True for a key that is seen. block_mask: (⌈N/Br⌉, ⌈N_k/Bc⌉), True for a tile of `blocks` = (Br, Bc) that
    is seen. dropout_p, seed, first: Z is that of `dropout.to_dense`, shaped like S, or 1 without dropout.
    """
    if causal or key_mask is not None or block_mask is not None:
        seen = to_dense(*S.shape[-2:], causal, key_mask, block_mask, blocks)
        S = np.where(seen[:, None] if seen.ndim == 3 else seen, S, -np.inf)
    P, L = _softmax(S)
    if not dropout_p:
        return P, L, 1
    return P, L, dropout.to_dense(seed, dropout_p, math.prod(S.shape[:-2]), *S.shape[-2:], first).reshape(S.shape)


def _softmax(S):
    """P = exp(S − m) / l, row by row, and L = m + log l. A row that sees no key has P = 0 and L = −∞."""
    m = S.real.max(axis=-1, keepdims=True, initial=-np.inf)  # the real part, so that complex steps can be taken
    exp_S = np.exp(S - np.where(np.isneginf(m), 0, m))
    l = exp_S.sum(axis=-1, keepdims=True)
    l = np.where(l == 0, 1, l)
    return exp_S / l, (m + np.log(l))[..., 0]


def _scale(q, scale):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _transpose(x):
    return np.swapaxes(x, -1, -2)  # no conjugate, which would spoil complex steps


def _repeat_heads(x, q):
    """Keys or values with a head for every head of q: GQA without sharing."""
    return np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if x.ndim > 2 else x


def _sum_heads(dx, shape):
    """Undo `_repeat_heads` for a gradient: what had been copied is summed."""
    group = dx.shape[-3] // shape[-3] if len(shape) > 2 else 1
    return dx.reshape(*shape[:-2], group, *shape[-2:]).sum(axis=-3)


def _at_least_float64(*arrays):
    arrays = [widened(x) for x in arrays]
    return [x.astype(np.result_type(x.dtype, np.float64)) for x in arrays]


def _check_shapes(q, k, v):
    """Numpy would broadcast some shapes that are no attention. d of v may differ from that of q and k."""
    fits = (
        2 <= q.ndim <= 4
        and q.ndim == k.ndim
        and k.shape[:-1] == v.shape[:-1]
        and q.shape[-1] == k.shape[-1] > 0
        and q.shape[:-3] == k.shape[:-3]
        and (q.ndim == 2 or (q.shape[-3] > 0 and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0))
    )
    if not fits:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} do not fit: give q as (H, N, d), k and v as (H_kv, N_k, d) with "
            "H_kv a divisor of H; (N, d) and (B, H, N, d) are taken too"
        )
