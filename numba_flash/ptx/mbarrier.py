"""Barriers in shared memory (mbarrier), on which threads and the copies of TMA arrive; and barriers with a number.

PTX ISA manual, "Parallel Synchronization and Communication Instructions: mbarrier" and "bar, barrier". An mbarrier is 8
bytes of shared memory. It counts, in its current phase, arrivals still to come and bytes still to come; when both are 0
the phase is over, and the next begins with the same number of arrivals. Phases have parity 0, 1, 0, …; who waits names
the parity of the phase whose end he waits for, so he must never be two phases late. A new barrier is in phase 0:
to wait for parity 1 passes at once.

`address` is always the barrier's address in shared memory.
"""

from .inline import instruction, u32


@instruction("mbarrier.init.shared::cta.b64 [$address], $arrivals;")
def init(address: u32, arrivals: u32):
    """A new barrier, each of whose phases takes so many arrivals. One thread calls it."""


@instruction("fence.mbarrier_init.release.cluster;")
def fence_init():
    """New barriers become visible to TMA; by the thread that made them, before the block synchronises."""


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$address], $bytes;")
def expect(address: u32, bytes: u32):
    """One arrival, and the phase does not end before copies have brought so many bytes."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [$address];")
def arrive(address: u32):
    """One arrival; what this thread has read and written before, it has done (release)."""


@instruction(
    "{ .reg .pred over; AGAIN${:uid}: mbarrier.try_wait.parity.shared::cta.b64 over, [$address], $parity; "
    "@!over bra AGAIN${:uid}; }"
)
def wait(address: u32, parity: u32):
    """Until the phase of this parity is over; then what was done before the arrivals is seen (acquire)."""


@instruction("bar.sync $number, $threads;")
def sync_named(number: u32, threads: u32):
    """Wait at barrier `number`, 1 to 15, until so many threads have come; those of arrive_named count, too."""


@instruction("bar.arrive $number, $threads;")
def arrive_named(number: u32, threads: u32):
    """Come to that barrier without waiting."""
