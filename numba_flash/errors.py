"""What can go wrong in a kernel, one class a kind."""


class KernelError(RuntimeError):
    """A kernel did something that CUDA does not promise to work, or that hides a bug.

    Attributes (None where they do not apply): `kernel` its name; `file` and `line` of the faulty statement; `block` and
    `thread`, three-tuples (x, y, z); `tensor`, the kernel's name for the array.
    """

    def __init__(self, message, *, kernel=None, file=None, line=None, block=None, thread=None, tensor=None):
        super().__init__(message)
        self.kernel, self.file, self.line = kernel, file, line
        self.block, self.thread, self.tensor = block, thread, tensor


class BarrierDivergence(KernelError):
    """Some threads of a block wait at a barrier that the others never reach.

    To return before a barrier counts too, although GPUs since Volta do not wait for threads that have returned.
    """


class OutOfBounds(KernelError, IndexError):
    """An index below 0 or beyond the end of an axis, or a store to a read-only array."""


class SharedMemoryError(KernelError, ValueError):
    """A block asks for more shared memory than the device has."""


class RaceDetected(KernelError):
    """Two threads touch one element with no barrier between them, and one of them writes."""


class UninitializedRead(KernelError):
    """A kernel reads an element that nothing has written."""


class OutOfMemory(KernelError, MemoryError):
    """An array does not fit into the memory that is free."""


class Unsupported(KernelError):
    """Something the chosen device cannot run."""
