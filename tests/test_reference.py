"""The reference is the truth for every other test, so it is checked against things that are not NumPy matrices."""

import math
import warnings
from functools import partial

import numpy as np
import pytest

from numba_flash import reference

SHAPES = {  # name: (shape of q, shape of k and v)
    "2-D": ((5, 4), (7, 4)),
    "one query, one key": ((1, 3), (1, 3)),
    "heads": ((3, 4, 5), (3, 6, 5)),
    "GQA 4:2": ((4, 3, 2), (2, 5, 2)),
    "GQA 4:1": ((4, 3, 2), (1, 5, 2)),
    "batch and GQA": ((2, 4, 3, 2), (2, 2, 4, 2)),
}
shapes = pytest.mark.parametrize("q_shape, k_shape", SHAPES.values(), ids=SHAPES.keys())


def inputs(q_shape, k_shape, seed=0):
    rng = np.random.default_rng(seed)
    q, k = 2 * rng.standard_normal(q_shape), rng.standard_normal(k_shape)
    return q, k, rng.standard_normal(k_shape) + 1, rng.standard_normal(q_shape)


def row_by_hand(q_row, K, V, scale):
    """One row of attention in plain Python, sums without rounding error."""
    S = [scale * math.fsum(a * b for a, b in zip(q_row, k_row, strict=True)) for k_row in K]
    m = max(S)
    l = math.fsum(math.exp(s - m) for s in S)
    P = [math.exp(s - m) / l for s in S]
    return [math.fsum(p * v_row[t] for p, v_row in zip(P, V, strict=True)) for t in range(len(V[0]))], m + math.log(l)


