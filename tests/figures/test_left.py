"""Figure 2 (left): the yardstick and the stages against `predict`, the best tiles against all others, what is said."""

import json
import math

import pytest

import numba_flash as nf
from numba_flash.blocks import Blocks
from numba_flash.engine.model import DYNAMIC_SHARED, REGISTERS
from numba_flash.figures import left
from numba_flash.stages import LADDER


@pytest.fixture(scope="module")
def figures():
    return left.compute(**left.PAPER)


def test_the_passes_and_the_product_are_those_of_the_configuration(figures):
    H, N, d = 16 * 64, 1024, 64
    assert figures["pass_bytes"] == {"N²": 2 * H * N * N, "Nd": 2 * H * N * d}
    assert f"{figures['pass_bytes']['N²'] / 1e9:.4f} {figures['pass_bytes']['Nd'] / 1e9:.4f}" == "2.1475 0.1342"
    assert figures["product_flops"] == H * 2 * N * N * d
    assert f"{6 * figures['product_flops'] / 1e9:.1f}" == "824.6"


def test_the_ideal_is_11_passes_over_a_matrix_and_12_over_an_operand(figures):
    square, thin = figures["pass_bytes"].values()
    assert figures["ideal"] == {
        "forward": 4 * square + 4 * thin,
        "backward": 7 * square + 8 * thin,
        "both": 11 * square + 12 * thin,
    }


def test_the_papers_numbers_are_those_of_the_paper(figures):
    assert figures["paper"]["standard"] == {"gflop": 66.6, "gb": 40.3, "ms": 41.7}
    assert figures["paper"]["flash"] == {"gflop": 75.2, "gb": 4.4, "ms": 7.3}


@pytest.mark.parametrize(("n", "d", "heads", "batch"), [(1024, 64, 16, 64), (100, 24, 3, 2), (1, 1, 1, 1)])
def test_the_stages_are_the_prediction_in_2_bytes(n, d, heads, batch):
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch}
    found = left.compute(**sizes)["stages"]
    assert list(found) == [*LADDER, "flash2, atomics"]
    for name, row in found.items():
        how = {**sizes, "deterministic": name != "flash2, atomics"}
        stage = name.partition(",")[0]
        assert row["both"] == nf.predict(stage, **how, direction="both").total_bytes // 2  # float32 has 4 bytes
        assert row["forward"] == nf.predict(stage, **sizes).total_bytes // 2
        assert row["forward"] + row["backward"] == row["both"]
        assert row["flops"] == nf.flops(stage, **how, direction="both")


@pytest.mark.parametrize("stage", left.VARIANTS)
def test_a_stage_is_what_a_ledger_counts(stage):
    n, d = 70, 8
    name, deterministic = left.VARIANTS[stage]
    q, k, v = nf.testing.inputs((n, d), (n, d))
    with nf.ledger() as bill:
        nf.attention_backward(q, k, v, q, stage=name, deterministic=deterministic, device="cpu")
    assert left.compute(n=n, d=d, heads=1, batch=1)["stages"][stage]["both"] == 2 * bill.elements


def test_products(figures):
    assert {name: row["products"] for name, row in figures["stages"].items()} == {
        "naive": 6, "tiled": 6, "online_softmax": 6, "flash": 7, "flash2": 9, "flash2, atomics": 7,
    }  # fmt: skip


# --- the largest tiles ------------------------------------------------------------------------------------------------


def fits(direction, Br, Bc, d, row_bytes):
    """The rule, written out: shared memory, threads, registers of whole warps; a thread's rows in registers."""
    threads = {"forward": Br, "backward": max(Br, Bc), "atomic": Bc}[direction]
    odd = d | 1
    if direction == "forward":
        shared = 2 * Bc * d + Bc * Br
    elif direction == "backward":
        shared = max(2 * Bc * odd + 8 * (2 * d + 2), 2 * 8 * d)
    else:
        shared = 2 * Bc * odd + Br * (2 * d + 3) + Br * Bc
    rows = (3 if direction == "backward" else 2) * d * row_bytes // 4
    registers = math.ceil(min(rows + 128, 255) / 8) * 8
    few = threads <= 1024 and 32 * math.ceil(threads / 32) * registers <= 65_536
    return 2 * shared <= 166_912 and few and rows <= 192


@pytest.mark.parametrize(("n", "d"), [(1024, 64), (1024, 32), (300, 64)])
@pytest.mark.parametrize(("row_bytes", "bits"), [(2, "16 bits"), (4, "32 bits")])
@pytest.mark.parametrize("variant", ["flash2", "flash2, atomics"])
def test_no_tiles_that_fit_move_less(n, d, row_bytes, bits, variant):
    best = left.compute(n=n, d=d, heads=1, batch=1)["best"][f"{variant}, {bits}"]
    moved = 0
    for direction in ("forward", "backward"):
        Br, Bc = best[direction]["Br"], best[direction]["Bc"]
        tiling = "atomic" if (variant, direction) == ("flash2, atomics", "backward") else direction
        assert fits(tiling, Br, Bc, d, row_bytes)
        how = {"n": n, "d": d, "direction": direction, "deterministic": variant == "flash2"}
        mine = nf.predict("flash2", **how, blocks=(Br, Bc)).elements
        others = [(r, c) for r in range(16, 1025, 112) for c in range(16, 1025, 16)]
        others += [(r, c) for r, c in zip(range(16, 1025, 16), range(16, 1025, 16), strict=True)]
        others += [(r, 16) for r in range(16, 1025, 16)]
        for r, c in others:
            if fits(tiling, r, c, d, row_bytes):
                assert nf.predict("flash2", **how, blocks=(r, c)).elements >= mine, (r, c)
        moved += mine
    assert best["bytes"] == 2 * moved


