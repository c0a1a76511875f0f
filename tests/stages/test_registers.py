"""On a GPU: rows that `blocks` says are in registers are, and a thread takes no more registers than it says.

The kernel of dQ, which has three rows, spills 16 of its values at d = 64; with its row of dO in shared memory instead
it spills none, and took 3.6 times as long on an H200.
"""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.blocks import choose_blocks

from . import modules

gpu = pytest.mark.skipif(nf.device().name != "gpu", reason="needs a GPU")


def compiled(stage, direction, d, monkeypatch):
    """The kernels that a pass launches, compiled for float32."""
    kernels = []

    def record(kernel, grid, block, *args, device=None):
        nf.launch(kernel, grid, block, *args, device=device)
        kernels.append(kernel)

    for module in modules():
        monkeypatch.setattr(module, "launch", record, raising=False)
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 64, d), dtype=np.float32) for _ in range(4))
    if direction == "forward":
        nf.attention(q, k, v, stage=stage)
    else:
        nf.attention_backward(q, k, v, dout, stage=stage, deterministic=direction == "backward")
    return kernels


@gpu
@pytest.mark.parametrize("d", [32, 64])
@pytest.mark.parametrize(
    ("stage", "direction"),
    [
        ("flash", "forward"),
        ("flash", "backward"),
        ("flash2", "forward"),
        ("flash2", "backward"),
        ("flash2", "atomic"),
        ("register_tiled", "forward"),
        ("register_tiled", "backward"),
    ],
)
def test_registers(stage, direction, d, monkeypatch):
    chosen = choose_blocks(stage, d=d, direction=direction)
    assert chosen.rows_in_registers
    kernels = compiled(stage, direction, d, monkeypatch)
    assert kernels
    for kernel in kernels:
        assert max(kernel.get_local_mem_per_thread().values()) < 4 * d, kernel.__name__  # no row; a few values may be
        assert max(kernel.get_regs_per_thread().values()) <= chosen.registers, kernel.__name__
