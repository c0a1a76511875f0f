"""Arrays that an exercise calls registers are: its solution, compiled to PTX, has no local memory, and no float64.

Needs numba-cuda, but no GPU.
"""

import importlib.util
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import numba_flash as nf
from numba_flash.course.exercise import load
from numba_flash.course.exercises import EXERCISES

from .wrong import DOT_PRODUCTS, PRODUCTS

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


@pytest.mark.course
def test_the_compiler_finds_what_is_loaded_twice(tmp_path, monkeypatch):
    """As 12_registers says: in its kernel, 16 sums with loads of their own become 8 loads per column, too."""
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    matrix, file = types.Array(types.float32, 2, "C"), tmp_path / "scores.py"
    for filling in (PRODUCTS, DOT_PRODUCTS):
        file.write_text(EXERCISES["12_registers"].solution.replace(PRODUCTS, filling), encoding="utf-8")
        kernel = load(file).scores.py_func
        ptx, _ = cuda.compile_ptx(kernel, (matrix, matrix, matrix, types.float32), cc=(9, 0))
        loads, products = (len(re.findall(name, ptx)) for name in (r"ld\.shared", r"fma\.rn\.f32"))
        assert products in (16, 16 * 16) and 2 * loads == products
