"""What every launch is checked for, and how the device is chosen."""

import numpy as np
import pytest
from numba import cuda, njit

import numba_flash as nf
from numba_flash.engine import launch as engine
from numba_flash.errors import KernelError, OutOfMemory, Unsupported

from . import error_kernels, feature_kernels
from .feature_kernels import copy, fences


def floats(*shape):
    return np.ones(shape, np.float32)


@cuda.jit(device=True)
def helper(x):
    return x


@njit
def compiled_for_the_cpu(A):
    A[0] = 1


BAD_LAUNCHES = {
    "a plain function": (lambda A: None, 1, 1, (floats(4),), TypeError, "@cuda.jit"),
    "no kernel": (7, 1, 1, (floats(4),), TypeError, "kernel=7"),
    "njit": (compiled_for_the_cpu, 1, 1, (floats(4),), TypeError, "@cuda.jit"),
    "a device function": (helper, 1, 1, (floats(4),), TypeError, "helper is a device function"),
    "grid 0": (fences, 0, 1, (floats(4),), ValueError, "grid=0"),
    "grid negative": (fences, (1, -2), 1, (floats(4),), ValueError, "grid=(1, -2)"),
    "grid float": (fences, 1.5, 1, (floats(4),), TypeError, "grid=1.5"),
    "grid bool": (fences, True, 1, (floats(4),), TypeError, "grid=True"),
    "four axes": (fences, 1, (1, 1, 1, 1), (floats(4),), TypeError, "block=(1, 1, 1, 1)"),
    "no axes": (fences, (), 1, (floats(4),), TypeError, "grid=()"),
    "too many threads": (fences, 1, (33, 32), (floats(4),), ValueError, "1056 threads"),
    "block z": (fences, 1, (1, 1, 65), (floats(4),), ValueError, "at most 64"),
    "grid y": (fences, (1, 65_536), 1, (floats(4),), ValueError, "65,535"),
    "grid z": (fences, (1, 1, 65_536), 1, (floats(4),), ValueError, "65,535"),
    "too few arguments": (copy, 1, 1, (floats(4),), TypeError, "takes 2 arguments (A, B), got 1"),
    "too many arguments": (fences, 1, 1, (floats(4), 1), TypeError, "takes 1 arguments (A), got 2"),
    "a list": (fences, 1, 1, ([1, 2],), TypeError, "argument A of fences is a list"),
    "arrays in a tuple": (fences, 1, 1, ((floats(2), 1),), TypeError, "argument of its own"),
    "None": (fences, 1, 1, (None,), TypeError, "argument A of fences is a NoneType"),
    "no axis": (fences, 1, 1, (np.array(1.0),), TypeError, "A[()]"),
    "objects": (fences, 1, 1, (np.array([1, "a"], object),), TypeError, "dtype object"),
    "structured": (fences, 1, 1, (np.zeros(2, "i4,f4"),), TypeError, "plain number type"),
    "other byte order": (fences, 1, 1, (np.zeros(2, ">f4"),), TypeError, "dtype >f4"),
    "strings": (fences, 1, 1, (np.array(["a"]),), TypeError, "dtype <U1"),
    "shared_bytes": (fences, 1, 1, (floats(4),), ValueError, "shared_bytes=-1"),
    "half on the CPU": (fences, 1, 1, (np.zeros(4, np.float16),), Unsupported, "float16"),
}


@pytest.mark.parametrize("name", BAD_LAUNCHES)
def test_a_launch_that_cannot_be(name):
    kernel, grid, block, args, error, said = BAD_LAUNCHES[name]
    options = {"shared_bytes": -1} if name == "shared_bytes" else {}
    with pytest.raises(error) as caught:
        nf.launch(kernel, grid, block, *args, device="cpu", **options)
    assert said in str(caught.value)


def test_the_largest_launches_are_accepted():
    nf.launch(fences, 1, 1024, floats(1024))
    nf.launch(feature_kernels.numbering, (1, 1, 1), (1, 1, 64), np.zeros((64, 1, 1)))
    nf.launch(error_kernels.make_large(1), (1, 65_535), 1, floats(1))


