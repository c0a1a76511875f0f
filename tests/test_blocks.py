"""Tiles: what they take of the device, which are chosen, and what is refused."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.blocks import TILINGS, check_blocks, fitting_blocks
from numba_flash.engine.model import REGISTERS, STATIC_SHARED, THREADS
from numba_flash.errors import SharedMemoryError

ROWS = ("flash", "flash2")


def test_every_stage_has_an_entry():
    assert list(TILINGS) == list(nf.STAGES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage", [stage for stage in nf.STAGES if stage != "naive"])
def test_the_choice_fits_for_every_d(stage, dtype):
    for d in range(1, 257):
        chosen = nf.choose_blocks(stage, d=d, dtype=dtype)
        assert tuple(fitting_blocks(stage, chosen, d=d, dtype=dtype)) == tuple(chosen)
        assert chosen.shared_bytes <= STATIC_SHARED
        assert chosen.threads <= THREADS


def test_the_comparison_of_the_design():
    """d = 64, float32, 48 KiB: flash comes out below Algorithm 0 and flash2 well below flash, at N = 1024."""
    N = 1024
    assert tuple(nf.choose_blocks("flash", d=64)) == (64, 64)
    assert nf.choose_blocks("flash", d=64).shared_bytes == STATIC_SHARED  # K_j, V_j and S_ij fill it
    flash, flash2 = (nf.predict(stage, n=N, d=64).elements for stage in ROWS)
    assert flash < 4.25 * N * N
    assert flash2 <= 0.6 * flash


def test_where_flash_cannot_win():
    from numba_flash.hbm.predict import algorithm0

    ideal = algorithm0(n=1024, d=128).elements
    assert nf.predict("flash", n=1024, d=128).elements > ideal > nf.predict("flash2", n=1024, d=128).elements


def test_the_rule_of_the_paper():
    """Algorithm 1, line 1: Bc = ⌈M / 4d⌉, Br = min(⌈M / 4d⌉, d). At d = 64 in float32 it leaves no room for S_ij."""
    chosen = nf.choose_blocks("flash", d=64, rule="paper")
    assert tuple(chosen) == (48, 48)
    assert tuple(nf.choose_blocks("flash", d=64, sram=4 * 100_000, rule="paper")) == (64, 391)
    assert nf.predict("flash", n=500, d=64, blocks="paper") == nf.predict("flash", n=500, d=64, blocks=(48, 48))
    with pytest.raises(ValueError, match="square tiles"):
        nf.choose_blocks("tiled", d=64, rule="paper")


def test_it_explains_itself():
    text = str(nf.choose_blocks("flash2", d=64))
    for part in ("Br = 128", "Bc = 32", "32,768 of 49,152 B", "about 224 for each of 128 threads"):
        assert part in text
    assert "spills" not in text
    assert "spills" in str(nf.choose_blocks("flash2", d=128))
    assert nf.choose_blocks("naive", d=64) is None


def test_forms():
    for blocks in (16, [16, 16], (16, 16), np.int64(16)):
        assert tuple(check_blocks("tiled", blocks, d=8)) == (16, 16)
    assert tuple(check_blocks("flash", [7, 9], d=8)) == (7, 9)
    assert check_blocks("naive", None, d=8) is None


BAD = [
    ("naive", 8, ValueError, "has no tiles"),
    ("tiled", (4, 8), ValueError, "one side T or"),
    ("tiled", (4, 4, 4), ValueError, "one side T or"),
    ("flash", 16, ValueError, "pass .Br, Bc."),
    ("flash", (16,), ValueError, "pass .Br, Bc."),
    ("flash", (16, 0), ValueError, "side=0 is too small"),
    ("flash2", (16, 8.0), TypeError, "side=8.0 is not an integer"),
    ("flash2", "big", ValueError, "blocks='big' is unknown"),
    ("flash", True, TypeError, "blocks=True"),
]


@pytest.mark.parametrize("stage, blocks, error, said", BAD)
def test_blocks_without_a_meaning(stage, blocks, error, said):
    with pytest.raises(error, match=said):
        check_blocks(stage, blocks, d=8)
    with pytest.raises(error, match=said):
        nf.predict(stage, n=8, d=8, blocks=blocks)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [1, 64, 128, 256])
@pytest.mark.parametrize("stage", ROWS)
def test_tiles_beyond_the_device(stage, d, dtype):
    size = np.dtype(dtype).itemsize
    for blocks in ((128, 128), (1, 100_000), (1024, 1), (2048, 8), (400, 16), (32, 8)):
        needed = (2 * blocks[1] * d + blocks[0] * blocks[1]) * size
        try:
            assert tuple(fitting_blocks(stage, blocks, d=d, dtype=dtype)) == blocks
            assert needed <= STATIC_SHARED
        except SharedMemoryError as error:
            assert needed > STATIC_SHARED
            assert f"{needed:,} bytes" in str(error)
            assert f"{STATIC_SHARED:,}" in str(error)
            fits = eval(str(error).rpartition("blocks=")[2].partition(" fits")[0])
            assert tuple(fitting_blocks(stage, fits, d=d, dtype=dtype)) == fits
        except ValueError as error:
            assert blocks[0] > THREADS or blocks[0] * min(255, 2 * d * size // 4 + 96) > REGISTERS
            fits = eval(str(error).rpartition("blocks=")[2].partition(" fits")[0])
            assert tuple(fitting_blocks(stage, fits, d=d, dtype=dtype)) == fits


def test_square_tiles_beyond_the_device():
    with pytest.raises(SharedMemoryError) as caught:
        fitting_blocks("tiled", 128, d=64, dtype="float32")
    for part in ("blocks=128: ", "131,072 bytes", "49,152", "16,384 threads", "blocks=(32, 32) fits"):
        assert part in str(caught.value)
    with pytest.raises(ValueError) as caught:
        fitting_blocks("tiled", 33, d=64, dtype="float32")
    for part in ("blocks=33: 1,089 threads", "1,024", "blocks=(32, 32) fits"):
        assert part in str(caught.value)
