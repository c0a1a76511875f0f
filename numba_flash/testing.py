"""Exactness checks for anyone's attention kernel, and inputs that broke other implementations.

    from numba_flash import testing
    testing.assert_exact(my_attention)                      # my_attention(q, k, v, scale) -> out, or (out, lse)
    testing.assert_exact(my_attention, dtype="float64")

Exact means: as good as the textbook algorithm in the same precision. `assert_exact` compares with float64 NumPy
(`numba_flash.reference`) and allows what `bound` allows; of float16 and bfloat16, what `half_bounds` allows.
"""

import contextvars
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from . import reference
from .checks import integer, truth
from .dtypes import DTYPES, HALVES, SINGLES, array_dtype, lse_dtype, name_of, rounded, widened
from .engine.launch import refuse_if_too_large


@dataclass(frozen=True, eq=False)
class Case:
    """One input of attention: q, k, v, shaped (N, d), (H, N, d) or (B, H, N, d), and a scale.

    `layout` copies an array into the memory layout that the case is about (strided, Fortran order, ...).
    `exact_scores`: every score has no rounding error even in float32, in whatever order it is summed, so that the
    float64 bound need not grow with the scores.
    """

    name: str
    q: np.ndarray = field(repr=False)
    k: np.ndarray = field(repr=False)
    v: np.ndarray = field(repr=False)
    scale: float
    layout: Callable = field(default=np.array, repr=False)
    exact_scores: bool = False

    def __str__(self):
        return self.name

    def inputs(self):
        """Fresh copies of q, k and v in the case's memory layout."""
        return tuple(self.layout(np.array(x, order="C")) for x in (self.q, self.k, self.v))

    def astype(self, dtype):
        """The same case in another dtype, the scale rounded to it too, or to float32 where that is a half.

        ValueError where a number becomes infinite.
        """
        with np.errstate(over="ignore"):
            q, k, v = (rounded(x, dtype) for x in (self.q, self.k, self.v))
        for name, x, before in zip("qkv", (q, k, v), (self.q, self.k, self.v)):
            if np.isinf(widened(x)).sum() > np.isinf(widened(before)).sum():
                raise ValueError(f"case {self.name!r}: {name} holds numbers beyond {name_of(dtype)}: leave it out")
        q, k, v = replace(self, q=q, k=k, v=v).inputs()
        return replace(self, q=q, k=k, v=v, scale=float(lse_dtype(dtype).type(self.scale)))


def cases(dtype="float32"):
    """Yield every Case, in `dtype` ("float16", "bfloat16", "float32" or "float64"), the same ones at each call.

    They are the inputs that broke other implementations: short and ragged lengths, tail columns, zero lengths, GQA,
    scores that are huge, equal or dominated by one, values far from 1, and unusual memory layouts. Unless a case is
    about something else, σ(scale · Q Kᵀ) = 2.5 and V has mean 1: with small scores and a zero mean, wrong
    attention looks right. The cases of a half have d = 64 and 128, and lengths about one, two and three tiles of 64 and
    128; bfloat16 is ml_dtypes' where that is installed, and V2 elsewhere.
    """
    dtype = _checked(dtype)
    for case in _cases_of(dtype):
        yield case.astype(dtype)


def assert_exact(fn, *, cases=None, dtype="float32"):
    """Check fn(q, k, v, scale) -> out, or (out, lse), against float64 on every case; AssertionError at the first fault.

    q, k, v are NumPy arrays of `dtype` ("float16", "bfloat16", "float32" or "float64") shaped (N, d), (H, N, d) or (B,
    H, N, d), k and v with their own length and perhaps fewer heads (GQA); scale is a Python float. out must be shaped
    like q, lse like q without its last axis, both of `dtype` (lse of a half: float32); NumPy arrays or CUDA arrays.
    `cases`: Case objects, converted to `dtype`; default: all of `cases()`, a part of which you may choose, as in
    `cases=[c for c in testing.cases() if c.q.ndim == 2]`.

    Each call gets fresh copies of the inputs: to write to one is a fault. Then shape, dtype and finiteness are checked,
    then |out − reference| ≤ `bound`, for halves `half_bounds`. lse must be log Σ exp(S), natural logarithm: the rows of
    exp(S − lse) sum to 1.
    The message names the case, the worst element, the expected and the given value, the error and the bound.
    Raises TypeError or ValueError when the arguments of assert_exact themselves are wrong.
    """
    _check_all(fn, "fn(q, k, v, scale) -> out or (out, lse)", cases, dtype, _fault)


def assert_exact_backward(fn, *, cases=None, dtype="float32", from_lse=False):
    """Check fn(q, k, v, dout, scale) -> (dq, dk, dv) against float64 on every case; AssertionError at the first fault.

    dout is random, and shaped like q: a dout of ones would hide errors in D and in dV. from_lse: whether fn computes P
    from lse in `dtype`, as FlashAttention-2 does, and may lose of it what `gradient_bounds` says. Halves are held to
    `half_gradient_bounds`, with or without it. The rest is as in `assert_exact`.
    """
    truth("from_lse", from_lse)
    form = "fn(q, k, v, dout, scale) -> (dq, dk, dv)"
    _check_all(fn, form, cases, dtype, lambda fn, case: _backward_fault(fn, case, from_lse))


