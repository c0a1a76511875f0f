"""A ring of slots in shared memory, between one thread that has them filled by TMA and the warps that read them.

Tile n of a sequence lies in slot n % slots. Each slot has two barriers: `full`, on which its tile has arrived, and
`empty`, on which its readers have left. Both are used once a round, and round n // slots is their phase. The producer
fills a slot in round r when the readers have left it in round r − 1; in round 0 it is free from the start.

`ring` is a named tuple: slots; first and size, bytes from `start` to slot 0, and of a slot; full and empty, bytes from
`start` to slot 0's barriers; readers. `full` takes 1 arrival, the producer's `expect`, and `size` bytes;
`empty` takes `readers` arrivals, one by each `release`. `start`: address of the block's shared memory.
"""

from . import mbarrier
from .inline import device


@device
def new(start, ring):
    """One thread makes the ring's barriers."""
    for slot in range(ring.slots):
        mbarrier.init(start + ring.full + 8 * slot, 1)
        mbarrier.init(start + ring.empty + 8 * slot, ring.readers)


@device
def slot(start, ring, n):
    """The address of tile n."""
    return start + ring.first + n % ring.slots * ring.size


@device
def full(start, ring, n):
    return start + ring.full + 8 * (n % ring.slots)


@device
def wait_empty(start, ring, n):
    """The producer, before it has tile n loaded."""
    mbarrier.wait(start + ring.empty + 8 * (n % ring.slots), (n // ring.slots & 1) ^ 1)


@device
def expect(start, ring, n):
    """The producer announces the bytes of tile n."""
    mbarrier.expect(full(start, ring, n), ring.size)


@device
def wait_full(start, ring, n):
    """A reader, before it reads tile n."""
    mbarrier.wait(full(start, ring, n), n // ring.slots & 1)


@device
def release(start, ring, n):
    """A reader, when it will not read tile n again."""
    mbarrier.arrive(start + ring.empty + 8 * (n % ring.slots))
