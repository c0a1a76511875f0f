"""Run kernels on an NVIDIA GPU through numba-cuda, and count their global-memory accesses.

Importing this module imports `numba.cuda` and so needs numba-cuda; nothing here touches a GPU before it is called.

How the counting works. A kernel that is counted runs as its *twin*: the same Python function, compiled once more as a
device function whose array arguments have the type `Counted`, a pair (array, tally). The tally is three integers in
the thread's own frame: loads, stores, atomics. Every access of an element adds one and then does what the array would
have done. Once all is inlined, the compiler keeps the tallies in registers. As a thread ends it adds its tallies to
counters in global memory, which are spread over `SLOTS` addresses because atomics on one address wait for one another.
"""

import ctypes
import inspect
import linecache
import math
import operator
import os
import re
import threading
import traceback
import weakref
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numba
import numpy as np
from cuda.core import LaunchConfig, Stream, launch
from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, config, stubs, types
from numba.cuda.api_util import prepare_shape_strides_dtype
from numba.cuda.cudadrv import driver
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.error import CudaDriverError
from numba.cuda.cudaimpl import lower
from numba.cuda.extending import core_models, intrinsic, overload, overload_attribute, register_model

from .. import errors
from .memory import refuse_if_too_large
from .pool import pool

SLOTS = 1024  # addresses that each counter is spread over; a power of two
LOADS, STORES, ATOMICS = range(3)


# ---------------------------------------------------------------------------------------------------------- the device
class Limits(NamedTuple):
    """What a block may use on this GPU, sizes in bytes."""

    name: str
    compute_capability: tuple
    threads: int
    static_shared: int
    dynamic_shared: int


def limits():
    """The `Limits` of the current GPU; dynamic shared memory is what a kernel can opt in to."""
    gpu = cuda.get_current_device()
    return Limits(
        name=gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name,
        compute_capability=tuple(gpu.compute_capability),
        threads=gpu.MAX_THREADS_PER_BLOCK,
        static_shared=gpu.MAX_SHARED_MEMORY_PER_BLOCK,
        dynamic_shared=gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    )


def compute_capability():
    """That of the current GPU, (major, minor)."""
    return tuple(cuda.get_current_device().compute_capability)


def free_bytes():
    """Bytes of GPU memory that are free now, or kept to be used again."""
    return cuda.current_context().get_memory_info().free + pool().kept


def to_device(x):
    """A device array with the contents of `x`; an array that is on the GPU already is returned as it is, not copied.

    Raises OutOfMemory when it does not fit.
    """
    if hasattr(x, "__cuda_array_interface__"):
        return x
    x = np.asarray(x)
    x = x if x.flags.forc else np.ascontiguousarray(x)
    return _allocated(x.nbytes, f"a copy of an array of shape {x.shape}", lambda: cuda.to_device(x))


def empties(shapes, dtype):
    """Device arrays nobody has written to: floats, bfloat16 (V2) and complex numbers hold NaN (bytes 0xFF), so that a
    forgotten store shows. Small ones lie in one block of memory. Raises OutOfMemory when they do not fit.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    *starts, end = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    if len(shapes) > 1 and end > SMALL:
        return [empties((shape,), dtype)[0] for shape in shapes]
    if end:
        what = f"an array of shape {shapes[0]}"
        if end >= 2**63:  # the driver is asked in 64 bits
            refuse_if_too_large(end, what, free_bytes())
        block = _allocated(end, what, lambda: pool().block(end))
        if dtype.kind in "fcV":
            driver.device_memset(block, 0xFF, end)
    return [
        _array(shape, dtype, (block.view(start, start + size) if start else block) if size else None)
        for shape, start, size in zip(shapes, starts, sizes, strict=True)
    ]


ALIGNED = 256  # bytes; every array begins at a multiple, as the driver's do
SMALL = 2**20  # bytes of arrays that share a block


def _array(shape, dtype, memory):
    return DeviceNDArray(*prepare_shape_strides_dtype(shape, None, dtype, "C"), gpu_data=memory)


def reshaped(array, shape):
    """A contiguous device array as another with as many elements; Numba's reshape takes three times as long."""
    if array.shape == shape:
        return array
    return _array(shape, array.dtype, array.gpu_data)


