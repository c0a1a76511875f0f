"""Causal order and key masks, apart from any stage: which pairs they allow, and the reference under them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_flash import reference
from numba_flash.hbm.predict import clamped_sum
from numba_flash.masks import make_allowed, make_first, make_seen, rows_with_keys, to_dense

lengths = st.integers(0, 9)


def rows(N, N_k, **how):
    return ["".join("01"[int(x)] for x in row) for row in to_dense(N, N_k, **how)]


def test_causal_order_is_aligned_at_the_bottom_right():
    assert rows(2, 5, causal=True) == ["11110", "11111"]
    assert rows(5, 2, causal=True) == ["00", "00", "00", "10", "11"]
    assert rows(3, 3, causal=True) == ["100", "110", "111"]
    assert rows(2, 3, key_mask=[True, False, True]) == ["101", "101"]
    assert rows(2, 3, causal=True, key_mask=[False, True, True]) == ["010", "011"]


@given(lengths, lengths, st.booleans(), st.lists(st.booleans(), min_size=9, max_size=9))
def test_the_device_functions_agree_with_it(N, N_k, causal, keys):
    """Their Python is run as it stands: indices as a kernel passes them."""
    mask = np.array([keys[:N_k]], np.uint8)
    dense = to_dense(N, N_k, causal, keys[:N_k])
    allowed, seen, first = (
        f.py_func for f in (make_allowed(int(causal), 1), make_seen(int(causal)), make_first(int(causal)))
    )
    for i in range(N):
        assert [bool(allowed(mask, 0, i + N_k - N, j)) for j in range(N_k)] == dense[i].tolist()
    order = to_dense(N, N_k, causal)
    for i in range(N):
        assert seen(i + N_k - N, N_k) == order[: i + 1].any(axis=0).sum()
    for j in range(N_k):
        sees = order[:, j:].any(axis=1)
        assert first(j + N - N_k) == (sees.argmax() if sees.any() else N)
    assert np.array_equal(rows_with_keys(N, N_k, causal, keys[:N_k]), dense.any(axis=1))


@given(st.integers(-50, 50), st.integers(1, 9), st.integers(0, 40), st.integers(-20, 20), st.integers(0, 30))
def test_clamped_sum(start, step, count, low, more):
    high = low + more
    assert clamped_sum(start, step, count, low, high) == sum(
        min(max(start + k * step, low), high) for k in range(count)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradients_of_the_reference_by_complex_steps(causal, masked):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape) for shape in ((2, 4, 7, 3), (2, 2, 5, 3), (2, 2, 5, 3), (2, 4, 7, 3)))
    key_mask = rng.random((2, 5)) < 0.5 if masked else None
    how = {"causal": causal, "key_mask": key_mask}
    gradients = reference.attention_backward(q, k, v, dout, **how)
    for at, gradient in enumerate(gradients):
        for _ in range(5):
            step = rng.standard_normal(gradient.shape)
            moved = [x + 1e-30j * step if i == at else x for i, x in enumerate((q, k, v))]
            slope = (reference.attention(*moved, **how)[0] * dout).sum().imag / 1e-30
            assert slope == pytest.approx((gradient * step).sum(), rel=1e-12, abs=1e-12)


def test_the_reference_has_no_number_but_zero_for_a_row_without_keys():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((n, 4)) for n in (5, 2, 2, 5))
    out, lse = reference.attention(q, k, v, causal=True)
    dq, dk, dv = reference.attention_backward(q, k, v, dout, causal=True)
    assert np.array_equal(out[:3], np.zeros((3, 4)))
    assert np.isneginf(lse[:3]).all()
    assert np.isfinite(lse[3:]).all()
    assert np.array_equal(dq[:3], np.zeros((3, 4)))
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
