"""Exactness checks for anyone's attention kernel, and inputs that broke other implementations.

    from numba_flash import testing
    testing.assert_exact(my_attention)                      # my_attention(q, k, v, scale) -> out, or (out, lse)
    testing.assert_exact(my_attention, dtype="float64")

Exact means: as good as the textbook algorithm in the same precision. `assert_exact` compares with float64 NumPy
(`numba_flash.reference`) and allows what `bound` allows.
"""

import contextvars
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from . import reference
from .checks import integer, truth
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
        """The same case in another dtype, the scale rounded to it too."""
        q, k, v = (x.astype(dtype) for x in (self.q, self.k, self.v))
        q, k, v = replace(self, q=q, k=k, v=v).inputs()
        return replace(self, q=q, k=k, v=v, scale=float(np.dtype(dtype).type(self.scale)))


def cases(dtype="float32"):
    """Yield every Case, in `dtype` ("float32" or "float64"), the same ones at each call.

    They are the inputs that broke other implementations: short and ragged lengths, tail columns, zero lengths, GQA,
    scores that are huge, equal or dominated by one, values far from 1, and unusual memory layouts. Unless a case is
    about something else, σ(scale · Q Kᵀ) = 2.5 and V has mean 1: with small scores and a zero mean, wrong
    attention looks right.
    """
    dtype = _checked(dtype)
    for case in _all_cases():
        yield case.astype(dtype)


def assert_exact(fn, *, cases=None, dtype="float32"):
    """Check fn(q, k, v, scale) -> out, or (out, lse), against float64 on every case; AssertionError at the first fault.

    q, k, v are NumPy arrays of `dtype` ("float32" or "float64") shaped (N, d), (H, N, d) or (B, H, N, d), k and v
    with their own length and perhaps fewer heads (GQA); scale is a Python float. out must be shaped like q, lse like q
    without its last axis, both of `dtype`; NumPy arrays or CUDA arrays. `cases`: Case objects, converted to `dtype`;
    default: all of `cases()`, a part of which you may choose, as in
    `cases=[c for c in testing.cases() if c.q.ndim == 2]`.

    Each call gets fresh copies of the inputs: to write to one is a fault. Then shape, dtype and finiteness are checked,
    then |out − reference| ≤ `bound`. lse must be log Σ exp(S), natural logarithm: the rows of exp(S − lse) sum to 1.
    The message names the case, the worst element, the expected and the given value, the error and the bound.
    Raises TypeError or ValueError when the arguments of assert_exact themselves are wrong.
    """
    _check_all(fn, "fn(q, k, v, scale) -> out or (out, lse)", cases, dtype, _fault)


def assert_exact_backward(fn, *, cases=None, dtype="float32", from_lse=False):
    """Check fn(q, k, v, dout, scale) -> (dq, dk, dv) against float64 on every case; AssertionError at the first fault.

    dout is random, and shaped like q: a dout of ones would hide errors in D and in dV. from_lse: whether fn computes P
    from lse in `dtype`, as FlashAttention-2 does, and may lose of it what `gradient_bounds` says. The rest is as in
    `assert_exact`.
    """
    truth("from_lse", from_lse)
    form = "fn(q, k, v, dout, scale) -> (dq, dk, dv)"
    _check_all(fn, form, cases, dtype, lambda fn, case: _backward_fault(fn, case, from_lse))


def inputs(q_shape, k_shape, *, dtype="float32", seed=0):
    """Random q, k and v of these shapes, σ(scale · Q Kᵀ) about 2.5 and the mean of v 1, so that wrong looks wrong.

    With small scores all weights are about 1/N, with a zero mean all outputs about 0. Raises OutOfMemory.
    """
    elements = math.prod(q_shape) + 2 * math.prod(k_shape)
    refuse_if_too_large(2 * elements * np.dtype(dtype).itemsize, f"random input of shape {q_shape}", "cpu")
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape, np.dtype(dtype)) for shape in (q_shape, k_shape, k_shape))
    return q * q.dtype.type(2.5), k, v + v.dtype.type(1)


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
    if _checked(dtype) == "float32":
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
    eps = np.finfo(_checked(dtype)).eps
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
    return {name: float(roundings * np.finfo(_checked(dtype)).eps * size) for name, size in sizes.items()}


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


# ---------------------------------------------------------------------------------------------------- the comparison


def _checked(dtype):
    """The name of a dtype; ValueError unless it is float32 or float64."""
    try:
        name = np.dtype(dtype).name if dtype is not None else None
    except TypeError:
        name = None
    if name not in ("float32", "float64"):
        raise ValueError(f'dtype is {dtype!r}: give "float32" or "float64"')
    return name


def _check_all(fn, form, cases, dtype, fault_of):
    dtype = _checked(dtype)
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}: give a function {form}")
    try:
        chosen = list(_all_cases() if cases is None else cases)
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
    limits = gradient_bounds(*arguments, dtype=case.q.dtype, **how_far)
    for (name, right), got in zip(expected.items(), result, strict=True):
        fault = _shape_fault(case, name, got, right)
        if fault is None and case.q.dtype == np.float32 and not _largest_error(got, right) <= limits[name]:
            limits = gradient_bounds(*arguments, _naive_gradient_errors(case, dout, expected), **how_far)
        how = "twice the naive kernel's error, and what rounding the terms of the sum explains"
        fault = fault or _beyond(name, _to_numpy(got), right, limits[name], how)
        if fault:
            lost = f"; {FROM_LSE}" if case.exact_scores and not from_lse else ""
            return fault + lost, None
    return None, None


FROM_LSE = "for a function that keeps lse alone, as FlashAttention-2 does, give from_lse=True"


def random_dout(case):
    """A gradient of out for a Case, shaped like q, in its dtype and layout; the same at each call."""
    if not isinstance(case, Case):
        raise TypeError(f"case is a {type(case).__name__}: give a Case")
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    return case.layout(rng.standard_normal(case.q.shape).astype(case.q.dtype))


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
        if not np.array_equal(arrays[name], original, equal_nan=True):
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
    if got.dtype != case.q.dtype:
        return f"{name} has dtype {got.dtype}, expected {case.q.dtype}, that of q, k and v"

    finite = np.isfinite(expected)
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
    error[finite] = np.abs(_to_numpy(got)[finite] - expected[finite])
    return error


def _largest_error(got, expected):
    return _errors(got, expected).max(initial=0)


def _beyond(name, got, expected, limit, how):
    """The worst element, where an error is beyond the limit, or None."""
    error = _errors(got, expected)
    if (error <= limit).all():
        return None
    at = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    return (
        f"{_element(name, at)} is {got[at]:.9g}, expected {expected[at]:.9g}: error {error[at]:.2e}, bound {limit:.2e} "
        f"({how}); {(error > limit).sum()} of {error.size} elements are beyond the bound"
    )


def _limit(case, name, expected, naive_error):
    """(the `bound` for out or lse, how it comes about). The size of lse counts as 1 at least: 0 is the log of 1."""
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


def _layouts():
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
        yield _random(f"layout: {name}", (3, 17, 12), (3, 21, 12), layout=layout)
    yield _random("layout: 2-D, Fortran order", (17, 12), (21, 12), layout=np.asfortranarray)


def _strided(axis):
    """A view of every second element along `axis`; NaN in between."""

    def layout(x):
        wide = np.full([2 * size if i == x.ndim + axis else size for i, size in enumerate(x.shape)], np.nan, x.dtype)
        view = np.moveaxis(np.moveaxis(wide, axis, 0)[::2], 0, axis)
        view[...] = x
        return view

    return layout


def _read_only(x):
    x.flags.writeable = False
    return x
