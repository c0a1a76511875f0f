"""Tiles: what they take of the device, which are chosen, and what is refused."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.blocks import TENSOR_CORE_PASSING, TILINGS, check_blocks, fitting_blocks, from_sides
from numba_flash.engine.model import REGISTERS, STATIC_SHARED, THREADS
from numba_flash.errors import SharedMemoryError
from numba_flash.stages import PORTABLE

ROWS = ("flash", "flash2")
with_tiles = pytest.mark.parametrize(
    ("stage", "direction"),
    [(stage, part) for part, tilings in TILINGS.items() for stage in PORTABLE if tilings.get(stage)],
)


def test_every_stage_has_an_entry():
    for direction in ("forward", "backward"):
        assert list(TILINGS[direction]) == list(nf.STAGES)
    with_atomics = [name for name, stage in nf.STAGES.items() if stage.backward_atomic]
    assert list(TILINGS["atomic"]) == with_atomics


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@with_tiles
def test_the_choice_fits_for_every_d(stage, direction, dtype):
    most = 224 if (stage, direction, dtype) == ("register_tiled", "backward", "float64") else 256
    for d in range(1, most + 1):
        chosen = nf.choose_blocks(stage, d=d, dtype=dtype, direction=direction)
        assert tuple(fitting_blocks(stage, chosen, d=d, dtype=dtype, direction=direction)) == tuple(chosen)
        assert chosen.shared_bytes <= STATIC_SHARED
        assert chosen.threads <= THREADS


@with_tiles
def test_the_choice_fits_little_memory(stage, direction):
    """Smaller tiles where the usual ones do not fit; an error that says how much is needed where none does."""
    for d in (1, 7, 64, 1000):
        for sram in (1, 20, 100, 213, 1000, 5000, 10_000, 2**20):
            try:
                chosen = nf.choose_blocks(stage, d=d, sram=sram, direction=direction)
            except ValueError as error:
                least = int(str(error).partition("take ")[2].partition(" bytes")[0].replace(",", ""))
                assert least > sram
                assert tuple(nf.choose_blocks(stage, d=d, sram=least, direction=direction))
            else:
                assert min(chosen) >= 1
                assert chosen.shared_bytes <= sram


def test_registers_come_in_whole_warps():
    """At d = 96 a thread takes 255, a warp 8,192: a block has room for 8 warps, and 257 threads are 9."""
    assert tuple(fitting_blocks("flash2", (256, 8), d=96, dtype="float32")) == (256, 8)
    with pytest.raises(ValueError, match=r"257 threads .* 73,728, and a block has 65,536; blocks=\(256, 8\) fits"):
        fitting_blocks("flash2", (257, 8), d=96, dtype="float32")


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
    for part in ("Br = 128", "Bc = 32", "32,768 of 49,152 B", "each of 128 threads", "up to 255"):
        assert part in text
    assert "local memory" not in text
    assert "local memory" not in str(nf.choose_blocks("flash2", d=96))
    assert "local memory" in str(nf.choose_blocks("flash2", d=128))
    assert "egisters" not in str(nf.choose_blocks("tiled", d=128))
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
    ("flash", True, ValueError, "blocks=True: pass .Br, Bc."),
    ("flash", 1.0, ValueError, "blocks=1.0: pass .Br, Bc."),
    ("naive", "paper", ValueError, "has no tiles"),
    ("tiled", "paper", ValueError, "square tiles: pass a side T"),
    ("tiled", "fit", ValueError, "blocks='fit' is unknown: pass None or one side T"),
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
            warps = -(-blocks[0] // 32)
            assert blocks[0] > THREADS or warps * 32 * min(256, 2 * d * size // 4 + 128) > REGISTERS
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


@pytest.mark.parametrize(
    ("stage", "sides", "meant"),
    [
        ("tiled", [8], 8),
        ("flash", [8], (8, 8)),
        ("flash2", [8, 4], (8, 4)),
        ("tiled", [8, 4], (8, 4)),
        ("naive", [8], 8),
    ],
)
def test_the_sides_of_a_command_line(stage, sides, meant):
    assert from_sides(stage, sides) == meant


NEW = "tensor_core", "hopper"


@pytest.mark.parametrize("stage", NEW)
@pytest.mark.parametrize("d", [64, 128])
def test_a_stage_with_tiles_of_its_own(stage, d):
    chosen = nf.choose_blocks(stage, d=d, dtype="float16")
    assert tuple(chosen) == TILINGS["forward"][stage].fixed[d]
    assert chosen.itemsize == 2 and chosen.fits
    assert 0 < chosen.shared_bytes <= (166_912 if stage == "tensor_core" else 232_448)  # of an A100, of an H100
    assert chosen.threads <= 512
    assert str(chosen).endswith(f"{chosen.shared_bytes:,} B, dynamic.")
    assert tuple(fitting_blocks(stage, tuple(chosen), d=d, dtype="bfloat16")) == tuple(chosen)
    with pytest.raises(
        ValueError, match=rf"blocks=\(32, 64\): stage '{stage}' is written for \(.*\); leave blocks out"
    ):
        fitting_blocks(stage, (32, 64), d=d, dtype="float16")
    with pytest.raises(ValueError, match=f"'paper' is not for stage '{stage}', which .* leave blocks out"):
        check_blocks(stage, "paper", d=d, dtype="float16")


@pytest.mark.parametrize("d", [64, 128])
def test_shared_memory_of_the_backward_pass_on_tensor_cores(d):
    """In bytes: K_j, V_j and twice Q_i, dO_i, L_i, D_i; or Q_i, dO_i and twice K_j, V_j."""
    chosen = nf.choose_blocks("tensor_core", d=d, dtype="float16", direction="backward")
    (queries, keys), (Br, Bc) = TENSOR_CORE_PASSING[d], chosen
    own_keys = 2 * Bc * d * 2 + 2 * (2 * queries * d * 2 + 2 * queries * 4)
    assert chosen.shared_bytes == max(own_keys, 2 * Br * d * 2 + 2 * 2 * keys * d * 2) <= 101_376  # of a GPU of 8.6


@pytest.mark.parametrize("stage", NEW)
def test_a_d_that_a_stage_with_tiles_of_its_own_does_not_take(stage):
    with pytest.raises(ValueError, match=f"d=96: stage '{stage}' takes d = 64 and 128; pass another stage"):
        nf.choose_blocks(stage, d=96, dtype="float16")