def to_host(x):
    """`x` as a NumPy array, after every kernel launched so far has finished. Raises KernelError when one has failed."""
    if not hasattr(x, "__cuda_array_interface__"):
        return np.asarray(x)
    with explained(_launched):
        return cuda.as_cuda_array(x).copy_to_host()


def _allocated(nbytes, what, make):
    """make(), which allocates; what the pool keeps is given back where the driver has no more."""
    try:
        return make()
    except CudaDriverError as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
    pool().clear()
    try:
        return make()
    except CudaDriverError as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
        refuse_if_too_large(nbytes, what, min(free_bytes(), nbytes - 1))


# -------------------------------------------------------------------------------------------------------------- launch
_launched = None  # the kernel launched last: the one to name when a later call meets its failure
_configuring = threading.Lock()
PLANS = 1000  # of a kernel; more different grids than that are rare


def run(kernel, grid, block, args, shared_bytes, counting):
    """Launch `kernel[grid, block, 0, shared_bytes](*args)`, or its counting twin.

    `grid` and `block` are three-tuples; `args` are NumPy arrays (copied to the GPU, and back afterwards), arrays on the
    GPU (anything with `__cuda_array_interface__`, used in place) and scalars. The call returns before the kernel has
    finished unless it counts or an argument is a NumPy array.

    Returns None, or when counting {parameter of an array: (itemsize, loads, stores, atomics)} in elements.

    Raises Unsupported for what Numba cannot compile (or, when counting, what cannot be counted), SharedMemoryError for
    too much shared memory, OutOfMemory for NumPy arrays that do not fit, OutOfBounds for a store to a read-only array
    and KernelError for what the driver reports.
    """
    global _launched
    with explained(kernel):
        on_device = tuple(_on_device(a) for a in args)
        arrays = [i for i, a in enumerate(on_device) if isinstance(a, DeviceNDArray)]
        launched, values, totals = kernel, on_device, []
        if counting and arrays:
            counters = cuda.device_array((3 * len(arrays), SLOTS), np.uint64)
            driver.device_memset(counters, 0, counters.nbytes)
            values = (on_device, counters)
            launched = _fitting_twin(kernel, block, values)
        if shared_bytes:
            _opt_in(kernel, launched, values, shared_bytes)
        _launched = kernel
        _configured(launched, grid, block, shared_bytes)(*values)
        if counting and arrays:
            totals = counters.copy_to_host().sum(axis=1).reshape(-1, 3).tolist()
        for host, device in zip(args, on_device):
            if isinstance(host, np.ndarray) and host.flags.writeable:
                np.copyto(host, device.copy_to_host())
    if not counting:
        return None
    names = list(inspect.signature(kernel.py_func).parameters)
    return {names[i]: (on_device[i].dtype.itemsize, *total) for i, total in zip(arrays, totals)}


def _on_device(value):
    if isinstance(value, DeviceNDArray):
        return value
    if isinstance(value, np.ndarray):
        array = to_device(value)
        readonly = not value.flags.writeable
    elif hasattr(value, "__cuda_array_interface__"):
        array = cuda.as_cuda_array(value)
        readonly = value.__cuda_array_interface__["data"][1]
    else:
        return value
    if readonly:  # Numba forgets it; this way a store is refused when the kernel is compiled
        array._numba_type_ = array._numba_type_.copy(readonly=True)
    return array


_SCALARS = {np.float32: ctypes.c_float, np.float64: ctypes.c_double, float: ctypes.c_double}
_SCALARS |= {int: ctypes.c_int64, np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.uint64: ctypes.c_uint64}
_plans = weakref.WeakKeyDictionary()  # kernel -> {(shape, *kinds of arguments): (library, how to launch)}


