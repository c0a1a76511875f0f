"""Counts on Numba's simulator. It must be chosen before `numba.cuda` is imported, so all cases run in one other
process: this module, run with `python -m`, prints what it found as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32

from numba_flash import errors

from .view_kernels import CASES


@cuda.jit
def store_row(A):
    A[cuda.grid(1)] = float32(0)


@cuda.jit
def store_slice(A):
    A[0, :] = float32(0)


@cuda.jit
def store_slice_of_view(A):
    row = A[0]
    row[1:] = row[0]


@cuda.jit
def out_of_bounds(A):
    A[0, 0] = A[cuda.threadIdx.x + 2, 0]


@cuda.jit
def divide_by_zero(A):
    n = cuda.threadIdx.x - cuda.blockIdx.x
    A[0, 0] = 1 // n


@cuda.jit
def crowd(A):
    for t in range(A.shape[0]):
        A[t] = A[t] + float32(1)
        cuda.atomic.add(A, t, float32(1))


@cuda.jit
def reverse(A):
    tile = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    tile[i] = A[i]
    cuda.syncthreads()
    A[i] = tile[tile.shape[0] - 1 - i]


FAILURES = {  # kernel -> (class of the error, its line in the kernel)
    store_row: ("Unsupported", 2),
    store_slice: ("Unsupported", 2),
    store_slice_of_view: ("Unsupported", 3),
    out_of_bounds: ("OutOfBounds", 2),
    divide_by_zero: ("KernelError", 3),
}


def main():
    from numba_flash.engine import sim

    found = {}
    for case in CASES:
        args = case.arguments()
        counts = sim.run(case.kernel, case.grid, case.block, args, 0, True)
        stored = dict(zip(counts, (a for a in args if isinstance(a, np.ndarray))))
        found[case.name] = {
            "counts": {name: list(accesses[1:]) for name, accesses in counts.items()},
            "right": all(np.array_equal(stored[name], expected) for name, expected in case.results.items()),
        }

    failures = {}
    for kernel in FAILURES:
        try:
            sim.run(kernel, (2, 1, 1), (1, 1, 1), (np.zeros((2, 3), np.float32),), 0, True)
        except errors.KernelError as error:
            line = error.line - kernel.fn.__code__.co_firstlineno
            failures[error.kernel] = [type(error).__name__, line, error.file, error.block, error.thread, str(error)]

    on_device, A = cuda.to_device(np.zeros(50, np.float32)), np.arange(6, dtype=np.float32)
    print(
        json.dumps(
            {
                "cases": found,
                "failures": failures,
                "crowd": sim.run(crowd, (2, 1, 1), (32, 1, 1), (on_device,), 0, True),
                "uncounted": sim.run(reverse, (1, 1, 1), (6, 1, 1), (A,), 24, False),
                "reversed": A.tolist(),
                "float64": sim.run(crowd, (1, 1, 1), (1, 1, 1), (np.zeros(2),), 0, True),
            }
        )
    )


@pytest.fixture(scope="module")
def found():
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=root,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counts_and_results(found, case):
    assert found["cases"][case.name]["counts"] == {name: list(counts) for name, counts in case.counts.items()}
    assert found["cases"][case.name]["right"]


@pytest.mark.parametrize("kernel", FAILURES, ids=lambda kernel: kernel.__name__)
def test_errors_say_where(found, kernel):
    kind, line, file, block, thread, message = found["failures"][kernel.__name__]
    assert (kind, line) == FAILURES[kernel]
    assert file == __file__
    assert block[1:] == thread[1:] == [0, 0]
    assert kernel.__name__ in message
    assert kind != "Unsupported" or "write a loop" in message


def test_no_access_is_lost_among_many_threads(found):
    assert found["crowd"] == {"A": [4, 64 * 50, 64 * 50, 64 * 50]}


def test_item_size(found):
    assert found["float64"] == {"A": [8, 2, 2, 2]}


def test_dynamic_shared_memory_and_no_counting(found):
    assert found["uncounted"] is None
    assert found["reversed"] == [5, 4, 3, 2, 1, 0]


if __name__ == "__main__":
    main()