def inputs(q_shape, k_shape, *, dtype="float32", seed=0):
    """Random q, k and v of these shapes, σ(scale · Q Kᵀ) about 2.5 and the mean of v 1, so that wrong looks wrong.

    With small scores all weights are about 1/N, with a zero mean all outputs about 0. Raises OutOfMemory.
    """
    elements = math.prod(q_shape) + 2 * math.prod(k_shape)
    of = np.dtype(np.float32 if name_of(dtype) in HALVES else dtype)
    refuse_if_too_large(2 * elements * of.itemsize, f"random input of shape {q_shape}", "cpu")
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape, of) for shape in (q_shape, k_shape, k_shape))
    q, k, v = q * of.type(2.5), k, v + of.type(1)
    return tuple(rounded(x, dtype) for x in (q, k, v)) if of != array_dtype(name_of(dtype)) else (q, k, v)


def bound(reference, naive_error=0.0, dtype="float32", *, max_score=1.0, n_k=16):
    """The largest |error| that counts as exact, for an output whose float64 value is `reference`.

    float32: 2 · naive_error + 4 · eps · max|reference|, with naive_error the largest |error| of the stage `naive` in
    float32 on the same input. Errors of two right kernels differ by the order of their sums, which is luck: hence the
    factor 2. Where `naive` is lucky enough to be right to the last bit, nothing else may be asked of a kernel that
    rescales its output and divides at the end, two or three roundings of half an eps each more: hence 4 · eps. Over
    n_k > 16 keys it is √n_k · eps: the errors of a long sum grow like the square root of its length (Higham & Mary
    2019, doi:10.1137/18M1226312), and naive may be lucky in all its sums.

    float64: 1e-12 · max(1, max_score) · max|reference|, with max_score the largest |score|. A score S has an error of
    about d · 2⁻⁵³ · |S|, d ≤ 256, which reaches the output as a relative error of the weights exp(S − m).
    """
    largest = np.abs(reference).max(initial=0)
    if _checked(dtype, SINGLES) == "float32":
        n_k = integer("n_k", n_k)
        return float(2 * naive_error + max(4, math.sqrt(n_k)) * np.finfo(np.float32).eps * largest)
    return float(1e-12 * max(1, max_score) * largest)


