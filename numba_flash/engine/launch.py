"""Where a kernel runs: checks a launch, then hands it to the GPU, the CPU engine or Numba's simulator."""

import ctypes
import importlib.metadata
import importlib.util
import math
import os
import sys
from dataclasses import dataclass
from functools import cache

import numba
import numpy as np

from ..dtypes import BFLOAT16
from ..errors import KernelError, Unsupported
from ..hbm import ledger, lines
from . import cpu, memory, model, recorder
from .rewrite import function_of, is_kernel

DEVICES = ("gpu", "cpu", "sim")
INTEGERS = int, np.integer
SMALL = 2**24  # bytes: nobody asks how much memory is free for an array of so many, which takes longer than to make it


@dataclass(frozen=True)
class Device:
    """What kernels run on: `name` "gpu", "cpu" (the compiled CPU engine) or "sim" (Numba's simulator), and `why`."""

    name: str
    why: str

    def __str__(self):
        return f"{self.name} ({self.why})"


@cache
def gpu_problem():
    """Why no GPU can be used, or None when one can. Asks the driver and the package list; does not touch numba.cuda."""
    if numba.config.ENABLE_CUDASIM:
        return "NUMBA_ENABLE_CUDASIM is set, which replaces the GPU by Numba's simulator"
    if not gpu_count():
        return "no NVIDIA driver is installed" if gpu_count() is None else "the NVIDIA driver reports no GPU"
    if importlib.util.find_spec("numba_cuda") is None:
        return "a GPU is there, but the package numba-cuda is not: pip install 'numba_flash[cu13]' (or [cu12])"
    return numpy_conflict()


def numpy_conflict():
    """numba-cuda 0.30 calls np.row_stack, which NumPy 2.5 removed. Returns what to do about it, or None."""
    try:
        version = importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in version.split(".")[:2]) <= (0, 30) and not hasattr(np, "row_stack"):
        return f"numba-cuda {version} does not work with NumPy {np.__version__}: pip install 'numpy<2.5'"
    return None


@cache
def gpu_count():
    """The number of GPUs that the CUDA driver sees; None without a driver."""
    for name in ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
        return 0
    return None


def device(name=None):
    """What kernels run on, and why: `name`, or else NUMBA_FLASH_DEVICE, or else the GPU if one is usable.

    Returns a Device. Raises ValueError for an unknown name, KernelError for a device that is not there.
    """
    reason, asked, otherwise = "asked for by device=", f"device={name!r}", "device='cpu' runs the same kernels"
    if name is None and (recorder.active() or lines.active()):
        return Device("cpu", "recordings and lines are made there")
    if name is None:
        name, reason = os.environ.get("NUMBA_FLASH_DEVICE") or None, "asked for by NUMBA_FLASH_DEVICE"
        asked, otherwise = f"NUMBA_FLASH_DEVICE={name!r}", "unset it, or set it to cpu"
    if isinstance(name, Device):
        name = name.name
    if name is None:
        if numba.config.ENABLE_CUDASIM:
            return Device("sim", "NUMBA_ENABLE_CUDASIM is set")
        problem = gpu_problem()
        return Device("cpu", problem) if problem else Device("gpu", "a GPU and numba-cuda are there")
    if name not in DEVICES:
        none = "None to choose" if "device=" in reason else "unset it"
        raise ValueError(f"{asked} is unknown: use one of {', '.join(map(repr, DEVICES))}, or {none}")
    if name == "gpu" and (problem := gpu_problem()):
        raise KernelError(f"{asked} cannot be used: {problem}; {otherwise}")
    if name == "sim" and not numba.config.ENABLE_CUDASIM:
        needs = "needs NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts"
        raise KernelError(f"{asked} {needs}; {otherwise}")
    return Device(name, reason)


def compute_capability():
    """That of the current GPU, (major, minor)."""
    return backend("gpu").compute_capability()


@cache
def backend(chosen):
    """The module that drives a device; numba.cuda is started only when the GPU's is imported."""
    if chosen == "gpu":
        from . import gpu as module
    elif chosen == "sim":
        from . import sim as module
    else:
        module = cpu
    return module


