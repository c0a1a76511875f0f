"""What a stage moves and computes, from closed forms alone: no launch, and no look at its kernels.

Each stage is one function below, and one for its backward pass, that reads like the table of a bill: for one head of N
queries, N_k keys and d columns, what every kernel loads, stores and computes. A floating-point add, subtract, multiply,
divide, exp, log or max of one element is one operation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial

import numpy as np

from ..blocks import (
    KEY_THREADS,
    TENSOR_CORE_PASSING,
    TILINGS,
    boolean_tiles,
    check_blocks,
    filled_up,
    mask_blocks,
    passing,
    stream,
    tiles,
)
from ..checks import (
    check_deterministic,
    check_sparse,
    check_split,
    check_stage,
    dtype_name,
    integer,
    itemsize,
    probability,
    truth,
)
from ..choice import Needs, check_takes
from ..engine.model import STATIC_SHARED
from ..stages import STAGES
from .ledger import Bill, Count

DIRECTIONS = ("forward", "backward", "both")
BYTES = ("mask", "block_mask", "Z")  # tensors of one byte per element
AT_LEAST_4 = ("L", "D", "queue")  # of 4 bytes where the others have 2


@dataclass(frozen=True)
class Problem:
    """The size of one attention: N queries, N_k keys, d columns, `heads` times, in tiles of `blocks`.

    `share`: heads of K and V for each head of Q. `kept`: whether the backward pass has all that its stage's forward
    pass keeps, or O and L alone. `masked`: whether there is a key mask. Query i sees key j where j ≤ i + N_k − N, if
    `causal`. `dropped`: whether there is dropout.
    """

    N: int
    N_k: int
    d: int
    heads: int
    share: Fraction
    blocks: tuple | None
    itemsize: int
    return_lse: bool = False
    kept: bool = False
    deterministic: bool = True
    causal: bool = False
    masked: bool = False
    dropped: bool = False
    splits: int = 0

    @property
    def pairs(self):
        """Pairs of a query and a key that it may see in causal order."""
        return clamped_sum(self.N_k - self.N + 1, 1, self.N, 0, self.N_k) if self.causal else self.N * self.N_k

    @property
    def rows(self):
        """Queries that may see a key."""
        return min(self.N, self.N_k) if self.causal else self.N * bool(self.N_k)

    @property
    def mask(self):
        """The loads of the key mask, where one thread asks for each pair."""
        return {"mask": self.pairs} if self.masked else {}

    @property
    def drops(self):
        """Products with Z, for each score."""
        return int(self.dropped)

    def block_mask(self, threads, rows=None, keys=None):
        """The loads of the block mask: none."""
        return {}

    def queries_of_tiles(self, Bc, step=1):
        """The queries from which a tile of Bc keys is seen, summed over the tiles; and with each key of the tile."""
        Tc = tiles(self.N_k, Bc)
        if not self.causal:
            return Tc * self.N, self.N_k * self.N
        rows = Tc * self.N - clamped_sum(self.N - self.N_k, Bc, Tc, 0, self.N)
        last = self.N - max(0, (Tc - 1) * Bc + self.N - self.N_k) if Tc else 0
        return rows, Bc * rows - (Tc * Bc - self.N_k) * last

    def keys_of_tiles(self, Br):
        """The keys that the last query of a tile of Br sees, summed over the tiles; and with each query of the tile."""
        Tr = tiles(self.N, Br)
        if not self.causal:
            return Tr * self.N_k, self.N * self.N_k
        keys = clamped_sum(Br + self.N_k - self.N, Br, Tr - 1, 0, self.N_k) + self.N_k
        return keys, Br * keys - (Tr * Br - self.N) * self.N_k

    def steps(self, Br, Bc):
        """Tiles of Br queries and Bc keys that are computed."""
        if not self.causal:
            return tiles(self.N, Br) * tiles(self.N_k, Bc)
        return sum(tiles(max(0, min(i + Br, self.N) + self.N_k - self.N), Bc) for i in range(0, self.N, Br))

    def rows_of_steps(self, Br, Bc, least):
        """Keys in the tiles of Bc, whole ones, that a tile of Br queries visits, at least `least`, over all of them."""
        if not self.causal:
            return tiles(self.N, Br) * self.N_k
        seen = (max(0, min(i + Br, self.N) + self.N_k - self.N) for i in range(0, self.N, Br))
        return sum(min(self.N_k, Bc * max(least, tiles(keys, Bc))) for keys in seen)

    def steps_of_rows(self, Br, Bc):
        """Tiles of keys that the rows go through, summed over the rows."""
        last = self.N % Br  # rows of a last tile that is not whole; it meets all keys
        return Br * self.steps(Br, Bc) - (Br - last) * tiles(self.N_k, Bc) * bool(last)


@dataclass(frozen=True)
class SparseProblem(Problem):
    """One whose tiles `visited` (Tr, Tc) alone are computed; `block_mask` counts what it costs to ask."""

    visited: np.ndarray = None

    @cached_property
    def sides(self):
        """Where the tiles of queries and of keys begin and end: i0, i1 of shape (Tr, 1), j0, j1 of shape (Tc,)."""
        exact = np.int64 if (self.N + self.N_k) ** 2 < 2**62 else object  # of Python's integers, which have no end
        i0, j0 = (np.arange(count).astype(exact) * side for count, side in zip(self.visited.shape, self.blocks))
        i1, j1 = np.minimum(i0 + self.blocks[0], self.N), np.minimum(j0 + self.blocks[1], self.N_k)
        return i0[:, None], i1[:, None], j0, j1

    @property
    def pairs(self):
        i0, i1, j0, j1 = self.sides
        if not self.causal:
            return int(((i1 - i0) * (j1 - j0) * self.visited).sum())
        offset = self.N_k - self.N

        def triangle(x):
            return np.where(x > 0, x * (x + 1) // 2, 0)

        def before(i, j):  # pairs of a query before i and a key before j
            return triangle(i + offset) - triangle(offset) - triangle(i + offset - j) + triangle(offset - j)

        inside = before(i1, j1) - before(i0, j1) - before(i1, j0) + before(i0, j0)
        return int((inside * self.visited).sum())

    @property
    def rows(self):
        i0, i1, j0, _ = self.sides
        first = j0[self.visited.argmax(axis=1)][:, None] + (self.N - self.N_k if self.causal else -self.N_k)
        seeing = np.clip(i1 - np.maximum(i0, first), 0, None)[:, 0]
        return int(seeing[self.visited.any(axis=1)].sum())

    @property
    def keys(self):
        """How many keys the last query of each tile may see (Tr, 1)."""
        _, i1, _, _ = self.sides
        return np.clip(i1 + self.N_k - self.N, 0, self.N_k) if self.causal else np.full_like(i1, self.N_k)

    def keys_of_tiles(self, Br):
        i0, i1, j0, j1 = self.sides
        width = np.clip(self.keys - j0, 0, j1 - j0) * self.visited
        return int(width.sum()), int((width * (i1 - i0)).sum())

    def starts(self, step):
        """The query that each tile of keys begins with, a multiple of `step` (Tc,)."""
        _, _, j0, _ = self.sides
        return np.maximum(j0 + self.N - self.N_k, 0) // step * step if self.causal else np.zeros_like(j0)

    def queries_of_tiles(self, Bc, step=1):
        i0, i1, j0, j1 = self.sides
        height = np.clip(i1 - np.maximum(i0, self.starts(step)), 0, None) * self.visited
        return int(height.sum()), int((height * (j1 - j0)).sum())

    def block_mask(self, threads, rows=None, keys=None):
        """The loads of the block mask by `threads`, one at each step of `rows` queries, or of `keys` keys."""
        steps = tiles(self.N - self.starts(rows), rows) if rows else tiles(self.keys, keys)
        return {"block_mask": threads * int(steps.sum())}

    def steps_of_rows(self, Br, Bc):
        i0, i1, j0, _ = self.sides
        return int(((i1 - i0) * (self.visited & (j0 < self.keys))).sum())


def clamped_sum(start, step, count, low, high):
    """Σ min(max(start + k · step, low), high) over k < count, step > 0, without a loop."""
    begin = min(max(-((start - low) // step), 0), count)  # from here on at least low
    end = min(max((high - start) // step + 1, begin), count)  # from here on more than high
    inner = (end - begin) * start + step * (end * (end - 1) - begin * (begin - 1)) // 2
    return begin * low + inner + (count - end) * high


@dataclass(frozen=True)
class Kernel:
    """What one kernel does for one head of Q: elements loaded, stored and updated by atomics, by tensor; operations.

    flops: a number, or a function without arguments where it takes a loop over tiles.
    """

    loads: dict = field(default_factory=dict)
    stores: dict = field(default_factory=dict)
    flops: int | Callable = 0
    atomics: dict = field(default_factory=dict)


_FORMS = {direction: {} for direction in ("forward", "backward")}


def closed_form(stage, direction="forward"):
    """Register the function below as the closed form of `stage`: Problem -> kernel name -> Kernel."""

    def register(kernels: Callable):
        _FORMS[direction][stage] = kernels
        return kernels

    return register


# --- forward ----------------------------------------------------------------------------------------------------------


def softmax(p):
    """One thread per row of S, three passes over it: maximum; sum of exp; exp / sum to P."""
    scores = p.N * p.N_k
    return Kernel(loads={"S": 3 * scores}, stores={"P": scores}, flops=7 * scores)


def dropout(p):
    """P ∘ Z, one thread per element; Z goes to HBM, a byte each."""
    scores = p.N * p.N_k
    form = Kernel({"P": scores}, {"Z": scores, "P_dropped": scores}, flops=scores)
    return {"dropout": form} if p.dropped else {}


def logsumexp(p):
    """One thread per row of S, two passes: maximum; sum of exp, of which a row with keys takes m + log l."""
    scores = p.N * p.N_k
    form = Kernel(loads={"S": 2 * scores}, stores={"L": p.N}, flops=4 * scores + 2 * p.rows)
    return {"logsumexp": form} if p.return_lse else {}


def naive_scores(p):
    N, N_k, d = p.N, p.N_k, p.d
    loads = {"Q": N * N_k * d, "K": N * N_k * d, **p.mask}
    return Kernel(loads, {"S": N * N_k}, flops=N * N_k * 2 * d + p.pairs)


@closed_form("naive")
def naive(p):
    """One thread per element of S, then of O, each with its own pass over a row and a column in HBM."""
    N, N_k, d = p.N, p.N_k, p.d
    return {
        "scores": naive_scores(p),
        "softmax": softmax(p),
        **dropout(p),
        "output": Kernel({"P": N * N_k * d, "V": N * N_k * d}, {"O": N * d}, flops=N * N_k * 2 * d),
        **logsumexp(p),
    }


@closed_form("tiled")
def tiled(p):
    """One T×T tile of S, then of O, per block of threads; the operands pass through shared T×T tiles.

    A tile at the edge loads only what is there, but every thread multiplies through the whole tile, zeros included.
    """
    N, N_k, d = p.N, p.N_k, p.d
    T, Tr, Tc, Td = square_tiles(p)
    return {
        "scores": tiled_scores(p),
        "softmax": softmax(p),
        **dropout(p),
        "output": Kernel({"P": N * N_k * Td, "V": N_k * d * Tr}, {"O": N * d}, flops=Tr * Tc * Td * 2 * T**3),
        **logsumexp(p),
    }


def square_tiles(p):
    """T, and how many tiles of side T cover the queries, the keys and the columns."""
    T = p.blocks[0]
    return T, tiles(p.N, T), tiles(p.N_k, T), tiles(p.d, T)


def tiled_scores(p):
    N, N_k, d = p.N, p.N_k, p.d
    T, Tr, Tc, Td = square_tiles(p)
    loads = {"Q": N * d * Tc, "K": N_k * d * Tr, **p.mask}
    return Kernel(loads, {"S": N * N_k}, flops=Tr * Tc * Td * 2 * T**3 + p.pairs)


@closed_form("online_softmax")
def online_softmax(p):
    """The scores as in tiled; one pass over S for m and l; exp(S − m) / l is formed on the way into the product.

    Statistics, an element: a max, a product, a sum, and twice a subtraction and exp: for the score, and to rescale what
    came before it.
    """
    N, N_k, d = p.N, p.N_k, p.d
    T, Tr, Tc, Td = square_tiles(p)
    output = Kernel(
        {"S": N * N_k * Td, "m": N * T * Td, "l": N * T * Td, "V": N_k * d * Tr},
        {"O": N * d},
        flops=Tr * Tc * Td * 2 * T**3 + Td * N * N_k * (3 + p.drops),
    )
    return {
        "scores": tiled_scores(p),
        "statistics": Kernel({"S": N * N_k}, {"m": N, "l": N}, flops=7 * N * N_k),
        "output": output,
        **lse_from_m_and_l(p),
    }


def lse_from_m_and_l(p):
    """L = m + log l, for `return_lse`: one thread a row."""
    form = Kernel({"m": p.N, "l": p.N}, {"L": p.N}, flops=2 * p.rows)
    return {"logsumexp": form} if p.return_lse else {}


@closed_form("flash")
def flash(p):
    """Algorithm 1: K and V once; Q, O, l and m at each tile of keys that the query sees; O, l and m also to start with.

    A score of a tile: max, subtract, exp, sum, times exp(m̃ − m), two products of d; one that is seen: scale. A row at
    each step: max; 2 × (subtract, exp); the new l, 3; O scaled and divided, d each. With dropout, a score times Z.
    """
    N, N_k, d = p.N, p.N_k, p.d
    rows, scores = p.queries_of_tiles(p.blocks[1])
    return {
        "initialise": Kernel({}, {"O": N * d, "l": N, "m": N}),
        "flash": Kernel(
            {"Q": rows * d, "K": N_k * d, "V": N_k * d, "O": rows * d, "l": rows, "m": rows, **p.mask},
            {"O": rows * d, "l": rows, "m": rows},
            flops=scores * (4 * d + 5 + p.drops) + p.pairs + rows * (2 * d + 8),
        ),
        **lse_from_m_and_l(p),
    }


@closed_form("flash2")
def flash2(p):
    """FlashAttention-2's order: Q once, O and L once; K and V for each tile of queries, as far as its last query sees.

    A score of a tile: max, subtract, exp, sum, two products of d; one that is seen: scale. A row at each step: l and O
    rescaled, 1 + d, by a factor of 2. At the end a row with keys is divided, d, and L formed, 2.
    """
    N, d = p.N, p.d
    Br, Bc = p.blocks
    keys, scores = p.keys_of_tiles(Br)
    if p.splits:
        return flash2_split(p)

    def flops():
        work = scores * (4 * d + 4 + p.drops) + p.pairs
        return work + p.steps_of_rows(Br, Bc) * (d + 3) + p.rows * (d + 2)

    loads = {"Q": N * d, "K": keys * d, "V": keys * d, **p.mask, **p.block_mask(Br, keys=Bc)}
    return {"flash2": Kernel(loads, {"O": N * d, "L": N}, flops)}


@closed_form("register_tiled")
def register_tiled(p):
    """flash2's traffic. Its work is by tiles, filled up with zeros to whole shares of a thread.

    A score of a tile: two products, max, subtract, exp, sum; one that is seen: scale. A row at each step: O rescaled,
    and by each of X threads the maximum of X parts, l rescaled, and the factor for that, 2. At the end the sum of X
    parts of l, by X threads; a row with keys: O divided, d, and L formed, 2.
    """
    N, d, X = p.N, p.d, KEY_THREADS
    Br, Bc = p.blocks
    rows, scores, columns = filled_up(Br, Bc, d)
    keys, _ = p.keys_of_tiles(Br)
    loads = {"Q": N * d, "K": keys * d, "V": keys * d, **p.mask}

    def flops():
        work = p.steps(Br, Bc) * rows * (scores * (4 * columns + 4 + p.drops) + X * X + 3 * X + columns) + p.pairs
        return work + tiles(N, Br) * rows * X * X + p.rows * (d + 2)

    return {"register_tiled": Kernel(loads, {"O": N * d, "L": N}, flops)}


@closed_form("tensor_core")
def tensor_core(p):
    """flash2's traffic, but for the mask: a thread asks for each pair, and for rows beyond N as for the last.

    Its work is by whole tiles. A score: two products, scale, max, subtract, exp, sum. A row at each step: O rescaled,
    and by each of 4 threads a max of two others, subtract and exp for the factor, l rescaled. At the end the sum of 4
    parts of l, by 4 threads, 1 / l by each, a row O times that, and L formed, 2.
    """
    N, N_k, d = p.N, p.N_k, p.d
    Br, Bc = p.blocks
    keys, _ = p.keys_of_tiles(Br)
    filled = tiles(N, Br) * Br
    mask = {"mask": p.pairs + (filled - N) * N_k} if p.masked else {}

    def flops():
        work = p.steps(Br, Bc) * Br * (Bc * (4 * d + 5) + d + 4 * (2 + 2 + 1))
        return work + 4 * (2 * filled + p.rows + (filled - N) * bool(N_k)) + N * d + 2 * p.rows

    return {"tensor_core": Kernel({"Q": N * d, "K": keys * d, "V": keys * d, **mask}, {"O": N * d, "L": N}, flops)}


@closed_form("hopper")
def hopper(p):
    """flash2's traffic in whole tiles of keys, of which a tile of queries visits one at least; no keys, no launch.

    Each warp, of 16 rows, asks for the mask of each key. `queue`, which hands out the tiles, is of the whole launch: an
    atomic a tile, and one store. Work by whole tiles, O rescaled at each step (the kernel leaves out most of that). A
    score: two products, max, scale, subtract, exp, sum. A row at each step: O rescaled, and by each of 4 threads m
    times scale, a max of two others, subtract, scale and exp for the factor, l rescaled. At the end the sum of 4 parts
    of l, by 4 threads, 1 / l by each, O times that, and L formed, 4.
    """
    N, N_k, d = p.N, p.N_k, p.d
    Br, Bc = p.blocks
    if not N_k:
        return {}
    keys = p.rows_of_steps(Br, Bc, least=1)
    mask = {"mask": Br // 16 * keys} if p.masked else {}

    def flops():
        Tr = tiles(N, Br)
        steps = Tr * tiles(N_k, Bc)
        if p.causal:
            steps = sum(max(1, tiles(min(i + Br, N) + N_k - N, Bc)) for i in range(0, N, Br))
        return steps * Br * (Bc * (4 * d + 5) + d + 4 * (1 + 2 + 3 + 1)) + Tr * Br * (4 * 3 + d + 4)

    loads = {"Q": N * d, "K": keys * d, "V": keys * d, **mask}
    stores = {"O": N * d, "L": N, "queue": Fraction(1, p.heads)}
    return {"hopper": Kernel(loads, stores, flops, atomics={"queue": tiles(N, Br)})}


def flash2_split(p):
    """Blocks that share the keys of a query, each in tiles of Bc; and one thread per element of O to merge their parts.

    A score: two products of d, scale, and for each of Bc threads a max and a sum; a tile: O rescaled, d, and for each
    of Bc threads subtract and exp, and l and its factor, 1 + 2. To merge, an element of each split: max, two products,
    two sums, and 2 for the factor; a row with keys: O divided, d, and L formed, 2.
    """
    N, N_k, d, n = p.N, p.N_k, p.d, p.splits
    Bc = p.blocks[1]

    steps = N * tiles(N_k, Bc)  # tiles that a query sees something of, summed over the queries
    if p.causal:
        steps = _sum_of_tiles(N_k, Bc) - _sum_of_tiles(max(N_k - N, 0), Bc)
    flops = p.pairs * (4 * d + 1 + 2 * Bc) + steps * (d + 5 * Bc)
    merging = 7 * n * N * d + p.rows * (d + 2)
    loads = {"Q": n * N * d, "K": p.pairs * d, "V": p.pairs * d, **p.mask}
    merge = {"O_s": n * N * d, "m_s": 2 * n * N * d, "l_s": n * N * d}
    return {
        "flash2_split": Kernel(loads, {"O_s": n * N * d, "m_s": n * N, "l_s": n * N}, flops),
        "merge_splits": Kernel(merge, {"O": N * d, "L": N}, merging),
    }


def _sum_of_tiles(size, T):
    """Σ ⌈x/T⌉ over x from 1 to `size`."""
    whole, rest = divmod(size, T)
    return T * whole * (whole + 1) // 2 + rest * (whole + 1)


def ideal(p):
    """Algorithm 0 of the paper, each matmul reading its operands once."""
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    return {
        "scores": Kernel({"Q": N * d, "K": keys}, {"S": N * N_k}) if N_k else Kernel(),
        "softmax": Kernel({"S": N * N_k}, {"P": N * N_k}),
        "output": Kernel({"P": N * N_k, "V": keys}, {"O": N * d}),
    }


# --- backward ---------------------------------------------------------------------------------------------------------


@closed_form("naive", "backward")
def naive_backward(p):
    """Algorithm 3 with one thread per element; P is formed again from Q, K and L where it was not kept.

    D and dS, an element: a product and a sum, a difference and a product.
    """
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    product = N * N_k * d
    return {
        **({} if p.kept else {"scores": naive_scores(p), "probabilities": probabilities(p), **dropout(p)}),
        "backward_dV": Kernel({"P": product, "dO": product}, {"dV": keys}, 2 * product),
        "backward_dP": Kernel({"dO": product, "V": product}, {"dP": N * N_k}, 2 * product),
        **dropout_backward(p),
        "backward_dS": dS(p),
        "backward_dQ": Kernel({"dS": product, "K": product}, {"dQ": N * d}, 2 * product + N * d),
        "backward_dK": Kernel({"dS": product, "Q": product}, {"dK": keys}, 2 * product + keys),
    }


def probabilities(p):
    """P = exp(S − L), one thread per element."""
    scores = p.N * p.N_k
    return Kernel({"S": scores, "L": scores}, {"P": scores}, flops=2 * scores)


def dropout_backward(p):
    """dP ∘ Z in place, one thread per element."""
    scores = p.N * p.N_k
    form = Kernel({"Z": scores, "dP": scores}, {"dP": scores}, flops=scores)
    return {"dropout_backward": form} if p.dropped else {}


def dS(p):
    """One thread per row: D_i in a first pass over P and dP, dS in a second."""
    scores = p.N * p.N_k
    return Kernel({"P": 2 * scores, "dP": 2 * scores}, {"dS": scores}, flops=scores * (2 + 2))


@closed_form("tiled", "backward")
def tiled_backward(p):
    """Algorithm 3 with shared T×T tiles; P is formed again from Q, K and L where it was not kept."""
    return {
        **({} if p.kept else {"scores": tiled_scores(p), "probabilities": probabilities(p), **dropout(p)}),
        **tiled_gradients(p),
    }


def tiled_gradients(p):
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    T, Tr, Tc, Td = square_tiles(p)
    flops = Tr * Tc * Td * 2 * T**3
    return {
        "backward_dV": Kernel({"P": N * N_k * Td, "dO": N * d * Tc}, {"dV": keys}, flops),
        "backward_dP": Kernel({"dO": N * d * Tc, "V": N_k * d * Tr}, {"dP": N * N_k}, flops),
        **dropout_backward(p),
        "backward_dS": dS(p),
        "backward_dQ": Kernel({"dS": N * N_k * Td, "K": N_k * d * Tr}, {"dQ": N * d}, flops + N * d),
        "backward_dK": Kernel({"dS": N * N_k * Td, "Q": N * d * Tc}, {"dK": keys}, flops + keys),
    }


@closed_form("online_softmax", "backward")
def online_softmax_backward(p):
    """P is formed first, from the S that was kept or from a new one; then as tiled."""
    if p.kept:
        scores = p.N * p.N_k
        loads = {"S": scores, "m": scores, "l": scores}
        first = {"form_P": Kernel(loads, {"P": scores}, flops=(p.rows + 2 * p.N) * p.N_k)}
    else:
        first = {"scores": tiled_scores(p), "probabilities": probabilities(p)}
    return {**first, **dropout(p), **tiled_gradients(p)}


@closed_form("flash", "backward")
def flash_backward(p):
    """Algorithm 4: K, V, dK, dV once; Q, O, dO, l, m at each tile of keys that the query sees, dQ read and written.

    A score of a tile: five products of d, subtract, exp, a quotient, dP − D, times P; one that is seen: scale. At each
    step a row's D, 2d, and the update of dQ, 2d. At the end dK is scaled.
    """
    N, d, keys = p.N, p.d, p.share * p.N_k * p.d
    rows, scores = p.queries_of_tiles(p.blocks[1])
    loads = {"Q": rows * d, "K": keys, "V": keys, "O": rows * d, "l": rows, "m": rows, "dO": rows * d, "dQ": rows * d}
    flops = scores * (10 * d + 5 + 2 * p.drops) + p.pairs + rows * 4 * d + keys
    return {
        **({} if p.kept else {"split_lse": Kernel({"L": N}, {"l": N, "m": N})}),
        "initialise_dQ": Kernel({}, {"dQ": N * d}),
        "flash_backward": Kernel({**loads, **p.mask}, {"dQ": rows * d, "dK": keys, "dV": keys}, flops),
    }


@closed_form("flash2", "backward")
def flash2_backward(p):
    """FlashAttention-2's Algorithm 2, split by owner, or in one kernel whose blocks add to dQ by atomics.

    A score of a tile: the products of d that the kernel needs, subtract, exp, dP − D, times P; one that is seen: scale.
    dQ and dK are scaled once.
    """
    N, d, keys = p.N, p.d, p.share * p.N_k * p.d
    Br, Bc = p.blocks
    step = stream(Br)
    rows, by_keys = p.queries_of_tiles(Bc, step)
    passing, by_queries = p.keys_of_tiles(Br)
    stores = {"dK": keys, "dV": keys}
    key_loads = {"Q": rows * d, "K": keys, "V": keys, "dO": rows * d, "L": rows, "D": rows}
    key_loads |= {**p.mask, **p.block_mask(Bc, rows=step)}
    rowsum = {"rowsum": Kernel({"dO": N * d, "O": N * d}, {"D": N}, flops=2 * N * d)}
    if not p.deterministic:
        flops = by_keys * (10 * d + 4 + 2 * p.drops) + p.pairs + 2 * rows * d + keys
        return {
            **rowsum,
            "initialise_dQ": Kernel({}, {"dQ": N * d}),
            "backward_atomic": Kernel(key_loads, stores, flops, atomics={"dQ": rows * d}),
        }
    query_loads = {"Q": N * d, "K": passing * d, "V": passing * d, "dO": N * d, "L": N, "D": N, **p.mask}
    query_loads |= p.block_mask(Br, keys=stream(Bc))
    return {
        **rowsum,
        "backward_dKdV": Kernel(key_loads, stores, by_keys * (8 * d + 4 + 2 * p.drops) + p.pairs + keys),
        "backward_dQ": Kernel(query_loads, {"dQ": N * d}, by_queries * (6 * d + 4 + p.drops) + p.pairs + N * d),
    }


@closed_form("register_tiled", "backward")
def register_tiled_backward(p):
    """flash2's traffic, split by owner. Its work is by tiles, filled up with zeros to whole shares of a thread.

    A score of a tile: the products of d that the kernel needs, subtract, exp, dP − D, times P; one that is seen: scale.
    dQ and dK are scaled once.
    """
    N, d, keys = p.N, p.d, p.share * p.N_k * p.d
    Br, Bc = p.blocks
    flash2 = flash2_backward(p)
    queries, step = passing(d)
    own_keys, passing_queries, columns = filled_up(Bc, queries, d)
    own_queries, passing_keys, _ = filled_up(Br, step, d)

    def key_flops():
        steps = tiles(p.N_k, Bc) * tiles(N, queries)
        if p.causal:
            steps = sum(tiles(N - max(0, j + N - p.N_k), queries) for j in range(0, p.N_k, Bc))
        return steps * own_keys * passing_queries * (8 * columns + 4 + 2 * p.drops) + p.pairs + keys

    def query_flops():
        return p.steps(Br, step) * own_queries * passing_keys * (6 * columns + 4 + p.drops) + p.pairs + N * d

    flops = {"rowsum": flash2["rowsum"].flops, "backward_dKdV": key_flops, "backward_dQ": query_flops}
    return {name: replace(kernel, flops=flops[name]) for name, kernel in flash2.items()}


@closed_form("tensor_core", "backward")
def tensor_core_backward(p):
    """flash2's traffic, split by owner; four threads of backward_dQ ask for L and D of a row, four for a key's mask.

    Its work is by whole tiles. A score: the products of d that the kernel needs, scale, subtract, exp, dP − D, times P.
    At the end dQ and dK are multiplied by scale, dV by 1. D: a product and a sum an element, and for each row X = d/8
    threads, which add log₂ X times.
    """
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    Br, Bc = p.blocks
    queries, step = TENSOR_CORE_PASSING[d]
    rows, _ = p.queries_of_tiles(Bc)
    passing_keys, _ = p.keys_of_tiles(Br)
    filled, X = tiles(N, Br) * Br, d // 8
    key_mask = {"mask": p.share * 4 * N_k} if p.masked else {}
    query_mask = {"mask": p.pairs + (filled - N) * N_k} if p.masked else {}

    def key_flops():
        steps = tiles(N_k, Bc) * tiles(N, queries)
        if p.causal:
            steps = sum(tiles(N - max(0, j + N - N_k), queries) for j in range(0, N_k, Bc))
        return steps * Bc * queries * (8 * d + 5) + 2 * keys

    def query_flops():
        return p.steps(Br, step) * Br * step * (6 * d + 5) + N * d

    of_a_block = 128 // X  # rows
    adds = tiles(N, of_a_block) * of_a_block * X * (X.bit_length() - 1)
    key_loads = {"Q": rows * d, "K": keys, "V": keys, "dO": rows * d, "L": rows, "D": rows, **key_mask}
    query_loads = {"Q": N * d, "K": passing_keys * d, "V": passing_keys * d, "dO": N * d, "L": 4 * N, "D": 4 * N}
    return {
        "rowsum": Kernel({"dO": N * d, "O": N * d}, {"D": N}, flops=2 * N * d + adds),
        "backward_dKdV": Kernel(key_loads, {"dK": keys, "dV": keys}, key_flops),
        "backward_dQ": Kernel({**query_loads, **query_mask}, {"dQ": N * d}, query_flops),
    }


def ideal_backward(p):
    """Algorithm 3 of the paper, each step reading its operands once."""
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    return {
        "backward_dV": Kernel({"P": N * N_k, "dO": N * d}, {"dV": keys}),
        "backward_dP": Kernel({"dO": N * d, "V": keys}, {"dP": N * N_k}),
        "backward_dS": Kernel({"P": N * N_k, "dP": N * N_k}, {"dS": N * N_k}),
        "backward_dQ": Kernel({"dS": N * N_k, "K": keys}, {"dQ": N * d}),
        "backward_dK": Kernel({"dS": N * N_k, "Q": N * d}, {"dK": keys}),
    }


# --- what is asked ----------------------------------------------------------------------------------------------------


def predict(
    stage,
    *,
    n,
    d,
    n_k=None,
    heads=1,
    kv_heads=None,
    batch=1,
    causal=False,
    key_mask=False,
    dropout_p=0.0,
    block_mask=None,
    split_kv=None,
    direction="forward",
    dtype="float32",
    blocks=None,
    sram=STATIC_SHARED,
    return_lse=False,
    deterministic=True,
):
    """The bill of `stage` before it runs, equal to what the ledger counts -> Bill.

    n queries, n_k keys (default n), d columns a head; `heads` query heads and `kv_heads` key and value heads (default
    the same; heads must be a multiple) in each of `batch`. `dtype` is float32 or float64, for tensor_core and hopper
    "float16" or "bfloat16". `blocks`, for a stage with
    tiles: T or (T, T) where they are square, (Br, Bc) for flash and flash2, of any size, also one that no device could
    hold; "paper" for line 1 of Algorithm 1; None for what fits `sram` bytes of shared memory per block (see
    `choose_blocks`). Pure arithmetic on Python integers, so exact at any size.

    causal, dropout_p, block_mask and split_kv as in `attention`; key_mask: whether there is one. (For a key that is
    hidden the bill is the same, and `flops` counts the product with scale as if it were seen.) To draw Z is work on
    integers, and no FLOP.

    direction: "forward" for `attention`, where alone `return_lse` adds the kernel that forms L; "backward" for
    `attention_backward` with out and lse; "both" for `attention_backward` without them, which runs the forward pass,
    in tiles that fit, and keeps of it what the stage wants. `blocks` are those of the backward pass then;
    `deterministic` as in `attention_backward`.

    TypeError or ValueError for an argument that has no meaning: it names the argument, its value and the way out.
    Source: Dao et al. 2022, arXiv:2205.14135, Algorithms 0, 1, 3 and 4; Dao 2023, arXiv:2307.08691, Algorithms 1 and 2.
    """
    _check_taken(stage, dtype, d, dropout_p)
    sizes, masks = (n, d, n_k, heads, kv_heads, batch), (causal, key_mask, dropout_p, block_mask, split_kv)
    return _bill(*_problem(stage, sizes, masks, direction, dtype, blocks, sram, return_lse, deterministic))


def flops(
    stage,
    *,
    n,
    d,
    n_k=None,
    heads=1,
    kv_heads=None,
    batch=1,
    causal=False,
    key_mask=False,
    dropout_p=0.0,
    block_mask=None,
    split_kv=None,
    direction="forward",
    dtype="float32",
    blocks=None,
    sram=STATIC_SHARED,
    return_lse=False,
    deterministic=True,
):
    """Floating-point operations that `stage` executes, padding of tiles included -> int. Arguments as for `predict`."""
    _check_taken(stage, dtype, d, dropout_p)
    sizes, masks = (n, d, n_k, heads, kv_heads, batch), (causal, key_mask, dropout_p, block_mask, split_kv)
    kernels, p = _problem(stage, sizes, masks, direction, dtype, blocks, sram, return_lse, deterministic)
    work = (kernel.flops() if callable(kernel.flops) else kernel.flops for kernel in kernels.values())
    return int(p.heads * sum(work))


def algorithm0(*, n, d, n_k=None, heads=1, kv_heads=None, batch=1, direction="forward", dtype="float32"):
    """The yardstick of every bill: Algorithm 0, backward Algorithm 3, with each operand of a step read once -> Bill.

    Forward 4N·N_k + 2Nd + 2N_k·d elements a head, backward 7N·N_k + 4Nd + 4N_k·d: 11N² + 12Nd for "both" where
    N = N_k. Arguments and errors as for `predict`.
    """
    _, p = _problem(
        "naive",
        (n, d, n_k, heads, kv_heads, batch),
        (False, False, 0.0, None, None),
        direction,
        dtype,
        None,
        STATIC_SHARED,
        False,
        True,
    )
    forms = {"forward": [ideal], "backward": [ideal_backward], "both": [ideal, ideal_backward]}[direction]
    return _bill({name: kernel for form in forms for name, kernel in form(p).items()} if p.N else {}, p)


def kept(stage, *, n, n_k=None, heads=1, batch=1, dropout_p=0.0):
    """What a stage keeps for the backward pass, beside Q, K, V and O -> {tensor: elements}; arguments as `predict`."""
    check_stage(stage, _FORMS["forward"])
    rows = integer("n", n) * integer("heads", heads, 1) * integer("batch", batch, 1)
    scores = rows * (n if n_k is None else integer("n_k", n_k))
    matrix = {"P": scores, "P_dropped": scores, "Z": scores} if probability("dropout_p", dropout_p) else {"P": scores}
    return {
        "naive": matrix,
        "tiled": matrix,
        "online_softmax": {"S": scores, "m": rows, "l": rows},
        "flash": {"l": rows, "m": rows},
        "flash2": {"L": rows},
        "register_tiled": {"L": rows},
        "tensor_core": {"L": rows},
        "hopper": {"L": rows},
    }[stage]


def _check_taken(stage, dtype, d, dropout_p):
    """ValueError where a stage does not compute in `dtype`, with d columns or with dropout."""
    check_stage(stage, _FORMS["forward"])
    p_drop = probability("dropout_p", dropout_p)
    check_takes(STAGES[stage], Needs(dtype_name(dtype), integer("d", d, 1), dropout_p=p_drop))


def _bill(kernels, p):
    bill = {}
    for name, kernel in kernels.items():
        tensors = bill[name] = {}
        for tensor in kernel.loads | kernel.stores | kernel.atomics:
            counts = (p.heads * kind.get(tensor, 0) for kind in (kernel.loads, kernel.stores, kernel.atomics))
            itemsize = 1 if tensor in BYTES else max(4, p.itemsize) if tensor in AT_LEAST_4 else p.itemsize
            tensors[tensor] = Count(*map(int, counts), itemsize=itemsize)
    return Bill(bill)


def _problem(stage, sizes, masks, direction, dtype, blocks, sram, return_lse, deterministic):
    """The kernels that run, and the problem they solve."""
    check_stage(stage, _FORMS["forward"])
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is unknown: pass {', '.join(map(repr, DIRECTIONS))}")
    causal, key_mask, dropout_p, block_mask, split_kv = masks
    flags = {"return_lse": return_lse, "deterministic": deterministic, "causal": causal, "key_mask": key_mask}
    for name, flag in flags.items():
        truth(name, flag)
    dropped = probability("dropout_p", dropout_p) > 0
    check_deterministic(STAGES[stage], deterministic)
    n, d, n_k, heads, kv_heads, batch = sizes
    n, d = integer("n", n), integer("d", d, 1)
    n_k = n if n_k is None else integer("n_k", n_k)
    heads, batch = integer("heads", heads, 1), integer("batch", batch, 1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is no multiple of kv_heads={kv_heads}: each key head serves equally many heads"
        )

    splits = 0 if split_kv is None else check_split(STAGES[stage], split_kv, block_mask, dropout_p)
    if splits and direction != "forward":
        raise ValueError(f"split_kv={splits} is for direction='forward', not {direction!r}: leave it out")
    if block_mask is not None:
        check_sparse(STAGES[stage])
        blocks = mask_blocks(blocks, d=d, dtype=dtype, sram=sram)

    def problem(direction, blocks):
        tiling = "split" if splits else "atomic" if direction == "backward" and not deterministic else direction
        sides = check_blocks(stage, blocks, d=d, dtype=dtype, sram=sram, direction=tiling)
        visited = None if block_mask is None else boolean_tiles(block_mask, sides, n, n_k)
        return (Problem if visited is None or 0 in visited.shape else partial(SparseProblem, visited=visited))(
            n,
            n_k,
            d,
            batch * heads,
            Fraction(kv_heads, heads),
            sides and tuple(sides),
            itemsize(dtype),
            bool(return_lse),
            deterministic=bool(deterministic),
            causal=bool(causal),
            masked=bool(key_mask),
            dropped=dropped,
            splits=splits,
        )

    if direction == "both":  # square tiles serve both passes
        own = TILINGS["forward"][stage]
        parts = {"forward": problem("forward", blocks if own is None or own.square or block_mask is not None else None)}
        parts["forward"] = replace(parts["forward"], return_lse=False)  # what the pass itself does not want
        parts["backward"] = replace(problem("backward", blocks), kept=True)
    else:
        parts = {direction: problem(direction, blocks)}
    kernels = {}
    for part, p in parts.items():
        if n and stage not in _FORMS[part]:
            raise ValueError(f"direction={direction!r}: stage {stage!r} has no closed form of its backward pass yet")
        kernels |= _FORMS[part][stage](p) if n else {}
    return kernels, p
