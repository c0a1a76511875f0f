"""`python -m numba_flash`: what each command prints, writes and returns, and what it says to a bad value."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import __main__ as cli
from numba_flash import reference, testing
from numba_flash.dtypes import rounded, widened
from numba_flash.hbm.ledger import Bill

from . import halves

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "lessons", "bill", "figures", "doctor", "bench", "listing", "play", "check", "lab", "exam"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_FLASH_DEVICE": "cpu"}


def command(*args, **more):
    """The command in a process of its own, piped."""
    args = [sys.executable, "-m", "numba_flash", *map(str, args)]
    environment = ENVIRONMENT | more
    return subprocess.run(args, env=environment, capture_output=True, text=True, timeout=120, encoding="utf-8")


@pytest.fixture
def run(capsys, monkeypatch):
    """The command in this process -> exit status, standard output, standard error."""
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*args):
        try:
            status = cli.main([str(arg) for arg in args])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


# --- the command itself -----------------------------------------------------------------------------------------------


def test_without_a_command_it_helps_and_fails(run):
    status, out, err = run()
    assert status == 2
    assert all(name in out for name in COMMANDS)
    assert err == ""


def test_version_and_help(run):
    assert run("--version") == (0, f"numba_flash {nf.__version__}\n", "")
    for name in COMMANDS:
        status, out, _ = run(name, "--help")
        assert status == 0
        assert out.isascii()
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "invalid choice: 'nothing'"),
        ("bill --n -1", "argument --n: '-1' is not valid: give a whole number of 0 or more"),
        ("bill --n 1e6", "'1e6' is not valid"),
        ("bill --d 0", "argument --d: '0' is not valid: give a whole number of 1 or more"),
        ("bill --d 300", "d = 300"),
        ("bill --heads 3 --kv-heads 2", "heads=3 is no multiple of kv_heads=2"),
        ("bill --heads 70000 --n 1", "70,000 heads"),
        ("bill --blocks 64 32 8", "blocks=(64, 32, 8): pass (Br, Bc)"),
        ("bill --stage tiled --blocks 64", "blocks=64: "),
        ("bill --blocks 0", "argument --blocks: '0' is not valid"),
        ("bill --stage naive --blocks 8", "'naive' has no tiles"),
        ("bill --stage flash9", "invalid choice: 'flash9'"),
        ("bill --dtype float8", "invalid choice: 'float8'"),
        ("bill --dtype float16", "dtype='float16': stage 'flash2' takes float32 and float64; pass dtype='float32'"),
        ("bill --stage hopper --dtype float32", "stage 'hopper' takes float16 and bfloat16; pass dtype='float16'"),
        ("bill --stage tensor_core --d 96 --predict-only", "d=96: stage 'tensor_core' takes d = 64 and 128; pad"),
        ("bill --device tpu", "invalid choice: 'tpu'"),
        ("bill --json no/such/folder/file", "the folder of 'no/such/folder/file' does not exist"),
        ("bill --json .", "cannot be written"),
        ("bill --more", "unrecognized arguments: --more"),
        ("bench --n 0", "argument --n: '0' is not valid"),
        ("bench --d 257", "argument --d: '257' is not valid: give a whole number from 1 to 256"),
        ("bench --repeats 0", "argument --repeats: '0' is not valid"),
        ("doctor --json no/such/folder/file", "does not exist"),
        ("lessons 99", "lesson '99' is unknown: the lessons are 00_"),
    ],
)
def test_a_value_that_will_not_do(run, line, says):
    status, out, err = run(*line.split())
    assert status == 2
    assert out == ""
    assert says in err
    assert err.splitlines()[-1].startswith("python -m numba_flash")


@pytest.mark.parametrize(
    "line", ["bill --n 8 --device sim", "bill --stage hopper --device cpu", "bill --stage naive --n 500000"]
)
def test_what_this_machine_cannot_do_is_one_line(run, line):
    status, out, err = run(*line.split())
    assert status == 1
    assert out == ""
    assert err.startswith("python -m numba_flash bill: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", ["--n 1000000", "--stage naive --n 20000", "--n 1 --n-k 10000000000 --split-kv 9"])
def test_a_bill_of_minutes_is_refused(run, line):
    status, out, err = run("bill", "--device", "cpu", *line.split())
    assert (status, out) == (2, "") and "would run for minutes: pass a smaller --n, or --predict-only" in err


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill cannot send Ctrl-C on Windows")
def test_ctrl_c_exits_with_130():
    args = [sys.executable, "-m", "numba_flash", "bill", "--stage", "naive", "--n", "8192", "--d", "256"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(args, env=ENVIRONMENT, **pipes)
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err.strip()) == (130, "", "stopped by Ctrl-C")


LOST = """
import os, signal, sys, time, weakref
from numba_flash import __main__ as cli
def main():
    thing = type("thing", (), {})()
    there = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.NAME), time.sleep(0)))
    del thing                   # the callback swallows what the signal's handler raises
    time.sleep(SECONDS)
    return 0