@shapes
def test_attention_equals_a_plain_python_loop(q_shape, k_shape):
    q, k, v, _ = inputs(q_shape, k_shape)
    out, lse = reference.attention(q, k, v, 0.7)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and out.dtype == lse.dtype == np.float64
    group = q_shape[-3] // k_shape[-3] if q.ndim > 2 else 1
    for index in np.ndindex(lse.shape):
        kv = (*index[:-2], index[-2] // group) if q.ndim > 2 else ()
        O_row, L = row_by_hand(q[index].tolist(), k[kv].tolist(), v[kv].tolist(), 0.7)
        np.testing.assert_allclose(out[index], O_row, rtol=1e-13, atol=1e-13)
        assert lse[index] == pytest.approx(L, rel=1e-14)


def test_the_default_scale_is_one_over_root_d():
    q, k, v, dout = inputs((5, 4), (7, 4))
    np.testing.assert_array_equal(reference.attention(q, k, v)[0], reference.attention(q, k, v, 0.5)[0])
    np.testing.assert_equal(
        reference.attention_backward(q, k, v, dout), reference.attention_backward(q, k, v, dout, 0.5)
    )


@shapes
def test_rows_of_exp_S_minus_L_sum_to_one(q_shape, k_shape):
    q, k, v, _ = inputs(q_shape, k_shape)
    _, lse = reference.attention(q, k, v, 0.3)
    k = np.repeat(k, q_shape[-3] // k_shape[-3], axis=-3) if q.ndim > 2 else k
    S = 0.3 * np.einsum("...id,...jd->...ij", q, k)
    np.testing.assert_allclose(np.exp(S - lse[..., None]).sum(axis=-1), 1, rtol=1e-13)


@pytest.mark.parametrize("shift", [-1e6, -200, 200, 1e6])
def test_equal_scores_give_the_mean_of_V(shift):
    q, k = np.full((3, 4), math.sqrt(abs(shift))), np.full((5, 4), math.copysign(math.sqrt(abs(shift)), shift))
    v = np.random.default_rng(1).standard_normal((5, 4))
    out, lse = reference.attention(q, k, v, 0.25)
    np.testing.assert_allclose(out, np.tile(v.mean(axis=0), (3, 1)), rtol=1e-14)
    np.testing.assert_allclose(lse, shift + math.log(5), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.float32])
def test_input_of_any_precision_is_computed_in_float64(dtype):
    q, k, v, dout = (np.rint(4 * x).astype(dtype) for x in inputs((5, 4), (7, 4)))
    wide = [x.astype(np.float64) for x in (q, k, v, dout)]
    np.testing.assert_array_equal(reference.attention(q, k, v)[0], reference.attention(*wide[:3])[0])
    gradients = reference.attention_backward(q, k, v, dout)
    assert all(gradient.dtype == np.float64 for gradient in gradients)
    np.testing.assert_equal(gradients, reference.attention_backward(*wide))


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_no_keys(heads):
    q, empty, dout = np.ones((*heads, 5, 4)), np.ones((*heads, 0, 4)), np.ones((*heads, 5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = reference.attention(q, empty, empty)
        dq, dk, dv = reference.attention_backward(q, empty, empty, dout)
    np.testing.assert_array_equal(out, np.zeros(q.shape))
    np.testing.assert_array_equal(lse, np.full(q.shape[:-1], -np.inf))
    np.testing.assert_array_equal(dq, np.zeros(q.shape))
    assert dk.shape == dv.shape == empty.shape


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_no_queries(heads):
    empty, k = np.ones((*heads, 0, 4)), np.ones((*heads, 5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = reference.attention(empty, k, k)
        dq, dk, dv = reference.attention_backward(empty, k, k, empty)
    assert out.shape == dq.shape == empty.shape and lse.shape == empty.shape[:-1]
    np.testing.assert_array_equal(dk, np.zeros(k.shape))
    np.testing.assert_array_equal(dv, np.zeros(k.shape))


def derivatives(step, arrays, which, dout, scale):
    """d Σ(out ∘ dout) / d arrays[which], one element at a time, by `step(f, x)` with f a function of that element."""

    def loss(x, index):
        moved = [a.astype(np.result_type(a.dtype, type(x))) for a in arrays]
        moved[which][index] = x
        return (reference.attention(*moved, scale)[0] * dout).sum()

    result = np.empty(arrays[which].shape)
    for index in np.ndindex(result.shape):
        result[index] = step(partial(loss, index=index), float(arrays[which][index]))
    return result


def complex_step(f, x, h=1e-30):
    """f'(x) with no subtraction, so to full precision: Im f(x + ih) / h."""
    return f(complex(x, h)).imag / h


def central_difference(f, x, h=6e-6):
    return (f(x + h) - f(x - h)) / (2 * h)


@shapes
@pytest.mark.parametrize("step, tolerance", [(complex_step, 1e-12), (central_difference, 1e-8)])
def test_gradients(q_shape, k_shape, step, tolerance):
    q, k, v, dout = inputs(q_shape, k_shape, seed=2)
    for which, gradient in enumerate(reference.attention_backward(q, k, v, dout, 0.6)):
        expected = derivatives(step, (q, k, v), which, dout, 0.6)
        assert gradient.shape == expected.shape
        # one query and one key: P = 1 whatever q and k are, so that dq and dk are 0 on both sides
        assert np.abs(gradient - expected).max() <= tolerance * max(np.abs(expected).max(), 1)


def test_gradients_with_large_scores():
    q, k, v, dout = inputs((9, 8), (11, 8), seed=3)
    q *= 5
    for which, gradient in enumerate(reference.attention_backward(q, k, v, dout)):
        expected = derivatives(complex_step, (q, k, v), which, dout, None)
        assert np.abs(gradient - expected).max() <= 1e-12 * np.abs(expected).max()


def test_the_gradients_themselves_are_analytic():
    """A complex step through attention_backward: the second derivatives in q are symmetric."""
    q, k, v, dout = inputs((2, 3), (4, 3), seed=4)
    hessian = np.empty((q.size, q.size))
    for i in range(q.size):
        moved = q.astype(complex)
        moved.flat[i] += 1e-30j
        hessian[i] = reference.attention_backward(moved, k, v, dout)[0].imag.ravel() / 1e-30
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-12, atol=1e-13)
    assert np.abs(hessian).max() > 1e-3


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((5,), (5,), (5,)),
        ((1, 1, 1, 5, 4), (1, 1, 1, 5, 4), (1, 1, 1, 5, 4)),
        ((5, 4), (1, 5, 4), (1, 5, 4)),
        ((5, 4), (5, 3), (5, 4)),
        ((5, 0), (5, 0), (5, 4)),
        ((5, 4), (5, 4), (6, 4)),
        ((4, 5, 4), (3, 5, 4), (3, 5, 4)),
        ((1, 5, 4), (2, 5, 4), (2, 5, 4)),
        ((4, 5, 4), (2, 5, 4), (4, 5, 4)),
        ((0, 5, 4), (0, 5, 4), (0, 5, 4)),
        ((4, 5, 4), (0, 5, 4), (0, 5, 4)),
        ((3, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
    ],
)
def test_shapes_that_do_not_fit(q, k, v):
    with pytest.raises(ValueError, match="do not fit"):
        reference.attention(np.ones(q), np.ones(k), np.ones(v))
    with pytest.raises(ValueError, match="do not fit"):
        reference.attention_backward(np.ones(q), np.ones(k), np.ones(v), np.ones(q))


def test_dout_of_another_shape():
    with pytest.raises(ValueError, match=r"dout has shape \(4,\): give it the shape of out, \(5, 4\)"):
        reference.attention_backward(np.ones((5, 4)), np.ones((5, 4)), np.ones((5, 4)), np.ones(4))
