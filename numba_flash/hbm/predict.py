"""What a stage moves and computes, from closed forms alone: no launch, and no look at its kernels.

Each stage is one function below, and one for its backward pass, that reads like the table of a bill: for one head of N
queries, N_k keys and d columns, what every kernel loads, stores and computes. A floating-point add, subtract, multiply,
divide, exp, log or max of one element is one operation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..blocks import TILINGS, check_blocks, tiles
from ..checks import check_deterministic, check_stage, integer, itemsize, truth
from ..engine.model import STATIC_SHARED
from .ledger import Bill, Count

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Problem:
    """The size of one attention: N queries, N_k keys, d columns, `heads` times, in tiles of `blocks`.

    `share`: heads of K and V for each head of Q. `kept`: whether the backward pass has all that its stage's forward
    pass keeps, or O and L alone.
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


@dataclass(frozen=True)
class Kernel:
    """What one kernel does for one head of Q: elements loaded, stored and updated by atomics, by tensor; operations."""

    loads: dict = field(default_factory=dict)
    stores: dict = field(default_factory=dict)
    flops: int = 0
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
    N, N_k = p.N, p.N_k
    return Kernel(loads={"S": 3 * N * N_k}, stores={"P": N * N_k}, flops=N * N_k * (1 + 3 + 3))


def logsumexp(p):
    """One thread per row of S, two passes: maximum; sum of exp, of which a row with keys takes m + log l."""
    N, N_k = p.N, p.N_k
    form = Kernel(loads={"S": 2 * N * N_k}, stores={"L": N}, flops=N * N_k * (1 + 3) + (2 * N if N_k else 0))
    return {"logsumexp": form} if p.return_lse else {}


def naive_scores(p):
    N, N_k, d = p.N, p.N_k, p.d
    return Kernel({"Q": N * N_k * d, "K": N * N_k * d}, {"S": N * N_k}, flops=N * N_k * (2 * d + 1))