cli.main = main
sys.exit(cli.script())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends a process on Windows")
@pytest.mark.parametrize(
    ("name", "seconds", "says"),
    [("SIGTERM", 30, ""), ("SIGTERM", 0, ""), ("SIGINT", 30, "stopped by Ctrl-C"), ("SIGINT", 0, "")],
)
def test_a_signal_takes_effect_where_its_exit_is_swallowed(name, seconds, says):
    code = LOST.replace("NAME", name).replace("SECONDS", str(seconds))
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (128 + getattr(signal, name), "", says)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a signal of Unix")
def test_a_signal_that_is_ignored_stays_so():
    code = (
        "import os, signal, sys; from numba_flash import __main__ as cli\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
        "cli.main = lambda: os.kill(os.getpid(), signal.SIGHUP); sys.exit(cli.script())"
    )
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, timeout=25).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error on Windows")
@pytest.mark.parametrize("line", ["--help", "lessons", "bill --predict-only", "bill --n 8 --json"])
def test_a_closed_pipe_is_silent(line):
    reader, writer = os.pipe()
    os.close(reader)
    args = [sys.executable, "-m", "numba_flash", *line.split()]
    done = subprocess.run(args, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.stderr == b""


# --- lessons ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Lessons of our own: {name: text} -> their files."""

    def fill(**lessons):
        for name, text in lessons.items():
            (tmp_path / f"{name.removeprefix('_')}.py").write_text(text)
        files = sorted(tmp_path.glob("*.py"))
        monkeypatch.setattr(cli, "lesson_files", lambda: files)
        return files

    return fill


def test_lessons_are_listed_with_their_titles(run):
    status, out, _ = run("lessons")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:] if line[1:3].isdigit()] == [
        file.stem[:2] for file in sorted((ROOT / "lessons").glob("[0-9]*.py"))
    ]
    assert "Run it with" not in out
    assert "python -m numba_flash lessons 02" in out
    assert max(map(len, out.splitlines())) <= 80


def test_titles(shelf):
    texts = {
        "_00_a": '"""Lesson 00, the first. Run it so."""',
        "_01_b": '# %%\n"""What √d does\n\nMore."""',
        "_02_no_text": "x = 1",
        "_03_broken": "def",
    }
    titles = [cli.title(file) for file in shelf(**texts)]
    assert titles[:3] == ["the first", "What √d does", "no text"]
    assert titles[3].startswith("03_broken.py cannot be read")


@pytest.mark.parametrize("name", ["02", "2", "naive", "Naive", "02_naive", "02_naive.py"])
def test_a_lesson_has_several_names(name):
    assert cli.chosen(name, [Path("00_cuda.py"), Path("02_naive.py")]).stem == "02_naive"


@pytest.mark.parametrize("name", ["3", "nai", "²", "-2", ""])
def test_an_unknown_lesson_is_told_which_there_are(name):
    with pytest.raises(ValueError, match="is unknown: the lessons are 00_cuda, 02_naive"):
        cli.chosen(name, [Path("00_cuda.py"), Path("02_naive.py")])


def test_lessons_are_found_in_a_checkout_and_in_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "numba_flash"
    package.mkdir()
    monkeypatch.setattr(cli, "__file__", str(package / "__main__.py"))
    with pytest.raises(FileNotFoundError, match="no lessons in"):
        cli.lesson_files()
    for folder in (tmp_path / "lessons", package / "lessons"):
        folder.mkdir()
        (folder / "00_cuda.py").touch()
        (folder / "notes.py").touch()
        assert cli.lesson_files() == [folder / "00_cuda.py"]


def test_flags_are_passed_on_and_the_exit_status_comes_back(run, shelf):
    shelf(_00_echo="import sys; print(__name__, sys.argv[1:])", _01_fails="raise SystemExit(3)")
    flags = ["--n", "64", "--json", "-", "x"]
    assert run("lessons", "0", *flags) == (0, f"__main__ {flags}\n", "")
    assert run("lessons", "0", "--help")[1] == "__main__ ['--help']\n"
    assert run("lessons", "fails")[0] == 3


def test_a_slip_in_a_lesson_shows_its_traceback_and_an_error_of_ours_its_line(run, shelf):
    of_ours = "from numba_flash import lesson, predict\nlesson.start('01 · x')\npredict('naive', n=-1, d=2)\n"
    shelf(_00_slip="1 / 0", _01_ours=of_ours)
    status, _, err = run("lessons", "0")
    assert status == 1
    assert "ZeroDivisionError" in err
    status, _, err = run("lessons", "1")
    assert status == 1
    assert err == "01_ours.py, line 3: n=-1 is too small: pass 0 or more\n"


def test_a_lesson_of_the_course_runs(tmp_path):
    file = tmp_path / "figures.json"
    done = command("lessons", "naive", "--n", 40, "--d", 8, "--json", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Lesson 02")
    assert json.loads(file.read_text())["n"] == 40
    done = command("lessons", "02", "--n", "many")
    assert done.returncode == 2
    assert "argument --n: 'many' is not valid" in done.stderr


# --- bill -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
@pytest.mark.parametrize(
    "flags",
    [
        "--n 33 --d 5",
        "--n 9 --n-k 20 --d 7 --heads 4 --kv-heads 2 --batch 2 --return-lse --dtype float64",
        "--n 0",
        "--n 5 --n-k 0 --return-lse",
    ],
)
def test_a_bill_counts_what_it_predicts(run, stage, flags):
    status, out, err = run("bill", "--stage", stage, *flags.split(), "--json")
    assert (status, err) == (0, "")
    figures = json.loads(out)
    assert figures["equal"] is True
    assert figures["diff"] == []
    assert figures["error"] <= figures["bound"]
    problem = {name: figures[name] for name in ("n", "d", "n_k", "heads", "batch", "dtype")}
    more = {name: figures[name] for name in ("kv_heads", "blocks", "return_lse")}
    expected = nf.predict(stage, **problem, **more)
    for kind in ("predicted", "counted"):
        assert type(expected).from_json(json.dumps(figures[kind])) == expected
    assert figures["flops"] == nf.flops(stage, **problem, **more)


def test_a_bill_is_printed_and_written(run, tmp_path):
    file = tmp_path / "bill.json"
    status, out, _ = run("bill", "--stage", "tiled", "--n", 40, "--d", 8, "--blocks", 8, "--json", file)
    assert status == 0
    assert out.splitlines()[0] == " Stage tiled                      N = 40, d = 8, float32, 1 head, T = 8"
    for words in ("predicted", "counted", "diff", "Algorithm 0, ideal", "error against float64", "floating-point"):
        assert words in out
    assert out.endswith(f" written: {file}\n")
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert json.loads(file.read_text())["blocks"] == 8


def test_predict_only_works_at_any_size(run, monkeypatch):
    monkeypatch.setattr(cli, "attention", None)
    status, out, _ = run("bill", "--stage", "naive", "--n", 10**6, "--predict-only")
    assert status == 0
    assert "64,000,000,000,000" in out
    assert "counted  diff" not in out
    figures = json.loads(
        run("bill", "--stage", "tiled", "--n", 10**15, "--d", 1000, "--blocks", 128, "--predict-only", "--json")[1]
    )
    assert "counted" not in figures
    assert figures["predicted"]["kernels"]["softmax"]["S"]["loads"] == 3 * 10**30


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
@pytest.mark.parametrize("direction", ["backward", "both"])
def test_bill_of_the_backward_pass(run, stage, direction):
    flags = ("bill", "--stage", stage, "--n", 37, "--n-k", 29, "--d", 8, "--heads", 4, "--kv-heads", 2)
    status, out, err = run(*flags, "--direction", direction, "--device", "cpu")
    assert (status, err) == (0, "")
    assert out.count("error of d") == 3
    assert out.count("exact") == 3
    figures = json.loads(run(*flags, "--direction", direction, "--device", "cpu", "--dtype", "float64", "--json")[1])
    assert figures["equal"]
    assert set(figures["errors"]) == {"dq", "dk", "dv"}
    assert ("scores" in figures["counted"]["kernels"]) == (stage in ("naive", "tiled", "online_softmax"))


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("sizes", [(37, 37), (37, 21), (21, 37)])
def test_causal_bill(run, direction, sizes, monkeypatch):
    monkeypatch.setattr(cli, "SCORES_AT_ONCE", 5 * 37)
    n, n_k = sizes
    flags = ("bill", "--n", n, "--n-k", n_k, "--d", 8, "--causal", "--direction", direction, "--device", "cpu")
    status, out, _ = run(*flags)
    assert status == 0
    assert "causal" in out and "exact" in out
    assert json.loads(run(*flags, "--dtype", "float64", "--json")[1])["equal"]


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("stage", ["naive", "flash2"])
def test_bill_with_dropout(run, direction, stage, monkeypatch):
    """The reference is compared a few rows, or a head of k, at a time: Z must be that of their place."""
    monkeypatch.setattr(cli, "SCORES_AT_ONCE", 5 * 6 * 37)
    sizes = "--n", 37, "--d", 8, "--heads", 6, "--kv-heads", 2, "--batch", 2
    flags = (
        "bill",
        *sizes,
        "--stage",
        stage,
        "--dropout",
        0.3,
        "--seed",
        5,
        "--direction",
        direction,
        "--device",
        "cpu",
    )
    status, out, _ = run(*flags)
    assert status == 0
    assert "dropout 0.3" in out and "WRONG" not in out
    assert ("Z  " in out) == (stage == "naive")
    assert json.loads(run(*flags, "--dtype", "float64", "--json")[1])["equal"]
    status, _, err = run("bill", "--dropout", 1)
    assert status == 2
    assert "dropout_p=1.0 is no probability" in err


def test_bill_of_decoding(run):
    flags = "bill", "--n", 1, "--n-k", 300, "--d", 8, "--split-kv", 4, "--device", "cpu"
    status, out, _ = run(*flags)
    assert status == 0
    assert "4 splits" in out and "merge_splits" in out and "exact" in out
    status, _, err = run(*flags, "--stage", "flash")
    assert status == 2
    assert "stage 'flash' does not split the keys" in err


def test_bill_with_atomics(run):
    flags = "bill", "--n", 40, "--d", 8, "--direction", "both", "--atomics", "--device", "cpu"
    status, out, _ = run(*flags)
    assert status == 0
    assert "atomics" in out
    status, _, err = run(*flags, "--stage", "flash")
    assert status == 2
    assert "--atomics is for the backward pass of flash2" in err
    assert run("bill", "--n", 40, "--atomics")[0] == 2


def test_scores_that_do_not_fit_are_refused_at_once(run):
    status, _, err = run("bill", "--stage", "naive", "--n", 3_000_000, "--device", "cpu")
    assert status == 1
    assert "S of 3,000,000 × 3,000,000 needs 36,000,000,000,000 B" in err


def test_flags_of_a_figure_without_its_name(run):
    status, _, err = run("figures", "--n", 5)
    assert status == 2
    assert "--n is for a figure: name one" in err


def test_a_difference_or_a_wrong_result_is_exit_status_1(run, monkeypatch):
    small = ("bill", "--n", "8", "--d", "4")
    monkeypatch.setattr(cli, "predict", lambda stage, **sizes: nf.predict(stage, **{**sizes, "n": 9}))
    status, out, _ = run(*small)
    assert status == 1
    assert "differs" in out
    assert json.loads(run(*small, "--json")[1])["diff"]
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    for fault in (1e-3, np.nan):
        monkeypatch.setattr(cli, "attention", lambda *args, **how: nf.attention(*args, **how) + np.float32(fault))  # noqa: B023
        status, out, _ = run(*small, "--stage", "naive")
        assert status == 1
        assert "WRONG" in out


def test_the_error_is_that_of_the_whole_however_many_rows_are_compared_at_once(monkeypatch):
    q, k, v = cli.exactness.inputs((1, 2, 50, 8), (1, 1, 30, 8))
    scale = float(np.float32(0.3))
    naive, tiled = (nf.attention(q, k, v, stage=stage, scale=scale, device="cpu") for stage in ("naive", "tiled"))
    expected = reference.attention(q, k, v, scale)[0]
    own, error = (np.abs(out - expected).max() for out in (naive, tiled))
    monkeypatch.setattr(cli, "SCORES_AT_ONCE", 7 * 2 * 30)
    flags = argparse.Namespace(causal=False, dropout=0.0, seed=0)
    flags.stage = "tiled"
    found = cli.errors(flags, tiled, q, k, v, scale, "cpu")
    assert found == pytest.approx((error, own, testing.bound(expected, own, n_k=30)))
    flags.stage = "naive"
    found = cli.errors(flags, naive, q, k, v, scale, "cpu")
    assert found == (pytest.approx(own), None, pytest.approx(testing.naive_bound(q, k, v, scale)))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    limit = testing.bound(expected, dtype="float64", max_score=np.abs(reference.scores(q, k, scale)).max())
    found = cli.errors(flags, expected, q, k, v, scale, "cpu")
    assert found == (pytest.approx(0, abs=1e-14), None, pytest.approx(limit))


def test_output_is_ascii_where_there_is_no_unicode():
    for line in ("lessons", "bill --n 8 --d 4", "lessons 99"):
        done = command(*line.split(), PYTHONIOENCODING="ascii")
        assert (done.stdout + done.stderr).isascii()
        assert "\x1b" not in done.stdout
        assert max(map(len, done.stdout.splitlines()), default=0) <= 80


@pytest.mark.parametrize("stage", ["tensor_core", "hopper"])
def test_a_bill_of_halves_is_predicted_without_a_gpu(run, stage):
    status, out, _ = run("bill", "--stage", stage, "--n", 1000, "--causal", "--predict-only", "--json")
    assert status == 0
    predicted = nf.predict(stage, n=1000, d=64, causal=True, dtype="float16")
    assert Bill.from_json(json.dumps(json.loads(out)["predicted"])) == predicted
    status, out, _ = run("bill", "--stage", stage, "--n", 1000, "--dtype", "bfloat16", "--predict-only")
    assert status == 0 and "elements of 2 and 4 bytes" in out and "bfloat16" in out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wrong", [False, True])
def test_errors_of_halves(monkeypatch, dtype, wrong):
    """The figures that a bill shows: of the emulation, within the bound; of one with an element that is off, beyond."""
    halves.install(monkeypatch, "hopper")
    flags = argparse.Namespace(n=70, n_k=133, d=64, heads=4, kv_heads=2, batch=2, dtype=dtype, seed=0, causal=True,
                               stage="hopper", direction="forward", dropout=0.0, return_lse=False, split_kv=None,
                               blocks=None, atomics=False)  # fmt: skip
    given, work = cli.prepare(flags, "cpu")
    out = work()
    if wrong:
        out = rounded(widened(out) + 0.2 * (np.arange(out.size) == 999).reshape(out.shape), dtype)
    error, naive, limit = cli.errors(flags, out, *given, "cpu")
    assert naive is None and (error > limit) == wrong and 0 < limit < 0.1
    flags.direction = "both"
    given, work = cli.prepare(flags, "cpu")
    gradients = list(work())
    if wrong:
        gradients[1] = rounded(widened(gradients[1]) * 1.5, dtype)
    found = cli.gradient_errors(flags, gradients, *given, "cpu")
    assert [error > limit for error, _, limit in found.values()] == [False, wrong, False]
    assert all(naive is None for _, naive, _ in found.values())
