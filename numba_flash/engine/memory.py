"""How much memory is free, the refusal of what does not fit, and the record of what is allocated."""

import os

from ..errors import OutOfMemory
from ..opened import Opened


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


_open = Opened("records of allocations")


def allocations():
    """Record each array that `empty` makes in the body: `with allocations() as made: ...` -> [(shape, dtype)].

    Records nest, and each thread has its own, as with `ledger`. Copies made by `to_device` are not in it.
    """
    return _open([])


def record(shape, dtype):
    """Enter one array in every open record."""
    for made in _open:
        made.append((shape, dtype))
