"""Figure 2 (left): the yardstick and the stages against `predict`, the best tiles against all others, what is said."""

import json
import math

import pytest

import numba_flash as nf
from numba_flash.blocks import Blocks
from numba_flash.engine.model import DYNAMIC_SHARED, REGISTERS
from numba_flash.figures import command, left
from numba_flash.stages import PORTABLE


@pytest.fixture(scope="module")
def figures():
    return left.compute(**left.PAPER, run=False)


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
    found = left.compute(**sizes, run=False)["stages"]
    assert list(found) == [*PORTABLE, "flash2, atomics"]
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
    assert left.compute(n=n, d=d, heads=1, batch=1, run=False)["stages"][stage]["both"] == 2 * bill.elements


def test_products(figures):
    assert {name: row["products"] for name, row in figures["stages"].items()} == {
        "naive": 6, "tiled": 6, "online_softmax": 6, "flash": 7, "flash2": 9, "register_tiled": 9, "flash2, atomics": 7,
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
    best = left.compute(n=n, d=d, heads=1, batch=1, run=False)["best"][f"{variant}, {bits}"]
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
    assert left.compute(n=64, d=128, heads=1, batch=1, run=False)["best"]["flash2, 16 bits"]
    found = left.compute(n=64, d=129, heads=1, batch=1, run=False)["best"]
    assert (found["flash2, 16 bits"], found["flash2, atomics, 32 bits"]) == (None, None)
    assert found["flash2, atomics, 16 bits"]
    assert set(left.compute(n=64, d=193, heads=1, batch=1, run=False)["best"].values()) == {None}
    found = left.compute(n=64, d=10_000, heads=1, batch=1, run=False)
    assert found["stages"]["flash"] is None
    assert found["stages"]["tiled"]["products"] == 6


# --- the command ------------------------------------------------------------------------------------------------------


def words(out):
    return " ".join(out.split())


def test_json_holds_every_figure(run, figures):
    status, out, err = run("left --predict-only --json -")
    assert (status, err) == (0, "")
    assert json.loads(out) == figures


def test_the_page_shows_the_paper_and_ours_side_by_side(run, figures):
    status, out, err = run("left --predict-only")
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
    out = words(run("left --predict-only")[1])
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
    status, out, _ = run(f"left --predict-only {sizes}")
    assert status == 0
    assert says in words(out)
    assert "66.6" not in out
    assert ("flash2 is in the largest tiles" in words(out)) is ("ours, flash2" in out)
    assert ("those that move least" in words(out)) is ("ours, flash2" in out)
    assert "Why the paper" not in out
    assert json.loads(run(f"left {sizes} --json")[1])["paper"] is None


# --- what is counted, timed and measured ------------------------------------------------------------------------------


def test_each_stage_is_counted_at_one_head(run):
    status, out, err = run("left --n 3000 --heads 2")
    assert (status, err) == (0, "")
    found = json.loads(run("left --n 3000 --heads 2 --json")[1])
    assert found["equal"] is True and found["device"] == "cpu" and found["times"] is None
    assert list(found["counted"]) == [*PORTABLE, "flash2, atomics"]
    for name, row in found["counted"].items():
        stage, deterministic = left.VARIANTS[name]
        expected = nf.predict(stage, n=64, d=8, direction="both", deterministic=deterministic).elements
        assert (row["n"], row["d"], row["counted"]) == (64, 8, expected)
        assert [*name.split(), *[f"{expected:,}"] * 2, "0"] in [line.split() for line in out.splitlines()]
    assert "N = 64, d = 8, 1 head, float32, both passes" in words(out)
    assert "Predicted and counted are equal, tensor by tensor." in words(out)


def test_predict_only_counts_nothing(run, monkeypatch):
    monkeypatch.setattr(left.runs, "count", None)
    status, out, _ = run("left --predict-only")
    assert status == 0
    assert "Counted" not in out
    found = json.loads(run("left --predict-only --json")[1])
    assert (found["counted"], found["equal"], found["device"]) == (None, None, None)


def test_a_count_that_differs_is_exit_status_1(run, monkeypatch):
    real = left.runs.count

    def count(stage, **how):
        return real(stage, **how) | ({"equal": False, "diff": ["S loads"]} if stage == "tiled" else {})

    monkeypatch.setattr(left.runs, "count", count)
    status, out, _ = run("left")
    assert status == 1
    assert "PREDICTED AND COUNTED DIFFER:\n     tiled: S loads\n" in out
    assert json.loads(run("left --json")[1])["equal"] is False


def spread(ms):
    return {"median": ms / 1000, "min": 0.9 * ms / 1000, "max": 1.1 * ms / 1000}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU without memory for naive, slow in register_tiled; online_softmax moves as much as tiled."""
    asked = {}

    def times(sizes, passes):
        asked["times"] = sizes, passes
        ms = dict(zip(PORTABLE, (400, 90, 80, 70, 30, 33.5), strict=True))
        seconds = {f"{name} {part}": spread(x) for name, x in ms.items() for part in ("forward", "both")}
        seconds["flash2, atomics both"] = spread(99)
        for part in ("forward", "both"):
            del seconds[f"naive {part}"]
        why = dict.fromkeys(("naive forward", "naive both"), "it needs 9 B; 7 B are free: --batch 2 fits")
        return {"gpu": "H0", "repeats": 5, "seconds": seconds, "why": why}

    def dram(sizes, stages):
        asked["dram"] = sizes, list(stages)
        gb = dict(zip(PORTABLE, (90, 20, 20, 8, 3, 2), strict=True))
        moved = {name: {"read": x * 10**9 - 7, "written": 7, "kernels": {}} for name, x in gb.items()}
        return {"bytes": moved, "why": {}}

    monkeypatch.setattr(left.runs, "times", times)
    monkeypatch.setattr(left.runs, "dram", dram)
    monkeypatch.setattr(command.profiler, "refuse", lambda **how: None)
    return asked


def test_the_gpus_page(run, gpu):
    status, out, err = run("left --measure")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    bytes_of = {name: left.size(nf.predict(name, **left.PAPER).total_bytes).split() for name in PORTABLE}
    assert ["naive", *bytes_of["naive"], "90.0", "GB", "-", "-", "-"] in lines
    assert ["tiled", *bytes_of["tiled"], "20.0", "GB", "90", "90", "81", "to", "99"] in lines
    assert [line[0] for line in lines if line[1:3] in bytes_of.values() and len(line) > 6] == list(PORTABLE)
    out = words(out)
    assert "DRAM bytes: not less in online_softmax, 20.0 GB, than in tiled, 20.0 GB." in out
    assert "The time of the forward pass: not less in register_tiled, 33.5 ms, than in flash2, 30 ms." in out
    assert "Predicted bytes: not less in register_tiled" in out
    assert "Not timed: naive forward, naive both. it needs 9 B; 7 B are free: --batch 2 fits" in out


def test_what_is_asked_of_the_gpu(run, gpu):
    run("left --measure --batch 2")
    sizes, passes = gpu["times"]
    assert sizes == left.PAPER | {"batch": 2}
    assert list(passes) == [f"{name} {part}" for name in PORTABLE for part in ("forward", "both")] + [
        "flash2, atomics both"
    ]
    assert passes["flash2, atomics both"] == {"stage": "flash2", "direction": "both", "deterministic": False}
    assert gpu["dram"] == (sizes, list(PORTABLE))
    gpu.clear()
    run("left")
    assert list(gpu) == ["times"]


def test_a_measurement_that_fails_is_exit_status_1_after_the_page(run, gpu, monkeypatch, tmp_path):
    why = dict.fromkeys(PORTABLE, "nothing was measured: this user may not read the GPU's counters")
    monkeypatch.setattr(left.runs, "dram", lambda sizes, stages: {"bytes": {}, "why": why})
    status, out, err = run(f"left --measure --csv {tmp_path}/left.csv")
    assert status == 1
    assert err == f"python -m numba_flash figures: error: {why['naive']}\n"
    assert "tiled" in out and "On the GPU" in out and "90" in out
    assert f"DRAM not measured: {', '.join(PORTABLE)}. nothing was measured: this user may not" in words(out)
    assert (tmp_path / "left.csv").exists()


def test_falls():
    assert list(left.falls("x", {"a": 3, "b": 2, "c": 1}, str)) == ["x: less at every step."]
    (same,) = left.falls("x", {"a": 1000, "b": 999}, str)
    assert same == "x: not less in b, 999, than in a, 1000."
    assert list(left.falls("x", {"a": 3, "b": 3, "c": 4}, str)) == [
        "x: not less in b, 3, than in a, 3.",
        "x: not less in c, 4, than in b, 3.",
    ]
    assert list(left.falls("x", {"a": 3}, str)) == list(left.falls("x", {}, str)) == []


@pytest.mark.course
def test_every_stage_at_the_papers_N_and_d(monkeypatch):
    monkeypatch.setattr(left, "RUN", {"n": 1024, "d": 64})
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    found = left.compute(**left.PAPER)
    assert found["equal"] is True
    assert {(row["n"], row["d"]) for row in found["counted"].values()} == {(1024, 64)}