def launch(kernel, grid, block, *args, shared_bytes=0, device=None, strict=None):
    """Run one unmodified `@cuda.jit` kernel and, inside `ledger()`, count its HBM loads and stores.

    grid, block: int or tuple of up to three. args: NumPy or device arrays of at least one axis, NumPy or Python
    numbers, tuples of numbers. shared_bytes: dynamic shared memory per block. device: "gpu", "cpu", "sim" or None (see
    `device`). strict: find races and reads of unwritten memory too, on the CPU engine (default: NUMBA_FLASH_STRICT=1).
    On a GPU this is `kernel[grid, block, 0, shared_bytes](*args)`; a kernel launched that way is not counted.
    Raises TypeError or ValueError for a launch that no device accepts, and the errors of `numba_flash.errors`.
    """
    name = device_name(device)
    watched = ledger.active() or recorder.active() or lines.active()
    known = name == "gpu" and gpu_count() == 1 and not (strict or watched)  # on several GPUs each has its own code
    shape = grid, block, shared_bytes
    if known and backend(name).again(kernel, shape, args):
        return
    function = function_of(kernel)
    if not is_kernel(kernel):
        raise TypeError(f"kernel={kernel!r} is not a kernel: decorate the function with @cuda.jit")
    if getattr(kernel, "targetoptions", {}).get("device") or getattr(kernel, "_device", False):
        raise TypeError(f"kernel={function.__name__} is a device function: launch a kernel that calls it")
    grid, block = dimensions("grid", grid), dimensions("block", block)
    check_limits(grid, block)
    check_arguments(function, args, name)
    if isinstance(shared_bytes, bool) or not isinstance(shared_bytes, INTEGERS) or shared_bytes < 0:
        raise ValueError(f"shared_bytes={shared_bytes!r} must be a number of bytes, 0 or more")
    if name != "cpu" and (recorder.active() or lines.active()):
        raise ValueError(f"device={name!r} cannot be recorded or counted by line, which is for the CPU engine alone: "
                         "leave device= out inside recording() and lines(), and pass NumPy arrays")  # fmt: skip
    if name == "cpu":
        counts = cpu.run(kernel, grid, block, args, int(shared_bytes), is_strict(strict))
    elif strict:
        raise ValueError(
            f"strict=True works on the CPU engine only: add device='cpu' (this launch would run on {name!r})"
        )
    else:
        counts = backend(name).run(kernel, grid, block, args, int(shared_bytes), ledger.active())
        if known:
            backend(name).remember(kernel, shape, grid, block, args, int(shared_bytes))
    if ledger.active():
        ledger.record(function.__name__, grid, block, counts)


def is_strict(strict):
    if isinstance(strict, (bool, np.bool_)):
        return bool(strict)
    if strict is not None:
        raise TypeError(f"strict={strict!r} must be True, False or None")
    asked = os.environ.get("NUMBA_FLASH_STRICT", "").lower()
    if asked not in ("", "0", "1", "false", "true"):
        raise ValueError(f"NUMBA_FLASH_STRICT={asked!r} must be 1 or 0")
    return asked in ("1", "true")


def device_name(name):
    """device(name).name; launches and allocations ask each time, so that the answer to the commonest comes first."""
    return name if name == "gpu" and gpu_problem() is None else device(name).name


def are_integers(parts):
    plain = {int}.issuperset(map(type, parts))  # the commonest, and asked in each launch
    return plain or all(isinstance(n, INTEGERS) and not isinstance(n, bool) for n in parts)


