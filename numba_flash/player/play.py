"""One stage, run and recorded on random input, ready to be shown."""

import math
from dataclasses import dataclass

import numpy as np

from .. import testing
from ..attention import attention
from ..blocks import Blocks, fitting_blocks
from ..engine.recorder import LIMIT, Recording, recording
from ..hbm.ledger import Bill, ledger
from ..hbm.predict import algorithm0
from ..stages import STAGES
from ..stages.naive import SIDE
from .frames import frames
from .paper import ALGORITHMS, lit

TILES = 4  # along each side, where nobody says otherwise
ORDER = "QKSPVOlmL"  # of matrices, from left to right
SQUARE = 16  # side of square tiles at most: a thread for each element


@dataclass
class Play:
    """A recorded stage: one head, N = n queries and keys. `row` is the query that is followed."""

    stage: str
    n: int
    d: int
    blocks: Blocks | None
    row: int
    causal: bool
    record: Recording
    frames: list
    bill: Bill
    ideal: Bill
    out: np.ndarray

    @property
    def sides(self):
        """(Br, Bc), or the block of threads of the stage without tiles."""
        return tuple(self.blocks) if self.blocks else (SIDE, SIDE)

    @property
    def facts(self):
        tiles = "no tiles" if not self.blocks else "T = {}".format(*self.blocks) if self.blocks.square \
            else "Br = {}, Bc = {}".format(*self.blocks)  # fmt: skip
        return f"N = {self.n}, d = {self.d}, float32, 1 head, {tiles}{', causal' * self.causal}"

    def launch(self, frame):
        return self.record.launches[frame.launch]

    def algorithm(self, frame):
        """The lines of the paper's algorithm that belong to a frame: their positions in `ALGORITHMS`."""
        return lit(ALGORITHMS[self.stage], frame.paper, self.launch(frame).kernel)

    def matrices(self):
        """{HBM tensor: (rows, columns)} of those that a frame touches, in the order of the kernels' parameters."""
        found = {}
        for number, launch in enumerate(self.record.launches):
            touched = {touch.array for frame in self.frames if frame.launch == number for touch in frame.touches}
            for at, array in enumerate(launch.arrays):
                if at in touched and array.space == "global":
                    found[array.name] = matrix(array)
        return dict(sorted(found.items(), key=lambda item: ORDER.find(item[0])))

    def tile(self, name):
        """The sides of the tiles in which a matrix is walked through."""
        Br, Bc = self.sides
        square = not self.stage.startswith("flash")
        return Bc if name in "KV" else Br, Bc if name in "SP" or (square and name in "QKVO") else self.d

    def scores(self, frame):
        """((first, last) query, (first, last) key) of the scores that live on chip, or None."""
        on_chip = {self.launch(frame).arrays[touch.array].name for touch in frame.touches}
        if "S_ij" not in on_chip or not frame.queries or "j" not in frame.turns:
            return None
        first = frame.turns["j"][0]
        return frame.queries, (first, min(first + self.sides[1], self.n) - 1)

    def says(self, frame):
        """What a frame does, in words."""
        launch = self.launch(frame)
        moves = {"reads": [], "writes": [], "works on": []}
        for touch in frame.touches:
            array = launch.arrays[touch.array]
            if array.space == "global":
                moves["reads" if touch.kind == "read" else "writes"].append(f"{array.name} {box(touch, array)}")
            elif array.name not in moves["works on"]:
                moves["works on"].append(array.name)
        said = [f"{verb} {', '.join(things)}" for verb, things in moves.items() if things]
        return "; ".join(said) or "works in registers"


def matrix(array):
    """(rows, columns) of an array of one head as a matrix."""
    sides = array.shape[1:] if array.space == "global" else array.shape
    return (*sides, 1)[:2]


def place(touch, array):
    """(first row, last row, first column, last column) of a Touch in that matrix."""
    sides = list(zip(touch.lo, touch.hi, strict=True))[array.space == "global" :]
    return sum([*sides, (0, 0)][:2], ())


def box(touch, array):
    """[0:16, 0:16], as NumPy writes it, without the head."""
    return "[" + ", ".join(f"{lo}:{hi + 1}" for lo, hi in zip(touch.lo[1:], touch.hi[1:], strict=True)) + "]"


def largest_n(d):
    """How many queries and keys every stage can be recorded with, in its default tiles."""
    return math.isqrt(LIMIT // (12 * max(d, SQUARE) + 40))


def play(stage, *, n=64, d=16, blocks=None, row=None, causal=False, seed=0):
    """Run and record a stage -> Play. blocks: as `attention` takes them (default: about 4 × 4 tiles). row: the query
    that is followed (default: 5, or the last).

    ValueError for a size that is too large to record, tiles that do not fit, and a row that is not there.
    """
    if n > largest_n(d):
        raise ValueError(f"n={n} leaves too many accesses to record: with d={d}, n={largest_n(d)} is the most")
    row = min(5, n - 1) if row is None else row
    if not 0 <= row < n:
        raise ValueError(f"row={row} is outside: with n={n} there are queries 0 to {n - 1}")
    if blocks is None and stage != "naive":
        side = -(-n // TILES)
        blocks = (side, side) if stage.startswith("flash") else min(side, SQUARE)
    chosen = fitting_blocks(stage, blocks, d=d, dtype="float32")
    q, k, v = testing.inputs((n, d), (n, d), seed=seed)
    with ledger() as bill, recording() as record:
        out = attention(q, k, v, stage=stage, blocks=blocks, causal=causal, device="cpu")
    return Play(STAGES[stage].name, n, d, chosen, row, causal, record, frames(record, row), bill,
                algorithm0(n=n, d=d), out)  # fmt: skip
