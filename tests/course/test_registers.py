"""Arrays that an exercise calls registers are: its solution, compiled to PTX, has no local memory, and no float64.

Needs numba-cuda, but no GPU.
"""

import importlib.util
import os
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import numba_flash as nf
from numba_flash.course.exercises import EXERCISES

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("needs numba-cuda (pip install numba_flash[cu12] or [cu13])", allow_module_level=True)
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba.cuda import dispatcher, types
from numba.cuda.np.numpy_support import from_dtype


def launched(name, monkeypatch):
    """{kernel: its arguments} of what the solution of an exercise launches, on all its inputs; nothing runs."""
    kernels = {}
    exercise = EXERCISES[name]
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    monkeypatch.setattr(nf, "launch", lambda kernel, grid, block, *arguments: kernels.setdefault(kernel, arguments))
    module = exercise.trusted()
    launch = getattr(module, "launch", getattr(module, exercise.answer))
    for _, inputs in exercise.inputs():
        launch(*(float(x) if type(x) is np.float32 else x for x in inputs))  # as a student may call it
    return kernels


def typed(x):
    if isinstance(x, np.ndarray):
        return types.Array(from_dtype(x.dtype), x.ndim, "C")
    return types.float64 if type(x) is float else from_dtype(x.dtype)


@pytest.mark.course
@pytest.mark.parametrize("name", EXERCISES)
def test_registers(name, monkeypatch):
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    kernels = launched(name, monkeypatch)
    assert kernels
    for kernel, arguments in kernels.items():
        ptx, _ = cuda.compile_ptx(kernel.py_func, tuple(map(typed, arguments)), cc=(9, 0))
        assert ".local" not in ptx
        if name != "09_dropout":  # whose probability is a float64
            assert ".f64" not in ptx
