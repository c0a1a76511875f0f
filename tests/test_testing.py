"""assert_exact must accept every right kernel and catch every wrong one, so it is tried on both."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference, testing


def transposed(x):
    return np.swapaxes(x, -1, -2)


def for_every_head(x, q):
    return np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if x.ndim > 2 else x


def scores(q, k, scale):
    return q @ transposed(for_every_head(k, q)) * q.dtype.type(scale)


def softmax(S):
    exp_S = np.exp(S - S.max(axis=-1, keepdims=True, initial=-np.inf))
    return exp_S / exp_S.sum(axis=-1, keepdims=True)


def apply(P, q, v):
    return P @ for_every_head(v, q)


# ------------------------------------------------------------------------------------------------ right implementations


def textbook(q, k, v, scale):
    return apply(softmax(scores(q, k, scale)), q, v)


def scale_first_divide_last(q, k, v, scale):
    S = scores(q * q.dtype.type(scale), k, 1)
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    exp_S = np.exp(S - m)
    l = exp_S.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[..., 0]
    return apply(exp_S, q, v) / np.where(l == 0, 1, l).astype(q.dtype), lse


def keys_backwards(q, k, v, scale):
    return textbook(q, k[..., ::-1, :], v[..., ::-1, :], scale)


def online(q, k, v, scale, Bc=32, m0=-np.inf, rescale=True):
    """Online softmax over blocks of keys, as FlashAttention-2 does it."""
    O = np.zeros_like(q)
    l = np.zeros_like(q[..., :1])
    m = np.full_like(l, m0)
    for j in range(0, k.shape[-2], Bc):
        S = scores(q, k[..., j : j + Bc, :], scale)
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        P = np.exp(S - m_new)
        shrink = np.exp(m - m_new)
        l = shrink * l + P.sum(axis=-1, keepdims=True)
        O = (shrink if rescale else 1) * O + apply(P, q, v[..., j : j + Bc, :])
        m = m_new
    with np.errstate(divide="ignore"):
        return O / np.where(l == 0, 1, l).astype(q.dtype), (m + np.log(l))[..., 0]


def in_double(q, k, v, scale):
    return tuple(x.astype(q.dtype) for x in reference.attention(q, k, v, scale))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fn", [textbook, scale_first_divide_last, keys_backwards, online, in_double])
def test_right_implementations_pass(fn, dtype):
    testing.assert_exact(fn, dtype=dtype)


# ------------------------------------------------------------------------------------------------ wrong implementations


def padded(fill):
    """Keys padded with zeros to a multiple of 16, their scores set to `fill` (None: left as they are, 0)."""

    def fn(q, k, v, scale):
        extra = [(0, 0)] * (k.ndim - 2) + [(0, -k.shape[-2] % 16), (0, 0)]
        S = scores(q, np.pad(k, extra), scale)
        if fill is not None:
            S[..., k.shape[-2] :] = fill
        return apply(softmax(S), q, np.pad(v, extra))

    return fn


def no_maximum(q, k, v, scale):
    exp_S = np.exp(scores(q, k, scale))
    return apply(exp_S / exp_S.sum(axis=-1, keepdims=True), q, v)


def softmax_over_queries(q, k, v, scale):
    return apply(transposed(softmax(transposed(scores(q, k, scale)))), q, v)


def heads_by_remainder(q, k, v, scale):
    pick = np.arange(q.shape[-3]) % k.shape[-3] if q.ndim > 2 else None
    return textbook(q, k, v, scale) if q.ndim == 2 else textbook(q, k[..., pick, :, :], v[..., pick, :, :], scale)


def strides_ignored(q, k, v, scale):
    """What a kernel does that takes the pointer and believes in C order."""

    def from_memory(x):
        return np.lib.stride_tricks.as_strided(x, x.shape, np.empty(x.shape, x.dtype).strides)

    base = [x if x.base is None or 0 in x.strides or min(x.strides) < 0 else from_memory(x) for x in (q, k, v)]
    return textbook(*base, scale)


def writes_to_q(q, k, v, scale):
    q *= q.dtype.type(scale)
    return textbook(q, k, v, 1)


def raises_without_keys(q, k, v, scale):
    exp_S = np.exp(scores(q, k, scale) - scores(q, k, scale).max(axis=-1, keepdims=True))
    return apply(exp_S / exp_S.sum(axis=-1, keepdims=True), q, v)


def sets(index, value):
    def fn(q, k, v, scale):
        out = textbook(q, k, v, scale)
        if out.size:
            out[index] = value
        return out

    return fn


WRONG = {  # name: (implementation, what the message must say)
    "scale ignored": (lambda q, k, v, scale: textbook(q, k, v, 1), "error .* bound"),
    "always 1/√d": (lambda q, k, v, scale: textbook(q, k, v, q.shape[-1] ** -0.5), "case 'scale 1.0'.*error .* bound"),
    "scale twice": (lambda q, k, v, scale: textbook(q, k, v, scale**2), "error .* bound"),
    "scale's sign lost": (lambda q, k, v, scale: textbook(q, k, v, abs(scale)), "case 'scale -0.4'"),
    "softmax over queries": (softmax_over_queries, "error .* bound"),
    "no softmax": (lambda q, k, v, scale: apply(scores(q, k, scale), q, v), "error .* bound"),
    "not divided by l": (lambda q, k, v, scale: apply(np.exp(scores(q, k, scale)), q, v), "error .* bound"),
    "no maximum subtracted": (no_maximum, "is (nan|inf)"),
    "m starts at 0": (lambda q, k, v, scale: online(q, k, v, scale, m0=0), "case 'every score -200'"),
    "O not rescaled": (lambda q, k, v, scale: online(q, k, v, scale, rescale=False), "error .* bound"),
    "last key dropped": (
        lambda q, k, v, scale: textbook(q, k[..., :-1, :], v[..., :-1, :], scale),
        "case 'N = 1, d = 1'",
    ),
    "last key dropped from 33 on": (
        lambda q, k, v, scale: textbook(
            q, k[..., : max(32, k.shape[-2] - 1), :], v[..., : max(32, k.shape[-2] - 1), :], scale
        ),
        "case 'N = 33",
    ),
    "tail of a tile dropped": (
        lambda q, k, v, scale: online(q, k[..., : k.shape[-2] // 8 * 8, :], v[..., : k.shape[-2] // 8 * 8, :], scale),
        "error .* bound",
    ),
    "last feature dropped": (lambda q, k, v, scale: textbook(q[..., :-1], k[..., :-1], v, scale), "error .* bound"),
    "features beyond 64 dropped": (
        lambda q, k, v, scale: textbook(q[..., :64], k[..., :64], v, scale),
        "case 'd = 128'",
    ),
    "V shifted by a row": (lambda q, k, v, scale: textbook(q, k, np.roll(v, 1, axis=-2), scale), "error .* bound"),
    "q and k exchanged": (lambda q, k, v, scale: textbook(k, q, v, scale), "error .* bound|shape"),
    "tail keys not masked": (padded(None), "case 'N = 1, d = 1'|error .* bound"),
    "mask of -1e4": (padded(-1e4), "case 'every score -32768'"),
    "mask of -1e9": (padded(-1e9), r"case 'every score -2\^31"),
    "mask of -1e30": (padded(-1e30), r"case 'every score -2\^101"),
    "zeros": (lambda q, k, v, scale: np.zeros_like(q), "error .* bound"),
    "zeros for the last query": (sets(np.s_[..., -1, :], 0), "error .* bound"),
    "NaN": (lambda q, k, v, scale: np.full_like(q, np.nan), r"out\[0, 0\] is nan, expected .*: 1 of 1 elements"),
    "one NaN": (sets((..., -1, -1), np.nan), "is nan"),
    "infinity": (sets((..., -1, -1), np.inf), "is inf"),
    "mean of V": (
        lambda q, k, v, scale: np.broadcast_to(for_every_head(v, q).mean(axis=-2, keepdims=True), q.shape),
        "error .* bound",
    ),
    "V itself": (lambda q, k, v, scale: v.copy(), "error .* bound|shape"),
    "NaN without keys": (
        lambda q, k, v, scale: textbook(q, k, v, scale) if k.shape[-2] else np.full_like(q, np.nan),
        "case 'no keys'.*is nan, expected 0",
    ),
    "garbage without keys": (
        lambda q, k, v, scale: textbook(q, k, v, scale) if k.shape[-2] else np.full_like(q, 1e-30),
        "case 'no keys'.*bound 0",
    ),
    "half precision inside": (
        lambda q, k, v, scale: textbook(*(x.astype(np.float16) for x in (q, k, v)), scale).astype(q.dtype),
        "error .* bound|is (nan|inf)",
    ),
    "half-precision P": (
        lambda q, k, v, scale: apply(softmax(scores(q, k, scale)).astype(np.float16).astype(q.dtype), q, v),
        "error .* bound",
    ),
    "heads backwards": (
        lambda q, k, v, scale: textbook(q, k[..., ::-1, :, :], v, scale) if q.ndim > 2 else textbook(q, k, v, scale),
        "case '3 heads'",
    ),
    "first head for all": (
        lambda q, k, v, scale: (
            textbook(q, k[..., :1, :, :], v[..., :1, :, :], scale) if q.ndim > 2 else textbook(q, k, v, scale)
        ),
        "case '3 heads'",
    ),
    "heads and queries exchanged": (
        lambda q, k, v, scale: (
            textbook(*(np.swapaxes(x, -2, -3) for x in (q, k, v)), scale).swapaxes(-2, -3)
            if q.shape == k.shape and q.ndim > 2
            else textbook(q, k, v, scale)
        ),
        "case 'as many heads as queries'",
    ),
    "GQA by remainder": (heads_by_remainder, "case 'GQA, 4 heads on 2'"),
    "batch ignored": (
        lambda q, k, v, scale: (
            textbook(q, k[:1].repeat(len(k), 0), v, scale) if q.ndim == 4 else textbook(q, k, v, scale)
        ),
        "case 'batch 2, 3 heads'",
    ),
    "strides ignored": (strides_ignored, "case 'layout: .*is nan"),
    "writes to q": (
        writes_to_q,
        r"the function changed q, its input \(here a copy\): let it write to an array of its own",
    ),
    "returns a view of q's memory": (lambda q, k, v, scale: np.multiply(q, 0, out=q), "the function changed q"),
    "raises": (raises_without_keys, "case 'no keys'.*the function raised ValueError: zero-size array"),
    "flat": (lambda q, k, v, scale: textbook(q, k, v, scale).ravel(), r"out has shape \(1,\), expected \(1, 1\)"),
    "N and d exchanged": (
        lambda q, k, v, scale: transposed(textbook(q, k, v, scale)),
        r"out has shape \(3, 1\), expected \(1, 3\)",
    ),
    "an axis too many": (
        lambda q, k, v, scale: textbook(q, k, v, scale)[None],
        r"shape \(1, 1, 1\), expected \(1, 1\)",
    ),
    "float64 out": (
        lambda q, k, v, scale: textbook(q, k, v, scale).astype(np.float64),
        "out has dtype float64, expected float32",
    ),
    "None": (lambda q, k, v, scale: None, "out is None, a NoneType: return a NumPy array"),
    "a list": (lambda q, k, v, scale: textbook(q, k, v, scale).tolist(), "a list: return a NumPy array"),
    "three results": (lambda q, k, v, scale: (q, q, q), r"returned a tuple of 3: return out, or \(out, lse\)"),
    "lse in base 2": (
        lambda q, k, v, scale: right_with_lse(q, k, v, scale, lambda L: L / np.log(2)),
        "lse.*natural logarithm",
    ),
    "lse is m": (
        lambda q, k, v, scale: (textbook(q, k, v, scale), scores(q, k, scale).max(axis=-1, initial=-np.inf)),
        "lse.*natural",
    ),
    "lse is log l": (
        lambda q, k, v, scale: right_with_lse(
            q, k, v, scale, lambda L: L - scores(q, k, scale).max(axis=-1, initial=-np.inf)
        ),
        "lse.*natural logarithm",
    ),
    "lse negative": (lambda q, k, v, scale: right_with_lse(q, k, v, scale, np.negative), "lse.*natural logarithm"),
    "lse 0 without keys": (
        lambda q, k, v, scale: right_with_lse(q, k, v, scale, lambda L: np.where(np.isinf(L), np.float32(0), L)),
        "lse.*expected -inf",
    ),
    "lse with an axis too many": (
        lambda q, k, v, scale: right_with_lse(q, k, v, scale, lambda L: L[..., None]),
        r"lse has shape \(1, 1\), expected \(1,\)",
    ),
    "lse in float64": (
        lambda q, k, v, scale: right_with_lse(q, k, v, scale, lambda x: x.astype(np.float64)),
        "lse has dtype float64, expected float32",
    ),
}


def right_with_lse(q, k, v, scale, change):
    out, lse = scale_first_divide_last(q, k, v, scale)
    return out, change(lse)


@pytest.mark.parametrize("fn, message", WRONG.values(), ids=WRONG.keys())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wrong_implementations_are_caught(fn, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_exact(fn)


def test_single_precision_inside_float64_is_caught():
    with pytest.raises(AssertionError, match=r"error .* bound .*1e-12 · max\(1, max\|S\|\) · max\|reference\|"):
        testing.assert_exact(
            lambda q, k, v, scale: textbook(*(x.astype(np.float32) for x in (q, k, v)), scale).astype(np.float64),
            dtype="float64",
        )


def test_inputs_cut_to_single_precision_are_caught_in_float64():
    with pytest.raises(AssertionError, match=r"error .* bound"):
        testing.assert_exact(
            lambda q, k, v, scale: textbook(*(x.astype(np.float32).astype(np.float64) for x in (q, k, v)), scale),
            dtype="float64",
        )


# ------------------------------------------------------------------------------------------------------ what it says


def one_case(**changes):
    arrays = {"q": np.zeros((2, 4)), "k": np.zeros((3, 4)), "v": np.arange(12.0).reshape(3, 4)}
    return testing.Case("mine", **arrays | changes, scale=0.5)


def test_the_message_names_the_worst_element():
    def fn(q, k, v, scale):
        out = textbook(q, k, v, scale)
        out[0, 1] += 0.25
        out[1, 2] += 0.5
        return out

    with pytest.raises(AssertionError) as caught:
        testing.assert_exact(fn, cases=[one_case()])
    message = str(caught.value)
    assert message.startswith("case 'mine' (q (2, 4), k and v (3, 4), scale 0.5, float32): ")
    assert "out[1, 2] is 6.5, expected 6: error 5.00e-01, bound" in message
    assert "the naive kernel's own" in message and "2 of 8 elements are beyond the bound" in message


def test_what_the_function_raised_is_the_cause():
    def fn(q, k, v, scale):
        raise ZeroDivisionError("by nought")

    with pytest.raises(
        AssertionError, match=r"case 'mine'.*the function raised ZeroDivisionError: by nought"
    ) as caught:
        testing.assert_exact(fn, cases=[one_case()])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_interrupt_is_no_fault():
    def fn(q, k, v, scale):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        testing.assert_exact(fn, cases=[one_case()])


class DeviceArray:
    """Numba's device array as far as to_host needs it."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {"shape": array.shape}
        self.copy_to_host = lambda: array


