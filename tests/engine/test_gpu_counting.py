"""Counting twins compiled to PTX, which needs numba-cuda but no GPU, and what becomes of Numba's and driver errors."""

import gc
import importlib.util
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, float32

from numba_flash import errors

from .view_kernels import CASES

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("needs numba-cuda (pip install numba_flash[cu12] or [cu13])", allow_module_level=True)
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba.cuda import dispatcher, types
from numba.cuda.cudadrv.driver import CudaAPIError
from numba.cuda.cudadrv.error import CCSupportError
from numba.cuda.np.numpy_support import from_dtype

from numba_flash.engine import gpu

COUNTERS = types.Array(types.uint64, 2, "C")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Compile for compute capability 9.0 where there is no GPU to ask."""
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))


def signature(arguments):
    return tuple(
        types.Array(from_dtype(a.dtype), a.ndim, "C", readonly=not a.flags.writeable)
        if isinstance(a, np.ndarray)
        else from_dtype(a.dtype)
        for a in arguments
    )


def plain_ptx(kernel, arguments):
    with gpu.explained(kernel):
        return cuda.compile_ptx(kernel.py_func, signature(arguments), cc=(9, 0))[0]


def twin_ptx(kernel, arguments):
    with gpu.explained(kernel):
        twin = gpu.counting_twin(kernel)
        return cuda.compile_ptx(twin.py_func, (types.Tuple(signature(arguments)), COUNTERS), cc=(9, 0))[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way_to_reach_an_element_compiles(case):
    plain, twin = plain_ptx(case.kernel, case.arguments()), twin_ptx(case.kernel, case.arguments())
    columns = sum(n > 0 for accesses in case.counts.values() for n in accesses)
    assert twin.count("atom.") + twin.count("red.global") == plain.count("atom.") + plain.count("red.global") + columns
    assert ".f64" not in twin


@cuda.jit
def scores(Q, K, S, scale):
    i, j = cuda.grid(2)
    if i < S.shape[0] and j < S.shape[1]:
        acc = float32(0)
        for t in range(Q.shape[1]):
            acc += Q[i, t] * K[j, t]
        S[i, j] = acc * scale


@cuda.jit
def with_tiles(Q, O):
    tile = cuda.shared.array((32, 32), float32)
    mine = cuda.local.array(32, float32)
    i, tx = cuda.grid(1), cuda.threadIdx.x
    m = float32(-math.inf)
    for t in range(32):
        tile[tx, t] = Q[i, t]
    cuda.syncthreads()
    for t in range(32):
        mine[t] = tile[t, tx]
        m = max(m, mine[t])
    for t in range(32):
        O[i, t] = math.exp(mine[t] - m)


def matrix(*shape):
    return np.zeros(shape or (32, 32), np.float32)


def test_tallies_live_in_registers():
    arguments = (matrix(), matrix(), matrix(), np.float32(1))
    ptx = twin_ptx(scores, arguments)
    assert ".local" not in ptx and "call" not in ptx and ".f64" not in ptx
    assert ptx.count("atom.global.add.u64") == 3  # Q's loads, K's loads, S's stores: once a thread, at its end
    assert ptx.index("atom.") > ptx.rindex("ld.global")


def test_shared_and_local_arrays_are_not_counted():
    plain, twin = plain_ptx(with_tiles, (matrix(), matrix())), twin_ptx(with_tiles, (matrix(), matrix()))
    assert twin.count("atom.global.add.u64") == 2
    assert twin.count(".local") == plain.count(".local")
    assert twin.count("bar.sync") == plain.count("bar.sync") > 0
    assert ".f64" not in twin


def test_float64_and_integers_are_counted_too():
    ptx = twin_ptx(scores, (np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)), np.float64(1)))
    assert "fma.rn.f64" in ptx and ptx.count("atom.global.add.u64") == 3


@cuda.jit
def store_row(A):
    i = cuda.grid(1)
    A[i] = float32(0)


@cuda.jit
def store_slice(A):
    A[0, :] = float32(0)


@cuda.jit
def store_all(A):
    A[:] = float32(0)


@cuda.jit(device=True)
def clear(row):
    row[1:] = float32(0)


@cuda.jit
def store_in_device_function(A):
    clear(A[0])


@pytest.mark.parametrize(
    "kernel, culprit",
    [(store_row, store_row), (store_slice, store_slice), (store_all, store_all), (store_in_device_function, clear)],
)
def test_a_store_to_more_than_an_element_is_refused(kernel, culprit):
    with pytest.raises(errors.Unsupported, match="write a loop") as caught:
        twin_ptx(kernel, (matrix(),))
    code = culprit.py_func.__code__
    assert caught.value.kernel == kernel.__name__ and caught.value.kernel in str(caught.value)
    assert caught.value.file == code.co_filename
    assert code.co_firstlineno < caught.value.line <= code.co_firstlineno + 3
    assert "] = float32(0)" in str(caught.value)


@cuda.jit
def unknown_attribute(A):
    A[0, 0] = A.reshaped[0]


@cuda.jit
def unknown_name(A):
    A[0, 0] = nowhere  # noqa: F821


@cuda.jit
def too_many_indices(A):
    A[0, 0, 0] = float32(1)


@cuda.jit
def with_statement(A):
    with open("file") as file:
        A[0, 0] = len(file)


@pytest.mark.parametrize("ptx", [plain_ptx, twin_ptx])
@pytest.mark.parametrize(
    "kernel, line, reason",
    [
        (unknown_attribute, 2, "Unknown attribute 'reshaped' of type array(float32, 2d, C)"),
        (unknown_name, 0, "name 'nowhere' is not defined"),  # Numba does not say where
        (too_many_indices, 2, "cannot index array(float32, 2d, C) with 3 indices"),
        (with_statement, 0, "construct is not supported"),
    ],
)
def test_what_numba_cannot_compile(kernel, line, reason, ptx):
    with pytest.raises(errors.Unsupported) as caught:
        ptx(kernel, (matrix(),))
    assert caught.value.kernel == kernel.__name__
    assert caught.value.line == kernel.py_func.__code__.co_firstlineno + line
    assert kernel.__name__ in str(caught.value) and reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.__cause__ is not None


@cuda.jit
def write(A):
    A[0, 0] = float32(1)


@pytest.mark.parametrize("ptx", [plain_ptx, twin_ptx])
def test_a_read_only_array_is_not_written(ptx):
    A = matrix()
    A.flags.writeable = False
    with pytest.raises(errors.OutOfBounds, match="readonly"):
        ptx(write, (A,))


def test_what_does_not_go_together():
    with pytest.raises(errors.KernelError, match=r"pip install 'numpy<2\.5'"), gpu.explained(write):
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")
    with pytest.raises(errors.KernelError, match=r"requires >=7\.5.*device='cpu'"), gpu.explained(write):
        raise CCSupportError("GPU compute capability 5.2 is not supported (requires >=7.5)")
    with pytest.raises(AttributeError, match="other"), gpu.explained(write):
        raise AttributeError("module 'numpy' has no attribute 'other'")


def test_too_much_static_shared_memory():
    class nvJitLinkError(Exception):
        pass

    with pytest.raises(errors.SharedMemoryError, match="write.*65,536.*49,152"), gpu.explained(write):
        raise nvJitLinkError("error : Entry function 'f' uses too much shared data (0x10000 bytes, 0xc000 max)")


def test_a_crash_on_the_gpu(monkeypatch):
    def lost():
        raise CudaAPIError(700, "Call to cuCtxSynchronize results in CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(gpu.cuda, "synchronize", lost)
    with pytest.raises(errors.KernelError, match='write.*ILLEGAL_ADDRESS.*lost.*device="cpu"'), gpu.explained(write):
        lost()


def test_twins_are_kept_as_long_as_their_kernel():
    def python(A):
        A[0] = float32(1)

    kernel = cuda.jit(python)
    before = len(gpu._twins)
    assert gpu.counting_twin(kernel) is gpu.counting_twin(kernel)
    assert gpu.counting_twin(kernel, 1024) is not gpu.counting_twin(kernel)
    assert len(gpu._twins) == before + 1
    del kernel
    gc.collect()
    assert len(gpu._twins) == before
