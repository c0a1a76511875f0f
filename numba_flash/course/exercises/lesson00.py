"""Exercises of lesson 00: thread, guard, shared memory, barrier."""

import numpy as np

from ..exercise import Bound, Exercise, Mistake, Share, constants
from .common import cases, normal

(B,) = constants("00_reduce", "B")
GRID = "cuda.grid(1), the number of the thread in the whole grid"


def _fold(X, stop):
    """The tree sum of each block with the steps half = B/2, …, stop."""
    tile = np.pad(X, (0, -len(X) % B)).reshape(-1, B).copy()
    half = B // 2
    while half >= stop:
        tile[:, :half] += tile[:, half : 2 * half]
        half //= 2
    return tile[:, 0]


EXERCISES = (
    Exercise(
        name="00_guard",
        answer="add",
        outputs=("Z",),
        inputs=cases(
            1,
            lambda rng, N: (normal(rng, N), normal(rng, N), np.float32(rng.uniform(2, 3))),
            *({"N": n} for n in (1000, 1, 64, 65, 128)),
        ),
        sizes=lambda X, Y, factor: {"N": len(X)},
        bill=(
            Bound("X", "loads", "N", "each thread that has an element loads one", "a thread loads more than its own"),
            Bound("Y", "loads", "N", "as of X", "a thread loads more than its own element"),
            Bound("Z", "stores", "N", "each thread that has an element stores one", "Z[i] is stored in two steps"),
        ),
        share=(Share("HBM", "3", "two loads and a store"),),
        hints=(
            "A kernel has no loop over the elements. Each thread takes the element whose number it has. Which number "
            "is that? Look for `cuda.grid` in lesson 00.",
            "There are more threads than elements when B does not divide N. Those past the end must neither load nor "
            "store: an `if` around the work, with X.shape[0].",
            "Three lines: i = cuda.grid(1), then if i < X.shape[0]:, and within it Z[i] = ... from X[i] and Y[i].",
        ),
        mistakes=(
            Mistake("That is X + Y: the factor is left out.", lambda X, Y, factor: X + Y),
            Mistake("That is factor·X: Y is left out.", lambda X, Y, factor: factor * X),
            Mistake("The factor is on the wrong term, or on both: Z = factor·X + Y.", lambda X, Y, f: f * (X + Y)),
            Mistake("The factor is on the wrong term: Z = factor·X + Y.", lambda X, Y, f: X + f * Y),
        ),
        faults={
            "OutOfBounds": "the guard is missing, or lets one thread too many through: a thread whose number is N or "
            "more has no element.",
            "RaceDetected in one line": "several threads store the same element. A thread has one element, that of its "
            "own number, cuda.grid(1): it goes through no others, and threads past the end do nothing.",
            "RaceDetected": f"cuda.threadIdx.x was taken for the thread's number. It begins at 0 in each block; you "
            f"want {GRID}.",
            "unwritten": f"the guard keeps too many threads out, or the number is not {GRID}.",
        },
    ),
    Exercise(
        name="00_reduce",
        answer="block_sum",
        outputs=("Y",),
        inputs=cases(2, lambda rng, N: (normal(rng, N, mean=0.5),), *({"N": n} for n in (300, 1, 64, 65, 128))),
        sizes=lambda X: {"N": len(X)},
        bill=(
            Bound("X", "loads", "N", "each element once, on the way into the tile", "X is loaded again in the hole"),
            Bound("Y", "stores", "tiles(N, B)", "one sum per block", "Y is stored in the hole, too"),
        ),
        share=(
            Share("HBM", "2", "a load and, for one thread of a block, a store"),
            Share(
                "shared memory", "2*(3*log2(B) + 2)", "twice what it takes: its element, and one addition per step", 1
            ),
        ),
        hints=(
            "Two things happen in turn: half of the threads add, and everybody waits. As half gets smaller, fewer "
            "threads add, but all have to come to the barrier.",
            "The tile was filled by all threads, one element each: before anyone adds, it must be complete. And "
            "before the next step begins, the sums of this one must be.",
            "A barrier; then while half > 0:, in it `if tx < half:` with tile[tx] += tile[tx + half], after that "
            "`if` (not in it) a barrier, and half //= 2.",
        ),
        mistakes=(
            Mistake("That is the first element of each block: nothing was added to it.", lambda X: _fold(X, B)),
            Mistake(
                "The last step is missing, that with half = 1: tile[1] was not added to tile[0].",
                lambda X: _fold(X, 2),
            ),
            Mistake("Only the first step was taken: there is a loop missing.", lambda X: _fold(X, B // 2)),
        ),
        faults={
            "RaceDetected": "a barrier is missing. Two are needed: one before the first addition, so that the tile "
            "is complete, and one after each step, so that its sums are there for the next.",
            "BarrierDivergence": "the barrier stands inside `if tx < half`, where the other threads never come. Put "
            "it after the `if`.",
            "OutOfBounds": "tile[tx + half] is past the end: only threads with tx < half add.",
            "wrong": "follow the picture in the file: at each step thread tx < half adds tile[tx + half].",
        },
    ),
)
