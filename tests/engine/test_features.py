"""Every construct a kernel may use gives what Python or NumPy gives, on whatever device the tests run."""

import math

import numpy as np
import pytest
from numba import float32, float64

import numba_flash as nf

from . import feature_kernels as kernels
from . import identity_kernels


def run(kernel, grid, block, *args, **options):
    """Launch on copies of the arrays; returns the arrays as the kernel left them."""
    on_device = [nf.to_device(a) if isinstance(a, np.ndarray) else a for a in args]
    nf.launch(kernel, grid, block, *on_device, **options)
    results = [nf.to_host(a) for a in on_device if not isinstance(a, (int, float, np.generic, tuple))]
    return results[0] if len(results) == 1 else results


@pytest.mark.parametrize("grid, block", [((2, 3, 4), (5, 2, 3)), ((1, 1, 7), (1, 4, 1)), ((6,), (32,)), (3, 2)])
def test_grids_and_blocks_of_one_to_three_dimensions(grid, block):
    def sizes(dims):
        dims = dims if isinstance(dims, tuple) else (dims,)
        return [*dims, 1, 1][:3]

    shape = tuple(g * b for g, b in zip(sizes(grid), sizes(block), strict=True))[::-1]
    A = run(kernels.numbering, grid, block, np.zeros(shape, np.int64))
    assert np.array_equal(A.ravel(), 1 + np.arange(A.size))


def test_names_are_resolved_by_identity():
    assert np.array_equal(run(identity_kernels.renamed, 3, 4, np.zeros(10, np.int32)), np.full(10, 12))
    assert np.array_equal(run(kernels.alias, 2, 3, np.zeros(6, np.int32)), [0, 1, 2, 10, 11, 12])


@pytest.mark.parametrize("T", [1, 8, 33])
def test_static_shared_memory_and_a_barrier(T):
    A = np.arange(2 * T, dtype=np.float32).reshape(2, T)
    assert np.array_equal(run(kernels.make_reverse(T), 2, T, A), A[:, ::-1])


def test_dynamic_shared_memory_is_one_buffer():
    A = np.arange(8, dtype=np.float32)
    _, B = run(kernels.dynamic, 1, 8, A, np.zeros(8, np.float32), shared_bytes=64)
    assert np.array_equal(B, A[::-1] + 16)


@pytest.mark.parametrize("real, dtype", [(float32, np.float32), (float64, np.float64)])
def test_local_arrays(real, dtype):
    A = np.arange(12, dtype=dtype).reshape(4, 3)
    _, B = run(kernels.make_local(3, real), 2, 3, A, np.zeros(4, dtype))
    assert np.array_equal(B, (A * A + A).sum(axis=1))


@pytest.mark.parametrize("T", [8, 64])
def test_barriers_inside_a_device_function(T):
    A = np.random.default_rng(0).integers(0, 9, (3, T)).astype(np.float32)
    _, B = run(kernels.make_block_sums(T), 1, T, A, np.zeros(3, np.float32))
    assert np.array_equal(B, A.sum(axis=1))


def test_device_functions_of_other_modules_with_defaults_and_keywords():
    A = np.arange(6, dtype=np.float32)
    assert np.array_equal(run(kernels.from_elsewhere, 1, 6, A), 3 * A + 18 * A + 27 * A)


def test_closure_constants_of_every_kind():
    A = np.arange(4, dtype=np.float32)
    for factor, offsets in [(2, (1, 3)), (5, (1, 4))]:
        got = run(kernels.make_closures(factor, True, offsets, float32), 1, 4, A)
        assert np.array_equal(got, A + offsets[1] * factor + 5.5)
    assert np.array_equal(run(kernels.make_closures(2, False, (9, 3), float32), 1, 4, A), np.full(4, 9))


def test_mathematics():
    A = np.array([0.5, 1, 2.25], np.float32)
    _, B = run(kernels.mathematics, 1, 3, A, np.zeros((3, 8), np.float32))
    x = A.astype(np.float64)
    want = [np.exp(x), np.log(x), np.sqrt(x), np.maximum(x, 1) - np.minimum(x, 1), 2 * x, x**2 + math.pi,
            np.tanh(x) + np.floor(x) + np.ceil(x), np.full(3, np.inf)]  # fmt: skip
    np.testing.assert_allclose(B.T, want, rtol=4e-7, atol=1e-7)


def test_float32_stays_float32():
    x, y = np.float32(1.1), np.float32(0.7)
    acc, fused = np.float32(0), np.float32(0)
    for _ in range(100):
        acc += x * y
        fused = np.float32(np.float64(x) * np.float64(y) + np.float64(fused))  # a GPU's fma
    A = run(kernels.number_types, 1, 1, np.array([x, y, 0], np.float32))
    assert A[2] in (acc, fused)