def again(kernel, shape, args):
    """Launch a kernel once more with such a shape and arguments of such kinds, if they are remembered -> whether so.

    They were checked then. And what Numba finds out anew in each launch (the type of each value, what was compiled for
    them, how each is laid out for the driver) is known: it takes a quarter of the time.
    """
    global _launched
    try:
        library, config = _plans[kernel][(shape, *map(_kind, args))]
    except (KeyError, TypeError):  # not remembered; what cannot be, such as a grid that is a list
        return False
    _launched = kernel
    try:
        launch(_stream(), config, library.get_cufunc().kernel, *_laid_out(args))  # which makes the context current
    except Exception:
        with explained(kernel):
            raise
    return True


def remember(kernel, shape, grid, block, args, shared_bytes):
    """Have `again` launch what `run` has launched; shape: grid, block and shared memory as they were asked for."""
    kinds = tuple(map(_kind, args))
    if None not in kinds and not any(kernel.targetoptions.get(name) for name in ("extensions", "debug")):
        compiled = _compiled(kernel, args)
        if not compiled.cooperative and not compiled.launch_config_sensitive:
            plans = _plans.setdefault(kernel, {})
            if len(plans) == PLANS:
                plans.clear()
            config = LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
            plans[(shape, *kinds)] = compiled.library, config


def _kind(value):
    """What a value is compiled for and laid out by; None where that is left to Numba."""
    if type(value) is DeviceNDArray:
        return (value.dtype, value.ndim) if value.is_c_contiguous() and 0 not in value.strides else None
    if type(value) is int and not -(2**63) <= value < 2**63:
        return None
    return type(value) if type(value) in _SCALARS else None


def _laid_out(values):
    """Numba's layout of arguments: an array is two null pointers, its size, itemsize, address, shape and strides."""
    for value in values:
        if type(value) is DeviceNDArray:
            yield from (0, 0, value.size, value.dtype.itemsize, value.device_ctypes_pointer.value)
            yield from value.shape
            yield from value.strides
        else:
            yield _SCALARS[type(value)](value)


@cache
def _stream():
    return Stream.from_handle(0)


def _configured(kernel, grid, block, shared_bytes):
    """kernel[grid, block, 0, shared_bytes] without Numba's warning that a small grid leaves the GPU idle."""
    with _configuring:
        warn, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
        try:
            return kernel[grid, block, 0, shared_bytes]
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = warn


def _compiled(dispatcher, values):
    signature = tuple(dispatcher.typeof_pyval(v) for v in values)
    return dispatcher.overloads.get(signature) or dispatcher.compile(signature)


def _opt_in(kernel, launched, values, shared_bytes):
    """Allow `launched` its dynamic shared memory where static and dynamic together pass what every kernel may have."""
    compiled, gpu = _compiled(launched, values), limits()
    static = compiled.shared_mem_per_block
    if static + shared_bytes > gpu.dynamic_shared:
        raise errors.SharedMemoryError(
            f"kernel {_name(kernel)!r} asks for {static + shared_bytes:,} bytes of shared memory per block ({static:,} "
            f"static, {shared_bytes:,} dynamic); {gpu.name} has {gpu.dynamic_shared:,}",
            kernel=_name(kernel),
        )
    if static + shared_bytes > gpu.static_shared:
        attribute = driver.binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function = compiled.library.get_cufunc()
        most = gpu.dynamic_shared - static  # never less than a launch before was allowed
        driver.driver.cuKernelSetAttribute(attribute, most, function.handle, function.device.id)


# -------------------------------------------------------------------------------------------------------------- errors
# The compilers' and the driver's errors come from several packages, whose modules move; their names stay.
_COMPILER = {"NumbaError", "UnsupportedBytecodeError", "NotImplementedError"}
_COMPILER |= {"NvvmError", "nvvmError", "NvrtcError", "NVRTCError", "LinkerError", "nvJitLinkError"}
_DRIVER = {"CudaDriverError", "CUDAError"}


