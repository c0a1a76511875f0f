"""FlashAttention-2 in half precision as a GPU computes it, emulated in NumPy: a right one, and wrong ones by keyword.

Products of halves are exact in float32, sums are in float32, P and dS are rounded to half before they are multiplied,
and so are the results. The functions are those of a stage: see `numba_flash.stages.Stage`.
"""

from dataclasses import replace

import numpy as np

import numba_flash as nf
from numba_flash.dtypes import BFLOAT16, rounded, widened
from numba_flash.masks import to_dense

SINGLE = np.float32


def half(x, dtype):
    """float32 rounded to a half, as float32."""
    with np.errstate(over="ignore"):
        return widened(rounded(x, dtype)).astype(SINGLE)


def as_stage_dtype(x, dtype):
    """The result of a stage: bfloat16 is V2."""
    x = rounded(x, dtype)
    return x.view(BFLOAT16) if x.dtype.name == "bfloat16" else x


def seen_by(mask, H, N, N_k, shift=0):
    """(H, N, N_k), whether a query sees a key; `shift`: by so much the causal mask is off."""
    seen = np.broadcast_to(to_dense(N, N_k), (H, N, N_k))
    if mask is not None and mask.causal:
        i, j = np.indices((N, N_k), sparse=True)
        seen = seen & (j <= i + N_k - N + shift)
    if mask is not None and mask.masked:
        seen = seen & np.repeat(np.asarray(mask.keys, bool), H // len(mask.keys), axis=0)[:, None]
    return seen


def repeated(x, H, other_heads=False):
    """Keys or values with a head for each of H; `other_heads`: in the wrong order, h % G."""
    G = len(x)
    return x[np.arange(H) % G if other_heads else np.arange(H) // (H // G)]


def forward(Q, K, V, scale, *, mask=None, blocks=None, return_lse=False, device=None, Bc=64, **fault):
    """Faults: drop=n, the last n keys are left out; shift, of the causal mask; other_heads; once: O is not rescaled."""
    dtype, (H, N, d) = Q.dtype, Q.shape
    Q, K, V = (widened(x).astype(SINGLE) for x in (Q, K, V))
    K, V = (repeated(x, H, fault.get("other_heads", False)) for x in (K, V))
    N_k, scale = K.shape[1] - fault.get("drop", 0), SINGLE(scale)
    seen = seen_by(mask, H, N, K.shape[1], fault.get("shift", 0))
    m, l, O = np.full((H, N, 1), -np.inf, SINGLE), np.zeros((H, N, 1), SINGLE), np.zeros((H, N, d), SINGLE)
    for j in range(0, max(N_k, 0), Bc):
        keys = slice(j, min(j + Bc, N_k))
        S = np.where(seen[:, :, keys], Q @ K[:, keys].swapaxes(1, 2) * scale, SINGLE(-np.inf))
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        base = np.where(np.isneginf(m_new), SINGLE(0), m_new)
        P, old = np.exp(S - base), np.exp(m - base)
        l = l * old + P.sum(axis=-1, keepdims=True, dtype=SINGLE)
        O = O * (SINGLE(1) if fault.get("once") else old) + half(P, dtype) @ V[:, keys]
        m = m_new
    with np.errstate(divide="ignore"):
        L = (m + np.log(l))[..., 0]
    return as_stage_dtype(O / np.where(l == 0, SINGLE(1), l), dtype), L


def backward(Q, K, V, dO, scale, *, O=None, L=None, mask=None, blocks=None, device=None, **fault):
    """Faults: those of `forward`, drop_queries=n, no_D, no_scale, and one_head: dK and dV of one head of the group."""
    of_both = {name: value for name, value in fault.items() if name in ("drop", "shift", "other_heads")}
    if O is None:
        O, L = forward(Q, K, V, scale, mask=mask, **of_both)
    dtype, (H, N, d), (G, N_k, _) = Q.dtype, Q.shape, K.shape
    Q, K, V, dO, O = (widened(x).astype(SINGLE) for x in (Q, K, V, dO, O))
    K, V = (repeated(x, H, fault.get("other_heads", False)) for x in (K, V))
    seen, scale = seen_by(mask, H, N, N_k, fault.get("shift", 0)).copy(), SINGLE(scale)
    if fault.get("drop"):
        seen[:, :, N_k - fault["drop"] :] = False
    D = SINGLE(0) if fault.get("no_D") else (dO * O).sum(axis=-1, keepdims=True, dtype=SINGLE)
    S = np.where(seen, Q @ K.swapaxes(1, 2) * scale, SINGLE(-np.inf))
    P = np.exp(S - np.where(np.isneginf(L), SINGLE(0), L)[..., None])
    dS = half(P * (dO @ V.swapaxes(1, 2) - D), dtype)
    P = half(P, dtype)
    tau = SINGLE(1) if fault.get("no_scale") else scale
    dQ = dS @ K * tau
    own = slice(0, N - fault.get("drop_queries", 0))
    dK, dV = dS[:, own].swapaxes(1, 2) @ Q[:, own] * tau, P[:, own].swapaxes(1, 2) @ dO[:, own]
    dK, dV = (x.reshape(G, H // G, N_k, d) for x in (dK, dV))
    dK, dV = (x[:, 0] if fault.get("one_head") else x.sum(axis=1, dtype=SINGLE) for x in (dK, dV))
    return tuple(as_stage_dtype(x, dtype) for x in (dQ, dK, dV))


def install(monkeypatch, *names, calls=None):
    """Put the emulation in place of stages, which then need no GPU; `calls` collects what they are called with."""

    def noted(function):
        def run(*arguments, **keywords):
            if calls is not None:
                calls.append((arguments, keywords))
            return function(*arguments, **keywords)

        return run

    for name in names:
        fake = {"forward": noted(forward), "backward": noted(backward), "compute_capability": None}
        monkeypatch.setitem(nf.STAGES, name, replace(nf.STAGES[name], **fake))
