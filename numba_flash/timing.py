"""How long things take: runs in turn, the median and what lies around it, and a clock for GPU and CPU each."""

import statistics
import time
from functools import cache

from .engine.launch import device

NAP = 50_000  # nanoseconds; a GPU sleeps at least 0 and at most twice as long
NAPS = 20


def interleaved(works, repeats, clock=None, *, most=None):
    """Time each of `works`, {name: callable}, in turn -> {name: [seconds, ...]}.

    One round that is not timed, in which kernels are compiled; then `repeats` rounds, each of which runs every work
    once and begins with another one, so that what changes while they run meets all alike. clock(work) -> seconds: by
    default `event_seconds` on a GPU and `wall_seconds` elsewhere. most: a work whose times add up to so many seconds
    sits out the rounds that are left.
    """
    clock = clock or (event_seconds if device().name == "gpu" else wall_seconds)
    for work in works.values():
        work()
    names, times = list(works), {name: [] for name in works}
    for first in range(repeats):
        first %= len(names)
        for name in names[first:] + names[:first]:
            if most is None or sum(times[name]) < most:
                times[name].append(clock(works[name]))
    return times


def spread(seconds):
    """The median of a list of times, and the least and the largest of them."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def wall_seconds(work):
    """The time that `work()` takes on the CPU's clock."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def event_seconds(work):
    """The time between two CUDA events around what `work()` puts on the default stream of the GPU.

    The GPU sleeps first, for about a millisecond, while `work()` launches its kernels: what is timed are the kernels,
    not the wait for Python. (Work that itself waits for the GPU, as counting does, is timed with its wait.) Freed
    memory goes back to the driver before or after, since that makes the GPU wait.
    """
    from numba import cuda

    cuda.current_context().deallocations.clear()
    cuda.synchronize()
    start, stop = cuda.event(), cuda.event()
    head_start()
    with cuda.defer_cleanup():
        start.record()
        work()
        stop.record()
        stop.synchronize()
    return cuda.event_elapsed_time(start, stop) / 1000


def head_start():
    """Keep the GPU asleep for about a millisecond; returns at once."""
    _sleeper()()


@cache
def _sleeper():
    from numba import cuda

    from .engine import gpu

    @cuda.jit
    def sleep():
        for _ in range(NAPS):
            cuda.nanosleep(NAP)

    return gpu._configured(sleep, 1, 1, 0)
