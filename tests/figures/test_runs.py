"""What figures run: counts of one head; on a GPU, played here, times and DRAM, or why not."""

import argparse
import itertools
from functools import partial

import pytest

import numba_flash as nf
from numba_flash import __main__ as cli
from numba_flash import testing
from numba_flash.engine.launch import Device
from numba_flash.errors import KernelError, OutOfMemory
from numba_flash.figures import common, runs
from numba_flash.hbm import profiler
from numba_flash.stages import PORTABLE
from numba_flash.timing import interleaved

SIZES = {"n": 32, "d": 8, "heads": 2, "batch": 3}
PASSES = {
    "naive": {"stage": "naive", "direction": "forward"},
    "naive, both": {"stage": "naive", "direction": "both"},
    "flash2": {"stage": "flash2", "direction": "forward"},
}


@pytest.fixture
def gpu(monkeypatch):
    """The figures believe in a GPU with some free memory; kernels run on the CPU engine, and a clock is faked."""
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    monkeypatch.setattr(runs, "place", lambda: "gpu")
    work = runs.work
    monkeypatch.setattr(runs, "work", lambda stage, given, device, **how: work(stage, given, "cpu", **how))
    monkeypatch.setattr(runs, "to_device", lambda x, device: x)
    monkeypatch.setattr(runs, "free_bytes", lambda device: runs.free)
    monkeypatch.setattr(runs, "free", 10**9, raising=False)
    monkeypatch.setattr(runs, "gpu_name", lambda: "H0")
    monkeypatch.setattr(runs.timing, "idle", lambda: None)

    monkeypatch.setattr(runs.timing, "interleaved", partial(interleaved, clock=lambda one: (one(), next(ticks))[1]))
    ticks = itertools.cycle([0.4, 0.1, 0.2, 0.9, 0.3])
    return monkeypatch


# --- counted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_a_count_is_the_bill_of_the_pass(direction):
    found = runs.count("flash2", n=20, d=4, direction=direction)
    expected = nf.predict("flash2", n=20, d=4, direction=direction).elements
    assert found == {"n": 20, "d": 4, "predicted": expected, "counted": expected, "diff": [], "equal": True}


def test_a_count_takes_tiles_and_atomics():
    atomic = runs.count("flash2", n=20, d=4, direction="both", deterministic=False)
    assert atomic["equal"] and atomic["counted"] != runs.count("flash2", n=20, d=4, direction="both")["counted"]
    few, many = (runs.count("flash", n=20, d=4, blocks=(4, Bc))["counted"] for Bc in (20, 5))
    assert few < many


def test_a_bill_that_differs_is_not_equal_and_says_where(monkeypatch):
    monkeypatch.setattr(runs, "predict", lambda stage, **how: nf.predict(stage, **how | {"n": 21}))
    found = runs.count.__wrapped__("flash2", n=20, d=4, direction="forward")
    assert found["equal"] is False and found["predicted"] != found["counted"]
    assert any(line.startswith("flash2: Q loads") for line in found["diff"])


@pytest.mark.parametrize("name", ["gpu", "cpu", "sim"])
def test_nothing_runs_on_the_simulator(monkeypatch, name):
    monkeypatch.setattr(common, "device", lambda: Device(name, "set"))
    assert common.place() == ("gpu" if name == "gpu" else "cpu")


# --- timed ------------------------------------------------------------------------------------------------------------


def test_passes_are_timed_in_seconds(gpu):
    found = runs.times(SIZES, {"flash2": PASSES["flash2"]})
    expected = {"median": 0.3, "min": 0.1, "max": 0.9}
    assert found == {"gpu": "H0", "repeats": 5, "seconds": {"flash2": expected}, "why": {}}
    assert list(runs.times(SIZES, PASSES)["seconds"]) == list(PASSES)


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    assert runs.times(SIZES, PASSES) is None


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_the_work_is_the_pass_in_float32_at_the_figures_sizes(gpu, direction):
    bills = []

    def clock(works, repeats):
        for one in works.values():
            with nf.ledger() as bill:
                one()
            bills.append(bill)
        return {name: [1.0] for name in works}

    gpu.setattr(runs.timing, "interleaved", clock)
    passes = {
        "flash2": {"stage": "flash2", "direction": direction, "deterministic": direction == "forward"},
        "flash": {"stage": "flash", "direction": "forward", "blocks": (8, 16)},
    }
    runs.times(SIZES, passes)
    assert bills == [nf.predict(**SIZES, **how) for how in passes.values()]


def test_what_does_not_fit_is_left_out_with_a_size_that_fits(gpu):
    gpu.setattr(runs, "free", 60_000)
    found = runs.times(SIZES, PASSES)
    assert list(found["seconds"]) == ["flash2"]
    # Q, K, V, dO and O: 5 · 32 · 8, S and P: 2 · 32², for 6 heads of 4 bytes
    assert found["why"]["naive"] == ("naive, forward, needs 79,872 B of GPU memory; 60,000 B are free: --batch 1 fits")
    assert "naive, forward and backward, needs" in found["why"]["naive, both"]


