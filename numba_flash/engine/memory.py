"""How much memory is free, the refusal of what does not fit, and the record of what is allocated."""

import contextlib
import contextvars
import os

from ..errors import OutOfMemory


def refuse_if_too_large(needed, what, there):
    """OutOfMemory where `needed` bytes for `what` are more than the bytes that are `there` (None: nobody knows)."""
    if there is not None and needed > there:
        raise OutOfMemory(
            f"{what} needs {needed:,} B; {there:,} B are free: use shorter sequences, fewer heads or another stage"
        )


def free_host_bytes():
    """Bytes of the computer's memory that are free, or None where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            available = min(available, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass
    return available


_open = contextvars.ContextVar("open records of allocations", default=())


@contextlib.contextmanager
def allocations():
    """Record each array that `empty` makes in the body: `with allocations() as made: ...` -> [(shape, dtype)].

    Records nest, and each thread has its own, as with `ledger`. Copies made by `to_device` are not in it.
    """
    made = []
    _open.set((*_open.get(), made))
    try:
        yield made
    finally:
        _open.set(tuple(other for other in _open.get() if other is not made))


def record(shape, dtype):
    """Enter one array in every open record."""
    for made in _open.get():
        made.append((shape, dtype))
