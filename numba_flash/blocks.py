"""How large the tiles of a stage may be: what they take of shared memory, registers and threads, and which are chosen.

Everything on chip is counted: tiles in shared memory, and the rows that a thread keeps for itself in registers. The
device is the one that `engine.model` describes.
"""

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from .checks import check_stage, integer, itemsize
from .engine.model import REGISTERS, STATIC_SHARED, THREADS, WARP
from .errors import SharedMemoryError

REGISTERS_A_THREAD = 255  # the most that CUDA gives one thread
ROW_REGISTERS = 192  # with more, the compiler puts a thread's rows into local memory (ptxas 13.0, sm_80 and sm_90)
OTHER_REGISTERS = 128  # beside them: addresses and values in flight, at most
STREAM = 8  # rows, at most, of the tiles that pass by while a block keeps its own
ROWS, KEY_THREADS = 4, 8  # of register_tiled: rows of results per thread, and threads that share such a row


def tiles(size, T):
    """⌈size / T⌉: how many tiles of T cover `size`."""
    return -(-size // T)


def stream(T):
    """The largest divisor of T up to STREAM: tiles of so many rows pass by, and none lies in two tiles of T."""
    return max(rows for rows in range(1, STREAM + 1) if T % rows == 0)


def pitch(columns, unit=4):
    """Elements from one row of a shared tile to the next: an odd number of `unit`s, for rows in different banks.

    4: eight threads, which read the same four columns of eight rows, find them in different banks.
    8: so do the threads of a warp that have eight columns of four rows.
    """
    return unit * (tiles(columns, unit) | 1)


DIRECTIONS = "forward", "backward"
PASSES = {"forward": "", "backward": ", backward", "atomic": ", backward", "split": ", split"}


@dataclass(frozen=True)
class Tiling:
    """What tiles of (Br, Bc) take in one pass of one stage, and which are chosen by default."""

    square: bool
    threads: Callable  # (Br, Bc) -> threads of a block
    shared: Callable  # (Br, Bc, d) -> {array in shared memory: (rows, columns)}
    own: Callable  # (Br, Bc, d) -> rows and columns of what a thread keeps for itself, in registers
    default: Callable  # (d, elements of shared memory) -> (Br, Bc)
    fixed: dict | None = None  # d -> (Br, Bc), for a stage that is written for these; in dynamic shared memory


def _query_a_thread(Br, most):
    """A thread for each of Br queries, with its rows of Q_i and O_i; as many keys as fit, up to `most`."""

    def shared(Br, Bc, d):
        return {"K_j": (Bc, d), "V_j": (Bc, d), "S_ij": (Bc, Br)}

    def default(d, elements):
        rows = max(1, min(Br, elements - 2 * d))  # fewer where not even one key would fit
        return rows, min(elements // (2 * d + rows), most)

    return Tiling(False, lambda Br, Bc: Br, shared, _rows(2), default)


def _rows(count):
    """So many rows of d elements for each thread."""
    return lambda Br, Bc, d: (count, d)


def _whole_warps(threads):
    """`threads`, up to 128, without the rest beyond whole warps, where there is a whole one."""
    threads = min(threads, 128)
    return threads - threads % WARP if threads > WARP else threads


def _key_tiles(rows, Bc, d):
    own = {"K_j": (Bc, d | 1), "V_j": (Bc, d | 1)}
    return own | {"Q_i": (rows, d), "dO_i": (rows, d), "dS_ij": (rows, Bc), "l_i, m_i, D_i": (3, rows)}


def _queries_and_keys(d, elements):
    """A tile of up to STREAM queries, and as many keys as fit beside it."""
    rows = max(1, min(STREAM, (elements - 2 * (d | 1)) // (2 * d + 4)))  # fewer where not even one key would fit
    return rows, _whole_warps((elements - rows * (2 * d + 3)) // (2 * (d | 1) + rows))


def _owner_tiles(Br, Bc, d):
    """Of the two kernels, the one that takes more."""
    own_keys = {
        "K_j": (Bc, d | 1),
        "V_j": (Bc, d | 1),
        "Q_i": (STREAM, d),
        "dO_i": (STREAM, d),
        "L_i, D_i": (2, STREAM),
    }
    own_queries = {"K_j": (STREAM, d), "V_j": (STREAM, d)}
    return max(own_keys, own_queries, key=_elements)


def _elements(arrays):
    return sum(rows * columns for rows, columns in arrays.values())


def _side(elements):
    return min(16, math.isqrt(elements // 2))


_SQUARE = Tiling(
    True,
    lambda Br, Bc: Br * Bc,
    lambda Br, Bc, d: {"two tiles": (2 * Br, Bc)},
    _rows(0),
    lambda d, elements: (_side(elements),) * 2,
)
_KEY_A_THREAD = Tiling(False, lambda Br, Bc: Bc, _key_tiles, _rows(2), _queries_and_keys)  # its rows of dK_j and dV_j
# One kernel with a thread for each of Bc keys; another with one for each of Br queries: its rows of Q_i, dO_i and dQ_i.
_OWNERS = Tiling(
    False,
    lambda Br, Bc: max(Br, Bc),
    _owner_tiles,
    _rows(3),
    lambda d, elements: (128, _whole_warps((elements - 2 * STREAM * (d + 1)) // (2 * (d | 1)))),
)
_ONE_QUERY = Tiling(
    False,
    lambda Br, Bc: Bc,
    lambda Br, Bc, d: {"K_j": (Bc, d | 1), "Q_i, O_i": (2, d), "S_j, P_j": (2, Bc)},
    _rows(0),
    lambda d, elements: (1, _whole_warps((elements - 2 * d) // ((d | 1) + 2))),
)


def _register_threads(rows):
    return KEY_THREADS * tiles(rows, ROWS)


def filled_up(Br, Bc, d):
    """The tile's rows, keys and columns, with those that fill up the share of a thread: columns come in fours."""
    return ROWS * tiles(Br, ROWS), KEY_THREADS * tiles(Bc, KEY_THREADS), 4 * KEY_THREADS * tiles(d, 4 * KEY_THREADS)


def _register_tiles(Br, Bc, d):
    rows, keys, columns = filled_up(Br, Bc, d)
    width = pitch(columns)
    operands = {"Q_i": (rows, width), "K_j": (keys, width), "V_j": (keys, width), "P_ij": (rows, pitch(keys, 8))}
    return operands | {"part": (rows, KEY_THREADS)}


def _register_results(Br, Bc, d):
    """S, O_i, l_i and m_i, and the row and two columns that are multiplied next."""
    _, keys, columns = (size // KEY_THREADS for size in filled_up(Br, Bc, d))
    return ROWS, keys + columns + 3


def passing(d):
    """Rows of the tiles that pass by in register_tiled's backward pass: queries for a block with keys, and keys.

    Of what fits beside 32 keys or 48 queries at d = 64, (32, 24) took the least time on an H200, 21.2 and 16.1 ms (64
    heads, N = 4096). Larger d was not tried out: what fits.
    """
    return (32, 24) if d <= 64 else (16, 16) if d <= 96 else (8, 8)


def _owned_tiles(own, d, passing_by, products):
    """Of a kernel of the backward pass: the tile that its block owns, and what passes by."""
    rows, others, columns = filled_up(own, passing_by, d)
    width = pitch(columns)
    return {"own": (2 * rows, width), "passing": (2 * others, width), "scores": (products * rows, pitch(others, 8)),
            "L_i, D_i": (2, max(rows, others))}  # fmt: skip


def _register_owners(Br, Bc, d):
    """Of the two kernels, the one that takes more: dS for one product, or P and dS for two."""
    queries, keys = passing(d)
    return max(_owned_tiles(Br, d, keys, 1), _owned_tiles(Bc, d, queries, 2), key=_elements)


def _register_gradients(Br, Bc, d):
    """S, dP, and dK_j and dV_j, with the row and two columns that are multiplied next."""
    _, others, columns = (size // KEY_THREADS for size in filled_up(1, max(passing(d)), d))
    return ROWS, 2 * others + 2 * columns + 2


def _most_rows(most, shared, elements):
    """Rows of a tile that fit, up to `most`: in whole warps, or else in whole shares of a thread, if so many fit."""
    rows = max((rows for rows in range(1, most + 1) if _elements(shared(rows)) <= elements), default=1)
    warp = WARP // KEY_THREADS * ROWS
    whole = warp if rows >= warp else ROWS
    return rows - rows % whole if rows > whole else rows


def _queries_of_shares(d, elements):
    wanted = max(KEY_THREADS, min(32, elements // (6 * d)) // KEY_THREADS * KEY_THREADS)
    fitting = [
        Bc for Bc in range(KEY_THREADS, wanted + 1, KEY_THREADS) if _elements(_register_tiles(1, Bc, d)) <= elements
    ]
    keys = max(fitting, default=1)
    return _most_rows(64, lambda Br: _register_tiles(Br, keys, d), elements), keys


def _owners_of_shares(d, elements):
    queries, keys = passing(d)
    return (
        _most_rows(48, lambda own: _owned_tiles(own, d, keys, 1), elements),
        _most_rows(32, lambda own: _owned_tiles(own, d, queries, 2), elements),
    )


def _fixed(tiles_of_d, threads, shared):
    """A stage's own tiles, which nobody else chooses. What a thread keeps for itself are fragments, not rows."""
    return Tiling(False, threads, shared, _rows(0), lambda d, elements: tiles_of_d[d], tiles_of_d)


def _tensor_core_tiles(Br, Bc, d):
    return {"Q_i": (Br, d), "K_j": (Bc, d), "V_j": (Bc, d)}


TENSOR_CORE_PASSING = {64: (64, 64), 128: (64, 32)}  # d -> queries, and keys, of the tiles that pass by, backward


def _tensor_core_owners(Br, Bc, d):
    """Of the two kernels of the backward pass, the one that takes more; the next tile arrives while one is used."""
    queries, keys = TENSOR_CORE_PASSING[d]
    own_keys = {
        "K_j, V_j": (2 * Bc, d),
        "Q_i, dO_i": (4 * queries, d),
        "L_i, D_i, twice as wide": (2 * 2 * 2, queries),
    }
    own_queries = {"Q_i, dO_i": (2 * Br, d), "K_j, V_j": (4 * keys, d)}
    return max(own_keys, own_queries, key=_elements)


def _hopper_tiles(Br, Bc, d):
    """Slots for two tiles of queries, and for two of keys, or four at d = 64; and O on its way out."""
    keys = (4 if d == 64 else 2) * Bc
    return {"Q_i": (2 * Br, d), "K_j": (keys, d), "V_j": (keys, d), "O_i": (Br, d)}


TILINGS = {
    "forward": {
        "naive": None,
        "tiled": _SQUARE,
        "online_softmax": _SQUARE,
        "flash": _query_a_thread(64, most=1024),  # Q and O are read again for each tile of keys: as many as fit
        "flash2": _query_a_thread(128, most=32),  # K and V are read again for each tile of queries: many queries
        "register_tiled": Tiling(
            False, lambda Br, Bc: _register_threads(Br), _register_tiles, _register_results, _queries_of_shares
        ),
        "tensor_core": _fixed({64: (128, 64), 128: (128, 64)}, lambda Br, Bc: 128, _tensor_core_tiles),
        "hopper": _fixed({64: (192, 128), 128: (128, 128)}, lambda Br, Bc: 2 * Br + 128, _hopper_tiles),
    },
    "backward": {
        "naive": None,
        "tiled": _SQUARE,
        "online_softmax": _SQUARE,
        "flash": _KEY_A_THREAD,
        "flash2": _OWNERS,
        "register_tiled": Tiling(
            False,
            lambda Br, Bc: _register_threads(max(Br, Bc)),
            _register_owners,
            _register_gradients,
            _owners_of_shares,
        ),
        "tensor_core": _fixed({64: (128, 64), 128: (128, 64)}, lambda Br, Bc: 128, _tensor_core_owners),
        "hopper": None,
    },
    "atomic": {"flash2": _KEY_A_THREAD},  # the backward pass with atomics
    "split": {"flash2": _ONE_QUERY},  # several blocks for the keys of one query
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
    direction: str = "forward"

    @property
    def tiling(self):
        return TILINGS[self.direction][self.stage]

    @property
    def square(self):
        return self.tiling.square

    @property
    def threads(self):
        return self.tiling.threads(self.Br, self.Bc)

    @property
    def shared_bytes(self):
        return _elements(self.tiling.shared(self.Br, self.Bc, self.d)) * self.itemsize

    @property
    def row_registers(self):
        """Registers of 32 bits that the rows of one thread would fill."""
        rows, columns = self.tiling.own(self.Br, self.Bc, self.d)
        return rows * columns * self.itemsize // 4

    @property
    def rows_in_registers(self):
        """Whether a thread's rows are expected in registers; else the compiler puts them into local memory."""
        return self.row_registers <= ROW_REGISTERS

    @property
    def registers(self):
        """Registers of 32 bits that a thread takes, estimated from above."""
        own = self.row_registers if self.rows_in_registers else REGISTERS_A_THREAD
        return min(own + OTHER_REGISTERS, REGISTERS_A_THREAD) if own else REGISTERS // THREADS

    @property
    def block_registers(self):
        """Registers that a block takes: CUDA gives them to whole warps, in units of 8 a thread."""
        return math.ceil(self.threads / WARP) * WARP * math.ceil(self.registers / 8) * 8

    @property
    def threads_fit(self):
        """Whether a block of the device can have so many threads, with the registers they take."""
        return self.threads <= THREADS and self.block_registers <= REGISTERS

    @property
    def fits(self):
        """Whether a block of the device holds such tiles in static shared memory, or they are the stage's own."""
        if self.tiling.fixed:
            return (self.Br, self.Bc) == self.tiling.fixed.get(self.d)
        return self.threads_fit and self.shared_bytes <= STATIC_SHARED

    def __iter__(self):
        return iter((self.Br, self.Bc))

    def __str__(self):
        arrays = self.tiling.shared(self.Br, self.Bc, self.d)
        parts = ", ".join(f"{name} {rows} × {columns}" for name, (rows, columns) in arrays.items())
        if self.square:
            parts = f"two tiles of {self.Br} × {self.Bc}"
        queries = "1 query" if self.Br == 1 else f"{self.Br} queries"
        keys = "1 key" if self.Bc == 1 else f"{self.Bc} keys"
        text = f"{self.stage}{PASSES[self.direction]}: Br = {queries} and Bc = {keys} per tile. "
        there = "B, dynamic" if self.tiling.fixed else f"of {self.sram:,} B"
        text += f"Shared memory: {parts}, {self.shared_bytes:,} {there}."
        rows, columns = self.tiling.own(self.Br, self.Bc, self.d)
        if not rows:
            return text
        threads = "1 thread" if self.threads == 1 else f"each of {self.threads} threads"
        text += f" Rows of its own: {rows} × {columns} for {threads}, {self.row_registers} registers"
        if self.rows_in_registers:
            return f"{text}, and up to {self.registers} with all else."
        return (
            f"{text}. That is too much for the {REGISTERS_A_THREAD} a thread can have: the compiler puts such rows "
            "into local memory, which is in HBM behind the caches."
        )


def choose_blocks(stage, *, d, dtype="float32", sram=STATIC_SHARED, rule="fit", direction="forward"):
    """The tiles that `blocks=None` stands for -> Blocks, or None for a stage without tiles.

    d columns a head; `sram` bytes of shared memory for a block of threads; direction "forward", "backward", "atomic",
    "split" (`split_kv`), or "both": what fits forward and backward, which a block mask goes by.
    rule: "fit" counts all that a stage keeps on chip; "paper" is line 1 of Algorithm 1 (line 2 of Algorithm 4),
    Bc = ⌈M/4d⌉ and Br = min(Bc, d) with M the elements that fit `sram`, which leaves S_ij out and so may not fit.
    TypeError or ValueError for an argument without a meaning.
    """
    if direction == "both":
        one, other = (
            choose_blocks(stage, d=d, dtype=dtype, sram=sram, rule=rule, direction=part) for part in DIRECTIONS
        )
        return one and replace(one, Br=min(one.Br, other.Br), Bc=min(one.Bc, other.Bc))
    tiling = _tiling(stage, direction)
    d, sram, size = integer("d", d, 1), integer("sram", sram, 1), itemsize(dtype)
    if rule not in ("fit", "paper"):
        raise ValueError(f"rule={rule!r} is unknown: pass 'fit' or 'paper'")
    if tiling is None:
        return None
    if tiling.fixed:
        _check_half(stage, dtype)
        return Blocks(stage, *_fixed_tiles(stage, tiling, rule, d), d, size, sram, direction)
    if rule == "fit":
        Br, Bc, taken = _default(stage, direction, d, sram // size)
        if taken * size > sram or min(Br, Bc) < 1:
            least = _elements(tiling.shared(1, 1, d)) * size
            raise ValueError(
                f"sram={sram} holds no tiles of {stage!r}{PASSES[direction]} with d = {d} and {size} bytes an element: "
                f"the smallest take {least:,} bytes; pass another stage, or for a prediction more sram or "
                f"blocks={_form(stage, tiling)}"
            )
    elif tiling.square:
        raise ValueError(f"'paper' is for stages with (Br, Bc), and stage {stage!r} has square tiles: pass a side T")
    else:
        Bc = tiles(sram // size, 4 * d)
        Br = min(Bc, d)
    return Blocks(stage, max(Br, 1), max(Bc, 1), d, size, sram, direction)


def check_blocks(stage, blocks, *, d, dtype="float32", sram=STATIC_SHARED, direction="forward"):
    """`blocks` as a user gives them -> Blocks, or None for a stage without tiles. Whether they fit is not asked.

    blocks: None (what fits, see `choose_blocks`), "paper", one side T for square tiles, or (Br, Bc).
    """
    tiling = _tiling(stage, direction)
    if blocks is not None and tiling is None:
        raise ValueError(f"blocks={blocks!r}: stage {stage!r} has no tiles; leave blocks out")
    if blocks is None or isinstance(blocks, str):
        if blocks not in (None, "paper") or (blocks and direction == "split"):
            raise ValueError(f"blocks={blocks!r} is unknown: pass None or {_form(stage, tiling)}")
        rule = "paper" if blocks else "fit"
        return choose_blocks(stage, d=d, dtype=dtype, sram=sram, rule=rule, direction=direction)
    if isinstance(blocks, Blocks):
        blocks = tuple(blocks)
    if isinstance(blocks, tuple | list):
        sides = tuple(integer(f"blocks={blocks!r}: side", side, 1) for side in blocks)
    elif tiling.square:
        sides = (integer("blocks", blocks, 1),) * 2
    else:
        sides = ()
    if len(sides) != 2 or (tiling.square and sides[0] != sides[1]):
        raise ValueError(f"blocks={blocks!r}: pass {_form(stage, tiling)}")
    if direction == "split" and sides[0] != 1:
        raise ValueError(f"blocks={blocks!r}: with split_kv a block has one query, so pass (1, Bc)")
    return Blocks(stage, *sides, integer("d", d, 1), itemsize(dtype), integer("sram", sram, 1), direction)


def _check_half(stage, dtype):
    if itemsize(dtype) != 2:
        raise ValueError(f"dtype={dtype!r}: stage {stage!r} takes float16 and bfloat16; pass dtype='float16'")


def _fixed_tiles(stage, tiling, rule, d):
    if rule == "paper":
        raise ValueError(f"'paper' is not for stage {stage!r}, which is written for tiles of its own: leave blocks out")
    if d not in tiling.fixed:
        raise ValueError(f"d={d}: stage {stage!r} takes d = {' and '.join(map(str, tiling.fixed))}; pass another stage")
    return tiling.fixed[d]


@cache
def _default(stage, direction, d, elements):
    """The default tiles -> Br, Bc, and the elements of shared memory that they take."""
    tiling = TILINGS[direction][stage]
    Br, Bc = tiling.default(d, elements)
    return Br, Bc, _elements(tiling.shared(Br, Bc, d))


def _tiling(stage, direction):
    if not isinstance(direction, str) or direction not in TILINGS:
        raise ValueError(f"direction={direction!r} has no tiles: pass {', '.join(map(repr, TILINGS))} or 'both'")
    check_stage(stage, TILINGS["forward"])
    if stage not in TILINGS[direction]:
        raise ValueError(f"direction={direction!r} is not one of stage {stage!r}: pass stage='flash2'")
    return TILINGS[direction][stage]


def _form(stage, tiling):
    if tiling.square:
        return f"one side T or (T, T) for the square tiles of stage {stage!r}"
    return "(1, Bc)" if tiling is _ONE_QUERY else "(Br, Bc)"


SIDES = "T, or Br Bc where tiles are not square"  # what a command line takes for `from_sides`, in words


def from_sides(stage, sides):
    """What a command line's one or two numbers mean for `blocks`: T, or (Br, Bc), of which one number is both."""
    if len(sides) == 1:
        tiling = TILINGS["forward"][stage]
        return sides[0] if tiling is None or tiling.square else (sides[0], sides[0])
    return tuple(sides)


def fitting_blocks(stage, blocks, *, d, dtype, direction="forward"):
    """`check_blocks`, and whether a block of threads of the device holds such tiles.

    SharedMemoryError (a ValueError) where the tiles overflow static shared memory, ValueError for too many threads or
    registers; each says what is needed, what is there, and tiles that fit.
    """
    if blocks is None or isinstance(blocks, Blocks):
        return _fitting_again(stage, blocks, d, dtype, direction)
    return _fitting(stage, blocks, d, dtype, direction)


def _fitting(stage, blocks, d, dtype, direction):
    chosen = check_blocks(stage, blocks, d=d, dtype=dtype, direction=direction)
    if chosen is None or chosen.fits:
        return chosen
    if chosen.tiling.fixed:
        own = _fixed_tiles(stage, chosen.tiling, "fit", d)
        raise ValueError(f"blocks={tuple(chosen)}: stage {stage!r} is written for {own}; leave blocks out")
    if not replace(chosen, Br=1, Bc=1).fits:
        choose_blocks(stage, d=d, dtype=dtype, direction=direction)  # raises: there are none
    given = blocks if blocks is not None else tuple(chosen)
    given = tuple(given) if isinstance(given, Blocks) else given
    way_out = f"blocks={_largest(chosen, lambda Br, Bc: replace(chosen, Br=Br, Bc=Bc).fits)} fits"
    too_many = f"{chosen.threads:,} threads, and a block has at most {THREADS:,}"
    if chosen.shared_bytes > STATIC_SHARED:
        also = f"; they are also {too_many}" if chosen.threads > THREADS else ""
        raise SharedMemoryError(
            f"blocks={given!r}: the tiles of {stage!r}{PASSES[direction]}{',' * (direction != 'forward')} in "
            f"{np.dtype(dtype).name} with d = {d} need {chosen.shared_bytes:,} bytes of shared memory, and a block has "
            f"{STATIC_SHARED:,}{also}; {way_out}"
        )
    if chosen.threads > THREADS:
        raise ValueError(f"blocks={given!r}: {too_many}; {way_out}")
    raise ValueError(
        f"blocks={given!r}: {chosen.threads} threads of up to {chosen.registers} registers take, in whole warps, "
        f"{chosen.block_registers:,}, and a block has {REGISTERS:,}; {way_out}"
    )


_fitting_again = lru_cache(maxsize=None, typed=True)(_fitting)  # attention and its stage ask the same, in every call


def mask_blocks(blocks, *, d, dtype, sram=STATIC_SHARED):
    """The tiles of a block mask: `blocks`, or by default those that fit flash2 in both passes."""
    return choose_blocks("flash2", d=d, dtype=dtype, sram=sram, direction="both") if blocks is None else blocks


def boolean_tiles(block_mask, blocks, N, N_k):
    """`block_mask`, an array (⌈N/Br⌉, ⌈N_k/Bc⌉). TypeError where it holds no booleans, ValueError for another shape."""
    if not hasattr(block_mask, "dtype") or isinstance(block_mask, np.ma.MaskedArray):
        what = type(block_mask).__name__
        raise TypeError(f"block_mask={reprlib.repr(block_mask)} is a {what}: pass a NumPy array of booleans")
    if block_mask.dtype != np.bool_:
        raise TypeError(f"block_mask has dtype {block_mask.dtype}: pass booleans, True for a tile that is computed")
    shape = tiles(N, blocks.Br), tiles(N_k, blocks.Bc)
    if block_mask.shape != shape:
        raise ValueError(
            f"block_mask has shape {block_mask.shape}: with blocks=({blocks.Br}, {blocks.Bc}), N = {N} queries and "
            f"N_k = {N_k} keys it must be {shape}"
        )
    return block_mask


def kernel_tiles(sides, deterministic):
    """The tiles of flash2's backward pass under a block mask with tiles of `sides`."""
    return tuple(sides) if deterministic else (stream(sides.Br), sides.Bc)


def fitting_sides(blocks, *, d, dtype, deterministic):
    """The tiles of a block mask, as for `mask_blocks`, if they fit flash2 in both passes.

    SharedMemoryError or ValueError for others: it says what is too much, and tiles that fit.
    """
    sides = check_blocks("flash2", mask_blocks(blocks, d=d, dtype=dtype), d=d, dtype=dtype)
    direction = "backward" if deterministic else "atomic"

    def parts(Br, Bc):
        forward = replace(sides, Br=Br, Bc=Bc)
        yield forward
        Br, Bc = kernel_tiles(forward, deterministic)
        yield replace(forward, Br=Br, Bc=Bc, direction=direction)

    def fit(Br, Bc):
        return all(part.fits for part in parts(Br, Bc))

    if fit(*sides):
        return sides
    over = next(part for part in parts(*sides) if not part.fits)
    kind = SharedMemoryError if over.shared_bytes > STATIC_SHARED else ValueError
    raise kind(
        f"blocks={tuple(sides)!r}: the tiles of a block mask serve both passes; flash2{PASSES[over.direction]} would "
        f"need {over.shared_bytes:,} bytes of shared memory, {over.threads:,} threads and {over.block_registers:,} "
        f"registers, and a block has {STATIC_SHARED:,}, {THREADS:,} and {REGISTERS:,}; "
        f"blocks={_largest(sides, fit)} fits"
    )


def _largest(blocks, fits):
    """Sides for which fits(Br, Bc), as near as can be to those asked for: first Br is cut where it must be, then Bc."""
    if blocks.square:
        return (max(T for T in range(1, THREADS) if fits(T, T)),) * 2
    most = STATIC_SHARED // blocks.itemsize
    Br = max(Br for Br in range(1, min(blocks.Br, most) + 1) if fits(Br, 1))
    return Br, max(Bc for Bc in range(1, min(blocks.Bc, most) + 1) if fits(Br, Bc))
