"""Run kernels on Numba's own simulator (NUMBA_ENABLE_CUDASIM=1), and count their accesses.

The simulator runs the kernel as Python, one OS thread per CUDA thread: slow, but a second opinion on the CPU engine.
Both simulators work, the one in numba and the one in numba-cuda. Negative indices wrap and divergent barriers pass.
"""

import copy
import inspect
import os
import re
import threading
import traceback

import numba
import numpy as np
from numba import cuda
from numba.cuda.simulator import kernel as simulator

from .. import errors

LOADS, STORES, ATOMICS = range(3)


def run(kernel, grid, block, args, shared_bytes, counting):
    """Launch `kernel[grid, block, 0, shared_bytes](*args)` and wait for it.

    `grid` and `block` are three-tuples; `args` are scalars, NumPy arrays and the simulator's device arrays; arrays are
    used in place. Returns None, or when counting {parameter of an array: (itemsize, loads, stores, atomics)} in
    elements.

    Raises KernelError for whatever the kernel raises: Unsupported for a store to a whole row or slice, OutOfBounds for
    an IndexError.
    """
    args = [getattr(a, "_ary", a) for a in args]
    values = [Counted(a, Tally()) if isinstance(a, np.ndarray) else a for a in args]
    twin = copy.copy(kernel)
    twin.extensions = [*kernel.extensions, _CountAtomics]
    try:
        twin[grid, block, 0, shared_bytes](*values)
    except Exception as error:
        raise _explained(kernel.fn, error) from error
    if not counting:
        return None
    names = inspect.signature(kernel.fn).parameters
    return {n: (a.itemsize, *v._tally.counts) for n, a, v in zip(names, args, values) if isinstance(v, Counted)}


class Tally:
    """Loads, stores and atomics of one tensor, counted by many threads."""

    def __init__(self):
        self.counts = [0, 0, 0]
        self._lock = threading.Lock()

    def add(self, column):
        with self._lock:
            self.counts[column] += 1


class Counted:
    """A NumPy array that counts accesses of its elements, through any view of it, in one `Tally`."""

    def __init__(self, array, tally):
        self._array, self._tally = array, tally

    def __getitem__(self, index):
        value = self._array[index]
        if isinstance(value, np.ndarray):
            return Counted(value, self._tally)
        self._tally.add(LOADS)
        return value

    def __setitem__(self, index, value):
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) < self._array.ndim or not all(isinstance(i, (int, np.integer)) for i in indices):
            raise errors.Unsupported(
                "one statement stores a whole row or slice of a kernel argument, and only single elements are counted; "
                "write a loop, with an integer index for every axis"
            )
        self._array[index] = value
        self._tally.add(STORES)

    def __len__(self):
        return len(self._array)

    def __getattr__(self, name):
        if name in ("shape", "size", "ndim", "strides", "itemsize", "nbytes", "dtype"):
            return getattr(self._array, name)
        if name == "T":
            return Counted(self._array.T, self._tally)
        raise AttributeError(f"a kernel argument has no attribute {name!r} that can be counted")


class _CountAtomics:
    """An extension of a simulated kernel: as the launch begins, its `cuda.atomic` becomes one that counts."""

    @staticmethod
    def prepare_args(ty, value, stream, retr):
        launch = simulator._get_kernel_context()
        if not isinstance(launch._atomic, _Atomic):
            launch._atomic = _Atomic(launch._atomic)
        return ty, value


class _Atomic:
    """`cuda.atomic` of one launch: an operation on a counted array is one atomic, not the load and store in it."""

    def __init__(self, plain):
        self._plain = plain

    def __getattr__(self, name):
        operation = getattr(self._plain, name)

        def counted(array, *operands):
            if isinstance(array, Counted):
                array._tally.add(ATOMICS)
                array = array._array
            return operation(array, *operands)

        return counted


def _explained(function, error):
    """The KernelError for what a simulated kernel raised; the simulator begins the message with thread and block."""
    match = re.match(r"tid=\[(\d+), (\d+), (\d+)\] ctaid=\[(\d+), (\d+), (\d+)\](?:: )?", str(error))
    numbers = tuple(int(n) for n in match.groups()) if match else ()
    thread, block = numbers[:3] or None, numbers[3:] or None
    ours = (os.path.join(os.path.dirname(numba.__file__), ""), os.path.join(os.path.dirname(cuda.__file__), ""))
    ours += (threading.__file__, __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else (None, None)
    kind = errors.OutOfBounds if isinstance(error, IndexError) else errors.KernelError
    kind = type(error) if isinstance(error, errors.KernelError) else kind
    text = str(error)[match.end() if match else 0 :]
    if not isinstance(error, errors.KernelError):
        text = f"{type(error).__name__}: {text}"
    message = f"kernel {function.__name__!r} ({file}:{line}), block {block}, thread {thread}: {text}"
    return kind(message, kernel=function.__name__, file=file, line=line, block=block, thread=thread)
