"""Kernels compiled to PTX and, where ptxas is installed, to machine code: needs numba-cuda, but no GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from numba import cuda

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("needs numba-cuda (pip install numba_flash[cu12] or [cu13])", allow_module_level=True)
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba.cuda import dispatcher, types

from numba_flash.engine import gpu

BITS, FLOATS, BYTES = (
    types.Array(types.uint16, 3, "C"),
    types.Array(types.float32, 2, "C"),
    types.Array(types.uint8, 2, "C"),
)
COUNTERS = types.Array(types.uint64, 2, "C")


@pytest.fixture
def pretended(monkeypatch):
    """Device functions ask which GPU there is."""
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))


def ptx_of(kernel, signature, cc=(9, 0)):
    bounds = kernel.targetoptions.get("launch_bounds")
    return cuda.compile_ptx(kernel.py_func, signature, cc=cc, launch_bounds=bounds)[0]


def twin_ptx(kernel, signature, cc=(9, 0)):
    """The PTX of the kernel's counting twin."""
    twin = gpu.counting_twin(kernel)
    bounds = twin.targetoptions.get("launch_bounds")
    return cuda.compile_ptx(twin.py_func, (types.Tuple(signature), COUNTERS), cc=cc, launch_bounds=bounds)[0]


def assembled(ptx, folder, cc=(9, 0)):
    """What ptxas says of it; None where it is not installed."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return None
    release = re.search(
        r"release (\d+)\.(\d+)", subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    )
    if release and tuple(map(int, release.groups())) < (13, 1):
        ptx = re.sub(r"\.version .*", ".version 9.0" if release[1] == "13" else ".version 8.0", ptx)
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas, "-v", f"-arch=sm_{cc[0]}{cc[1]}", source, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr
