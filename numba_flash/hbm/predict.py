"""What a stage moves and computes, from closed forms alone: no launch, and no look at its kernels.

Each stage is one function below that reads like the table of a bill: for one head of N queries, M keys and d columns,
what every kernel loads, stores and computes. A floating-point add, subtract, multiply, divide, exp, log or max of one
element is one operation.
"""

import difflib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..engine.model import STATIC_SHARED, THREADS
from ..errors import SharedMemoryError
from .ledger import Bill, Count

DTYPES = ("float32", "float64")
DIRECTIONS = ("forward",)


@dataclass(frozen=True)
class Problem:
    """The size of one attention: N queries, M keys, d columns, `heads` times, in tiles of `blocks`."""

    N: int
    M: int
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


class ClosedForm(NamedTuple):
    kernels: Callable
    blocks: tuple | None


_FORMS = {}


def closed_form(stage, blocks=None):
    """Register the function below as the closed form of `stage`: Problem -> kernel name -> Kernel.

    `blocks` are the stage's default tile sides, None where it has no tiles.
    """

    def register(kernels):
        _FORMS[stage] = ClosedForm(kernels, blocks)
        return kernels

    return register


def softmax(N, M):
    """One thread per row of S, three passes over it: maximum; sum of exp; exp / sum to P."""
    return Kernel(loads={"S": 3 * N * M}, stores={"P": N * M}, flops=N * M * (1 + 3 + 3))


def logsumexp(p):
    """One thread per row of S, two passes: maximum; sum of exp, of which a row with keys takes m + log l."""
    N, M = p.N, p.M
    form = Kernel(loads={"S": 2 * N * M}, stores={"L": N}, flops=N * M * (1 + 3) + (2 * N if M else 0))
    return {"logsumexp": form} if p.return_lse else {}


@closed_form("naive")
def naive(p):
    """One thread per element of S, then of O, each with its own pass over a row and a column in HBM."""
    N, M, d = p.N, p.M, p.d
    return {
        "scores": Kernel({"Q": N * M * d, "K": N * M * d}, {"S": N * M}, flops=N * M * (2 * d + 1)),
        "softmax": softmax(N, M),
        "output": Kernel({"P": N * M * d, "V": N * M * d}, {"O": N * d}, flops=N * M * 2 * d),
        **logsumexp(p),
    }


@closed_form("tiled", blocks=(16, 16))
def tiled(p):
    """One T×T tile of S, then of O, per block of threads; the operands pass through shared T×T tiles.

    A tile at the edge loads only what is there, but every thread multiplies through the whole tile, zeros included.
    """
    N, M, d, T = p.N, p.M, p.d, p.blocks[0]
    Tr, Tc, Td = -(-N // T), -(-M // T), -(-d // T)
    product = Tr * Tc * Td * 2 * T**3
    return {
        "scores": Kernel({"Q": N * d * Tc, "K": M * d * Tr}, {"S": N * M}, flops=product + N * M),
        "softmax": softmax(N, M),
        "output": Kernel({"P": N * M * Td, "V": M * d * Tr}, {"O": N * d}, flops=product),
        **logsumexp(p),
    }


def ideal(p):
    """Algorithm 0 of the paper, each matmul reading its operands once: 4NM + 2Nd + 2Md."""
    N, M, d = p.N, p.M, p.d
    scores = {"scores": Kernel({"Q": N * d, "K": M * d}, {"S": N * M})} if N * M else {}
    return scores | {
        "softmax": Kernel({"S": N * M}, {"P": N * M}),
        "output": Kernel({"P": N * M, "V": M * d if N else 0}, {"O": N * d}),
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
    return_lse=False,
):
    """The bill of `stage` before it runs, equal to what the ledger counts -> Bill.

    n queries, n_k keys (default n), d columns a head; `heads` query heads and `kv_heads` key and value heads (default
    the same; heads must be a multiple) in each of `batch`. `dtype` is float32 or float64. `blocks`, for a stage with
    tiles, is the side T or (T, T): any size, also one that no device could hold (`check_tile` asks that). `return_lse`
    adds the kernel that forms L. Pure arithmetic on Python integers, so exact at any size.

    TypeError or ValueError for an argument that has no meaning: it names the argument, its value and the way out.
    """
    form, p = _problem(stage, n, d, n_k, heads, kv_heads, batch, direction, dtype, blocks, return_lse)
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
    return_lse=False,
):
    """Floating-point operations that `stage` executes, padding of tiles included -> int. Arguments as for `predict`."""
    form, p = _problem(stage, n, d, n_k, heads, kv_heads, batch, direction, dtype, blocks, return_lse)
    return p.heads * sum(kernel.flops for kernel in form(p).values())


