"""The ladder: one file a stage. `STAGES` lists them in order; a stage arrives here when its file does."""

from collections.abc import Callable
from dataclasses import dataclass

from numba.np.numpy_support import from_dtype


def numba_type(dtype):
    """float32 or float64 of Numba, the `real` that kernels are built for."""
    return from_dtype(dtype)


def tiles(size, T):
    """⌈size / T⌉: how many tiles of T cover `size`."""
    return -(-size // T)


@dataclass(frozen=True)
class Stage:
    """One rung: its name, a title, what it deletes from the bill of the rung before, and where the paper has it.

    `forward(Q, K, V, scale, *, blocks, return_lse, device)` takes and returns arrays on the device; `backward` is None
    until the stage has one.
    """

    name: str
    title: str
    deletes: str
    paper: str
    forward: Callable
    backward: Callable | None = None


def _ladder():
    from . import flash, flash2, naive, online_softmax, tiled

    rows = (
        ("naive", "One thread per element, every operand from HBM", "nothing: the start", "Algorithm 0", naive),
        ("tiled", "Operands come through shared tiles", "the re-reads of Q, K, V and P", "Algorithm 0", tiled),
        ("online_softmax", "One pass over S; P only in shared memory", "P", "section 3.1, softmax", online_softmax),
        ("flash", "One kernel, K and V in the outer loop", "S", "Algorithm 1", flash),
        ("flash2", "One kernel, Q in the outer loop", "the re-reads of O, l and m", "FlashAttention-2", flash2),
    )
    return [Stage(name, title, deletes, paper, module.forward) for name, title, deletes, paper, module in rows]


STAGES = {stage.name: stage for stage in _ladder()}