def naive_bound(q, k, v, scale=None, dtype="float32"):
    """A bound on |error| of the stage `naive`: (2d · max(|Q||K|ᵀ · |scale|) + N_k + 8) · eps · max|V|.

    The forward error of the textbook algorithm, to first order in the unit roundoff u = eps / 2, with
    A = max(|Q||K|ᵀ · |scale|) and scale as the kernel gets it, in its own precision:

    1. Score. A dot product of length d summed in order: |error| ≤ d · u · Σ|q||k|, whatever cancels in the sum; times
       scale, one more rounding. So S_j is off by at most (d + 1) · u · A.
    2. Argument of exp, S_j − m. A wrong m does no harm, it cancels in the quotient; the subtraction rounds a number
       of at most 2A. So the argument is off by at most (d + 3) · u · A =: η.
    3. exp. An error of η in the argument is a relative error of η in the value; the function's own error is at most
       2 units in the last place, 4u. So each exp(S_j − m) is off by a factor 1 + δ_j, |δ_j| ≤ η + 4u.
    4. What that does to the output. To first order, O = Σ P_j V_j moves by Σ P_j (δ_j − δ̄) V_j with δ̄ = Σ P_j δ_j,
       because the sum l moves with its terms. Σ P_j |δ_j − δ̄| is a mean deviation: at most the standard deviation,
       at most max|δ_j|. So this moves O by at most (η + 4u) · max|V|.
    5. Sum l of N_k positive terms: a relative error of (N_k − 1) · u. Quotient P_j = exp(S_j − m) / l: one u more.
    6. Product P V, a dot product of length N_k with Σ P_j = 1: N_k · u · max|V|.

    Together ((d + 3) · A + 2 N_k + 4) · u · max|V|. With d + 3 ≤ 4d and u = eps / 2 that is at most
    (2d · A + N_k + 2) · eps · max|V|. The 8 in place of 2 leaves room for terms of second order, which count for
    nothing as long as η is far below 1, and for a result below the smallest normal number.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    scale = None if scale is None else abs(scale)
    A = reference.scores(np.abs(q), np.abs(k), scale).max(initial=0)
    return float((2 * q.shape[-1] * A + k.shape[-2] + 8) * np.finfo(dtype).eps * np.abs(v).max(initial=0))


def gradient_bounds(
    q, k, v, dout, scale=None, naive_errors=(0.0, 0.0, 0.0), dtype="float32", *, max_score=None, from_lse=False, **masks
):
    """The largest |error| of dq, dk and dv that counts as exact -> {"dq": …, "dk": …, "dv": …}.

    A gradient is a sum that may cancel to nothing: where all keys are equal, dq = scale · dS K is 0, and what is left
    is the rounding of its terms. So an error is measured by the size A of the terms instead of that of the sum:
    Pᵀ|dO| for dv; with E = P ∘ (|dO||V|ᵀ + rowsum(P ∘ |dO||V|ᵀ)), |scale| · E|K| for dq and |scale| · Eᵀ|Q| for dk.
    masks: the keywords of `reference.weights`, causal and so on; with dropout, |dO||V|ᵀ and P in dv are times Z.

    float32: 2 · naive_error + u · max A, with naive_error that of the stage `naive`, and u = 4 · eps as in `bound`.
    float64: u · max A with u = 1e-12 · max(1, max|S|), or max_score in place of max|S|.

    from_lse: u is at least what it does to round L. P = exp(S − L), and L off by eps / 2 of its size changes a row of P
    by one factor f, which is at most exp(|L| · eps / 2). It is at most N_k, too: rounding is monotone, so that L
    rounded is no less than the largest S, and no weight above 1, while the largest of N_k weights is at least 1 / N_k.
    dS = P ∘ (dP − Σ P dP) has P twice: u = f² − 1. In float32, with scores of 10⁵ that is a percent, with scores of 10⁸
    all of P. (P kept, or m and l kept apart as in Algorithm 4, lose nothing.)

    Raises ValueError when the shapes do not fit.
    """
    if np.shape(dout) != np.shape(q) or len(naive_errors) != 3:
        raise ValueError(
            f"dout {np.shape(dout)}, naive_errors {naive_errors!r}: give dout as q {np.shape(q)}, and three errors"
        )
    sizes, S, L = _sizes_of_terms(q, k, v, dout, scale, masks)
    eps = np.finfo(_checked(dtype, SINGLES)).eps
    if max_score is None:
        max_score = np.abs(S).max(initial=1)
    unit = 4 * eps if eps > 1e-12 else 1e-12 * max(1, max_score)
    if from_lse:
        largest = np.abs(L[np.isfinite(L)]).max(initial=0)
        unit = max(unit, min(math.exp(min(largest * eps / 2, 100)), max(S.shape[-1], 1)) ** 2 - 1)
    return {name: float(2 * own + unit * size) for (name, size), own in zip(sizes.items(), naive_errors, strict=True)}


def naive_gradient_bounds(q, k, v, dout, scale=None, dtype="float32", **masks):
    """A bound on |error| of the gradients of `naive` -> {"dq": …, "dk": …, "dv": …}, which is not its own error.

    (2 · (2d · A + N_k + 8) + 2d + N_k + N · H / H_k) · eps · the size of the terms, as in `gradient_bounds`, where the
    masks are explained. To first order: a weight P is off by a factor of at most the first bracket, as `naive_bound`
    derives with A = max(|Q||K|ᵀ · |scale|), and dS = P ∘ (dP − D) has P twice, once within D. dP and dK, dQ sum d
    products each or more, D sums N_k, and dK and dV sum N terms of each of the H / H_k heads that share them.
    """
    sizes, _, _ = _sizes_of_terms(q, k, v, dout, scale, masks)
    q, k = (np.asarray(x, dtype=np.float64) for x in (q, k))
    A = reference.scores(np.abs(q), np.abs(k), None if scale is None else abs(scale)).max(initial=0)
    (N, d), N_k = q.shape[-2:], k.shape[-2]
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    roundings = 2 * (2 * d * A + N_k + 8) + 2 * d + N_k + N * group
    return {name: float(roundings * np.finfo(_checked(dtype, SINGLES)).eps * size) for name, size in sizes.items()}


def _sizes_of_terms(q, k, v, dout, scale, masks):
    """({"dq": …, "dk": …, "dv": …}, S, L): the largest sum of |terms| of an element of each, scores and logsumexp."""
    Q, K, V, dO = (np.asarray(x, dtype=np.float64) for x in (q, k, v, dout))
    reference._check_shapes(Q, K, V)
    S = reference.scores(Q, K, scale)
    P, L, Z = reference.weights(S, **masks)
    terms = np.abs(dO) @ reference._transpose(np.abs(reference._repeat_heads(V, Q))) * Z
    E = P * (terms + (P * terms).sum(axis=-1, keepdims=True))
    tau = abs(reference._scale(Q, scale))
    sizes = {
        "dq": tau * (E @ np.abs(reference._repeat_heads(K, Q))),
        "dk": tau * reference._sum_heads(reference._transpose(E) @ np.abs(Q), K.shape),
        "dv": reference._sum_heads(reference._transpose(P * Z) @ np.abs(dO), V.shape),
    }
    return {name: size.max(initial=0) for name, size in sizes.items()}, S, L


ROUNDOFF = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}  # relative; below the normal numbers
EPS = 2.0**-23  # of float32: twice the roundoff, since tensor cores may cut off where they add


def half_bounds(q, k, v, scale=None, dtype="float16", *, exact_scores=False, **masks):
    """The largest |error| of each element that counts as exact, for halves -> {"out": …, "lse": …}, arrays.

    q, k, v: the inputs, rounded to `dtype` ("float16" or "bfloat16") already; masks: the keywords of
    `reference.weights`. The bound is for the algorithm that tensor cores run: S and O are summed in float32 from exact
    products of halves; P = exp(S − m) is rounded to a half before it meets V, with l the sum of P in float32, and O is
    rounded to a half at the end. It is no estimate: no kernel of that kind is further off, in whatever order it sums.
    With u the roundoff of a half, eps = 2⁻²³, A_i = max_j |scale| Σ|q_i||k_j|, and T = P|V| with exact weights P:

    1. Argument of exp. A sum of d products is off by at most d · eps · A; the products with scale and log₂ e, the one
       of m with them, and the difference take a few eps · A more: η = (d + 8) · eps · A. (exact_scores: 8 · eps · A.)
    2. exp has a few eps of its own. So each weight is off by a factor within 1 ± ρ, ρ = e^(η + 8 eps) − 1; the sum l
       moves with its terms, so that O moves by at most 2ρ · T.
    3. P rounded to a half: u · T. Where a half of a P below the normal numbers of float16 is a multiple of 2⁻²⁴, it is
       off by 2⁻²⁵ at most: 2⁻²⁵ · Σ_j |V_j| / l over the keys that are seen, with l relative to the largest weight.
    4. Sums over N_k keys of l and of PV, and what rescales them: 2 · (N_k + 8) · eps · T.
    5. O rounded to a half: u · |O| and of the error so far, and 2⁻²⁵.

    out: (1 + u) · ((u + 2ρ + 2 (N_k + 8) eps) · T + 2⁻²⁵ Σ|V| / l) + u |O| + 2⁻²⁵. For float16 that is some 10⁻³ of
    the terms, for bfloat16 some 10⁻²: a key that is missing or seen by mistake shows as soon as its weight in any row
    is larger. lse: ρ + (N_k + 8) · eps for log l, and 4 · eps · (A + |L|) for the sum with m.
    """
    u, tiny, _, V, P, L, S, rho, A = _half_terms(q, k, v, scale, dtype, exact_scores, masks)
    N_k = V.shape[-2]
    m = np.where(np.isneginf(L), 0, S.max(axis=-1, initial=-np.inf, where=P > 0))
    l = np.exp(np.where(np.isneginf(L), 0, L - m))[..., None]
    first = (u + 2 * rho + 2 * (N_k + 8) * EPS) * (P @ np.abs(V)) + tiny * ((P > 0) @ np.abs(V)) / l
    out = (1 + u) * first + u * np.abs(P @ V) + tiny
    size = A[..., 0] + np.where(np.isneginf(L), 0, np.abs(L))
    return {"out": out, "lse": rho[..., 0] + (N_k + 8) * EPS + 4 * EPS * size}


def _half_terms(q, k, v, scale, dtype, exact_scores, masks):
    """u, 2⁻²⁵ or its like, Q and V in float64 with a head for each of q, P, L, S; ρ and A, a number for each row."""
    u, tiny = ROUNDOFF[_checked(dtype, HALVES)]
    Q, K, V = (widened(x).astype(np.float64) for x in (q, k, v))
    reference._check_shapes(Q, K, V)
    S = reference.scores(Q, K, scale)
    P, L, _ = reference.weights(S, **masks)
    A = reference.scores(np.abs(Q), np.abs(K), abs(reference._scale(Q, scale))).max(axis=-1, initial=0, keepdims=True)
    rho = np.expm1(np.minimum((8 if exact_scores else Q.shape[-1] + 8) * EPS * A + 8 * EPS, 700))
    return u, tiny, Q, reference._repeat_heads(V, Q), P, L, S, rho, A


def half_gradient_bounds(q, k, v, dout, scale=None, dtype="float16", *, exact_scores=False, **masks):
    """The largest |error| of each element of dq, dk and dv that counts as exact, for halves -> {"dq": …, …}, arrays.

    Arguments as for `half_bounds`, dout rounded like them. The bound is for the algorithm that tensor cores run: S, dP
    and all gradients are summed in float32 from products of halves; P = exp(S − L) and dS = P ∘ (dP − D) are rounded to
    halves before they are multiplied, with D the row sums of dO ∘ O and O and L those of a forward pass within
    `half_bounds`. In the names of that function, with B the bound of O and λ that of L:

    1. P is off by a factor within 1 ± σ, σ = (1 + ρ) e^λ − 1, and by u more once it is rounded (dS may be formed from
       the rounded P, as well), or by 2⁻²⁵.
    2. D is off by δ = Σ|dO| B + (d + 8) · eps · Σ|dO||O|, dP by (d + 8) · eps · |dO||V|ᵀ =: ε.
    3. dS is off by E + P δ, with E = (σ + u + 4 eps) |dS| + 2⁻²⁵ |dP − D| + (1 + σ + u) P ε; rounded to a half, by u of
       itself more, or by 2⁻²⁵.
    4. dQ = scale · dS K. The error of D is one number for the whole row: it adds |scale| · δ · |P K| alone, not δ P|K|.
       The rest is |scale| · (u |dS| + E) |K|, N_k sums (N_k + 8) · eps · |scale| · |dS||K|, and 2⁻²⁵ Σ|K|.
    5. dK the same with the columns of dS, where each row has its own δ: |scale| · (u |dS| + E + P δ)ᵀ |Q|, and N sums
       over each head that shares the key; dV: (u + σ) · Pᵀ|dO|, the sums, and 2⁻²⁵ Σ|dO|.
    6. The results, rounded to halves: u of each and of its error, and 2⁻²⁵.
    """
    u, tiny, Q, V, P, _, _, rho, _ = _half_terms(q, k, v, scale, dtype, exact_scores, masks)
    K, dO = reference._repeat_heads(widened(k).astype(np.float64), Q), widened(dout).astype(np.float64)
    if dO.shape != Q.shape:
        raise ValueError(f"dout {dO.shape}: give it the shape of q, {Q.shape}")
    forward = half_bounds(q, k, v, scale, dtype, exact_scores=exact_scores, **masks)
    tau, d, seen = abs(reference._scale(Q, scale)), Q.shape[-1], P > 0
    sharing = Q.shape[-3] // np.shape(k)[-3] if Q.ndim > 2 else 1
    sums_k, sums_q = K.shape[-2] + 8, Q.shape[-2] * sharing + 8

    def t(x):
        return np.swapaxes(x, -1, -2)

    O = P @ V
    sigma = np.expm1(np.minimum(np.log1p(rho) + forward["lse"][..., None], 700))
    delta = (np.abs(dO) * (forward["out"] + (d + 8) * EPS * np.abs(O))).sum(axis=-1, keepdims=True)
    inner = np.abs(dO @ t(V) - (dO * O).sum(axis=-1, keepdims=True))  # |dP − D|
    dS = P * inner
    E = (sigma + u + 4 * EPS) * dS + tiny * inner * seen
    E += (1 + sigma + u) * P * ((d + 8) * EPS * (np.abs(dO) @ t(np.abs(V))))
    rounding, least = (1 + u) * E + u * dS, max(1, tau) * tiny
    of_rows = rounding + (1 + u) * P * delta
    group = {
        "dq": tau * ((rounding + sums_k * EPS * dS) @ np.abs(K) + (1 + u) * (1 + sigma) * delta * np.abs(P @ K)),
        "dk": tau * (t(of_rows + sums_q * EPS * dS) @ np.abs(Q)),
        "dv": (1 + u) * t((u + sigma + sums_q * EPS) * P) @ np.abs(dO),
    }
    group["dq"] += least * (seen @ np.abs(K)) + tau * (1 + u) * (sigma + u) * delta * (P @ np.abs(K))
    group["dk"] += least * (t(seen) @ np.abs(Q))
    group["dv"] += tiny * (t(seen) @ np.abs(dO))
    for name, like in (("dk", k), ("dv", v)):
        group[name] = reference._sum_heads(group[name], np.shape(like))
    truth = reference.attention_backward(q, k, v, dout, scale, **masks)
    return {name: (1 + u) * group[name] + u * np.abs(right) + tiny for name, right in zip(group, truth)}


# ---------------------------------------------------------------------------------------------------- the comparison


def _checked(dtype, dtypes=DTYPES):
    """The name of a dtype; ValueError unless it is one of `dtypes`."""
    try:
        name = name_of(dtype)
    except TypeError:
        name = None
    if name not in dtypes:
        *most, last = (f'"{name}"' for name in dtypes)
        raise ValueError(f"dtype is {dtype!r}: give {', '.join(most)} or {last}")
    return name


def _check_all(fn, form, cases, dtype, fault_of):
    dtype = _checked(dtype)
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}: give a function {form}")
    try:
        chosen = list(_cases_of(dtype) if cases is None else cases)
    except TypeError:
        raise TypeError(
            f"cases is {cases!r:.60}: give a list of Case objects, as testing.cases() yields them"
        ) from None
    if not chosen:
        raise ValueError("cases is empty, so that nothing would be checked: leave it out for all of testing.cases()")
    for case in chosen:
        if not isinstance(case, Case):
            raise TypeError(f"cases holds a {type(case).__name__}: give testing.Case(name, q, k, v, scale) objects")
        fault, cause = fault_of(fn, case.astype(dtype))
        if fault:
            shapes = f"q {case.q.shape}, k and v {case.k.shape}, scale {case.scale:.6g}, {dtype}"
            raise AssertionError(f"case {case.name!r} ({shapes}): {fault}") from cause


def _fault(fn, case):
    """(what is wrong with fn on this case or None, the exception that fn raised or None)."""
    result, fault, cause = _called(fn, case, {})
    if fault:
        return fault, cause
    if isinstance(result, tuple) and len(result) != 2:
        return f"the function returned a tuple of {len(result)}: return out, or (out, lse)", None
    out, lse = result if isinstance(result, tuple) else (result, None)

    O, L = reference.attention(case.q, case.k, case.v, case.scale)
    fault = _difference(case, "out", out, O)
    if fault is None and lse is not None:
        fault = _difference(case, "lse", lse, L)
        fault = fault and f"{fault}. lse is log Σ exp(S), natural logarithm: rows of exp(S − lse) sum to 1"
    return fault, None


def _backward_fault(fn, case, from_lse):
    dout = random_dout(case)
    result, fault, cause = _called(fn, case, {"dout": dout})
    if fault:
        return fault, cause
    if not isinstance(result, tuple) or len(result) != 3:
        return f"the function returned {result!r:.60}: return (dq, dk, dv)", None
    expected = dict(
        zip(("dq", "dk", "dv"), reference.attention_backward(case.q, case.k, case.v, dout, case.scale), strict=True)
    )
    arguments = case.q, case.k, case.v, dout, case.scale
    how_far = {"from_lse": from_lse, "max_score": 1.0 if case.exact_scores else None}
    is_half = name_of(case.q.dtype) in HALVES
    if is_half:
        limits = half_gradient_bounds(*arguments, case.q.dtype, exact_scores=case.exact_scores)
    else:
        limits = gradient_bounds(*arguments, dtype=case.q.dtype, **how_far)
    for (name, right), got in zip(expected.items(), result, strict=True):
        fault = _shape_fault(case, name, got, right)
        if fault is None and case.q.dtype == np.float32 and not _largest_error(got, right) <= limits[name]:
            limits = gradient_bounds(*arguments, _naive_gradient_errors(case, dout, expected), **how_far)
        how = "twice the naive kernel's error, and what rounding the terms of the sum explains"
        how = "what rounding P, dS, O and the result explains" if is_half else how
        fault = fault or _beyond(name, _to_numpy(got), right, limits[name], how)
        if fault:
            lost = f"; {FROM_LSE}" if case.exact_scores and not from_lse and not is_half else ""
            return fault + lost, None
    return None, None


FROM_LSE = "for a function that keeps lse alone, as FlashAttention-2 does, give from_lse=True"


def random_dout(case):
    """A gradient of out for a Case, shaped like q, in its dtype and layout; the same at each call."""
    if not isinstance(case, Case):
        raise TypeError(f"case is a {type(case).__name__}: give a Case")
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    return case.layout(rounded(rng.standard_normal(case.q.shape), case.q.dtype))


def _called(fn, case, more):
    """(what fn returns for copies of the inputs, what is wrong with the call or None, the exception or None)."""
    arrays = dict(zip("qkv", case.inputs(), strict=True)) | {
        name: case.layout(np.array(x, order="C")) for name, x in more.items()
    }
    try:
        result = fn(*arrays.values(), case.scale)
    except Exception as error:
        return None, f"the function raised {type(error).__name__}: {error}", error
    for name, original in {"q": case.q, "k": case.k, "v": case.v, **more}.items():
        if not np.array_equal(widened(arrays[name]), widened(original), equal_nan=True):
            what = f"the function changed {name}, its input (here a copy): let it write to an array of its own"
            return None, what, None
    return result, None, None


def _difference(case, name, got, expected):
    """What is wrong with `got`, which is out or lse, or None."""
    fault = _shape_fault(case, name, got, expected)
    if fault:
        return fault
    got = _to_numpy(got)
    limit, how = _limit(case, name, expected, naive_error=0)
    if case.q.dtype == np.float32 and not _largest_error(got, expected) <= limit:
        # only now, because it takes a run of the naive kernel
        limit, how = _limit(case, name, expected, _naive_errors(case)[name])
    return _beyond(name, got, expected, limit, how)


def _shape_fault(case, name, got, expected):
    """What is wrong with the kind, shape, dtype or finiteness of a result, or None."""
    got = _to_numpy(got)
    if not isinstance(got, np.ndarray):
        return f"{name} is {got!r:.60}, a {type(got).__name__}: return a NumPy array"
    if got.shape != expected.shape:
        return f"{name} has shape {got.shape}, expected {expected.shape}"
    wanted = name_of(lse_dtype(case.q.dtype) if name == "lse" else case.q.dtype)
    if name_of(got.dtype) != wanted:
        of = "which goes with" if name == "lse" and wanted != name_of(case.q.dtype) else "that of"
        return f"{name} has dtype {name_of(got.dtype)}, expected {wanted}, {of} q, k and v"

    finite, got = np.isfinite(expected), widened(got)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    strange = ~np.where(finite, np.isfinite(got), same)
    if strange.any():
        at = tuple(map(int, np.argwhere(strange)[0]))
        return (
            f"{_element(name, at)} is {got[at]}, expected {expected[at]:.9g}: "
            f"{strange.sum()} of {strange.size} elements are not what they should be"
        )
    return None


def _errors(got, expected):
    error = np.zeros(expected.shape)
    finite = np.isfinite(expected)
    error[finite] = np.abs(widened(_to_numpy(got))[finite] - expected[finite])
    return error


def _largest_error(got, expected):
    return _errors(got, expected).max(initial=0)


def _beyond(name, got, expected, limit, how):
    """The worst element, where an error is beyond the limit (a number, or one for each element), or None."""
    error, got, limit = _errors(got, expected), widened(got), np.broadcast_to(limit, expected.shape)
    if (error <= limit).all():
        return None
    at = tuple(map(int, np.unravel_index((error - limit).argmax(), error.shape)))
    return (
        f"{_element(name, at)} is {got[at]:.9g}, expected {expected[at]:.9g}: error {error[at]:.2e}, bound "
        f"{limit[at]:.2e} ({how}); {(error > limit).sum()} of {error.size} elements are beyond the bound"
    )


def _limit(case, name, expected, naive_error):
    """(the `bound` for out or lse, how it comes about). The size of lse counts as 1 at least: 0 is the log of 1."""
    if name_of(case.q.dtype) in HALVES:
        arguments = case.q, case.k, case.v, case.scale, case.q.dtype
        return half_bounds(*arguments, exact_scores=case.exact_scores)[name], "what rounding P, O and sums explains"
    size, how = expected[np.isfinite(expected)], "max|reference|"
    if name == "lse":
        size, how = np.append(size, 1), "max(1, max|reference|)"
    if case.q.dtype == np.float32:
        how = f"2 · {naive_error:.2e}, the naive kernel's own error, + 4 · eps · {how}"
        return bound(size, naive_error), how
    if case.exact_scores:
        return bound(size, dtype="float64"), f"1e-12 · {how}"
    max_score = np.abs(reference.scores(case.q, case.k, case.scale)).max(initial=1)
    return bound(size, dtype="float64", max_score=max_score), f"1e-12 · max(1, max|S|) · {how}"


def _naive_errors(case):
    """The errors of the stage `naive` in out and lse. On the CPU, so that the bound is the same on every machine."""
    from .attention import attention

    results = contextvars.Context().run(  # outside of any ledger: only fn goes on the caller's bill
        attention, case.q, case.k, case.v, stage="naive", scale=case.scale, return_lse=True, device="cpu"
    )
    truth = reference.attention(case.q, case.k, case.v, case.scale)
    errors = {}
    for name, got, expected, v in zip(("out", "lse"), results, truth, (case.v, np.ones_like(case.v))):
        finite = np.isfinite(expected)
        errors[name] = np.abs(got[finite] - expected[finite]).max(initial=0)
        _check_yardstick(case, name, errors[name], naive_bound(case.q, case.k, v, case.scale, "float32"))
    return errors


def _naive_gradient_errors(case, dout, expected):
    """The errors of the stage `naive` in dq, dk and dv, on the CPU and outside of any ledger; each within its bound."""
    from .attention import attention_backward

    results = contextvars.Context().run(
        attention_backward, case.q, case.k, case.v, dout, stage="naive", scale=case.scale, device="cpu"
    )
    errors = [_largest_error(got, truth) for got, truth in zip(results, expected.values(), strict=True)]
    limits = naive_gradient_bounds(case.q, case.k, case.v, dout, case.scale)
    for (name, limit), error in zip(limits.items(), errors, strict=True):
        _check_yardstick(case, name, error, limit)
    return errors


def _check_yardstick(case, name, error, limit):
    if not error <= limit:
        raise AssertionError(
            f"case {case.name!r}: the naive kernel itself, the yardstick, is off by {error:.2e} in {name}, "
            f"more than its bound {limit:.2e}: a fault in numba_flash"
        )


def _element(name, at):
    return f"{name}[{', '.join(map(str, at))}]"


def _to_numpy(x):
    """CUDA arrays come to the host; objects that know how to be a NumPy array (torch on the CPU) become one."""
    if hasattr(x, "__cuda_array_interface__"):
        from .engine import launch as engine

        return engine.to_host(x)
    return np.asarray(x) if hasattr(x, "__array__") else x


# --------------------------------------------------------------------------------------------------------- the cases


def _random(name, q_shape, k_shape, *, scale=None, sigma=2.5, **settings):
    """A Case of normal random numbers, V with mean 1, Q scaled so that σ(scale · Q Kᵀ) = sigma where that is possible.

    The seed comes from the name, so that a new case leaves the others as they are.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    q, k, v = rng.standard_normal(q_shape), rng.standard_normal(k_shape), rng.standard_normal(k_shape) + 1
    scale = q_shape[-1] ** -0.5 if scale is None else scale
    S = reference.scores(q, k, scale)
    if S.size > 1 and S.std() > 0:
        q *= sigma / S.std()
    return Case(name, q, k, v, scale, **settings)


