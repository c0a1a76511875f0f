"""The derived tolerances: no right answer is beyond them, and they are not far above what float32 does."""

import numpy as np
import pytest

from numba_flash import testing
from numba_flash.course.exercises import EXERCISES
from numba_flash.course.rounding import ROUNDINGS, TINY, Rounded, truth_and_limit


@pytest.mark.parametrize("name", EXERCISES)
def test_numpy_in_float32_is_within_the_limit_of_every_exercise(name):
    exercise = EXERCISES[name]
    specification = exercise.trusted().specification
    for at, (_, inputs) in enumerate(exercise.inputs()):
        plain = specification(*inputs)
        for got, (truth, limit) in zip(
            plain if isinstance(plain, tuple) else (plain,), truth_and_limit(specification, inputs), strict=True
        ):
            got = np.asarray(got, np.float32)
            assert got.shape == truth.shape == limit.shape
            finite = np.isfinite(truth)
            assert np.array_equal(got[~finite], truth[~finite])
            error = np.abs(got[finite] - truth[finite])
            assert (error <= (limit[finite] - TINY) / ROUNDINGS + TINY).all()
            if at == 0:
                assert np.median(limit[finite]) < 1e-3 * np.abs(truth[finite]).max()


def test_the_truth_is_that_of_float64():
    exercise = EXERCISES["06_no_matrix"]
    specification = exercise.trusted().specification
    _, inputs = next(iter(exercise.inputs()))
    ((truth, limit),) = truth_and_limit(specification, inputs)
    assert np.allclose(truth, specification(*(np.asarray(x, np.float64) for x in inputs)), rtol=1e-12)
    Q, K, V, scale = inputs
    assert limit.max() < ROUNDINGS * 4 * testing.naive_bound(Q, K, V, float(scale))


def test_a_sum_a_product_and_an_exponential_by_hand():
    u = 2.0**-24
    x = Rounded([1.0, 2.0, 4.0])
    assert not x.error.any()
    assert x.sum().error == 2 * u * 7
    assert not (x * x).error.any() and not (Rounded([3.1]) * x).error.any()  # powers of 2
    assert (Rounded([3.0, 5.0]) * Rounded([3.0, 3.0])).error.tolist() == [9 * u, 15 * u]
    ones = Rounded([[2.0, -2.0, 2.0]])
    assert not (ones @ Rounded([[4.0], [4.0], [-4.0]])).error.any()
    assert (ones @ Rounded([[4.0], [4.0], [-8.0]])).error.item() == 3 * u * 32
    y = Rounded([3.0, 5.0, 7.0])
    assert ((y * y) + y).error.tolist() == [9 * u + 12 * u, 25 * u + 30 * u, 49 * u + 56 * u]
    assert (x @ x).error == 3 * u * 21
    assert np.allclose(np.exp(x).error, 4 * u * np.exp(x.value))
    assert np.allclose(np.exp(y * y).error, np.exp(y.value**2) * (y.value**2 * u + 4 * u), rtol=1e-5)
    hidden = np.exp(Rounded([-np.inf]) - 3)
    assert hidden.value == 0 and hidden.error == 0


def test_numpy_that_it_does_not_know_is_refused():
    with pytest.raises(TypeError):
        np.sinh(Rounded([1.0]))
    with pytest.raises(TypeError):
        np.sort(Rounded([1.0]))
