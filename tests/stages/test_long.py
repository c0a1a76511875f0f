"""Sizes at which an index of 32 bits is too small: more than 2³¹ elements in Q, in K, in S, or in all heads together.

Without a GPU, a tensor of such a size is a view of one number, and the last block of each launch runs alone: an index
that is cut off is negative, or too small to be counted right. On a GPU, one run with real memory.
"""

import math

import numpy as np
import pytest
from numba import cuda

import numba_flash as nf
from numba_flash import reference
from numba_flash.engine import cpu
from numba_flash.engine.launch import check_limits, dimensions, free_bytes

from . import modules

LIMIT = 2**31
SIZES = {  # heads, kv_heads, N, N_k, d
    "queries": (1, 1, LIMIT // 64 + 5, 3, 64),
    "heads": (65_535, 65_535, 129, 2, 256),
    "scores": (2, 1, 46_500, 46_500, 1),
}


def of_one_number(value, shape, dtype=np.float32):
    """A view that can be written to."""
    return np.lib.stride_tricks.as_strided(np.full(1, value, dtype), shape, (0,) * len(shape))


def of_one_number_each(*shapes, dtype, device=None):
    return [of_one_number(1, shape, dtype) for shape in shapes]


@pytest.fixture
def launches(monkeypatch):
    """Every launch of the body runs its last block alone, and every new tensor is one number."""
    seen = []

    def launch(kernel, grid, block, *args, device=None):
        grid, block = dimensions("grid", grid), dimensions("block", block)
        check_limits(grid, block)
        counts = cpu.run(kernel, grid, block, args, block_order=[math.prod(grid) - 1])
        seen.append((kernel.py_func.__name__, counts, [a.size for a in args if isinstance(a, np.ndarray)]))

    for module in modules():
        monkeypatch.setattr(module, "launch", launch, False)
        monkeypatch.setattr(module, "empty", lambda shape, dtype, device=None: of_one_number(1, shape, dtype), False)
        monkeypatch.setattr(module, "empties", of_one_number_each, False)
    return seen


def passes(stage, size):
    """The functions to run: what goes through all queries in one block takes too long with many."""
    entry = nf.STAGES[stage]
    return [entry.forward, *filter(None, [entry.backward, entry.backward_atomic] if size != "queries" else [])]


CASES = [(stage, size) for stage in nf.stages.PORTABLE for size in SIZES
         if size == "heads" or ((size == "queries") == nf.STAGES[stage].fused and stage != "flash")]  # fmt: skip


LONG = [  # of many heads the first and the default stage; the others are for -m course
    pytest.param(*one, marks=pytest.mark.course if one[1] == "heads" and one[0] not in ("naive", "flash2") else ())
    for one in CASES
]


@pytest.mark.parametrize("stage, size", LONG)
def test_the_last_block(stage, size, launches):
    H, G, N, N_k, d = SIZES[size]
    Q, K, dO = (of_one_number(0.5, shape) for shape in ((H, N, d), (G, N_k, d), (H, N, d)))
    for run in passes(stage, size):
        kept = {"O": Q, "L": of_one_number(1, (H, N))} if run is not nf.STAGES[stage].forward else {}
        given = (Q, K, K, dO) if kept else (Q, K, K)
        run(*given, np.float32(1), device="cpu", **kept)
    assert any(max(sizes) > LIMIT for _, _, sizes in launches)
    for name, counts, _ in launches:
        assert sum(stores + atomics for _, _, stores, atomics in counts.values()) > 0, name


@pytest.mark.parametrize("stage", ["naive", "tiled", "online_softmax"])
def test_more_queries_than_a_grid_has_blocks(stage):
    """The other stages put the queries along the axis of a grid that reaches 2³¹."""
    T = 16
    many, few = (np.broadcast_to(np.float32(1), (n, 8)) for n in (65_535 * T + 1, 2))
    with pytest.raises(ValueError, match=f"q has length 1,048,561: stage '{stage}' reaches 1,048,560 of.*'flash2'"):
        nf.attention(many, few, few, stage=stage)
    with pytest.raises(ValueError, match="k has length 1,048,561: stage .* or a part of k"):
        nf.attention_backward(few, many, many, few, stage=stage)


@pytest.mark.skipif(nf.device().name != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_real_memory_beyond_31_bits(stage):
    """Q and O of more than 2³¹ elements: the last head is right, forward and backward."""
    H, N, N_k, d = 65_535, 129, 33, 256
    assert H * N * d > LIMIT
    if free_bytes() < 60e9:
        pytest.skip("needs 60 GB of GPU memory")

    @cuda.jit
    def fill(X, row):
        i, h = cuda.threadIdx.x, cuda.blockIdx.x
        for t in range(X.shape[2]):
            X[h, i, t] = row[i, t] * ((h + i) % 7 - 3)

    rng = np.random.default_rng(0)
    rows, on_device, last = (rng.standard_normal((n, d), dtype=np.float32) / 2 for n in (N, N_k, N_k)), [], []
    for row in rows:
        X = nf.empty((H, *row.shape), np.float32)
        nf.launch(fill, H, len(row), X, nf.to_device(row))
        on_device.append(X)
        last.append(row * ((H - 1 + np.arange(len(row))) % 7 - 3)[:, None].astype(np.float32))
    q, k, v = on_device
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    truth, L = reference.attention(*last)
    np.testing.assert_allclose(nf.to_host(out[H - 1]), truth, atol=1e-4)
    np.testing.assert_allclose(nf.to_host(lse[H - 1]), L, rtol=1e-4, atol=1e-4)
    gradients = nf.attention_backward(q, k, v, q, out=out, lse=lse, stage=stage)
    for got, expected in zip(gradients, reference.attention_backward(*last, last[0]), strict=True):
        np.testing.assert_allclose(nf.to_host(got[H - 1]), expected, atol=1e-3 * np.abs(expected).max())