def test_device_is_chosen_and_explained(monkeypatch):
    monkeypatch.delenv("NUMBA_FLASH_DEVICE", raising=False)
    chosen = nf.device()
    assert chosen.name in ("cpu", "gpu", "sim")
    assert chosen.why
    assert nf.device("cpu") == engine.Device("cpu", "asked for by device=")
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    assert "NUMBA_FLASH_DEVICE" in nf.device().why
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "tpu")
    with pytest.raises(ValueError, match=r"^NUMBA_FLASH_DEVICE='tpu' is unknown: .*'sim', or unset it$"):
        nf.device()
    with pytest.raises(ValueError, match=r"^device='tpu' is unknown: .*'sim', or None to choose$"):
        nf.device("tpu")
    for name, why in (("sim", "needs NUMBA_ENABLE_CUDASIM=1 .*"), ("gpu", "cannot be used: no such thing")):
        monkeypatch.setenv("NUMBA_FLASH_DEVICE", name)
        monkeypatch.setattr(engine, "gpu_problem", lambda: "no such thing")
        with pytest.raises(KernelError, match=f"^NUMBA_FLASH_DEVICE='{name}' {why}; unset it, or set it to cpu$"):
            nf.device()
        with pytest.raises(KernelError, match=f"^device='{name}' {why}; device='cpu' runs the same kernels$"):
            nf.device(name)
    with pytest.raises(KernelError, match="NUMBA_ENABLE_CUDASIM"):
        nf.device("sim")
    with pytest.raises(ValueError, match="device=3"):
        nf.device(3)


@pytest.mark.parametrize("count, package, numpy_fits, why", [
    (0, True, True, "no GPU"),
    (1, False, True, "cu13"),
    (1, True, False, "numpy<2.5"),
    (1, True, True, None),
])  # fmt: skip
def test_when_a_gpu_counts_as_one(monkeypatch, count, package, numpy_fits, why):
    monkeypatch.delenv("NUMBA_FLASH_DEVICE", raising=False)
    monkeypatch.setattr(engine, "gpu_count", lambda: count)
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object() if package else None)
    monkeypatch.setattr(engine, "numpy_conflict", lambda: None if numpy_fits else "pip install 'numpy<2.5'")
    engine.gpu_problem.cache_clear()
    try:
        assert nf.device().name == ("cpu" if why else "gpu")
        if why:
            assert why in nf.device().why
            with pytest.raises(KernelError, match="device='gpu' cannot be used"):
                nf.device("gpu")
    finally:
        engine.gpu_problem.cache_clear()


def test_strict_belongs_to_the_cpu_engine(monkeypatch):
    monkeypatch.setattr(engine, "device", lambda name=None: engine.Device("gpu", "pretended"))
    with pytest.raises(ValueError, match="device='cpu'"):
        nf.launch(fences, 1, 1, floats(1), strict=True)


def test_strict_by_environment(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "1")
    with pytest.raises(nf.errors.RaceDetected):
        nf.launch(error_kernels.write_write, 1, 4, floats(4), device="cpu")
    nf.launch(error_kernels.write_write, 1, 4, floats(4), device="cpu", strict=False)


def test_memory_functions():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    y = nf.to_device(x)
    assert np.array_equal(nf.to_host(y), x)
    assert not np.shares_memory(nf.to_host(y), x)
    for dtype in (np.float32, np.float64, np.int32, np.bool_):
        z = nf.empty((2, 3), dtype)
        assert (z.shape, z.dtype) == ((2, 3), np.dtype(dtype))
        assert dtype not in (np.float32, np.float64) or np.isnan(nf.to_host(z)).all()
    assert nf.empty(3, np.float32).shape == (3,)
    assert nf.empty((0, 4), np.float32).shape == (0, 4)


def test_memory_that_is_not_there(monkeypatch):
    with pytest.raises(OutOfMemory, match="needs 4,503,599,627,370,496,000 B"):
        nf.empty((2**50, 1000), np.float32, device="cpu")
    with pytest.raises(MemoryError):
        nf.to_device(np.broadcast_to(np.float32(1), (2**45, 3)), device="cpu")
