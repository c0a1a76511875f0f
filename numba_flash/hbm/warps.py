"""What the warps of a recorded launch ask for: sectors per request in HBM, wavefronts in shared memory.

A warp is 32 threads of a block, x first, that run an instruction together: its accesses are one request. Of HBM a
request moves whole sectors of 32 bytes, as many as its elements lie in. Shared memory has 32 banks of 4 bytes, and in
one wavefront a bank serves one word of 4 bytes, to as many threads as ask for it: a request takes as many wavefronts as
the bank with the most different words has to serve. (NVIDIA, CUDA C++ Best Practices Guide, "Coalesced access to global
memory" and "Shared memory".)

The CPU engine has no warps: it takes the threads one after another. Here the n-th access of each thread at one place of
the source, between two barriers, counts as one request of the warp. That is what a GPU does where the threads of a warp
take the same turns of a loop, as in the stages. A compiler may also join accesses to neighbours into one of 8 or 16
bytes, which makes fewer requests of as many bytes.
"""

from dataclasses import dataclass

import numpy as np

from ..engine import access

WARP, SECTOR, BANKS, WORD = 32, 32, 32, 4  # threads; bytes; banks; bytes
KINDS = {access.READ: "loads", access.WRITE: "stores", access.ATOMIC: "atomics"}


@dataclass(frozen=True)
class Access:
    """One place of the source where a kernel accesses an array, in one launch.

    space: "global" or "shared". kind: "loads", "stores" or "atomics". elements: accesses of threads. requests: of
    warps. units: sectors of 32 bytes that the requests touch, in shared memory wavefronts. least: as few as the same
    elements could do with, were they neighbours.
    """

    kernel: str
    line: int
    array: str
    space: str
    kind: str
    elements: int
    requests: int
    units: int
    least: int

    @property
    def per_request(self):
        return self.units / self.requests


def warp_accesses(launch):
    """The accesses of a `Launch` of a recording to arrays in HBM and in shared memory -> list of Access, by line."""
    found = []
    for number, array in enumerate(launch.arrays):
        if array is None or array.space == "local":
            continue
        mine = (launch.array == number) & (launch.kind != access.NOTE)
        for site in np.unique(launch.site[mine]):
            at = mine & (launch.site == site)
            found.append(_counted(launch, array, launch.sites[site].line, at))
    return sorted(found, key=lambda one: (one.line, one.array))


def _counted(launch, array, line, at):
    thread, phase, element, size = launch.thread[at], launch.phase[at], launch.element[at], array.dtype.itemsize
    order = np.lexsort((thread, phase))  # stable: an access stays in its place among those of its thread
    turn = np.empty(len(order), np.int64)
    turn[order] = _counted_off(phase[order], thread[order])
    request = _numbers(phase, thread // WARP, turn)
    if array.space == "global":
        pieces, least = request, SECTOR
        units = len(_pairs(request, element * size // SECTOR)[0])
    else:
        least = BANKS * WORD
        pieces = _numbers(request, thread % WARP * size // least)  # as many threads as the banks can serve at once
        units = _wavefronts(pieces, element, size)
    fewest = -(-np.bincount(_pairs(pieces, element)[0]) * size // least)
    kind, requests = KINDS[int(launch.kind[at][0])], int(request.max()) + 1
    counts = len(element), requests, int(units), int(fewest.sum())
    return Access(launch.kernel, int(line), array.name, array.space, kind, *counts)


def _numbers(*keys):
    """0, 1, … for the different combinations of keys, which are not negative; of one combination the same."""
    numbers = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        numbers = np.unique(numbers * (int(key.max()) + 1) + key, return_inverse=True)[1]
    return numbers


def _pairs(one, other):
    """The different pairs -> (one, other)."""
    return np.divmod(np.unique(one * (int(other.max()) + 1) + other), int(other.max()) + 1)


def _counted_off(phase, thread):
    """Of sorted keys, which of its equals each is: 0, 1, …"""
    begins = np.concatenate(([True], (phase[1:] != phase[:-1]) | (thread[1:] != thread[:-1])))
    at = np.arange(len(phase))
    return at - np.maximum.accumulate(np.where(begins, at, 0))


def _wavefronts(pieces, element, size):
    """The sum over pieces of requests of the most words that one bank has to serve."""
    words = (element * size)[:, None] // WORD + np.arange(max(1, size // WORD))
    piece, word = _pairs(np.repeat(pieces, words.shape[1]), words.ravel())
    busy = np.bincount(piece * BANKS + word % BANKS, minlength=(int(piece.max()) + 1) * BANKS)
    return busy.reshape(-1, BANKS).max(axis=1).sum()