def test_sizes_that_fit():
    def at_most(limit):
        return lambda sizes: sizes["n"] * sizes["heads"] * sizes["batch"] <= limit

    sizes = {"n": 64, "d": 8, "heads": 4, "batch": 8}
    assert runs.fitting(sizes, at_most(1024)) == "--batch 4"
    assert runs.fitting(sizes, at_most(255)) == "--batch 1 --heads 2"
    assert runs.fitting(sizes, at_most(16)) == "--batch 1 --heads 1 --n 16"
    assert runs.fitting(sizes, at_most(0)) is None


def test_what_would_take_minutes_is_left_out(gpu):
    gpu.setattr(runs, "MOST", 1e5)
    found = runs.times(SIZES, {"flash2": PASSES["flash2"]})
    assert found["seconds"] == {}
    assert "operations, which would run for minutes: --batch 1 fits" in found["why"]["flash2"]


def test_a_pass_that_fails_leaves_the_others(gpu):
    real = runs.attention

    def attention(*args, stage, **how):
        if stage == "naive":
            raise OutOfMemory("123 bytes do not fit on the GPU: 7 bytes are free")
        return real(*args, stage=stage, **how)

    gpu.setattr(runs, "attention", attention)
    found = runs.times(SIZES, {name: PASSES[name] for name in ("naive", "flash2")})
    assert list(found["seconds"]) == ["flash2"]
    assert found["why"] == {"naive": "123 bytes do not fit on the GPU: 7 bytes are free"}


def test_tiles_that_do_not_fit_are_told(gpu):
    found = runs.times(SIZES | {"d": 64}, {"512": {"stage": "flash", "direction": "forward", "blocks": (64, 512)}})
    assert found["seconds"] == {}
    assert "need 393,216 bytes of shared memory, and a block has 49,152" in found["why"]["512"]


def test_too_many_heads_are_told(gpu):
    found = runs.times({"n": 1, "d": 1, "heads": 300, "batch": 300}, {"flash2": PASSES["flash2"]})
    assert "90,000 heads over the batch: a CUDA grid holds 65,535" in found["why"]["flash2"]


# --- measured ---------------------------------------------------------------------------------------------------------


def test_the_launches_of_a_forward_pass_are_the_kernels_of_its_prediction():
    for stage in PORTABLE:
        q, k, v = testing.inputs((9, 4), (9, 4))
        with nf.ledger() as bill:
            nf.attention(q, k, v, stage=stage, device="cpu")
        assert [launch.kernel for launch in bill.launches] == list(nf.predict(stage, n=9, d=4).kernels)


def test_dram_of_each_stage(gpu):
    asked = []

    def measure(flags, launches):
        asked.append((flags, list(launches)))
        return {name: {"launches": 1, "dram_read": 100 * at, "dram_written": at} for at, name in enumerate(launches)}

    gpu.setattr(profiler, "measure", measure)
    found = runs.dram(SIZES, ["naive", "flash2"])
    assert found["why"] == {}
    each = {kernel: {"read": 100 * at, "written": at} for at, kernel in enumerate(("scores", "softmax", "output"))}
    assert found["bytes"]["naive"] == {"read": 300, "written": 3, "kernels": each}
    assert found["bytes"]["flash2"] == {"read": 0, "written": 0, "kernels": {"flash2": {"read": 0, "written": 0}}}
    assert [launches for _, launches in asked] == [["scores", "softmax", "output"], ["flash2"]]


def test_the_process_under_ncu_runs_the_forward_pass_of_the_figure(gpu):
    flags = runs.bill_flags("tiled", SIZES)
    with nf.ledger() as bill:
        assert profiler.main(profiler.to_arguments(flags)) == 0
    assert bill == nf.predict("tiled", **SIZES)
    line = "bill --stage tiled --n 32 --d 8 --heads 2 --batch 3"
    theirs = cli.with_dtype(cli.make_parser().parse_args(line.split()))
    for name in profiler.NOT_PASSED:
        delattr(theirs, name)
    assert flags == argparse.Namespace(**vars(theirs))


def test_a_stage_that_is_not_measured_leaves_the_others(gpu):
    def measure(flags, launches):
        if flags.stage == "tiled":
            raise KernelError("nothing was measured: ncu had not ended")
        return {kernel: {"launches": 1, "dram_read": 1, "dram_written": 1} for kernel in launches}

    gpu.setattr(profiler, "measure", measure)
    found = runs.dram(SIZES, ["naive", "tiled", "flash2"])
    assert list(found["bytes"]) == ["naive", "flash2"]
    assert found["why"] == {"tiled": "nothing was measured: ncu had not ended"}


def test_what_fails_twice_is_not_tried_again(gpu):
    tried = []

    def measure(flags, launches):
        tried.append(flags.stage)
        raise KernelError("nothing was measured: this user may not read the GPU's counters")

    gpu.setattr(profiler, "measure", measure)
    found = runs.dram(SIZES, PORTABLE)
    assert tried == ["naive", "tiled"]
    assert found["bytes"] == {} and list(found["why"]) == list(PORTABLE)
    assert set(found["why"].values()) == {"nothing was measured: this user may not read the GPU's counters"}


def test_what_does_not_fit_is_not_measured(gpu):
    gpu.setattr(runs, "free", 40_000)
    gpu.setattr(profiler, "measure", lambda flags, launches: pytest.fail("it was"))
    found = runs.dram(SIZES, ["naive"])
    assert "needs" in found["why"]["naive"]