def _integers(name, make, *, n=19, m=37, d=16):
    """A Case of whole numbers, whose scores have no rounding error: make(rng, n, m, d) -> q, k; scale 1/4."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    q, k = make(rng, n, m, d)
    return Case(name, q, k, rng.standard_normal((m, d)) + 1, 0.25, exact_scores=True)


def _cases_of(dtype):
    return _half_cases() if dtype in HALVES else _all_cases()


def _all_cases():
    """Every case, in float64 (not float32 numbers in float64: a kernel that loses half the digits must be seen)."""
    yield from _lengths()
    yield from _heads()
    yield from _numbers()
    yield from _layouts()


def _lengths():
    for n in (1, 2, 5, 17, 31, 32, 33, 63, 65, 97):
        for d in (1, 3, 8, 40, 59, 63, 64):
            yield _random(f"N = {n}, d = {d}", (n, d), (n, d))
    for n, m in ((1, 97), (97, 1), (2, 5), (5, 2), (33, 65), (65, 33), (16, 100), (100, 16)):
        yield _random(f"N_q = {n}, N_k = {m}", (n, 24), (m, 24))
    for d in (128, 200, 256):
        yield _random(f"d = {d}", (21, d), (37, d))
    yield _random("many tiles each way", (201, 32), (203, 32))
    yield _random("no keys", (5, 8), (0, 8))
    yield _random("no queries", (0, 8), (5, 8))
    yield _random("no queries and no keys", (0, 8), (0, 8))
    yield _random("no keys, batch and heads", (2, 3, 5, 8), (2, 3, 0, 8))
    yield _random("no queries, batch and heads", (2, 3, 0, 8), (2, 3, 5, 8))


def _heads():
    yield _random("1 head", (1, 17, 8), (1, 21, 8))
    yield _random("3 heads", (3, 17, 8), (3, 21, 8))
    yield _random("as many heads as queries", (17, 17, 8), (17, 17, 8))
    yield _random("batch 2, 3 heads", (2, 3, 17, 8), (2, 3, 21, 8))
    for heads, kv_heads in ((4, 1), (4, 2), (6, 2), (6, 3)):
        yield _random(f"GQA, {heads} heads on {kv_heads}", (heads, 17, 8), (kv_heads, 21, 8))
    for kv_heads in (1, 2):
        yield _random(f"GQA, batch 3, 4 heads on {kv_heads}", (3, 4, 17, 8), (3, kv_heads, 21, 8))


def _numbers():
    for m in (33, 65, 97, 100):
        case = _random(f"tail columns, N_k = {m}", (4, 100, 64), (4, m, 64), sigma=15)
        yield replace(case, q=case.q / 3, k=case.k * 3, v=case.v * 3)  # about 5 · randn and 3 · randn

    for scale in (1.0, 0.3, -0.4):
        yield _random(f"scale {scale}", (17, 12), (37, 12), scale=scale)
    yield _random("scale 0: O is the mean of V", (17, 12), (37, 12), scale=0.0)

    case = _random("negative scores: empty columns would outweigh them", (17, 12), (37, 12))
    yield replace(case, q=np.abs(case.q) + 3, k=-np.abs(case.k) - 3)
    for name, scores in (("rising", np.linspace(-60, 60, 100)), ("falling", np.linspace(60, -60, 100))):
        case = _random(f"{name} scores", (17, 16), (100, 16))
        q, k = np.abs(case.q), case.k.copy()
        q[:, 0], k[:, 0] = 4, scores
        yield replace(case, q=q, k=k)
    for d in (3, 40, 64):
        case = _random(f"d = {d}, all but the last feature of Q and K zero", (17, d), (37, d))
        last = np.arange(d) == d - 1
        q, k = case.q * last, case.k * last
        yield replace(case, q=q * 2.5 / reference.scores(q, k, case.scale).std(), k=k)
    for size in (1e5, 1e-5):
        case = _random(f"V of size {size:.0e}", (17, 12), (37, 12))
        yield replace(case, v=case.v * size)

    for score, q_value, k_value in ((-200, -5, 10), (-(2**15), -(2**8), 2**5), (2**15, 2**8, 2**5)):
        yield _integers(f"every score {score}", _constant(q_value, k_value))
    yield _integers("every score -2^31: far below a mask of -1e9", _constant(-(2**15), 2**14))
    yield _integers("every score -2^101: below a mask of -1e30", _constant(-(2**50), 2**49))
    yield _integers("Q and K of size 300", lambda rng, n, m, d: (_whole(rng, 300, n, d), _whole(rng, 300, m, d)))
    for name, at in (("first", 0), ("middle", 18), ("last", -1)):
        yield _integers(f"one dominating key, the {name}", _dominating(at))


def _constant(q_value, k_value):
    return lambda rng, n, m, d: (np.full((n, d), float(q_value)), np.full((m, d), float(k_value)))


def _whole(rng, size, *shape):
    return np.rint(size * rng.standard_normal(shape))


def _dominating(at):
    def make(rng, n, m, d):
        q, k = rng.integers(3, 7, (n, d)).astype(float), rng.integers(-1, 2, (m, d)).astype(float)
        k[at] = 16
        return q, k

    return make


def _layouts(shapes=((3, 17, 12), (3, 21, 12))):
    for name, layout in (
        ("every second feature of a wider array", _strided(-1)),
        ("every second row of a longer array", _strided(-2)),
        ("every second head", _strided(-3)),
        ("Fortran order", np.asfortranarray),
        ("heads beside features, (N, H, d) transposed", lambda x: x.swapaxes(-2, -3).copy().swapaxes(-2, -3)),
        ("rows backwards, a negative stride", lambda x: x[..., ::-1, :].copy()[..., ::-1, :]),
        ("one row broadcast over all", lambda x: np.broadcast_to(x[..., :1, :], x.shape)),
        ("one head broadcast over all", lambda x: np.broadcast_to(x[:1], x.shape)),
        ("read-only", _read_only),
    ):
        yield _random(f"layout: {name}", *shapes, layout=layout)
    yield _random("layout: 2-D, Fortran order", *(shape[1:] for shape in shapes), layout=np.asfortranarray)


def _half_cases():
    """Cases for stages with large tiles and halves, in float64: |numbers| of float16 end at 65,504."""
    for d in (64, 128):
        for n in (1, 2, 63, 64, 65, 127, 128, 129, 177, 192, 193, 257, 385):
            yield _random(f"N = {n}, d = {d}", (n, d), (n, d))
        for n, m in ((1, 300), (300, 1), (64, 129), (129, 64), (65, 257), (200, 130), (16, 400), (130, 1000)):
            yield _random(f"N_q = {n}, N_k = {m}, d = {d}", (n, d), (m, d))
        for n, m in ((5, 0), (0, 5), (0, 0)):
            yield _random(f"N_q = {n}, N_k = {m}, d = {d}", (n, d), (m, d))
        for heads, kv_heads in ((3, 3), (4, 1), (4, 2), (6, 3)):
            yield _random(f"{heads} heads on {kv_heads}, d = {d}", (heads, 70, d), (kv_heads, 133, d))
        yield _random(f"batch 2, 4 heads on 2, d = {d}", (2, 4, 70, d), (2, 2, 133, d))
    for scale in (1.0, 0.3, -0.4, 0.0):
        yield _random(f"scale {scale}", (70, 64), (133, 64), scale=scale)
    case = _random("negative scores: empty columns would outweigh them", (70, 64), (133, 64))
    yield replace(case, q=np.abs(case.q) + 3, k=-np.abs(case.k) - 3)
    for name, scores in (("rising", np.linspace(-60, 60, 300)), ("falling", np.linspace(60, -60, 300))):
        case = _random(f"{name} scores", (70, 64), (300, 64))
        q, k = np.abs(case.q), case.k.copy()
        q[:, 0], k[:, 0] = 4, scores
        yield replace(case, q=q, k=k)
    for size in (1e3, 1e-3):
        case = _random(f"V of size {size:.0e}", (70, 64), (133, 64))
        yield replace(case, v=case.v * size)
    for score, q_value, k_value in ((-800, -5, 10), (8192, 32, 16), (-8192, -32, 16)):
        yield _integers(f"every score {score}", _constant(q_value, k_value), n=70, m=133, d=64)
    for name, at in (("first", 0), ("middle", 70), ("last", -1)):
        yield _integers(f"one dominating key, the {name}", _dominating(at), n=70, m=133, d=64)
    yield from _layouts(((3, 70, 64), (3, 133, 64)))


def _strided(axis):
    """A view of every second element along `axis`; NaN in between."""

    def layout(x):
        wide = np.empty([2 * size if i == x.ndim + axis else size for i, size in enumerate(x.shape)], x.dtype)
        wide.view(np.uint8)[...] = 0xFF  # NaN in every format
        view = np.moveaxis(np.moveaxis(wide, axis, 0)[::2], 0, axis)
        view[...] = x
        return view

    return layout


def _read_only(x):
    x.flags.writeable = False
    return x