@contextmanager
def explained(kernel):
    """Turn what Numba, the compilers under it and the driver raise into the errors of this package."""
    try:
        yield
    except errors.Unsupported as error:  # from the typing of `Counted`, which does not know where it is
        where = _place(kernel, error)
        message = f"kernel {_name(kernel)!r}{_at(where)}: {error}"
        raise errors.Unsupported(message, kernel=_name(kernel), **where) from None
    except errors.KernelError:
        raise
    except Exception as error:
        names = {base.__name__ for base in type(error).__mro__}
        if names & _COMPILER:
            raise _compiler_error(kernel, error) from error
        if names & _DRIVER:
            raise _driver_error(kernel, error) from error
        if any(name.endswith("SupportError") for name in names):
            old = f"this GPU and the installed CUDA do not go together: {error}; device='cpu' runs the same kernels"
            raise errors.KernelError(old, kernel=_name(kernel)) from error
        if "has no attribute 'row_stack'" in str(error):
            advice = f"this numba-cuda does not work with NumPy {np.__version__}: pip install 'numpy<2.5'"
            raise errors.KernelError(advice, kernel=_name(kernel)) from error
        raise


def _name(kernel):
    return kernel.py_func.__name__ if kernel is not None else "?"


def _place(kernel, error):
    """{file, line} of the statement Numba was at: its own message loses it for many errors, its frames do not."""
    ours = (*(os.path.join(os.path.dirname(module.__file__), "") for module in (numba, cuda)), __file__)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        place = getattr(frame.f_locals.get("self"), "loc", None)
        file = getattr(place, "filename", None)
        if file and not os.path.abspath(file).startswith(ours):
            return {"file": file, "line": place.line}
    said = re.search(r" at (.+) \((\d+)\)", str(error))
    if said and not os.path.abspath(said[1]).startswith(ours):
        return {"file": said[1], "line": int(said[2])}
    code = kernel.py_func.__code__
    return {"file": code.co_filename, "line": code.co_firstlineno}


def _at(where):
    source = linecache.getline(where["file"], where["line"]).strip()
    return f" ({where['file']}:{where['line']}: {source})"


def _compiler_error(kernel, error):
    where, text = _place(kernel, error), re.sub(r"\x1b\[[0-9;]*m", "", str(error)).replace("counted ", "")
    shared = re.search(r"too much shared data \(0x([0-9a-f]+) bytes, 0x([0-9a-f]+) max\)", text)
    if shared:
        return _static_shared(kernel, *(int(n, 16) for n in shared.groups()))
    lines = [line.strip() for line in text.splitlines()]
    specific = [line for line in lines if re.match(r"\w*Error: (?!No implementation)", line)]
    calls = [line for line in lines if line.startswith(">>>")]
    noise = ("Failed in", "During:", "File ", "ERROR_")
    reason = specific[-1:] or [line for line in lines if line and not line.startswith(noise)][:1] + calls[-1:]
    kind = errors.OutOfBounds if "Cannot modify readonly array" in text else errors.Unsupported
    message = f"kernel {_name(kernel)!r} cannot be compiled for the GPU{_at(where)}: {' '.join(reason)}"
    return kind(message, kernel=_name(kernel), **where)


def _driver_error(kernel, error):
    try:
        cuda.synchronize()
    except Exception:
        return errors.KernelError(
            f"kernel {_name(kernel)!r}, or one launched before it, failed on the GPU: {error}. The context is lost: "
            'restart Python; device="cpu" finds the line',
            kernel=_name(kernel),
        )
    dispatchers = (kernel, *_twins.get(kernel, {}).values()) if kernel else ()
    compiled = [variant for dispatcher in dispatchers for variant in dispatcher.overloads.values()]
    static = max((getattr(variant, "shared_mem_per_block", 0) for variant in compiled), default=0)
    if static > limits().static_shared:
        return _static_shared(kernel, static, limits().static_shared)
    return errors.KernelError(f"kernel {_name(kernel)!r} cannot be launched: {error}", kernel=_name(kernel))


def _static_shared(kernel, needed, there):
    return errors.SharedMemoryError(
        f"kernel {_name(kernel)!r} asks for {needed:,} bytes of static shared memory per block; there are {there:,}, "
        "and more only as dynamic shared memory (shared_bytes=)",
        kernel=_name(kernel),
    )


