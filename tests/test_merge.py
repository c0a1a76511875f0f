"""The law of `merge`: any split of the keys, merged in any order, is the attention over all of them."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numba_flash as nf
from numba_flash import reference


def parts(seed, sizes, N=3, d=4, scale=3.0):
    """(out, lse) over consecutive parts of the keys of these sizes, and over all of them."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        scale * rng.standard_normal((N, d)),
        scale * rng.standard_normal((sum(sizes), d)),
        rng.standard_normal((sum(sizes), d)),
    )
    edges = np.cumsum([0, *sizes])
    pieces = [reference.attention(q, k[a:b], v[a:b]) for a, b in pairwise(edges)]
    return pieces, reference.attention(q, k, v)


def close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


sizes = st.lists(st.integers(0, 9), min_size=2, max_size=5)
seeds = st.integers(0, 2**32 - 1)


@given(seeds, sizes)
def test_any_split_gives_the_whole(seed, sizes):
    pieces, whole = parts(seed, sizes)
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = nf.merge(*merged, *piece)
    close(merged, whole)


@given(seeds, st.tuples(*[st.integers(0, 6)] * 3))
def test_associative_and_commutative(seed, sizes):
    (a, b, c), _ = parts(seed, sizes)
    close(nf.merge(*nf.merge(*a, *b), *c), nf.merge(*a, *nf.merge(*b, *c)))
    close(nf.merge(*a, *b), nf.merge(*b, *a))


@given(seeds)
def test_no_keys_change_nothing_bit_for_bit(seed):
    (a, empty), _ = parts(seed, (5, 0))
    for merged in (nf.merge(*a, *empty), nf.merge(*empty, *a)):
        assert np.array_equal(merged[0], a[0])
        assert np.array_equal(merged[1], a[1])
    both = nf.merge(*empty, *empty)
    assert not both[0].any()
    assert np.isneginf(both[1]).all()


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_splits_of_every_stage(stage):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 9, 8)), rng.standard_normal((2, 30, 8)), rng.standard_normal((2, 30, 8))
    whole = nf.attention(q, k, v, stage=stage, return_lse=True)
    for split in (0, 1, 13, 30):
        first, second = (
            nf.attention(q, k[:, part], v[:, part], stage=stage, return_lse=True)
            for part in (slice(0, split), slice(split, None))
        )
        close(nf.merge(*first, *second), whole)


def test_far_apart_parts_do_not_overflow():
    out = np.ones((1, 2), np.float32)
    merged, lse = nf.merge(out, np.float32([1e30]), 2 * out, np.float32([-1e30]))
    assert np.array_equal(merged, out)
    assert lse[0] == np.float32(1e30)


@pytest.mark.parametrize("size", [1e3, 1e8, 1e12, 1e17, 1e300])
def test_large_lse_keeps_the_weights(size):
    out = np.ones((1, 1))
    for lse in (size, -size):
        assert nf.merge(out, np.array([lse]), 3 * out, np.array([lse]))[0] == 2


def test_no_warning_for_what_the_result_can_hold():
    """Infinite outputs of weight 0, infinities that cancel to NaN, and the largest numbers."""
    inf, one = np.full((1, 1), np.inf), np.ones((1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nf.merge(inf, np.array([-np.inf]), one, np.array([0.0]))[0] == 1
        assert nf.merge(inf, np.array([-2000.0]), one, np.array([0.0]))[0] == 1
        assert np.isnan(nf.merge(inf, np.array([0.0]), -inf, np.array([0.0]))[0])
        assert nf.merge(one, np.array([1.7e308]), one, np.array([-1.7e308]))[1] == 1.7e308


GOOD = (np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.float32)) * 2
BAD = {
    "a list": (0, [[1.0]], TypeError, "out_1 is a list"),
    "a masked array": (0, np.ma.ones((2, 3, 4), np.float32), TypeError, "out_1 is a MaskedArray"),
    "integers": (2, np.ones((2, 3, 4), np.int32), TypeError, "out_2 has dtype int32"),
    "another dtype": (3, np.ones((2, 3)), TypeError, "lse_2 has dtype float64"),
    "another shape": (2, np.ones((2, 3, 5), np.float32), ValueError, "out_2 (2, 3, 5)"),
    "lse with d": (1, np.ones((2, 3, 4), np.float32), ValueError, "lse_1 has shape (2, 3, 4)"),
    "lse of NaN": (3, np.full((2, 3), np.nan, np.float32), ValueError, "lse_2 holds NaN"),
    "lse of infinity": (1, np.full((2, 3), np.inf, np.float32), ValueError, "lse_1 holds NaN or +∞"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit(name):
    position, value, error, said = BAD[name]
    arguments = list(GOOD)
    arguments[position] = value
    with pytest.raises(error) as caught:
        nf.merge(*arguments)
    assert said in str(caught.value)
