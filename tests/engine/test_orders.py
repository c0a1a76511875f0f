"""A race-free kernel gives the same bits whatever order its threads and blocks run in; one that races does not.

The launches are those that each stage makes, recorded while it runs.
"""

from dataclasses import replace

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.engine import cpu
from numba_flash.engine.launch import dimensions
from numba_flash.engine.rewrite import function_of
from numba_flash.masks import no_mask

from ..stages import modules
from .error_kernels import make_missing_barrier

ORDERS = {
    "reversed": lambda n: np.arange(n)[::-1],
    "odd first": lambda n: np.concatenate([np.arange(1, n, 2), np.arange(0, n, 2)]),
    "shuffled": lambda n: np.random.default_rng(n).permutation(n),
}
# tiles that give several in each direction
SMALL = {"tiled": 8, "online_softmax": 8, "flash": (8, 9), "flash2": (8, 9), "register_tiled": (8, 9)}
PASSES = [(stage, run) for stage in nf.stages.PORTABLE for run in ("forward", "both", "from lse", "masked")]
PASSES += [("flash2", run) for run in ("atomic", "masked atomic", "split", "masked split")]
passes = pytest.mark.parametrize("stage, run_of", PASSES)


def recorded(stage, run_of, monkeypatch):
    """(kernel, grid, block, arguments before the launch) of every launch of one run of the stage."""
    launches = []

    def record(kernel, grid, block, *args, device=None):
        before = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        launches.append((kernel, dimensions("grid", grid), dimensions("block", block), before))
        nf.launch(kernel, grid, block, *args, device="cpu")

    for module in modules():
        monkeypatch.setattr(module, "launch", record, raising=False)
    rng = np.random.default_rng(0)
    Q, K, V, dO = (rng.standard_normal((h, n, 12), dtype=np.float32) for h, n in ((2, 37), (1, 29), (1, 29), (2, 37)))
    entry, scale, how = nf.STAGES[stage], np.float32(0.3), {"blocks": SMALL.get(stage), "device": "cpu"}
    if "masked" in run_of:  # by all that hides a pair, and with dropout
        keys = (rng.random((1, 29)) < 0.7).astype(np.uint8)
        mask = replace(no_mask("cpu"), causal=True, keys=keys, masked=True, p_drop=np.float64(0.2), seed=np.uint64(3))
        if stage == "flash2" and "split" not in run_of:
            mask = replace(mask, blocks=(rng.random((5, 4)) < 0.7).astype(np.uint8), sides=(8, 9))
        how["mask"] = mask
    if "split" in run_of:
        how["mask"] = replace(how.get("mask", no_mask("cpu")), p_drop=np.float64(0))
        entry.forward_split(Q, K, V, scale, 3, **how | {"blocks": (1, 5)})
        return launches
    O, L = entry.forward(Q, K, V, scale, return_lse=True, **how)
    if run_of != "forward":
        launches.clear()
        backward = entry.backward_atomic if "atomic" in run_of else entry.backward
        kept = {"O": O, "L": L} if run_of not in ("both", "masked") else {}
        backward(Q, K, V, dO, scale, **kept, **how)
    return launches


def run(kernel, grid, block, before, **options):
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in before]
    cpu.run(kernel, grid, block, args, **options)
    return [a for a in args if isinstance(a, np.ndarray)]


@pytest.mark.parametrize(
    "order, stage, run_of",
    [
        pytest.param(order, *one, marks=pytest.mark.course if one[0] == "register_tiled" else ())
        for one in PASSES
        for order in ORDERS
        if "masked" not in one[1] or order == "shuffled"
    ],
)
def test_stages_do_not_depend_on_the_order(stage, run_of, order, monkeypatch):
    permutation = ORDERS[order]
    for kernel, grid, block, before in recorded(stage, run_of, monkeypatch):
        straight = run(kernel, grid, block, before)
        orders = {"thread_order": permutation(int(np.prod(block))), "block_order": permutation(int(np.prod(grid)))}
        for one, other in zip(straight, run(kernel, grid, block, before, **orders), strict=True):
            assert not np.isnan(one.astype(float)).any(), function_of(kernel).__name__
            if "atomic" in run_of:  # sums by atomics depend on it, in their last bits
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            else:
                assert np.array_equal(one, other), function_of(kernel).__name__


@passes
def test_stages_have_no_races_and_read_nothing_unwritten(stage, run_of, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "1")
    launches = recorded(stage, run_of, monkeypatch)
    assert len({function_of(kernel).__name__ for kernel, *_ in launches}) == len(launches)


def test_a_racing_kernel_depends_on_the_order():
    A = np.arange(4, dtype=np.float32)
    launch = make_missing_barrier(4), (1, 1, 1), (4, 1, 1), (A, A.copy())
    straight, back = run(*launch)[1], run(*launch, thread_order=np.arange(4)[::-1])[1]
    assert not np.array_equal(straight, back, equal_nan=True)
