"""The measured figures of lessons 10, 12 and 13: what one metric says follows from others, but for rounding."""

import pytest

import numba_flash as nf
from numba_flash.figures import left
from numba_flash.figures.measured import (
    BENCH,
    DENSE,
    INSIDE,
    KERNELS,
    MATMUL,
    PROCESSORS,
    SPARSE,
    SPARSE_LINE,
    TIMES,
    WARPS,
)

PEAK, CLOCK = 4.8e12, 1.98e9  # of an H200: bytes/s of DRAM (datasheet), cycles/s (ncu)


def test_the_stages_and_their_kernels():
    assert list(KERNELS) == list(TIMES) == list(nf.stages.PORTABLE)
    for stage, kernels in KERNELS.items():
        assert list(kernels) == list(nf.predict(stage, **left.PAPER).kernels)
        assert sum(one.ms for one in kernels.values()) == pytest.approx(TIMES[stage][0], rel=0.05)


@pytest.mark.parametrize("one", [one for kernels in KERNELS.values() for one in kernels.values()], ids=str)
def test_bytes_and_time_give_the_share_of_dram(one):
    assert 100 * (one.read + one.written) / (one.ms / 1000) / PEAK == pytest.approx(one.dram, abs=0.1)
    assert max(one[3:]) <= 100


@pytest.mark.parametrize("stage", INSIDE)
def test_what_is_said_of_a_multiprocessor(stage):
    one, seconds = INSIDE[stage], BENCH[stage][0] / 1000
    assert 100 * one.wavefronts / (PROCESSORS * CLOCK * seconds) == pytest.approx(one.shared, rel=0.01)
    multiply_adds = nf.flops(stage, n=4096, d=64, heads=64) / seconds / 2
    assert 0.8 < 100 * multiply_adds / (PROCESSORS * CLOCK * 128) / one.multiplied < 1.1
    assert multiply_adds < MATMUL / 2
    blocks = 65_536 // (128 * 8 * -(-one.registers // 8))
    assert 0.95 * 4 * blocks < one.warps <= 4 * blocks < WARPS


def test_block_sparse_times_lie_on_their_line():
    a, b, off = SPARSE_LINE
    for s, share in SPARSE.items():
        assert share * DENSE == pytest.approx(a + b * s, abs=off + 0.2)