def dimensions(what, value):
    """A launch dimension as three positive integers."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(parts) <= 3 or not are_integers(parts):
        raise TypeError(f"{what}={value!r} must be an integer or a tuple of up to three integers")
    if min(parts) < 1:
        raise ValueError(f"{what}={value!r}: every dimension must be at least 1")
    return tuple(map(int, parts)) + (1,) * (3 - len(parts))


def check_limits(grid, block):
    """What CUDA allows of every launch."""
    threads = block[0] * block[1] * block[2]
    if threads > model.THREADS:
        raise ValueError(f"block={block} has {threads} threads; a block has at most {model.THREADS}")
    if block[2] > model.BLOCK_Z:
        raise ValueError(f"block={block}: the third dimension is at most {model.BLOCK_Z}")
    if grid[0] > model.GRID_X or max(grid[1:]) > model.GRID_YZ:
        raise ValueError(
            f"grid={grid}: the first dimension is at most {model.GRID_X:,}, the second and third at most "
            f"{model.GRID_YZ:,}: give the longest axis the x dimension, or split the launch"
        )


def check_arguments(function, args, name):
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(args) != len(parameters):
        raise TypeError(
            f"{function.__name__} takes {len(parameters)} arguments ({', '.join(parameters)}), got {len(args)}"
        )
    for parameter, value in zip(parameters, args, strict=True):
        check_argument(function.__name__, parameter, value, name)


def is_number(value):
    """Whether a kernel can take it as a scalar: a Python number, or a NumPy one of a size that Numba knows."""
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufc" and value.dtype.char not in "egG"
    return isinstance(value, (bool, int, float, complex))


def check_argument(kernel, parameter, value, name):
    if name != "cpu" and getattr(type(value), "__cuda_ndarray__", False):
        return  # Numba's own array; to ask another kind for its interface takes longer than all of these checks
    what = f"argument {parameter} of {kernel}"
    if is_number(value):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TypeError(f"{what} is {value}, beyond 64 bits: pass np.uint64, or a float")
        return
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, whose mask a kernel does not see: pass {parameter}.filled(0)")
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise TypeError(f"{what} is an array with no axis: pass the number itself, {parameter}[()]")
        if value.dtype.kind not in "biufc" or not value.dtype.isnative:
            raise TypeError(f"{what} has dtype {value.dtype}: use a plain number type such as float32 or int64")
        if name == "cpu" and value.dtype.char in "egG":
            raise Unsupported(
                f"{what} has dtype {value.dtype}, which the CPU engine lacks: use float32, or run on a GPU",
                kernel=kernel,
                tensor=parameter,
            )
    elif isinstance(value, tuple):
        if not all(is_number(item) for item in value):
            raise TypeError(f"{what} is a tuple of more than numbers: pass each array as an argument of its own")
    elif hasattr(value, "__cuda_array_interface__") or type(value).__name__ == "FakeCUDAArray":
        if name == "cpu":
            raise TypeError(f"{what} is in GPU memory: copy it with to_host first, or run with device='gpu'")
    else:
        raise TypeError(f"{what} is a {type(value).__name__}: pass an array (np.asarray) or a number")


# --- memory -----------------------------------------------------------------------------------------------------------


def to_device(x, device=None):
    """A copy of the NumPy array `x` where kernels run; without a GPU a NumPy array. Raises OutOfMemory."""
    x = np.asarray(x)
    name = device_name(device)
    refuse_if_too_large(x.nbytes, f"a copy of an array of shape {x.shape}", name)
    return backend(name).to_device(x) if name == "gpu" else np.array(x, order="C")


def empty(shape, dtype, device=None):
    """A new array where kernels run. Its floats are NaN, so that a forgotten store shows. Raises OutOfMemory.

    shape: an integer, or a tuple of them, 0 or more each. dtype: a plain number type, or V2 for bfloat16.
    """
    return empties(shape, dtype=dtype, device=device)[0]


def empties(*shapes, dtype, device=None):
    """`empty` for each of `shapes`; on a GPU small arrays share one block of memory, which is faster to get."""
    name = device_name(device)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        dtype = None
    if dtype is None or (dtype.kind not in "biufc" and dtype != BFLOAT16):
        raise TypeError(f"dtype={dtype!r} must be a plain number type such as float32 or int64")
    shapes = tuple(map(extents, shapes))
    if name == "gpu":
        arrays = backend(name).empties(shapes, dtype)  # where the driver refuses what does not fit
    else:
        for shape in shapes:
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > SMALL:
                refuse_if_too_large(nbytes, f"an array of shape {shape}", name)
        arrays = [cpu.empty(shape, dtype) for shape in shapes]
    for shape in shapes:
        memory.record(shape, dtype)
    return arrays


def extents(shape):
    """`shape` as a tuple of Python integers, 0 or more each."""
    parts = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not are_integers(parts):
        raise TypeError(f"shape={shape!r} must be an integer or a tuple of integers")
    if min(parts, default=0) < 0:
        raise ValueError(f"shape={shape!r} holds a negative size")
    return tuple(map(int, parts))


def reshaped(array, shape):
    """A contiguous array, with as many elements in another shape and in the same memory."""
    return backend("gpu").reshaped(array, shape) if type(array).__name__ == "DeviceNDArray" else array.reshape(shape)


def to_host(x):
    """`x` as a NumPy array: a copy of a device array, and a NumPy array as it is."""
    if isinstance(x, np.ndarray):
        return x
    if not hasattr(x, "copy_to_host") and not hasattr(x, "__cuda_array_interface__"):
        raise TypeError(f"x={x!r:.60} is a {type(x).__name__}: pass an array, in host or in GPU memory")
    return x.copy_to_host() if hasattr(x, "copy_to_host") else backend("gpu").to_host(x)


def refuse_if_too_large(needed, what, device=None):
    """OutOfMemory where `needed` bytes for `what` are more than are free where kernels run."""
    memory.refuse_if_too_large(needed, what, free_bytes(device))


def free_bytes(device=None):
    """Bytes of memory that are free where kernels run, or None where nobody can tell."""
    name = device_name(device)
    return backend("gpu").free_bytes() if name == "gpu" else memory.free_host_bytes()
