"""The flash stages allocate no array of N_q × N_k elements: every allocation that attention makes, recorded."""

import math

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference
from numba_flash.engine.memory import allocations
from numba_flash.hbm.predict import kept

N, N_K, D = 32, 16_384, 8


def allocated(stage):
    """The number of elements of each array that a run of the stage allocates on the device."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((n, D), dtype=np.float32) for n in (N, N_K, N_K, N))
    with allocations() as of_forward:
        forward = nf.attention(q, k, v, stage=stage, return_lse=True)
    with allocations() as of_backward:
        backward = nf.attention_backward(q, k, v, dout, stage=stage, out=forward[0], lse=forward[1])
    results = *forward, *backward
    truth = *reference.attention(q, k, v), *reference.attention_backward(q, k, v, dout)
    for got, expected in zip(results, truth, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    return tuple([math.prod(shape) for shape, _ in made] for made in (of_forward, of_backward))


@pytest.mark.parametrize("stage", ["flash", "flash2"])
def test_no_matrix_of_scores(stage):
    forward, backward = allocated(stage)
    assert max(forward) == N * D
    assert sum(forward) <= N * (D + 3)
    assert max(backward) == N_K * D  # dK and dV
    assert sum(backward) <= (N + 2 * N_K) * D + 2 * N


@pytest.mark.parametrize("stage", ["naive", "tiled", "online_softmax"])
def test_the_record_sees_the_matrices_of_the_others(stage):
    forward, backward = allocated(stage)
    assert forward.count(N * N_K) == (1 if stage == "online_softmax" else 2)  # S and P
    assert backward.count(N * N_K) == 4  # S, P, dP, dS


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_what_is_kept_is_what_is_said(stage):
    """What the forward kernels store and the backward kernels load, beside O, which attention returns."""
    said = kept(stage, n=N, n_k=N_K, heads=3)
    sizes = {"P": 3 * N * N_K, "S": 3 * N * N_K, "m": 3 * N, "l": 3 * N, "L": 3 * N}
    assert said == {tensor: sizes[tensor] for tensor in said}
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, n, D), dtype=np.float32) for n in (N, 40, 40, N))
    with nf.ledger() as forward:
        nf.attention(q, k, v, stage=stage)
    with nf.ledger() as both:
        nf.attention_backward(q, k, v, dout, stage=stage)
    stored = {tensor for kernel in forward.kernels.values() for tensor in kernel if kernel[tensor].stores}
    backward = [kernel for name, kernel in both.kernels.items() if name not in forward.kernels]
    first = {tensor for kernel in backward for tensor in kernel if kernel[tensor].loads} & stored
    made = {tensor for kernel in backward for tensor in kernel if kernel[tensor].stores}
    assert first - made - {"O"} == set(said)
