"""Inputs of exercises, and attention in NumPy with a slip in it."""

import numpy as np

from ..exercise import Mistake


def a_scale(rng):
    """A scale of no meaning: one that is left out, taken for 1/√d or written as a number shows."""
    return np.float32(rng.uniform(0.3, 0.5))


def cases(seed, make, *sizes):
    """inputs() of an Exercise: for each dictionary of sizes its name and make(rng, **sizes), the same at each call."""

    def inputs():
        for at, size in enumerate(sizes):
            name = ", ".join(f"{name} = {value}" for name, value in size.items() if not name.startswith("_"))
            made = make(np.random.default_rng([seed, at]), **{key.lstrip("_"): value for key, value in size.items()})
            yield name, made

    return inputs


LOWEST = np.float32(-(2.0**101))  # a score below every number that one may choose in place of -∞
SENTINEL = np.float32(-1e30)


def normal(rng, *shape, size=1.0, mean=0.0):
    return (size * rng.standard_normal(shape) + mean).astype(np.float32)


def qkv(rng, N, N_k, d):
    """Q, K and V whose scores differ by several units, and V with a mean that is not 0: wrong then looks wrong."""
    return normal(rng, N, d, size=2.5), normal(rng, N_k, d), normal(rng, N_k, d, mean=1.0)


def lowest(rng, N, N_k, d):
    """As qkv, but every score is LOWEST with a scale of 1/4, without any rounding: d is a power of 2."""
    shape = (N, d), (N_k, d)
    Q, K = (np.full(size, value, np.float32) for size, value in zip(shape, (-(2.0**4), 2.0**99 / d), strict=True))
    return Q, K, normal(rng, N_k, d, mean=1.0)


def attention_inputs(rng, N, N_k, d, low=False, high=False):
    """Q, K, V and scale. high: scores beyond 100, too large for exp; low: as in `lowest`."""
    if high:
        Q, K, V = qkv(rng, N, N_k, d)
        return 16 * Q, K, V, a_scale(rng)
    return (*lowest(rng, N, N_k, d), np.float32(0.25)) if low else (*qkv(rng, N, N_k, d), a_scale(rng))


def no_maximum(S, V):
    """The mistake of attention without m -> O."""
    P = np.exp(S)
    return P @ V / P.sum(axis=1, keepdims=True)


NO_MAXIMUM = "The maximum is not subtracted: exp of a score beyond 88.7 is infinite, and inf/inf is nan."


def maximum_without_scale(Q, K, V, scale):
    """The mistake of attention whose m is that of the scores before scale: where they are large, l is 0 -> O."""
    S = Q @ K.T
    P = np.exp(scale * S - S.max(axis=1, keepdims=True))
    return P @ V / P.sum(axis=1, keepdims=True)


MAXIMUM_WITHOUT_SCALE = (
    "The maximum is that of the scores before scale. Mostly m cancels; but where scores are large, all exponentials "
    "are 0 then, and so is l."
)


def finite_start(what="m", *, guarded):
    """The mistakes of attention whose m begins at a finite number: l is 0, and O is nan, or 0 if that is guarded."""

    def outputs(Q, K, V, scale):
        S = scale * (Q @ K.T)
        P = np.exp(S - np.maximum(S.max(axis=1, keepdims=True), SENTINEL))
        l = P.sum(axis=1, keepdims=True)
        return P @ V / (np.where(l == 0, 1, l) if guarded else l)

    end = "l is 0" if guarded else "l is 0, and 0/0 is nan"
    return Mistake(f"{what} begins at a finite number, not at -∞: where all scores are lower still, {end}.", outputs)


def weights(S, m=None, l=None, *, guard=True):
    """Softmax of the rows of S, in the type of S; m and l: what is taken for the maximum and for the sum.

    guard: whether a row of -∞ alone gives 0. Without, it gives nan, as softmax by the letter does.
    """
    m = S.max(axis=1, keepdims=True, initial=-np.inf) if m is None else m
    P = np.exp(S - np.where(guard & np.isneginf(m), 0, m))
    l = P.sum(axis=1, keepdims=True) if l is None else l
    return P / np.where(guard & (l == 0), 1, l)


def causal(N, N_k, shift=None):
    """Which pairs are seen: j ≤ i + shift; shift None: N_k − N."""
    i, j = np.indices((N, N_k), sparse=True)
    return j <= i + (N_k - N if shift is None else shift)


def no_rescale(S, V, Bc, *, O=True, l=True):
    """An online softmax by tiles of Bc keys, whose O or l is not brought to the new maximum -> O."""
    m, total = np.full(len(S), -np.inf, S.dtype), np.zeros(len(S), S.dtype)
    out = np.zeros((len(S), *V.shape[1:]), S.dtype)
    for j in range(0, S.shape[1], Bc):
        new = np.maximum(m, S[:, j : j + Bc].max(axis=1))
        finite = np.where(np.isneginf(new), 0, new)
        old, P = np.exp(m - finite), np.exp(S[:, j : j + Bc] - finite[:, None])
        total = total * (old if l else 1) + P.sum(axis=1)
        factor = old if O else np.ones_like(old)
        out = out * factor.reshape(-1, *[1] * (V.ndim - 1)) + P @ V[j : j + Bc]
        m = new
    return out / np.where(total == 0, 1, total).reshape(-1, *[1] * (V.ndim - 1))
