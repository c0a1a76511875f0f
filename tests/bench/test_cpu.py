"""bench runs at tiny sizes and its figures are complete. How fast anything is, no test asks."""

import json
import math
import re
import subprocess

import numpy as np
import pytest

from numba_flash import __main__ as cli
from numba_flash import reference, timing
from numba_flash.bench import cpu as bench
from numba_flash.errors import KernelError
from numba_flash.stages import PORTABLE

FIGURES = {"device", "n", "d", "heads", "dtype", "repeats", "cores", "versions", "numpy", "cpu", "simulator"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")


def positive(*numbers):
    return all(math.isfinite(number) and number > 0 for number in numbers)


def check(figures):
    assert set(figures) == FIGURES
    assert list(figures["cpu"]) == list(PORTABLE)
    for stage in figures["cpu"].values():
        assert stage["equal"] is True
        assert positive(stage["seconds"], stage["times_numpy"])
    assert positive(figures["numpy"]["seconds"])


@pytest.mark.course
def test_the_whole_command(capsys, tmp_path):
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "--n", "9", "--d", "5", "--repeats", "2", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "every bill as predicted" in " ".join(out.split())
    assert "times as fast as the simulator" in out
    assert "On a GPU, this command times" in out
    assert "\x1b" not in out
    assert all(len(line) <= 80 for line in out.splitlines() if str(file) not in line)
    figures = json.loads(file.read_text())
    check(figures)
    assert figures["simulator"]["n"] == 9
    assert positive(*(figures["simulator"][name] for name in ("seconds", "engine_seconds", "times_faster")))


def test_without_the_simulator(capsys, monkeypatch):
    monkeypatch.setattr(bench, "against_simulator", None)
    assert cli.main(["bench", "--n", "4", "--d", "3", "--repeats", "1", "--skip-simulator", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    check(figures)
    assert figures["simulator"] is None


def test_the_simulator_never_runs_beyond_256(monkeypatch):
    monkeypatch.setattr(bench, "on_cpu", lambda *args: {"seconds": 1.0, "equal": True})
    monkeypatch.setattr(bench, "against_simulator", lambda n, d, repeats: n)
    assert [bench.run(n, 2, 1)["simulator"] for n in (None, 100, 300)] == [256, 100, 256]


def test_a_simulator_that_fails_is_one_line(capsys, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no simulator\n")
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **how: failed)
    with pytest.raises(KernelError, match="ImportError: no simulator; --skip-simulator"):
        bench.against_simulator(8, 4, 1)
    assert cli.main(["bench", "--n", "4", "--d", "3", "--repeats", "1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bill_that_is_not_as_predicted_is_said_and_fails(capsys, monkeypatch):
    wrong = {"seconds": 1.0, "equal": False}
    monkeypatch.setattr(bench, "on_cpu", lambda *args: dict(wrong))
    assert cli.main(["bench", "--n", "4", "--d", "3", "--repeats", "1", "--skip-simulator"]) == 1
    assert "PREDICTED AND COUNTED DIFFER: naive, tiled" in " ".join(capsys.readouterr().out.split())


def test_too_much_memory_is_refused(capsys):
    assert cli.main(["bench", "--n", "10000000", "--d", "1"]) == 1
    says = r"bench: error: attention in NumPy: 1\.\d+ PB are needed, and .* are free; --n \d+ fits\n"
    assert re.search(says, capsys.readouterr().err)


def test_inputs_tell_wrong_attention_from_right():
    q, k, v = bench.inputs((2, 200, 64), (1, 300, 64), dtype="float64", seed=3)
    assert q.dtype == k.dtype == v.dtype == np.float64
    assert 2 < reference.scores(q, k).std() < 3
    assert abs(v.mean() - 1) < 0.05
    assert bench.inputs((4, 2), (4, 2))[0].dtype == np.float32


def test_numpy_attention_is_attention():
    q, k, v = bench.inputs((50, 8), (50, 8))
    out = bench.numpy_attention(q, k, v)
    assert out.dtype == np.float32
    assert np.allclose(out, reference.attention(q, k, v)[0], atol=1e-5)


def test_the_median_leaves_out_the_first_call(monkeypatch):
    clock = iter([10, 11, 20, 23, 30, 35])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert bench.median_seconds(lambda: calls.append(1), 3) == 3
    assert len(calls) == 4


@pytest.mark.parametrize("flag", ["--pass decode", "--heads 2", "--batch 2", "--causal", "--stages flash2 naive"])
def test_a_flag_for_a_gpu_is_refused(capsys, flag):
    assert cli.main(["bench", *flag.split()]) == 2
    name = flag.split()[0]
    assert f"{name} is for a GPU, and kernels run on the CPU here: asked for by" in capsys.readouterr().err
