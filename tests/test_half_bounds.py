"""The exactness of halves: an emulated right kernel is within the bounds on every case, and wrong ones are not."""

import math
import re

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference, testing
from numba_flash.dtypes import BFLOAT16, name_of, rounded, widened
from numba_flash.masks import Mask

from . import halves

HALVES = "float16", "bfloat16"
of_halves = pytest.mark.parametrize("dtype", HALVES)


def mask_of(causal=False, key_mask=None):
    keys = np.ones((1, 1), np.uint8) if key_mask is None else np.atleast_2d(key_mask).astype(np.uint8)
    return Mask(causal, keys, key_mask is not None, None)


def bare(x):
    """As a stage gets it: (heads, N, d), bfloat16 as V2."""
    x = x.view(BFLOAT16) if name_of(x.dtype) == "bfloat16" else x
    return np.ascontiguousarray(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def forward(q, k, v, scale, causal=False, key_mask=None, **fault):
    O, L = halves.forward(bare(q), bare(k), bare(v), scale, mask=mask_of(causal, key_mask), **fault)
    return O.reshape(q.shape), L.reshape(q.shape[:-1])


def backward(q, k, v, dout, scale, causal=False, key_mask=None, **fault):
    heads = [bare(x) for x in (q, k, v, dout)]
    gradients = halves.backward(*heads, scale, mask=mask_of(causal, key_mask), **fault)
    return tuple(dX.reshape(x.shape) for dX, x in zip(gradients, (q, k, v)))


# ------------------------------------------------------------------------------------------------------ what is right


@of_halves
@pytest.mark.parametrize("Bc", [16, 128])
def test_a_right_forward_kernel(dtype, Bc):
    testing.assert_exact(lambda *inputs: forward(*inputs, Bc=Bc), dtype=dtype)


@of_halves
def test_a_right_backward_kernel(dtype):
    testing.assert_exact_backward(backward, dtype=dtype)


@of_halves
def test_float64_rounded_at_the_end_is_right(dtype):
    """So is a kernel that is better than tensor cores."""

    def fn(q, k, v, scale):
        out, lse = reference.attention(q, k, v, scale)
        return rounded(out, dtype), lse.astype(np.float32)

    def gradients(q, k, v, dout, scale):
        return tuple(rounded(x, dtype) for x in reference.attention_backward(q, k, v, dout, scale))

    testing.assert_exact(fn, dtype=dtype)
    testing.assert_exact_backward(gradients, dtype=dtype)


@of_halves
@pytest.mark.parametrize(
    "shapes", [((129, 64), (129, 64)), ((4, 100, 128), (2, 257, 128)), ((70, 64), (33, 64))], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_right_under_masks(dtype, shapes, masked):
    q, k, v = testing.inputs(*shapes, dtype=dtype)
    dout = rounded(np.random.default_rng(1).standard_normal(q.shape), dtype)
    scale = np.float32(q.shape[-1] ** -0.5)
    masks = {"causal": True, "key_mask": np.arange(k.shape[-2]) % 3 != 1 if masked else None}
    expected = dict(zip(("out", "lse"), reference.attention(q, k, v, scale, **masks)))
    bounds = testing.half_bounds(q, k, v, scale, dtype, **masks)
    for name, got in zip(bounds, forward(q, k, v, scale, **masks)):
        finite = np.isfinite(expected[name])
        assert (np.abs(widened(got)[finite] - expected[name][finite]) <= bounds[name][finite]).all()
        assert np.array_equal(widened(got)[~finite], expected[name][~finite])
    truth = reference.attention_backward(q, k, v, dout, scale, **masks)
    bounds = testing.half_gradient_bounds(q, k, v, dout, scale, dtype, **masks)
    for (name, bound), got, right in zip(bounds.items(), backward(q, k, v, dout, scale, **masks), truth):
        assert bound.shape == right.shape, name
        assert (np.abs(widened(got) - right) <= bound).all(), name


# ------------------------------------------------------------------------------------------------------ what is wrong

SIZES = [((129, 64), (129, 64)), ((200, 128), (257, 128)), ((4, 130, 64), (2, 1000, 64))]
FORWARD_FAULTS = {
    "a dropped tail of one key": {"drop": 1},
    "a dropped tail of a tile": {"drop": 64},
    "causal, one key too many": {"causal": True, "shift": 1},
    "causal, one key too few": {"causal": True, "shift": -1},
    "causal, aligned at the top left": {"causal": True, "shift": "top left"},
    "O is not rescaled": {"once": True},
    "heads of K in the wrong order": {"other_heads": True},
}
BACKWARD_FAULTS = {name: fault for name, fault in FORWARD_FAULTS.items() if name != "O is not rescaled"} | {
    "a dropped tail of one query": {"drop_queries": 1},
    "no D": {"no_D": True},
    "no scale": {"no_scale": True},
    "dK and dV of one head of the group": {"one_head": True},
}


def case_of(shapes, fault, dtype):
    """q, k, v, dout, scale and the fault; None where it changes nothing."""
    q, k, v = testing.inputs(*shapes, dtype=dtype, seed=3)
    group = q.ndim == 3 and q.shape[0] != k.shape[0]
    if ("other_heads" in fault or "one_head" in fault) and not group:
        return None
    if fault.get("shift") == "top left":
        if q.shape[-2] == k.shape[-2]:
            return None
        fault = fault | {"shift": q.shape[-2] - k.shape[-2]}
    dout = rounded(np.random.default_rng(1).standard_normal(q.shape), dtype)
    return q, k, v, dout, np.float32(q.shape[-1] ** -0.5), fault


@of_halves
@pytest.mark.parametrize("shapes", SIZES, ids=str)
@pytest.mark.parametrize("fault", FORWARD_FAULTS.values(), ids=FORWARD_FAULTS.keys())
def test_a_wrong_forward_kernel_is_beyond_the_bound(dtype, shapes, fault):
    case = case_of(shapes, fault, dtype)
    if case is None:
        pytest.skip("nothing is wrong there")
    q, k, v, _, scale, fault = case
    causal = {"causal": fault.get("causal", False)}
    expected = reference.attention(q, k, v, scale, **causal)
    bounds = testing.half_bounds(q, k, v, scale, dtype, **causal)
    results = forward(q, k, v, scale, **fault)
    beyond = [np.abs(widened(got) - right) > bound for got, right, bound in zip(results, expected, bounds.values())]
    assert beyond[0].any(), "out"
    if "once" not in fault:
        assert beyond[1].any(), "lse"


@of_halves
@pytest.mark.parametrize("shapes", SIZES, ids=str)
@pytest.mark.parametrize("fault", BACKWARD_FAULTS.values(), ids=BACKWARD_FAULTS.keys())
def test_a_wrong_backward_kernel_is_beyond_the_bound(dtype, shapes, fault):
    case = case_of(shapes, fault, dtype)
    if case is None:
        pytest.skip("nothing is wrong there")
    q, k, v, dout, scale, fault = case
    causal = {"causal": fault.get("causal", False)}
    expected = reference.attention_backward(q, k, v, dout, scale, **causal)
    bounds = testing.half_gradient_bounds(q, k, v, dout, scale, dtype, **causal)
    results = backward(q, k, v, dout, scale, **fault)
    beyond = {
        name: (np.abs(widened(got) - right) > bound).any()
        for (name, bound), got, right in zip(bounds.items(), results, expected)
    }
    assert beyond == {
        "dq": not set(fault) & {"drop_queries", "one_head"},
        "dk": True,
        "dv": not set(fault) & {"no_D", "no_scale"},
    }


@of_halves
def test_the_message_names_the_element(dtype):
    def fn(q, k, v, scale):
        out, lse = forward(q, k, v, scale)
        out = widened(out).copy()
        if out.size > 5:
            out[..., 1, 3] += 0.5
        return rounded(out, dtype), lse

    message = (
        rf"case 'N = 2, d = 64' \(q \(2, 64\), k and v \(2, 64\), scale 0.125, {dtype}\): out\[1, 3\] is .*, "
        r"expected .*: error .*, bound \S*e-0[1234] \(what rounding P, O and sums explains\); 1 of 128 elements are .*"
    )
    cases = [case for case in testing.cases(dtype) if case.name == "N = 2, d = 64"]
    with pytest.raises(AssertionError) as caught:
        testing.assert_exact(fn, cases=cases, dtype=dtype)
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


@of_halves
def test_dtypes_are_checked(dtype):
    case = [next(testing.cases(dtype))]
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    with pytest.raises(AssertionError, match=f"out has dtype {other}, expected {dtype}, that of q, k and v"):
        testing.assert_exact(lambda q, k, v, scale: rounded(v, other), cases=case, dtype=dtype)
    with pytest.raises(AssertionError, match=f"lse has dtype {dtype}, expected float32, which goes with q, k and v"):
        testing.assert_exact(lambda q, k, v, scale: (v, rounded(np.log(1 + widened(v[:, 0]) ** 2), dtype)),
                             cases=case, dtype=dtype)  # fmt: skip


@of_halves
def test_a_change_of_the_input_is_seen(dtype):
    def fn(q, k, v, scale):
        q.view(np.uint16)[0, 0] ^= 1
        return forward(q, k, v, scale)

    with pytest.raises(AssertionError, match="the function changed q, its input"):
        testing.assert_exact(fn, dtype=dtype)


def test_a_case_beyond_float16_is_refused_and_not_made_infinite():
    case = next(case for case in testing.cases("float64") if case.name.startswith("V of size 1e+05"))
    with pytest.raises(ValueError, match=r"case 'V of size 1e\+05': v holds numbers beyond float16: leave it out"):
        testing.assert_exact(forward, cases=[case], dtype="float16")
    testing.assert_exact(forward, cases=[case], dtype="bfloat16")


@of_halves
def test_the_cases_are_the_same_each_time_and_make_wrong_look_wrong(dtype):
    for one, other in zip(testing.cases(dtype), testing.cases(dtype), strict=True):
        assert one.name == other.name
        assert name_of(one.q.dtype) == dtype
        for a, b in zip(one.inputs(), other.inputs()):
            assert np.array_equal(widened(a), widened(b))
            assert np.isfinite(widened(a)).all()
    names = [case.name for case in testing.cases(dtype)]
    assert len(set(names)) == len(names)


def test_stages_pass_through_assert_exact(monkeypatch):
    halves.install(monkeypatch, "hopper")
    for dtype in HALVES:
        testing.assert_exact(
            lambda q, k, v, scale: nf.attention(q, k, v, stage="hopper", scale=scale, return_lse=True), dtype=dtype
        )
        testing.assert_exact_backward(
            lambda q, k, v, dout, scale: nf.attention_backward(q, k, v, dout, stage="hopper", scale=scale), dtype=dtype
        )


# ------------------------------------------------------------------------------------------------------- the rounding


def test_rounding_to_bfloat16_is_to_nearest_even():
    x = np.array([1, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, -1 - 2**-8, 0, -0.0, 3.4e38, np.inf, -np.inf], float)
    expected = [1, 1, 1 + 2**-7, 1 + 2**-6, -1, 0, -0.0, np.inf, np.inf, -np.inf]
    with np.errstate(over="ignore"):
        got = widened(rounded(x, "bfloat16"))
    assert np.array_equal(got, expected) and np.array_equal(np.signbit(got), np.signbit(expected))
    assert np.isnan(widened(rounded(np.array([np.nan]), "bfloat16"))).all()


def test_rounding_to_bfloat16_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(0).integers(0, 2**32, 10**5, np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    assert np.array_equal(rounded(x, "bfloat16").view(np.uint16), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(widened(x.astype(ml_dtypes.bfloat16)), x.astype(ml_dtypes.bfloat16).astype(np.float32))