def test_control_flow():
    def python(i, n):
        total = 0
        for j in range(1, n + 1):
            if j % 2 and j % 3 == 0 and j != 9:
                total -= j
            elif j % 2 and j < 50:
                total += j
        return (total * 2 if total * 2 > 0 else total) + 210 + i + 2

    assert np.array_equal(run(kernels.control, 1, 5, np.zeros(5, np.int64), 60), [python(i, 60) for i in range(5)])


def test_atomics():
    counter = np.array([0, 0, 0, 255, 0, 0, 0, 0], np.int32)
    extremes = np.zeros((2, 2), np.float32)
    extremes[1] = np.nan, 4
    counter, extremes, old = run(kernels.atomics, 4, 8, counter, extremes, np.zeros(32, np.int32))
    assert list(counter) == [32, -64, 255, 0, 0, 32, 9, 4]
    assert np.array_equal(extremes, [[31, -31], [31, 0]])
    assert sorted(old) == list(range(32))


def test_atomics_on_shared_memory():
    A = np.arange(64, dtype=np.float32)
    assert run(kernels.shared_atomics, 1, 64, A, np.zeros(1, np.float32))[1][0] == A.sum()


def test_fences_are_accepted():
    assert np.array_equal(run(kernels.fences, 1, 4, np.zeros(4, np.float32)), [1, 2, 3, 4])


def test_array_attributes():
    _, out = run(kernels.attributes, 1, 1, np.zeros((3, 5), np.float32), np.zeros(8, np.int64))
    assert list(out) == [2, 15, 3, 3, 305, 20, 5, 12]


def test_scalar_arguments_of_every_kind():
    A = run(kernels.scalars, 1, 1, np.zeros(2), np.int32(3), np.float32(0.25), 0.5, True, (2, 0.5))
    assert list(A) == [4.75, 1]


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint64, np.float32, np.float64])
def test_dtypes_are_copied_bit_for_bit(dtype):
    A = np.random.default_rng(0).integers(0, 100, (5, 3)).astype(dtype)
    assert np.array_equal(run(kernels.copy, (2, 1), (4, 4), A, np.zeros_like(A))[1], A)


VIEWS = {
    "every second column": lambda X: X[:, ::2],
    "Fortran order": np.asfortranarray,
    "transposed": lambda X: X.T,
    "reversed": lambda X: X[::-1, ::-1],
    "broadcast": lambda X: np.broadcast_to(X[:1], X.shape),
    "an inner block": lambda X: X[1:4, 2:5],
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_arguments_are_read_in_place(view):
    A = VIEWS[view](np.arange(48, dtype=np.float32).reshape(8, 6))
    B = np.zeros(A.shape, np.float32)
    nf.launch(kernels.copy, (4, 4), (4, 4), A, B, device="cpu")
    assert np.array_equal(A, B)


@pytest.mark.parametrize("view", [name for name in VIEWS if name != "broadcast"])
def test_strided_arguments_are_written_in_place(view):
    whole = np.zeros((8, 6), np.float32)
    B = VIEWS[view](whole)
    A = 1 + np.arange(B.size, dtype=np.float32).reshape(B.shape)
    nf.launch(kernels.copy, (4, 4), (4, 4), A, B, device="cpu")
    assert np.array_equal(A, B)


def test_the_index_of_an_augmented_assignment_is_evaluated_once():
    A, order = np.ones(4, np.int64), np.array([3, 2, 1, 0])
    A, _, counter = run(kernels.index_once, 1, 4, A, order, np.zeros(1, np.int64))
    assert counter[0] == 4
    if nf.device().name != "gpu":  # there the two statements of different threads interleave
        assert A.sum() > 4


def test_numpy_constants_and_casts():
    assert np.array_equal(run(kernels.numpy_constants, 1, 1, np.zeros(3, np.float32)), [8, 1, 7.5])


def test_names_that_the_engine_uses_itself():
    A = np.arange(8, dtype=np.float32)
    want = np.roll(A, 4) + np.roll(np.arange(8), 4) * 10 + 3 + 1 + 4 + 4
    assert np.array_equal(run(kernels.awkward_names, 1, 8, A, 3, 10), want)


@pytest.mark.parametrize("true, false", [(True, False), (1, 0)])
def test_a_constant_condition_drops_the_other_branch(true, false):
    A = np.full(1, 5, np.float32)
    assert run(kernels.make_pruned(true, true), 1, 1, A)[0] == 7
    assert run(kernels.make_pruned(false, true), 1, 1, A)[0] == 15


def test_atomics_that_wrap_around():
    counter, old = run(kernels.wrap_around, 1, 7, np.array([0, 1], np.uint32), np.zeros(7, np.uint32))
    assert list(counter) == [1, 2]  # 0 1 2 0 1 2 0 -> 1;  1 0 3 2 1 0 3 -> 2
    assert sorted(old) == [0, 0, 0, 1, 1, 2, 2]