def algorithm0(*, n, d, n_k=None, heads=1, batch=1, dtype="float32"):
    """The yardstick of every bill: Algorithm 0 with each operand of a matmul read once -> Bill.

    4NM + 2Nd + 2Md elements a head, 4N² + 4Nd where N = M. Arguments and errors as for `predict`.
    """
    _, p = _problem("naive", n, d, n_k, heads, None, batch, "forward", dtype, None, False)
    return _bill(ideal, p)


def _bill(form, p):
    kernels = {}
    for name, kernel in form(p).items():
        tensors = kernels[name] = {}
        for tensor in kernel.loads | kernel.stores:
            loads, stores = kernel.loads.get(tensor, 0), kernel.stores.get(tensor, 0)
            tensors[tensor] = Count(p.heads * loads, p.heads * stores, itemsize=p.itemsize)
    return Bill(kernels)


def _problem(stage, n, d, n_k, heads, kv_heads, batch, direction, dtype, blocks, return_lse):
    check_stage(stage)
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
    problem = Problem(n, n_k, d, batch * heads, check_blocks(stage, blocks), itemsize(dtype), bool(return_lse))
    return _FORMS[stage].kernels, problem


def integer(name, value, least=0):
    """`value` as a Python int. TypeError where it is no integer (a bool is none), ValueError below `least`."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer: pass an int, {least} or more") from None
    if number < least:
        raise ValueError(f"{name}={number} is too small: pass {least} or more")
    return number


def itemsize(dtype):
    """Bytes of one element of `dtype` (a name, or what numpy.dtype takes). ValueError where no stage computes in it."""
    try:
        name = np.dtype(dtype).name if dtype is not None else None
    except (TypeError, ValueError):
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one the stages compute in: pass {' or '.join(map(repr, DTYPES))}")
    return np.dtype(name).itemsize


def check_stage(stage, stages=None):
    """Raise unless `stage` is one of `stages` (default: those predicted); the error lists them and the nearest."""
    stages = list(_FORMS if stages is None else stages)
    names = ", ".join(map(repr, stages))
    if not isinstance(stage, str):
        raise TypeError(f"stage={stage!r} must be the name of a stage: one of {names}")
    if stage not in stages:
        near = difflib.get_close_matches(stage.lower(), stages, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"stage={stage!r} is unknown: use one of {names}{hint}")


def check_blocks(stage, blocks):
    """The tile sides (T, T) of `stage` for `blocks` None (its default), T or (T, T); None for a stage without tiles.

    Any side has a meaning here; whether the device can hold it is asked by `check_tile`.
    """
    default = _FORMS[stage].blocks
    if blocks is None:
        return default
    if default is None:
        raise ValueError(f"blocks={blocks!r}: stage {stage!r} has no tiles; leave blocks out")
    if isinstance(blocks, tuple | list):
        sides = tuple(integer(f"blocks={blocks!r}: side", side, 1) for side in blocks)
    else:
        sides = (integer("blocks", blocks, 1),) * 2
    if len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(f"blocks={blocks!r}: the tiles of stage {stage!r} are square; pass one side T, or (T, T)")
    return sides


def check_tile(stage, blocks, dtype):
    """The tile sides of `stage`, as `check_blocks` gives them, after asking whether a block of the device holds them.

    A block has T×T threads and two T×T tiles. SharedMemoryError (a ValueError) where the tiles overflow the static
    shared memory, ValueError where only the threads are too many; both name the largest tile that fits.
    """
    sides, size = check_blocks(stage, blocks), itemsize(dtype)
    if sides is None:
        return None
    T = sides[0]
    needed = 2 * T * T * size
    largest = min(math.isqrt(THREADS), math.isqrt(STATIC_SHARED // (2 * size)))
    way_out = f"the largest tile that fits is blocks=({largest}, {largest})"
    if needed > STATIC_SHARED:
        raise SharedMemoryError(
            f"blocks={sides}: two tiles of {np.dtype(dtype).name} need {needed:,} bytes of shared memory, and a block "
            f"has {STATIC_SHARED:,}; {way_out}"
        )
    if T * T > THREADS:
        raise ValueError(f"blocks={sides}: {T * T:,} threads, and a block has at most {THREADS:,}; {way_out}")
    return sides
