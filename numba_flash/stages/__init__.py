"""The ladder: one file a stage. `STAGES` lists them in order; a stage arrives here when its file does."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from numba.np.numpy_support import from_dtype

from ..dtypes import HALVES, SINGLES
from ..engine.launch import launch


def numba_type(dtype):
    """float32 or float64 of Numba, the `real` that kernels are built for."""
    return from_dtype(dtype)


def launch_if_any(kernel, grid, block, *args, **how):
    """`launch`, unless the grid holds no block: where there are no keys, there is nothing to compute for them."""
    if all(grid):
        launch(kernel, grid, block, *args, **how)


@dataclass(frozen=True)
class Stage:
    """One rung: its name, a title, what it deletes from the bill of the rung before, where the paper has it.

    All functions take and return arrays on the device; a Mask says what is left out and what is dropped.
    forward(Q, K, V, scale, *, mask, blocks, return_lse, device) -> O and L or None.
    backward(Q, K, V, dO, scale, *, O, L, mask, blocks, device) -> dQ, dK, dV; without O and L it runs the forward pass
    and keeps of it what its algorithm wants. backward_atomic: the same with atomics. Either is None where the stage has
    no such pass.
    forward_split(Q, K, V, scale, splits, *, mask, blocks, device) -> O and L, by several blocks for the keys of one
    query, or None. fused: whether S and P stay on chip.

    What it takes: dtypes, by name; head_dims, every d there is, or None for 1 to 256; whether dropout, and a block mask
    (causal and key_mask: all). compute_capability: the least that a GPU must have, or None where the CPU engine and the
    simulator run the stage too; architecture_specific: no GPU of another capability runs it.
    """

    name: str
    title: str
    deletes: str
    paper: str
    forward: Callable
    backward: Callable | None
    backward_atomic: Callable | None = None
    forward_split: Callable | None = None
    fused: bool = False
    dtypes: tuple = SINGLES
    head_dims: tuple | None = None
    dropout: bool = True
    block_mask: bool = False
    compute_capability: tuple | None = None
    architecture_specific: bool = False


def _on_gpu(module, function):
    """A host function of a stage that only a GPU runs: its module is imported when it is called."""

    def run(*arguments, **keywords):
        return getattr(importlib.import_module(f".{module}", __name__), function)(*arguments, **keywords)

    return run


def _ladder():
    from . import (
        flash,
        flash2,
        flash2_backward,
        flash2_split,
        flash_backward,
        naive,
        naive_backward,
        online_softmax,
        online_softmax_backward,
        register_tiled,
        register_tiled_backward,
        tiled,
        tiled_backward,
    )
    from . import flash2_atomic_backward as atomic

    return (
        Stage(
            "naive",
            "One thread per element, every operand from HBM",
            "nothing: the start",
            "Algorithms 0 and 3",
            naive.forward,
            naive_backward.backward,
        ),
        Stage(
            "tiled",
            "Operands come through shared tiles",
            "the re-reads of Q, K, V and P",
            "Algorithms 0 and 3",
            tiled.forward,
            tiled_backward.backward,
        ),
        Stage(
            "online_softmax",
            "One pass over S; P only in shared memory",
            "P",
            "section 3.1, softmax",
            online_softmax.forward,
            online_softmax_backward.backward,
        ),
        Stage(
            "flash",
            "One kernel, K and V in the outer loop",
            "S",
            "Algorithms 1 and 4",
            flash.forward,
            flash_backward.backward,
            fused=True,
        ),
        Stage(
            "flash2",
            "One kernel, Q in the outer loop",
            "the re-reads of Q, O, l and m",
            "FlashAttention-2",
            flash2.forward,
            flash2_backward.backward,
            atomic.backward,
            flash2_split.forward,
            fused=True,
            block_mask=True,
        ),
        Stage(
            "register_tiled",
            "flash2 with several results per thread",
            "about half of the loads from shared memory",
            "FlashAttention-2",
            register_tiled.forward,
            register_tiled_backward.backward,
            fused=True,
        ),
        Stage(
            "tensor_core",
            "flash2 with matrix products of a warp",
            "half of the bytes; the multiply-adds of single threads",
            "FlashAttention-2",
            _on_gpu("tensor_core", "forward"),
            _on_gpu("tensor_core_backward", "backward"),
            fused=True,
            dtypes=HALVES,
            head_dims=(64, 128),
            dropout=False,
            compute_capability=(8, 0),
        ),
        Stage(
            "hopper",
            "Copies, matrix products and softmax at the same time",
            "the waiting of the tensor cores",
            "FlashAttention-3",
            _on_gpu("hopper", "forward"),
            None,
            fused=True,
            dtypes=HALVES,
            head_dims=(64, 128),
            dropout=False,
            compute_capability=(9, 0),
            architecture_specific=True,
        ),
    )


STAGES = {stage.name: stage for stage in _ladder()}
LADDER = ("naive", "tiled", "online_softmax", "flash", "flash2")  # what HBM sees changes; later, what a thread does
PORTABLE = tuple(name for name, stage in STAGES.items() if stage.compute_capability is None)  # run on every device