# ------------------------------------------------------------------------------------------------------------ counting
_twins = weakref.WeakKeyDictionary()  # kernel -> {launch bounds: its counting twin}
_I64 = ir.IntType(64)
_TALLY = ir.ArrayType(_I64, 3)


def counting_twin(kernel, threads=None):
    """The kernel `twin(args, counters)` that runs `kernel(*args)` and adds its accesses to `counters`, a zeroed uint64
    array of shape (3 * number of arrays, SLOTS). `threads` limits its registers so that a block of so many can run.
    """
    twins = _twins.setdefault(kernel, {})
    if threads not in twins:
        options = kernel.targetoptions
        same = {key: options[key] for key in ("debug", "opt", "lineinfo", "fastmath")}
        body = cuda.jit(kernel.py_func, device=True, forceinline=True, **same)

        def twin(args, counters):
            counted = _counted(args)
            body(*counted)
            thread = cuda.threadIdx.x + cuda.blockDim.x * (cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z)
            _add_up(counted, counters, (thread + 32 * (cuda.blockIdx.x + cuda.blockIdx.y)) & (SLOTS - 1))

        twin.__name__ = twin.__qualname__ = f"counted_{_name(kernel)}"
        twins[threads] = cuda.jit(twin, **options | ({"launch_bounds": threads} if threads else {}))
    return twins[threads]


def _fitting_twin(kernel, block, values):
    threads = block[0] * block[1] * block[2]
    twin = counting_twin(kernel)
    if _compiled(twin, values).max_threads_per_block < threads:
        twin = counting_twin(kernel, threads)
    return twin


class Counted(types.Type):
    """Numba's type of a counted array: the array, and the address of the thread's tally for it."""

    def __init__(self, array):
        self.array, self.dtype, self.ndim = array, array.dtype, array.ndim
        super().__init__(f"counted {array}")

    @property
    def key(self):
        return self.array


@register_model(Counted)
class _CountedModel(core_models.StructModel):
    def __init__(self, manager, ty):
        super().__init__(manager, ty, [("array", ty.array), ("tally", types.CPointer(types.uint64))])


def _member(context, builder, ty, value, name):
    return getattr(cgutils.create_struct_proxy(ty)(context, builder, value=value), name)


def _pair(context, builder, ty, array, tally):
    pair = cgutils.create_struct_proxy(ty)(context, builder)
    pair.array, pair.tally = array, tally
    return pair._getvalue()


def add_count(context, builder, ty, value, column, elements):
    """Where `value` is a counted array, count `elements` (64 bits) more in `column`: LOADS, STORES or ATOMICS."""
    if isinstance(ty, Counted):
        address = builder.gep(_member(context, builder, ty, value, "tally"), [column])
        builder.store(builder.add(builder.load(address), elements), address)


def plain_array(context, builder, ty, value):
    """(type, value) of the array itself, which is counted or not."""
    return (ty.array, _member(context, builder, ty, value, "array")) if isinstance(ty, Counted) else (ty, value)


@intrinsic
def _counted(typingctx, args):
    """The tuple `args`, each array in it paired with a tally of zeros in this function's frame."""
    result = types.Tuple([Counted(t) if isinstance(t, types.Array) else t for t in args])

    def codegen(context, builder, sig, values):
        items = list(cgutils.unpack_tuple(builder, values[0]))
        for i, ty in enumerate(sig.return_type):
            if isinstance(ty, Counted):
                tally = cgutils.alloca_once(builder, _TALLY)
                builder.store(_TALLY([0, 0, 0]), tally)
                items[i] = _pair(context, builder, ty, items[i], builder.gep(tally, [_I64(0), _I64(0)]))
        return context.make_tuple(builder, sig.return_type, items)

    return result(args), codegen


