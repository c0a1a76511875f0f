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


@pytest.mark.parametrize("stage", nf.STAGES)
def test_what_is_kept_is_what_is_said(stage):
    """Everything that is alive between the passes, found by what the backward pass is given and does not make anew."""
    names = {"naive": ("P",), "tiled": ("P",), "online_softmax": ("S", "m", "l"), "flash": ("l", "m"), "flash2": ("L",)}
    said = kept(stage, n=N, n_k=N_K, d=D)
    assert tuple(said) == names[stage]
    forward, backward = nf.predict(stage, n=N, n_k=N_K, d=D), nf.predict(stage, n=N, n_k=N_K, d=D, direction="both")
    for tensor, elements in said.items():
        stored = sum(kernel[tensor].stores for kernel in forward.kernels.values() if tensor in kernel)
        assert stored % elements == 0
        assert stored > 0
        later = [kernel[tensor].loads for name, kernel in backward.kernels.items() if name not in forward.kernels
                 and tensor in kernel]  # fmt: skip
        assert sum(later) > 0
