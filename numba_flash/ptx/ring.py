"""A ring of slots in shared memory, between one thread that has them filled by TMA and the warps that read them.

Tile n of a sequence lies in slot n % slots. Each slot has two barriers: `full`, on which its tile has arrived, and
`empty`, on which its readers have left. Both are used once a round, and round n // slots is their phase. The producer
fills a slot in round r when the readers have left it in round r − 1; in round 0 it is free from the start.
"""

from typing import NamedTuple

from numba import cuda

from . import mbarrier


class Ring(NamedTuple):
    """Where a ring lies in a block's dynamic shared memory, in bytes from its start, and who arrives how often."""

    slots: int
    first: int  # slot 0
    size: int  # bytes of a slot; its `full` expects as many
    full: int  # barrier of slot 0; 1 arrival: the producer's, by `expect`
    empty: int  # barrier of slot 0
    readers: int  # arrivals on `empty`: each reader's `release`


@cuda.jit(device=True, inline="always")
def new(start, ring):
    """One thread makes the ring's barriers."""
    for slot in range(ring.slots):
        mbarrier.init(start + ring.full + 8 * slot, 1)
        mbarrier.init(start + ring.empty + 8 * slot, ring.readers)


@cuda.jit(device=True, inline="always")
def slot(start, ring, n):
    """The address of tile n."""
    return start + ring.first + n % ring.slots * ring.size


@cuda.jit(device=True, inline="always")
def full(start, ring, n):
    return start + ring.full + 8 * (n % ring.slots)


@cuda.jit(device=True, inline="always")
def wait_empty(start, ring, n):
    """The producer, before it has tile n loaded."""
    mbarrier.wait(start + ring.empty + 8 * (n % ring.slots), (n // ring.slots & 1) ^ 1)


@cuda.jit(device=True, inline="always")
def expect(start, ring, n):
    """The producer announces the bytes of tile n."""
    mbarrier.expect(full(start, ring, n), ring.size)


@cuda.jit(device=True, inline="always")
def wait_full(start, ring, n):
    """A reader, before it reads tile n."""
    mbarrier.wait(full(start, ring, n), n // ring.slots & 1)


@cuda.jit(device=True, inline="always")
def release(start, ring, n):
    """A reader, when it will not read tile n again."""
    mbarrier.arrive(start + ring.empty + 8 * (n % ring.slots))