def test_the_best_tiles_and_their_bill_in_closed_form(figures):
    H, N, d = 16 * 64, 1024, 64
    best = figures["best"]["flash2, 16 bits"]
    assert (best["forward"]["Br"], best["backward"]["Br"], best["backward"]["Bc"]) == (256, 256, 256)
    Tr = Tc = 4
    forward = (2 + 2 * Tr) * N * d + N
    rowsum, dKdV = 2 * N * d + N, (2 * Tc + 4) * N * d + 2 * Tc * N
    dQ = (3 + 2 * Tr) * N * d + 2 * N
    assert best["bytes"] == 2 * H * (forward + rowsum + dKdV + dQ)
    assert 5.3 < figures["ideal"]["both"] / best["bytes"] < 5.4


def test_the_shared_memory_is_that_of_the_device_and_not_of_48_KiB(figures):
    best = figures["best"]["flash2, 16 bits"]
    for direction in ("forward", "backward"):
        Br, Bc = best[direction]["Br"], best[direction]["Bc"]
        blocks = Blocks("flash2", Br, Bc, 64, 2, DYNAMIC_SHARED, direction)
        assert best[direction]["shared_bytes"] == blocks.shared_bytes <= DYNAMIC_SHARED
        assert blocks.threads_fit
        assert not blocks.fits  # in static shared memory


def test_threads_fit_until_their_registers_are_too_many():
    few, many = (Blocks("flash2", Br, 16, 64, 2, DYNAMIC_SHARED) for Br in (320, 336))
    assert (few.threads_fit, many.threads_fit) == (True, False)
    assert few.block_registers <= REGISTERS < many.block_registers
    assert not Blocks("tiled", 33, 33, 64, 2, DYNAMIC_SHARED).threads_fit


def test_too_large_a_d_has_no_tiles():
    assert left.compute(n=64, d=128, heads=1, batch=1)["best"]["flash2, 16 bits"]
    found = left.compute(n=64, d=129, heads=1, batch=1)["best"]
    assert (found["flash2, 16 bits"], found["flash2, atomics, 32 bits"]) == (None, None)
    assert found["flash2, atomics, 16 bits"]
    assert set(left.compute(n=64, d=193, heads=1, batch=1)["best"].values()) == {None}
    found = left.compute(n=64, d=10_000, heads=1, batch=1)
    assert found["stages"]["flash"] is None
    assert found["stages"]["tiled"]["products"] == 6


# --- the command ------------------------------------------------------------------------------------------------------


def words(out):
    return " ".join(out.split())


def test_json_holds_every_figure(run, figures):
    status, out, err = run("left --json -")
    assert (status, err) == (0, "")
    assert json.loads(out) == figures


def test_the_page_shows_the_paper_and_ours_side_by_side(run, figures):
    status, out, err = run("left")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["paper,", "standard", "66.6", "40.3", "GB", "41.7"] in lines
    assert ["paper,", "flash", "75.2", "4.4", "GB", "7.3"] in lines
    assert ["x", "1.13", "/", "9.2", "/", "5.7"] in lines
    assert ["ours,", "Algorithms", "0", "and", "3", "837.7", "25.2", "GB", "-"] in lines
    assert ["x", "1.50", "/", "5.3"] in lines
    for name, row in figures["stages"].items():
        assert any(f" {name} " in line and f"{row['flops'] / 1e9:,.1f}" in line for line in out.splitlines())


def test_the_page_says_what_does_and_what_does_not_follow(run):
    out = words(run("left")[1])
    assert "as much as 18.8 N² passes" in out
    assert "there remain 18.0N², 7.0 passes more" in out
    assert "4.4 GB is 32.8 Nd passes" in out
    assert "6 of them, 824.6 GFLOP" in out
    assert "has 7, 962.1 GFLOP" in out
    assert "do not follow from its caption" in out
    assert "flash2 has 9 products" in out
    assert out.count("Conjecture:") == 1


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("--n 2048", "The paper's numbers are left out: they are for N = 1,024, d = 64, 16 heads, batch 64."),
        ("--d 128", "At d = 128 the rows of a thread of flash and flash2 are too much for its registers."),
        ("--d 128", "Rows in 32 bits do not fit."),
        ("--d 200", "No tiles fit: a thread's rows of d = 200"),
        ("--d 10000", "A line of dashes: no tiles fit at d = 10,000."),
    ],
)
def test_another_configuration(run, sizes, says):
    status, out, _ = run(f"left {sizes}")
    assert status == 0
    assert says in words(out)
    assert "66.6" not in out
    assert "Why the paper" not in out
    assert json.loads(run(f"left {sizes} --json")[1])["paper"] is None