@closed_form("naive")
def naive(p):
    """One thread per element of S, then of O, each with its own pass over a row and a column in HBM."""
    N, N_k, d = p.N, p.N_k, p.d
    return {
        "scores": naive_scores(p),
        "softmax": softmax(p),
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
    flops = Tr * Tc * Td * 2 * T**3 + N * N_k
    return Kernel({"Q": N * d * Tc, "K": N_k * d * Tr}, {"S": N * N_k}, flops)


@closed_form("online_softmax")
def online_softmax(p):
    """The scores as in tiled; one pass over S for m and l; exp(S − m) / l is formed on the way into the product.

    Statistics, an element: a max, and twice a subtraction and exp, a product, a sum; at a row's first element m is −∞,
    and the weight of what came before needs no subtraction and exp.
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
        "statistics": Kernel({"S": N * N_k}, {"m": N, "l": N}, flops=N * N_k * 7 - (2 * N if N_k else 0)),
        "output": output,
        **(lse_from_m_and_l(p) if p.return_lse else {}),
    }


def lse_from_m_and_l(p):
    """L = m + log l, for `return_lse`: one thread a row."""
    form = Kernel({"m": p.N, "l": p.N}, {"L": p.N}, flops=2 * p.N if p.N_k else 0)
    return {"logsumexp": form} if p.return_lse else {}


@closed_form("flash")
def flash(p):
    """Algorithm 1: K and V once; Q, O, l and m at each of the Tc tiles of keys; O, l and m also to start with.

    A score: product with scale, max; subtract, exp, sum; times exp(m̃ − m); two products of d. A row at each step:
    max; 2 × (subtract, exp), of which one is not needed at the first; the new l, 3; O scaled and divided, d each.
    """
    N, N_k, d = p.N, p.N_k, p.d
    Tc = tiles(N_k, p.blocks[1])
    return {
        "initialise": Kernel({}, {"O": N * d, "l": N, "m": N}),
        "flash": Kernel(
            {"Q": Tc * N * d, "K": N_k * d, "V": N_k * d, "O": Tc * N * d, "l": Tc * N, "m": Tc * N},
            {"O": Tc * N * d, "l": Tc * N, "m": Tc * N},
            flops=N * N_k * (4 * d + 6) + N * Tc * (2 * d + 8) - (2 * N if N_k else 0),
        ),
        **lse_from_m_and_l(p),
    }


@closed_form("flash2")
def flash2(p):
    """FlashAttention-2's order: Q once, O and L once; K and V for each of the Tr tiles of queries.

    A score: product with scale, max; subtract, exp, sum; two products of d. A row at each step: subtract and exp, not
    needed at the first; l and O rescaled, 1 + d. At the end a row is divided, d, and L formed, 2. Rows beyond N are
    computed too, and not stored.
    """
    N, N_k, d = p.N, p.N_k, p.d
    Br, Bc = p.blocks
    Tr, Tc = tiles(N, Br), tiles(N_k, Bc)
    flops = Tr * Br * (N_k * (4 * d + 5) + Tc * (d + 3) - 2) + N * (d + 2) if N_k else 0
    loads = {"Q": N * d, "K": Tr * N_k * d, "V": Tr * N_k * d}
    return {"flash2": Kernel(loads, {"O": N * d, "L": N}, flops)}


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
        **({} if p.kept else {"scores": naive_scores(p), "probabilities": probabilities(p)}),
        "backward_dV": Kernel({"P": product, "dO": product}, {"dV": keys}, 2 * product),
        "backward_dP": Kernel({"dO": product, "V": product}, {"dP": N * N_k}, 2 * product),
        "backward_dS": dS(p),
        "backward_dQ": Kernel({"dS": product, "K": product}, {"dQ": N * d}, 2 * product + N * d),
        "backward_dK": Kernel({"dS": product, "Q": product}, {"dK": keys}, 2 * product + keys),
    }


def probabilities(p):
    """P = exp(S − L), one thread per element."""
    N, N_k = p.N, p.N_k
    return Kernel({"S": N * N_k, "L": N * N_k}, {"P": N * N_k}, flops=2 * N * N_k)


def dS(p):
    """One thread per row: D_i in a first pass over P and dP, dS in a second."""
    N, N_k = p.N, p.N_k
    return Kernel({"P": 2 * N * N_k, "dP": 2 * N * N_k}, {"dS": N * N_k}, flops=N * N_k * (2 + 2))


@closed_form("tiled", "backward")
def tiled_backward(p):
    """Algorithm 3 with shared T×T tiles; P is formed again from Q, K and L where it was not kept."""
    return {
        **({} if p.kept else {"scores": tiled_scores(p), "probabilities": probabilities(p)}),
        **tiled_gradients(p),
    }


def tiled_gradients(p):
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    T, Tr, Tc, Td = square_tiles(p)
    flops = Tr * Tc * Td * 2 * T**3
    return {
        "backward_dV": Kernel({"P": N * N_k * Td, "dO": N * d * Tc}, {"dV": keys}, flops),
        "backward_dP": Kernel({"dO": N * d * Tc, "V": N_k * d * Tr}, {"dP": N * N_k}, flops),
        "backward_dS": dS(p),
        "backward_dQ": Kernel({"dS": N * N_k * Td, "K": N_k * d * Tr}, {"dQ": N * d}, flops + N * d),
        "backward_dK": Kernel({"dS": N * N_k * Td, "Q": N * d * Tc}, {"dK": keys}, flops + keys),
    }


@closed_form("online_softmax", "backward")
def online_softmax_backward(p):
    """P is formed first, from the S that was kept or from a new one; then as tiled."""
    if p.kept:
        S = p.N * p.N_k
        first = {"form_P": Kernel({"S": S, "m": S, "l": S}, {"P": S}, flops=3 * S)}
    else:
        first = {"scores": tiled_scores(p), "probabilities": probabilities(p)}
    return {**first, **tiled_gradients(p)}


@closed_form("flash", "backward")
def flash_backward(p):
    """Algorithm 4: K, V, dK, dV once; Q, O, dO, l, m at each of the Tc tiles of keys, and dQ read and written.

    A score: five products of d; scale, subtract, exp, divide; dP − D, times P. At each step a row's D, 2d, and the
    update of dQ, 2d. At the end dK is scaled.
    """
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    Tc = tiles(N_k, p.blocks[1])
    rows = Tc * N * d
    loads = {"Q": rows, "K": keys, "V": keys, "O": rows, "l": Tc * N, "m": Tc * N, "dO": rows, "dQ": rows}
    flops = N * N_k * (10 * d + 6) + Tc * N * 4 * d + keys
    return {
        **({} if p.kept else {"split_lse": Kernel({"L": N}, {"l": N, "m": N})}),
        "initialise_dQ": Kernel({}, {"dQ": N * d}),
        "flash_backward": Kernel(loads, {"dQ": rows, "dK": keys, "dV": keys}, flops),
    }


@closed_form("flash2", "backward")
def flash2_backward(p):
    """FlashAttention-2's Algorithm 2, split by owner, or in one kernel whose blocks add to dQ by atomics.

    A score: the products of d that the kernel needs; scale, subtract, exp; dP − D, times P. dQ and dK are scaled once.
    """
    N, N_k, d, keys = p.N, p.N_k, p.d, p.share * p.N_k * p.d
    Br, Bc = p.blocks
    Tr, Tc = tiles(N, Br), tiles(N_k, Bc)
    rows, passing, stores = Tc * N * d, Tr * N_k * d, {"dK": keys, "dV": keys}
    by_key = {"Q": rows, "K": keys, "V": keys, "dO": rows, "L": Tc * N, "D": Tc * N}
    rowsum = {"rowsum": Kernel({"dO": N * d, "O": N * d}, {"D": N}, flops=2 * N * d)}
    if not p.deterministic:
        flops = N * N_k * (10 * d + 5) + 2 * rows + keys
        return {
            **rowsum,
            "initialise_dQ": Kernel({}, {"dQ": N * d}),
            "backward_atomic": Kernel(by_key, stores, flops, atomics={"dQ": rows}),
        }
    by_query = {"Q": N * d, "K": passing, "V": passing, "dO": N * d, "L": N, "D": N}
    return {
        **rowsum,
        "backward_dKdV": Kernel(by_key, stores, flops=N * N_k * (8 * d + 5) + keys),
        "backward_dQ": Kernel(by_query, {"dQ": N * d}, flops=N * N_k * (6 * d + 5) + N * d),
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
    direction="forward",
    dtype="float32",
    blocks=None,
    sram=STATIC_SHARED,
    return_lse=False,
    deterministic=True,
):
    """The bill of `stage` before it runs, equal to what the ledger counts -> Bill.

    n queries, n_k keys (default n), d columns a head; `heads` query heads and `kv_heads` key and value heads (default
    the same; heads must be a multiple) in each of `batch`. `dtype` is float32 or float64. `blocks`, for a stage with
    tiles: T or (T, T) where they are square, (Br, Bc) for flash and flash2, of any size, also one that no device could
    hold; "paper" for line 1 of Algorithm 1; None for what fits `sram` bytes of shared memory per block (see
    `choose_blocks`). Pure arithmetic on Python integers, so exact at any size.

    direction: "forward" for `attention`, where alone `return_lse` adds the kernel that forms L; "backward" for
    `attention_backward` with out and lse; "both" for `attention_backward` without them, which runs the forward pass,
    in tiles that fit, and keeps of it what the stage wants. `blocks` are those of the backward pass then;
    `deterministic` as in `attention_backward`.

    TypeError or ValueError for an argument that has no meaning: it names the argument, its value and the way out.
    Source: Dao et al. 2022, arXiv:2205.14135, Algorithms 0, 1, 3 and 4; Dao 2023, arXiv:2307.08691, Algorithms 1 and 2.
    """
    sizes = n, d, n_k, heads, kv_heads, batch
    return _bill(*_problem(stage, sizes, direction, dtype, blocks, sram, return_lse, deterministic))


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
    deterministic=True,
):
    """Floating-point operations that `stage` executes, padding of tiles included -> int. Arguments as for `predict`."""
    sizes = n, d, n_k, heads, kv_heads, batch
    kernels, p = _problem(stage, sizes, direction, dtype, blocks, sram, return_lse, deterministic)
    return int(p.heads * sum(kernel.flops for kernel in kernels.values()))


def algorithm0(*, n, d, n_k=None, heads=1, kv_heads=None, batch=1, direction="forward", dtype="float32"):
    """The yardstick of every bill: Algorithm 0, backward Algorithm 3, with each operand of a step read once -> Bill.

    Forward 4N·N_k + 2Nd + 2N_k·d elements a head, backward 7N·N_k + 4Nd + 4N_k·d: 11N² + 12Nd for "both" where
    N = N_k. Arguments and errors as for `predict`.
    """
    _, p = _problem("naive", (n, d, n_k, heads, kv_heads, batch), direction, dtype, None, STATIC_SHARED, False, True)
    forms = {"forward": [ideal], "backward": [ideal_backward], "both": [ideal, ideal_backward]}[direction]
    return _bill({name: kernel for form in forms for name, kernel in form(p).items()} if p.N else {}, p)


def kept(stage, *, n, n_k=None, heads=1, batch=1):
    """What a stage keeps for the backward pass, beside Q, K, V and O -> {tensor: elements}; arguments as `predict`."""
    check_stage(stage, _FORMS["forward"])
    rows = integer("n", n) * integer("heads", heads, 1) * integer("batch", batch, 1)
    scores = rows * (n if n_k is None else integer("n_k", n_k))
    matrix = {"P": scores}
    return {
        "naive": matrix,
        "tiled": matrix,
        "online_softmax": {"S": scores, "m": rows, "l": rows},
        "flash": {"l": rows, "m": rows},
        "flash2": {"L": rows},
    }[stage]


def _bill(kernels, p):
    bill = {}
    for name, kernel in kernels.items():
        tensors = bill[name] = {}
        for tensor in kernel.loads | kernel.stores | kernel.atomics:
            counts = (p.heads * kind.get(tensor, 0) for kind in (kernel.loads, kernel.stores, kernel.atomics))
            tensors[tensor] = Count(*map(int, counts), itemsize=p.itemsize)
    return Bill(bill)


def _problem(stage, sizes, direction, dtype, blocks, sram, return_lse, deterministic):
    """The kernels that run, and the problem they solve."""
    check_stage(stage, _FORMS["forward"])
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is unknown: pass {', '.join(map(repr, DIRECTIONS))}")
    for name, flag in (("return_lse", return_lse), ("deterministic", deterministic)):
        truth(name, flag)
    check_deterministic(stage, deterministic)
    n, d, n_k, heads, kv_heads, batch = sizes
    n, d = integer("n", n), integer("d", d, 1)
    n_k = n if n_k is None else integer("n_k", n_k)
    heads, batch = integer("heads", heads, 1), integer("batch", batch, 1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is no multiple of kv_heads={kv_heads}: each key head serves equally many heads"
        )

    def problem(direction, blocks):
        tiling = "atomic" if direction == "backward" and not deterministic else direction
        sides = check_blocks(stage, blocks, d=d, dtype=dtype, sram=sram, direction=tiling)
        return Problem(
            n,
            n_k,
            d,
            batch * heads,
            Fraction(kv_heads, heads),
            sides and tuple(sides),
            itemsize(dtype),
            bool(return_lse),
            deterministic=bool(deterministic),
        )

    if direction == "both":  # square tiles serve both passes
        own = TILINGS["forward"][stage]
        parts = {"forward": problem("forward", blocks if own is None or own.square else None)}
        parts["forward"] = replace(parts["forward"], return_lse=False)  # what the pass itself does not want
        parts["backward"] = replace(problem("backward", blocks), kept=True)
    else:
        parts = {direction: problem(direction, blocks)}
    kernels = {}
    for part, p in parts.items():
        kernels |= _FORMS[part][stage](p) if n else {}
    return kernels, p
