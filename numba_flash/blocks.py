"""How large the tiles of a stage may be: what they take of shared memory, registers and threads, and which are chosen.

Everything on chip is counted: K_j, V_j and S_ij in shared memory, a row of Q_i and of O_i in the registers of each
thread. The device is the one that `engine.model` describes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .checks import check_stage, integer, itemsize
from .engine.model import REGISTERS, STATIC_SHARED, THREADS
from .errors import SharedMemoryError

REGISTERS_A_THREAD = 255  # the most that CUDA gives one thread; what is beyond spills to local memory
OTHER_REGISTERS = 96  # beside arrays in registers: addresses and values in flight (the compiler takes 72 at d = 64)


@dataclass(frozen=True)
class Tiling:
    """What tiles of (Br, Bc) take in one stage. `default` chooses them for d columns and a number of elements."""

    square: bool
    threads: Callable  # (Br, Bc) -> threads of a block
    shared: Callable  # (Br, Bc, d) -> elements in shared memory
    local: Callable  # d -> elements that a thread keeps in registers
    default: Callable  # (d, elements of shared memory) -> (Br, Bc)


def _thread_a_row(Br, most):
    """A thread for each of Br queries; K_j, V_j and S_ij of as many keys as fit, up to `most`."""

    def default(d, elements):
        fits = min(elements // (2 * d + Br), most)
        return Br, max(1, fits - fits % 8 if fits > 8 else fits)

    return Tiling(False, lambda Br, Bc: Br, lambda Br, Bc, d: 2 * Bc * d + Bc * Br, lambda d: 2 * d, default)


_SQUARE = Tiling(True, lambda Br, Bc: Br * Bc, lambda Br, Bc, d: 2 * Br * Bc, lambda d: 0, lambda d, elements: (16, 16))

TILINGS = {
    "naive": None,
    "tiled": _SQUARE,
    "online_softmax": _SQUARE,
    "flash": _thread_a_row(64, most=1024),  # O is read again for each tile of keys: as many keys a tile as fit
    "flash2": _thread_a_row(128, most=32),  # K and V are read again for each tile of queries: many queries a tile
}


@dataclass(frozen=True)
class Blocks:
    """The tiles of a stage, Br queries by Bc keys, and what a block of threads takes with them; str() explains it."""

    stage: str
    Br: int
    Bc: int
    d: int
    itemsize: int
    sram: int

    @property
    def square(self):
        return TILINGS[self.stage].square

    @property
    def threads(self):
        return TILINGS[self.stage].threads(self.Br, self.Bc)

    @property
    def shared_bytes(self):
        return TILINGS[self.stage].shared(self.Br, self.Bc, self.d) * self.itemsize

    @property
    def registers(self):
        """Registers of 32 bits that a thread asks for, estimated; more than 255 spill."""
        local = TILINGS[self.stage].local(self.d) * self.itemsize // 4
        return local + OTHER_REGISTERS if local else REGISTERS // THREADS  # a kernel without such arrays takes 28

    def __iter__(self):
        return iter((self.Br, self.Bc))

    def __str__(self):
        if TILINGS[self.stage].square:
            parts = f"two tiles of {self.Br} × {self.Bc}"
        else:
            parts = f"K_j and V_j {self.Bc} × {self.d} each, S_ij {self.Bc} × {self.Br}"
        spill = ""
        if self.registers > REGISTERS_A_THREAD:
            spill = f" ({REGISTERS_A_THREAD} at most: the compiler spills the rest to local memory, which is in HBM)"
        queries = "1 query" if self.Br == 1 else f"{self.Br} queries"
        keys = "1 key" if self.Bc == 1 else f"{self.Bc} keys"
        threads = "its 1 thread" if self.threads == 1 else f"each of {self.threads} threads"
        return (
            f"{self.stage}: Br = {queries} and Bc = {keys} per tile. Shared memory: {parts}, {self.shared_bytes:,} of "
            f"{self.sram:,} B. Registers: about {self.registers} for {threads}{spill}."
        )


def choose_blocks(stage, *, d, dtype="float32", sram=STATIC_SHARED, rule="fit"):
    """The tiles that `blocks=None` stands for -> Blocks, or None for a stage without tiles.

    d columns a head; `sram` bytes of shared memory for a block of threads. rule: "fit" counts all that a stage keeps
    on chip; "paper" is line 1 of Algorithm 1, Bc = ⌈M/4d⌉ and Br = min(Bc, d) with M the elements that fit `sram`,
    which leaves S_ij out and so may not fit. TypeError or ValueError for an argument without a meaning.
    """
    check_stage(stage, TILINGS)
    d, sram, size = integer("d", d, 1), integer("sram", sram, 1), itemsize(dtype)
    if rule not in ("fit", "paper"):
        raise ValueError(f"rule={rule!r} is unknown: pass 'fit' or 'paper'")
    tiling = TILINGS[stage]
    if tiling is None:
        return None
    if rule == "fit":
        Br, Bc = tiling.default(d, sram // size)
    elif tiling.square:
        raise ValueError(f"rule='paper' is the rule of flash and flash2; stage {stage!r} has square tiles")
    else:
        Bc = -(-(sram // size) // (4 * d))
        Br = min(Bc, d)
    return Blocks(stage, max(Br, 1), max(Bc, 1), d, size, sram)


def check_blocks(stage, blocks, *, d, dtype="float32", sram=STATIC_SHARED):
    """`blocks` as a user gives them -> Blocks, or None for a stage without tiles. Whether they fit is not asked.

    blocks: None (what fits, see `choose_blocks`), "paper", one side T for square tiles, or (Br, Bc).
    """
    check_stage(stage, TILINGS)
    if blocks is None or isinstance(blocks, str):
        if blocks not in (None, "paper"):
            raise ValueError(f"blocks={blocks!r} is unknown: pass None, 'paper' or {_form(stage)}")
        return choose_blocks(stage, d=d, dtype=dtype, sram=sram, rule="paper" if blocks else "fit")
    tiling = TILINGS[stage]
    if tiling is None:
        raise ValueError(f"blocks={blocks!r}: stage {stage!r} has no tiles; leave blocks out")
    if isinstance(blocks, Blocks):
        blocks = tuple(blocks)
    if isinstance(blocks, tuple | list):
        sides = tuple(integer(f"blocks={blocks!r}: side", side, 1) for side in blocks)
    else:
        sides = (integer("blocks", blocks, 1),) * (2 if tiling.square else 1)
    if len(sides) != 2 or (tiling.square and sides[0] != sides[1]):
        raise ValueError(f"blocks={blocks!r}: pass {_form(stage)}")
    return Blocks(stage, *sides, integer("d", d, 1), itemsize(dtype), integer("sram", sram, 1))


def _form(stage):
    tiling = TILINGS[stage]
    if tiling is None:
        return f"None, since stage {stage!r} has no tiles"
    return f"one side T or (T, T) for the square tiles of stage {stage!r}" if tiling.square else "(Br, Bc)"


def fitting_blocks(stage, blocks, *, d, dtype):
    """`check_blocks`, and whether a block of threads of the device holds such tiles.

    SharedMemoryError (a ValueError) where the tiles overflow static shared memory, ValueError for too many threads or
    registers; each says what is needed, what is there, and tiles that fit.
    """
    chosen = check_blocks(stage, blocks, d=d, dtype=dtype)
    if chosen is None:
        return None
    given = blocks if blocks is not None else tuple(chosen)
    given = tuple(given) if isinstance(given, Blocks) else given
    way_out = f"blocks={_largest(chosen)} fits"
    too_many = f"{chosen.threads:,} threads, and a block has at most {THREADS:,}"
    if chosen.shared_bytes > STATIC_SHARED:
        also = f"; they are also {too_many}" if chosen.threads > THREADS else ""
        raise SharedMemoryError(
            f"blocks={given}: the tiles of {stage!r} in {np.dtype(dtype).name} with d = {d} need "
            f"{chosen.shared_bytes:,} bytes of shared memory, and a block has {STATIC_SHARED:,}{also}; {way_out}"
        )
    if chosen.threads > THREADS:
        raise ValueError(f"blocks={given}: {too_many}; {way_out}")
    if min(chosen.registers, REGISTERS_A_THREAD) * chosen.threads > REGISTERS:
        raise ValueError(
            f"blocks={given}: {chosen.threads} threads of about {min(chosen.registers, REGISTERS_A_THREAD)} registers, "
            f"and a block has {REGISTERS:,}; {way_out}"
        )
    return chosen


def _largest(blocks):
    """Tiles that fit, as near as they can be to those asked for."""
    if TILINGS[blocks.stage].square:
        T = min(math.isqrt(THREADS), math.isqrt(STATIC_SHARED // (2 * blocks.itemsize)))
        return T, T
    Br = min(blocks.Br, THREADS, REGISTERS // min(blocks.registers, REGISTERS_A_THREAD))
    return Br, min(blocks.Bc, STATIC_SHARED // blocks.itemsize // (2 * blocks.d + Br))
