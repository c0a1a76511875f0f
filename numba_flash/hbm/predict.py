"""What a stage moves and computes, from closed forms alone: no launch, and no look at its kernels.

Each stage is one function below that reads like the table of a bill: for one head of N queries, N_k keys and d columns,
what every kernel loads, stores and computes. A floating-point add, subtract, multiply, divide, exp, log or max of one
element is one operation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..blocks import check_blocks
from ..checks import check_stage, integer, itemsize
from ..engine.model import STATIC_SHARED
from .ledger import Bill, Count

DIRECTIONS = ("forward",)


@dataclass(frozen=True)
class Problem:
    """The size of one attention: N queries, N_k keys, d columns, `heads` times, in tiles of `blocks`."""

    N: int
    N_k: int
    d: int
    heads: int
    blocks: tuple | None
    itemsize: int
    return_lse: bool = False


@dataclass(frozen=True)
class Kernel:
    """What one kernel does for one head: elements loaded and stored by tensor, floating-point operations."""

    loads: dict = field(default_factory=dict)
    stores: dict = field(default_factory=dict)
    flops: int = 0


_FORMS = {}


def closed_form(stage):
    """Register the function below as the closed form of `stage`: Problem -> kernel name -> Kernel."""

    def register(kernels: Callable):
        _FORMS[stage] = kernels
        return kernels

    return register


def softmax(N, N_k):
    """One thread per row of S, three passes over it: maximum; sum of exp; exp / sum to P."""
    return Kernel(loads={"S": 3 * N * N_k}, stores={"P": N * N_k}, flops=N * N_k * (1 + 3 + 3))


def logsumexp(p):
    """One thread per row of S, two passes: maximum; sum of exp, of which a row with keys takes m + log l."""
    N, N_k = p.N, p.N_k
    form = Kernel(loads={"S": 2 * N * N_k}, stores={"L": N}, flops=N * N_k * (1 + 3) + (2 * N if N_k else 0))
    return {"logsumexp": form} if p.return_lse else {}


@closed_form("naive")
def naive(p):
    """One thread per element of S, then of O, each with its own pass over a row and a column in HBM."""
    N, N_k, d = p.N, p.N_k, p.d
    return {
        "scores": Kernel({"Q": N * N_k * d, "K": N * N_k * d}, {"S": N * N_k}, flops=N * N_k * (2 * d + 1)),
        "softmax": softmax(N, N_k),
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
        "softmax": softmax(N, N_k),
        "output": Kernel({"P": N * N_k * Td, "V": N_k * d * Tr}, {"O": N * d}, flops=Tr * Tc * Td * 2 * T**3),
        **logsumexp(p),
    }


def square_tiles(p):
    """T, and how many tiles of side T cover the queries, the keys and the columns."""
    T = p.blocks[0]
    return T, -(-p.N // T), -(-p.N_k // T), -(-p.d // T)


def tiled_scores(p):
    N, N_k, d = p.N, p.N_k, p.d
    T, Tr, Tc, Td = square_tiles(p)
    flops = Tr * Tc * Td * 2 * T**3 + N * N_k
    return Kernel({"Q": N * d * Tc, "K": N_k * d * Tr}, {"S": N * N_k}, flops)


@closed_form("online_softmax")
def online_softmax(p):
    """The scores as in tiled; one pass over S for m and l; exp(S − m) / l is formed on the way into the product.

    Statistics, an element: a max, and twice a subtraction and exp, a product, a sum.
    """
    N, N_k, d = p.N, p.N_k, p.d
    T, Tr, Tc, Td = square_tiles(p)
    output = Kernel(
        {"S": N * N_k * Td, "m": N * T * Td, "l": N * T * Td, "V": N_k * d * Tr},
        {"O": N * d},
        flops=Tr * Tc * Td * 2 * T**3 + N * N_k * Td * 3,
    )
    return {
        "scores": tiled_scores(p),
        "statistics": Kernel({"S": N * N_k}, {"m": N, "l": N}, flops=N * N_k * 7),
        "output": output,
        **lse_from_m_and_l(p),
    }


def lse_from_m_and_l(p):
    """L = m + log l, for `return_lse`: one thread a row."""
    form = Kernel({"m": p.N, "l": p.N}, {"L": p.N}, flops=2 * p.N if p.N_k else 0)
    return {"logsumexp": form} if p.return_lse else {}


@closed_form("flash")
def flash(p):
    """Algorithm 1: K and V once; Q, O, l and m at each of the Tc tiles of keys; O, l and m also to start with.

    A score: product with scale, max; subtract, exp, sum; times exp(m̃ − m); two products of d. A row at each step:
    max; 2 × (subtract, exp); the new l, 3; O scaled and divided, d each.
    """
    N, N_k, d = p.N, p.N_k, p.d
    Tc = -(-N_k // p.blocks[1])
    return {
        "initialise": Kernel({}, {"O": N * d, "l": N, "m": N}),
        "flash": Kernel(
            {"Q": Tc * N * d, "K": N_k * d, "V": N_k * d, "O": Tc * N * d, "l": Tc * N, "m": Tc * N},
            {"O": Tc * N * d, "l": Tc * N, "m": Tc * N},
            flops=N * N_k * (4 * d + 6) + N * Tc * (2 * d + 8),
        ),
        **lse_from_m_and_l(p),
    }


@closed_form("flash2")
def flash2(p):
    """FlashAttention-2's order: Q once, O and L once; K and V for each of the Tr tiles of queries.

    A score: product with scale, max; subtract, exp, sum; two products of d. A row at each step: subtract, exp; l and O
    rescaled, 1 + d. At the end a row is divided, d, and L formed, 2. Rows beyond N are computed too, and not stored.
    """
    N, N_k, d = p.N, p.N_k, p.d
    Br, Bc = p.blocks
    Tr, Tc = -(-N // Br), -(-N_k // Bc)
    flops = Tr * Br * (N_k * (4 * d + 5) + Tc * (d + 3)) + (N * (d + 2) if N_k else 0)
    loads = {"Q": N * d, "K": Tr * N_k * d, "V": Tr * N_k * d}
    return {"flash2": Kernel(loads, {"O": N * d, "L": N}, flops)}


def ideal(p):
    """Algorithm 0 of the paper, each matmul reading its operands once: 4N·N_k + 2Nd + 2N_k·d."""
    N, N_k, d = p.N, p.N_k, p.d
    scores = {"scores": Kernel({"Q": N * d, "K": N_k * d}, {"S": N * N_k})} if N * N_k else {}
    return scores | {
        "softmax": Kernel({"S": N * N_k}, {"P": N * N_k}),
        "output": Kernel({"P": N * N_k, "V": N_k * d if N else 0}, {"O": N * d}),
    }


def predict(
    stage,
    *,
    n,
    d,
    n_k=None,
    heads=1,
    kv_heads=None,
    batch=1,
    direction="forward",
    dtype="float32",
    blocks=None,
    sram=STATIC_SHARED,
    return_lse=False,
):
    """The bill of `stage` before it runs, equal to what the ledger counts -> Bill.

    n queries, n_k keys (default n), d columns a head; `heads` query heads and `kv_heads` key and value heads (default
    the same; heads must be a multiple) in each of `batch`. `dtype` is float32 or float64. `blocks`, for a stage with
    tiles: T or (T, T) where they are square, (Br, Bc) for flash and flash2, of any size, also one that no device could
    hold; "paper" for line 1 of Algorithm 1; None for what fits `sram` bytes of shared memory per block (see
    `choose_blocks`). `return_lse` adds the kernel that forms L. Pure arithmetic on Python integers, so exact at any
    size.

    TypeError or ValueError for an argument that has no meaning: it names the argument, its value and the way out.
    """
    form, p = _problem(stage, n, d, n_k, heads, kv_heads, batch, direction, dtype, blocks, sram, return_lse)
    return _bill(form, p)


def flops(
    stage,
    *,
    n,
    d,
    n_k=None,
    heads=1,
    kv_heads=None,
    batch=1,
    direction="forward",
    dtype="float32",
    blocks=None,
    sram=STATIC_SHARED,
    return_lse=False,
):
    """Floating-point operations that `stage` executes, padding of tiles included -> int. Arguments as for `predict`."""
    form, p = _problem(stage, n, d, n_k, heads, kv_heads, batch, direction, dtype, blocks, sram, return_lse)
    return p.heads * sum(kernel.flops for kernel in form(p).values())


def algorithm0(*, n, d, n_k=None, heads=1, batch=1, dtype="float32"):
    """The yardstick of every bill: Algorithm 0 with each operand of a matmul read once -> Bill.

    4N·N_k + 2Nd + 2N_k·d elements a head, 4N² + 4Nd where N = N_k. Arguments and errors as for `predict`.
    """
    _, p = _problem("naive", n, d, n_k, heads, None, batch, "forward", dtype, None, STATIC_SHARED, False)
    return _bill(ideal, p)


def _bill(form, p):
    kernels = {}
    for name, kernel in form(p).items():
        tensors = kernels[name] = {}
        for tensor in kernel.loads | kernel.stores:
            loads, stores = kernel.loads.get(tensor, 0), kernel.stores.get(tensor, 0)
            tensors[tensor] = Count(p.heads * loads, p.heads * stores, itemsize=p.itemsize)
    return Bill(kernels)


def _problem(stage, n, d, n_k, heads, kv_heads, batch, direction, dtype, blocks, sram, return_lse):
    check_stage(stage, _FORMS)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} has no closed form yet: pass {' or '.join(map(repr, DIRECTIONS))}")
    if not isinstance(return_lse, bool | np.bool_):
        raise TypeError(f"return_lse={return_lse!r} is not a truth value: pass True or False")
    n, d = integer("n", n), integer("d", d, 1)
    n_k = n if n_k is None else integer("n_k", n_k)
    heads, batch = integer("heads", heads, 1), integer("batch", batch, 1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is no multiple of kv_heads={kv_heads}: each key head serves equally many heads"
        )
    blocks = check_blocks(stage, blocks, d=d, dtype=dtype, sram=sram)
    sides = None if blocks is None else tuple(blocks)
    problem = Problem(n, n_k, d, batch * heads, sides, itemsize(dtype), bool(return_lse))
    return _FORMS[stage], problem
