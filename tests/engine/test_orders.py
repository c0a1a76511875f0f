"""A race-free kernel gives the same bits whatever order its threads and blocks run in; one that races does not."""

import numpy as np
import pytest
from numba import float32

from numba_flash.engine import cpu
from numba_flash.stages import naive, tiled

from .error_kernels import make_missing_barrier

ORDERS = {
    "reversed": lambda n: np.arange(n)[::-1],
    "odd first": lambda n: np.concatenate([np.arange(1, n, 2), np.arange(0, n, 2)]),
    "shuffled": lambda n: np.random.default_rng(n).permutation(n),
}


def results(kernel, grid, block, args, output, **orders):
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    cpu.run(kernel, grid, block, args, **orders)
    return args[output]


def launches():
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((2, n, 12), dtype=np.float32) for n in (37, 29, 29))
    S = rng.standard_normal((2, 37, 29), dtype=np.float32)
    P, O, L = np.empty_like(S), np.empty_like(Q), np.empty((2, 37), np.float32)
    scale = np.float32(0.3)
    return {
        "naive scores": (naive.make_scores(float32), (2, 3, 2), (16, 16, 1), (Q, K, P, scale), 2),
        "softmax": (naive.make_softmax(float32), (3, 2, 1), (16, 1, 1), (S, P), 1),
        "logsumexp": (naive.make_logsumexp(float32), (3, 2, 1), (16, 1, 1), (S, L), 1),
        "naive output": (naive.make_output(float32), (1, 3, 2), (16, 16, 1), (S, V, O), 2),
        "tiled scores": (tiled.make_scores(8, float32), (4, 5, 2), (8, 8, 1), (Q, K, P, scale), 2),
        "tiled output": (tiled.make_output(8, float32), (2, 5, 2), (8, 8, 1), (S, V, O), 2),
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", launches())
def test_stage_kernels_do_not_depend_on_the_order(name, order):
    kernel, grid, block, args, output = launches()[name]
    permutation = ORDERS[order]
    straight = results(kernel, grid, block, args, output)
    assert np.isfinite(straight).all()
    shuffled = results(kernel, grid, block, args, output, thread_order=permutation(int(np.prod(block))),
                       block_order=permutation(int(np.prod(grid))))  # fmt: skip
    assert np.array_equal(straight, shuffled)


@pytest.mark.parametrize("name", launches())
def test_stage_kernels_have_no_races_and_read_nothing_unwritten(name):
    kernel, grid, block, args, _ = launches()[name]
    cpu.run(kernel, grid, block, [a.copy() if isinstance(a, np.ndarray) else a for a in args], strict=True)


def test_a_racing_kernel_depends_on_the_order():
    A = np.arange(4, dtype=np.float32)
    launch = make_missing_barrier(4), (1, 1, 1), (4, 1, 1), (A, A.copy()), 1
    straight, back = results(*launch), results(*launch, thread_order=np.arange(4)[::-1])
    assert not np.array_equal(straight, back, equal_nan=True)
