"""The flash stages allocate no array of N_q × N_k elements: every allocation that attention makes, recorded."""

import importlib
import math

import numpy as np
import pytest

import numba_flash as nf

N, N_K, D = 32, 16_384, 8


def allocated(stage, monkeypatch):
    """The number of elements of each array that a run of the stage allocates on the device."""
    sizes = []

    def record(shape, dtype, device=None):
        sizes.append(math.prod(shape))
        return nf.empty(shape, dtype, device)

    for name in nf.STAGES:
        monkeypatch.setattr(importlib.import_module(f"numba_flash.stages.{name}"), "empty", record)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, D), dtype=np.float32) for n in (N, N_K, N_K))
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    reference, reference_lse = nf.attention(q, k, v, stage="naive", return_lse=True)
    np.testing.assert_allclose(out, reference, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, reference_lse, rtol=1e-5)
    return sizes[: sizes.index(N * N_K)] if N * N_K in sizes else sizes  # up to where naive begins


@pytest.mark.parametrize("stage", ["flash", "flash2"])
def test_no_matrix_of_scores(stage, monkeypatch):
    sizes = allocated(stage, monkeypatch)
    assert sizes
    assert max(sizes) == N * D
    assert sum(sizes) <= N * (D + 3)


def test_the_record_sees_the_matrices_of_naive(monkeypatch):
    assert allocated("naive", monkeypatch) == []  # its first allocation is S