class Tensor:
    """Something that knows how to be a NumPy array, as torch tensors do."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize("wrap", [DeviceArray, Tensor])
def test_results_that_are_not_numpy_arrays(wrap):
    testing.assert_exact(lambda q, k, v, scale: wrap(textbook(q, k, v, scale)), cases=[one_case()])
    with pytest.raises(AssertionError, match=r"error .* bound"):
        testing.assert_exact(lambda q, k, v, scale: wrap(np.zeros_like(q)), cases=[one_case()])


def test_the_function_gets_the_case_in_the_dtype_asked_for():
    seen = []

    def fn(q, k, v, scale):
        seen.append((q.dtype.name, k.dtype.name, v.dtype.name, type(scale)))
        return textbook(q, k, v, scale)

    testing.assert_exact(fn, cases=[one_case()])
    testing.assert_exact(fn, cases=[one_case()], dtype=np.float64)
    assert seen == [("float32",) * 3 + (float,), ("float64",) * 3 + (float,)]


def test_nan_that_the_inputs_bring_is_expected():
    case = one_case(q=np.array([[np.nan, 1, 1, 1], [1, 1, 1, 1]]))
    testing.assert_exact(textbook, cases=[case])
    with pytest.raises(AssertionError, match=r"out\[0, 0\] is 0.0, expected nan: 4 of 8 elements"):
        testing.assert_exact(lambda q, k, v, scale: np.nan_to_num(textbook(q, k, v, scale), nan=0), cases=[case])


def test_only_the_function_is_on_the_bill():
    case = one_case()
    with nf.ledger() as alone:
        nf.attention(case.q, case.k, case.v, stage="naive", scale=0.5)
    with nf.ledger() as bill:
        testing.assert_exact(
            lambda q, k, v, scale: nf.attention(q, k, v, stage="naive", scale=scale), cases=[case], dtype="float64"
        )
        testing.assert_exact(textbook, cases=[case])
    assert bill == alone


def test_a_broken_yardstick_is_noticed(monkeypatch):
    monkeypatch.setattr(testing, "naive_bound", lambda *args: 0.0)
    with pytest.raises(AssertionError, match="the naive kernel itself, the yardstick, is off by"):
        testing.assert_exact(lambda q, k, v, scale: np.ones_like(q), cases=[testing._random("a case", (5, 4), (7, 4))])


def test_a_broken_yardstick_of_gradients_is_noticed(monkeypatch):
    monkeypatch.setattr(testing, "naive_gradient_bounds", lambda *args: {"dq": 0.0, "dk": 0.0, "dv": 0.0})
    with pytest.raises(AssertionError, match="the naive kernel itself, the yardstick, is off by .* in dq"):
        testing.assert_exact_backward(
            lambda q, k, v, dout, scale: (np.ones_like(q),) * 3, cases=[testing._random("a case", (5, 4), (5, 4))]
        )


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"fn": 3}, TypeError, r"fn is 3: give a function fn\(q, k, v, scale\)"),
        ({"dtype": "int8"}, ValueError, 'dtype is \'int8\': give "float16", "bfloat16", "float32" or "float64"'),
        ({"dtype": "single precision"}, ValueError, "dtype is 'single precision'"),
        ({"cases": []}, ValueError, "cases is empty"),
        ({"cases": [(1, 2, 3)]}, TypeError, "cases holds a tuple: give testing.Case"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        testing.assert_exact(**{"fn": textbook} | arguments)


# ---------------------------------------------------------------------------------------------------------- the cases


def test_cases_are_the_same_at_each_call_and_have_names_of_their_own():
    first, second = list(testing.cases()), list(testing.cases())
    assert len({case.name for case in first}) == len(first) > 100
    for a, b in zip(first, second, strict=True):
        assert (a.name, a.scale) == (b.name, b.scale) == (str(a), b.scale)
        for x, y in zip(a.inputs(), (b.q, b.k, b.v), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == np.float32 and x.strides == y.strides and not np.shares_memory(x, y)


def test_float64_cases_are_no_float32_numbers():
    random = [case for case in testing.cases("float64") if case.v.size and not case.exact_scores]
    assert all((case.v != case.v.astype(np.float32)).any() for case in random)


ABOUT_SOMETHING_ELSE = "every score|scale 0|negative scores|one row broadcast|no keys|no queries|N = 1, d"


def test_scores_are_spread_and_values_have_a_mean():
    for case in testing.cases():
        if not any(words in case.name for words in ABOUT_SOMETHING_ELSE.split("|")):
            assert reference.scores(case.q, case.k, case.scale).std() >= 2, case.name
        if case.v.size > 40:
            assert abs(case.v.mean() / case.v.std()) > 0.5, case.name


def test_cases_cover_what_broke_others():
    shapes = [(case.q.shape, case.k.shape) for case in testing.cases()]
    assert {(n, d) for n in (1, 2, 5, 17, 31, 32, 33, 63, 65, 97) for d in (1, 3, 8, 40, 59, 63, 64)} <= {
        q for q, _ in shapes
    }
    assert {2, 3, 4} == {len(q) for q, _ in shapes}
    assert {q[-1] for q, _ in shapes} >= {128, 256}
    assert any(q[-2] == 0 < k[-2] for q, k in shapes) and any(k[-2] == 0 < q[-2] for q, k in shapes)
    assert any(len(q) > 2 and q[-3] > k[-3] > 1 for q, k in shapes)


# ---------------------------------------------------------------------------------------------------------- the bounds


def test_bound_float32():
    eps = 2.0**-23
    assert testing.bound(np.array([[1.0, -3.0]]), 0.25) == 0.5 + 4 * eps * 3
    assert testing.bound(np.zeros((0, 4)), 0.0) == 0


def test_bound_float64():
    assert testing.bound(np.array([1.0, -3.0]), 0.25, "float64") == pytest.approx(3e-12)
    assert testing.bound(np.array([1.0, -3.0]), dtype="float64", max_score=0.1) == pytest.approx(3e-12)
    assert testing.bound(np.array([1.0, -3.0]), dtype="float64", max_score=50) == pytest.approx(150e-12)


def test_naive_bound_is_the_formula():
    q, k, v = np.array([[1.0, -2.0]]), np.array([[3.0, 4.0], [-1.0, 0.5]]), np.array([[1.0, -7.0], [2.0, 3.0]])
    A = 11 * 0.5  # |1·3| + |−2·4|, times the scale
    for dtype, eps in (("float32", 2.0**-23), ("float64", 2.0**-52)):
        assert testing.naive_bound(q, k, v, -0.5, dtype) == pytest.approx((2 * 2 * A + 2 + 8) * eps * 7, rel=1e-15)
    assert testing.naive_bound(q, k, v) == pytest.approx((4 * 11 / np.sqrt(2) + 10) * 2.0**-23 * 7, rel=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_naive_stage_keeps_its_bound(dtype):
    for case in testing.cases(dtype):
        expected, _ = reference.attention(*(x.astype(np.longdouble) for x in (case.q, case.k, case.v)), case.scale)
        out = nf.attention(case.q, case.k, case.v, stage="naive", scale=case.scale)
        error = np.abs(out - expected).max(initial=0)
        assert error <= testing.naive_bound(case.q, case.k, case.v, case.scale, dtype), case.name


def test_naive_gradient_bounds_are_the_formula():
    """One query and one key: P = 1, so that E = 2 · |dO||V|."""
    q, k, v, dout = (np.array([[x, 0.0]]) for x in (2.0, 3.0, -5.0, 7.0))
    eps = (2 * (2 * 2 * 3.0 + 1 + 8) + 2 * 2 + 1 + 1) * 2.0**-23
    expected = {"dq": 0.5 * 70 * 3 * eps, "dk": 0.5 * 70 * 2 * eps, "dv": 7 * eps}
    assert testing.naive_gradient_bounds(q, k, v, dout, -0.5) == pytest.approx(expected, rel=1e-15)
    q, dout = (np.stack([x] * 6) for x in (q, dout))  # six heads share two of K and V: two more terms for each of dK
    k, v = (np.stack([x] * 2) for x in (k, v))
    eps += 2 * 2.0**-23
    expected = {"dq": 0.5 * 70 * 3 * eps, "dk": 3 * 0.5 * 70 * 2 * eps, "dv": 3 * 7 * eps}
    assert testing.naive_gradient_bounds(q, k, v, dout, 0.5) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_naive_stage_keeps_the_bounds_of_its_gradients(dtype):
    for case in testing.cases(dtype):
        dout = testing.random_dout(case)
        truth = reference.attention_backward(
            *(x.astype(np.longdouble) for x in (case.q, case.k, case.v, dout)), case.scale
        )
        got = nf.attention_backward(case.q, case.k, case.v, dout, stage="naive", scale=case.scale)
        limits = testing.naive_gradient_bounds(case.q, case.k, case.v, dout, case.scale, dtype)
        for (name, limit), one, right in zip(limits.items(), got, truth, strict=True):
            assert np.abs(one - right).max(initial=0) <= limit, (case.name, name)


# ------------------------------------------------------------------------------------------------------- the backward


def right(q, k, v, dout, scale):
    return tuple(x.astype(q.dtype) for x in reference.attention_backward(q, k, v, dout, scale))


def altered(q, k, v, dout, scale, change=None):
    """The formulas of Algorithm 4 in the dtype of the input, with one of them wrong."""
    heads = reference._repeat_heads
    K, V = heads(k, q), heads(v, q)
    P = reference._softmax(reference.scores(q, K, scale))[0].astype(q.dtype)
    dP = dout @ reference._transpose(V)
    D = (dout * (P @ V)).sum(-1, keepdims=True)
    terms = {"P": P, "dout": dout, "dP": dP, "D": D, "q": q, "K": K, "scale": scale, "sum": reference._sum_heads}
    terms |= {name: f(terms) for name, f in (change or {}).items()}
    dS = terms["P"] * (terms["dP"] - terms["D"])
    dk, dv = reference._transpose(dS) @ terms["q"], reference._transpose(terms["P"]) @ terms["dout"]
    dq, dk = (np.dtype(q.dtype).type(terms["scale"]) * x for x in (dS @ terms["K"], dk))
    return dq.astype(q.dtype), terms["sum"](dk, k.shape).astype(q.dtype), terms["sum"](dv, v.shape).astype(q.dtype)


def first_head(dx, shape):
    group = dx.shape[-3] // shape[-3] if len(shape) > 2 else 1
    return dx.reshape(*shape[:-2], group, *shape[-2:])[..., 0, :, :]


WRONG_BACKWARD = {
    "D left out": {"D": lambda t: 0 * t["D"]},
    "D from dO alone": {"D": lambda t: t["dout"].sum(-1, keepdims=True)},
    "D a mean": {"D": lambda t: t["D"] / t["dout"].shape[-1]},
    "dO of ones": {"dout": lambda t: np.ones_like(t["dout"])},
    "scale left out": {"scale": lambda t: 1.0},
    "scale twice": {"scale": lambda t: t["scale"] ** 2},
    "P not normalised": {"P": lambda t: 1.001 * t["P"]},
    "dP transposed sign": {"dP": lambda t: -t["dP"]},
    "the last key left out": {"P": lambda t: t["P"] * (np.arange(t["P"].shape[-1]) < t["P"].shape[-1] - 1)},
    "heads that share not summed": {"sum": lambda t: first_head},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_reference_backward_is_exact(dtype):
    testing.assert_exact_backward(right, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_wrong_gradients_are_caught(name, dtype):
    few = [case for case in testing.cases(dtype) if case.name in ("N = 33, d = 8", "GQA, 4 heads on 2")]
    testing.assert_exact_backward(right, cases=few, dtype=dtype)
    if dtype == "float64":
        testing.assert_exact_backward(altered, cases=few, dtype=dtype)
    with pytest.raises(AssertionError, match="beyond the bound"):
        testing.assert_exact_backward(
            lambda *arguments: altered(*arguments, WRONG_BACKWARD[name]), cases=few, dtype=dtype
        )


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda q, k, v, dout, scale: q, "the function returned .*: return \\(dq, dk, dv\\)"),
        (lambda q, k, v, dout, scale: (q, k), "return \\(dq, dk, dv\\)"),
        (lambda q, k, v, dout, scale: (q[..., None], k, v), "dq has shape"),
        (lambda q, k, v, dout, scale: (q, k.astype(np.float16), v), "has dtype float16|beyond the bound"),
        (lambda q, k, v, dout, scale: (q + np.nan, k, v), r"dq\[.*\] is nan"),
        (lambda q, k, v, dout, scale: dout.fill(0), "the function changed dout"),
        (lambda q, k, v, dout, scale: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_faults_of_a_backward_function(fn, says):
    with pytest.raises(AssertionError, match=says):
        testing.assert_exact_backward(fn)


def test_huge_scores_catch_a_finite_start_of_m():
    """Where every score is −2¹⁰¹, m starting at −1e30 gives 0, unless what is lost with lse excuses all."""

    def zeros(q, k, v, dout, scale):
        return 0 * q, 0 * k, 0 * v

    huge = [case for case in testing.cases() if "-2^" in case.name]
    for case in huge:
        with pytest.raises(AssertionError, match="beyond the bound; for a function that keeps lse alone"):
            testing.assert_exact_backward(zeros, cases=[case])
    testing.assert_exact_backward(right, cases=huge)
    testing.assert_exact_backward(right, cases=huge, dtype="float64")


def test_dout_has_the_layout_of_the_case():
    seen = []

    def fn(q, k, v, dout, scale):
        seen.append(dout.flags.c_contiguous)
        return right(q, k, v, dout, scale)

    testing.assert_exact_backward(fn, cases=[c for c in testing.cases() if c.name.startswith("layout: every second")])
    assert not any(seen)


def test_bad_arguments_of_the_bounds():
    q = np.ones((3, 4))
    with pytest.raises(ValueError, match="n_k=-1"):
        testing.bound(q, n_k=-1)
    with pytest.raises(ValueError, match="three errors"):
        testing.gradient_bounds(q, q, q, q, naive_errors=(1.0, 2.0))
    with pytest.raises(ValueError, match="dout"):
        testing.gradient_bounds(q, q, q, q[:1])
    with pytest.raises(TypeError, match="give a Case"):
        testing.random_dout(None)
    with pytest.raises(ValueError, match="dtype is None"):
        testing.assert_exact_backward(right, dtype=None)


def test_arguments_of_the_backward_check():
    with pytest.raises(TypeError, match=r"fn\(q, k, v, dout, scale\)"):
        testing.assert_exact_backward(None)
    with pytest.raises(TypeError, match="cases is 3"):
        testing.assert_exact_backward(right, cases=3)
    with pytest.raises(ValueError, match="cases is empty"):
        testing.assert_exact_backward(right, cases=[])