@intrinsic
def _add_up(typingctx, counted, counters, slot):
    """Add every tally to its row of `counters`, at `slot`."""

    def codegen(context, builder, sig, values):
        row = context.make_array(sig.args[1])(context, builder, values[1]).data
        for ty, value in zip(sig.args[0], cgutils.unpack_tuple(builder, values[0])):
            if isinstance(ty, Counted):
                tally = _member(context, builder, ty, value, "tally")
                for column in range(3):
                    number = builder.load(builder.gep(tally, [_I64(column)]))
                    with builder.if_then(builder.icmp_unsigned("!=", number, _I64(0))):
                        builder.atomic_rmw("add", builder.gep(row, [values[2]]), number, "monotonic")
                    row = builder.gep(row, [_I64(SLOTS)])
        return context.get_dummy_value()

    return types.void(counted, counters, types.intp), codegen


@intrinsic
def _count(typingctx, a, column):
    def codegen(context, builder, sig, values):
        add_count(context, builder, sig.args[0], *values, _I64(1))
        return context.get_dummy_value()

    return types.void(a, types.intp), codegen


@intrinsic
def _plain(typingctx, a):
    def codegen(context, builder, sig, values):
        return _member(context, builder, sig.args[0], values[0], "array")

    return a.array(a), codegen


@intrinsic
def _like(typingctx, view, a):
    """`view`, counted in the tally of `a`."""

    def codegen(context, builder, sig, values):
        tally = _member(context, builder, sig.args[1], values[1], "tally")
        return _pair(context, builder, sig.return_type, values[0], tally)

    return Counted(view)(view, a), codegen


def _indices(index):
    return tuple(index) if isinstance(index, types.BaseTuple) else (index,)


@overload(operator.getitem, target="cuda")
def _getitem(a, index):
    if isinstance(a, Counted):
        if len(_indices(index)) < a.ndim or not all(isinstance(i, types.Integer) for i in _indices(index)):
            return lambda a, index: _like(_plain(a)[index], a)  # a view touches no memory yet

        def load(a, index):
            _count(a, LOADS)
            return _plain(a)[index]

        return load


@overload(operator.setitem, target="cuda")
def _setitem(a, index, value):
    if isinstance(a, Counted):
        indices = _indices(index)
        if len(indices) < a.ndim or not all(isinstance(i, types.Integer) for i in indices):
            raise errors.Unsupported(
                "one statement stores a whole row or slice of a kernel argument, and only single elements are counted; "
                "write a loop, with an integer index for every axis"
            )

        def store(a, index, value):
            _count(a, STORES)
            _plain(a)[index] = value

        return store


@overload(len, target="cuda")
def _len(a):
    if isinstance(a, Counted):
        return lambda a: len(_plain(a))


def _attribute(name, get):
    overload_attribute(Counted, name, target="cuda")(lambda a: get)


_attribute("shape", lambda a: _plain(a).shape)
_attribute("size", lambda a: _plain(a).size)
_attribute("ndim", lambda a: _plain(a).ndim)
_attribute("strides", lambda a: _plain(a).strides)
_attribute("itemsize", lambda a: _plain(a).itemsize)
_attribute("nbytes", lambda a: _plain(a).nbytes)
_attribute("dtype", lambda a: _plain(a).dtype)
_attribute("T", lambda a: _like(_plain(a).T, a))


def _count_atomic(stub, operands):
    """Numba types cuda.atomic.* by dtype and ndim, which `Counted` has; here they are lowered."""

    @lower(stub, Counted, *[types.Any] * operands)
    def atomic(context, builder, sig, values):
        counted, *rest = sig.args
        add_count(context, builder, counted, values[0], _I64(ATOMICS), _I64(1))
        operation = context.get_function(stub, sig.return_type(counted.array, *rest))
        return operation(builder, (_member(context, builder, counted, values[0], "array"), *values[1:]))


for _stub in ("add", "sub", "max", "min", "nanmax", "nanmin", "and_", "or_", "xor", "inc", "dec", "exch"):
    _count_atomic(getattr(stubs.atomic, _stub), 2)
_count_atomic(stubs.atomic.compare_and_swap, 2)
_count_atomic(stubs.atomic.cas, 3)
