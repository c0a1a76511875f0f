"""Every lesson in a short form, as a learner runs it: in a process of its own."""

import html
import json
import math
import os
import random
import re
import runpy
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32

import numba_flash as nf
from numba_flash import dropout, lesson, report
from numba_flash.course.exam_questions import numbers
from numba_flash.course.exercises import EXERCISES
from numba_flash.figures import runs
from numba_flash.figures.measured import KERNELS
from numba_flash.hbm.ledger import Bill
from numba_flash.timing import spread

from . import answers

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(path.name for path in (ROOT / "lessons").glob("[0-9][0-9]_*.py"))
SHORT = ("--n", "64", "--d", "16")
FAULTS = {"00": ["OutOfBounds", "RaceDetected", "BarrierDivergence"], "03": ["RaceDetected", "RaceDetected"]}
LIMIT = 120  # seconds for one process
KEYS = {"lesson", "n", "d", "heads", "blocks", "seed", "device", "bills", "errors", "faults"}
unix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal or signals of Unix")


@pytest.fixture
def as_in_the_background():
    """These tests ignore Ctrl-C themselves, as they do where a script starts them in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def environment(**more):
    plain = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PYTHONIOENCODING")}
    return plain | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | more


def heed_ctrl_c():
    """In a child: a script's background job (`python -m pytest &`) ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(command, **how):
    """A process that heeds Ctrl-C, for the body of a `with`; killed if it still runs then, its pipes closed."""
    if sys.platform != "win32":
        how["preexec_fn"] = heed_ctrl_c
    process = subprocess.Popen(command, cwd=ROOT, **how)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()
        process.wait(timeout=LIMIT)


def finished(command, *, env=None, **how):
    """Run a command to its end -> (status, output, errors)."""
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    with started(command, env=env or environment(), encoding="utf-8", **how) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err


def lesson_command(name, *flags):
    return [sys.executable, os.path.join("lessons", name), *flags]


def run(name, *flags, **how):
    return finished(lesson_command(name, *flags), **how)


def agrees(out):
    """Whether no bill has a difference, and no output is wrong."""
    return not re.search(r"  differs$|WRONG", out, re.MULTILINE)


@cache
def short(name):
    """(status, output, errors) of the short form, run once."""
    return run(name, *SHORT)


def test_the_lessons_are_there():
    assert LESSONS[:4] == ["00_cuda.py", "01_memory_bound.py", "02_naive.py", "03_tiled.py"]
    assert LESSONS[4:8] == ["04_online_softmax.py", "05_flash.py", "06_what_it_is_not.py", "07_backward.py"]
    assert LESSONS[8:] == ["08_masks.py", "09_dropout.py", "10_block_sparse.py", "11_decoding.py"] + [
        "12_register_tiled.py",
        "13_figures.py",
    ]


# --- what a lesson prints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LESSONS)
def test_output(name):
    status, out, err = short(name)
    assert (status, err) == (0, "")
    assert out.startswith(f" Lesson {name[:2]} ")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= report.WIDTH
    assert "HBM bill" in out and "Check yourself" in out and re.search("rror (of dq )?against float64", out)
    assert not re.search(r"\b(simply|just|easy|easily|obviously|of course)\b", out, re.IGNORECASE)
    assert agrees(out)


@pytest.mark.parametrize("name", [name for name in LESSONS if name != "13_figures.py"])  # which has none
def test_it_names_its_exercises(name):
    end = " ".join(short(name)[1].split("Check yourself")[1].split())
    names = [exercise.name for exercise in EXERCISES.values() if exercise.lesson == name[:2]]
    one = len(names) == 1
    assert names and f"Exercise{'s' * (not one)}: {', '.join(names)}. Copy {'it' if one else 'them'}, fill" in end
    assert f"python -m numba_flash check work/{names[0]}.py" in end


@pytest.mark.parametrize("name", LESSONS)
def test_a_question_comes_before_its_answer(name):
    """Each has its own line with a question mark, a request to write, and a break before the figures."""
    out = " ".join(short(name)[1].split())
    breaks = re.findall(
        r"(Question \d+\..{,600})Write your answer down before you read on\.(.{,60}) ─+ the answer ─+ (Answer \d+: )",
        out,
    )
    assert len(breaks) == out.count("─ the answer ─") >= 1
    assert [bool(more) for _, more, _ in breaks] == [True] + [False] * (len(breaks) - 1)
    asked, told = (re.findall(rf"{word} (\d+)[.:] ", out) for word in ("Question", "Answer"))
    assert asked == told == [str(number + 1) for number in range(len(answers.ANSWERS[name[:2]]))]
    assert len(asked) >= 2


@pytest.mark.parametrize("name", LESSONS)
def test_what_is_counted_is_said_once(name):
    out = " ".join(short(name)[1].split())
    assert out.count("One access of one element of a kernel argument by one thread = one load or store.") == 1


def test_names_of_a_listing_are_explained_before_it():
    """In backquotes, in this lesson or an earlier one, or by the line that defines them."""
    names = ["weight", "allowed", "keep", "visited", "seen", "first", "load_or_zero"]
    names += ["mask", "block_mask", "g", "b", "acc", "real", "p_drop"]
    explained = set()
    for name in LESSONS:
        for line in short(name)[1].splitlines():
            explained |= set(re.findall(r"`(\w+)", line)) | set(re.findall(r"\bdef (\w+)\(", line))
            code = re.match(r" +\d+  (.*?)(  #|$)", line)
            calls = r"(?=\()" if re.search(r"\bdef ", line) else ""  # of a header, whose arguments come with it
            used = set(re.findall(rf"\b(?:{'|'.join(names)})\b(?! {{2}}){calls}", code[1])) if code else set()
            if code and re.search(r"[=(]", code[1]):
                assert used <= explained, (name, line)
    assert set(names) <= explained


def test_a_comment_above_its_line_is_explained_in_the_first_listing_that_has_one():
    explained = "with a number before a colon"
    first = next(name for name in LESSONS if re.search(r"^ +# \d+: ", short(name)[1], re.MULTILINE))
    assert [name for name in LESSONS if explained in " ".join(short(name)[1].split())] == [first]
    out = " ".join(short(first)[1].split())
    number, said = re.search(r"# (\d+: .*?) \1? ?", out)[1].split(": ")[0], out.index(explained)
    assert said < out.index(f"# {number}: ") and f'such as "{number}: Alg. 0, l. 1"' in out


def test_what_comes_later_is_named():
    for name in LESSONS:
        assert not re.search(r"\b[Aa] later (stage|lesson (measures|mends))", " ".join(short(name)[1].split())), name


def test_what_flash2_keeps_has_four_bytes_as_in_the_exam():
    table = short("07_backward.py")[1].split("What is kept between the passes")[1]
    flash2 = re.search(r"^ flash2 +L +[\d,]+ +(.+)$", table, re.MULTILINE)[1]
    question = numbers.kept_between(random.Random(1))
    facts, flash2_keeps = question["facts"], question["parts"][1]
    assert flash2 == report.in_bytes(4 * 65_536 * 8 * 16)
    assert "those of L 4 (float32)" in question["text"]
    assert flash2_keeps.expected == 4 * facts["n"] * facts["heads"] * facts["batch"]


def test_signs_are_explained_where_they_come_first():
    """rowsum and the product element by element, before the exercise on them: "The derivation" in lesson 07."""
    out = " ".join(short("07_backward.py")[1].split())
    derivation = out[: out.index("3. Standard: keep P")]
    assert "rowsum(dO ∘ O): ∘ is the product element by element, and rowsum the sum of each row" in derivation
    assert out.index("∘") == derivation.index("∘")


def test_numbered_algorithms_are_introduced_before_the_listing():
    """Alg. 1 means another paper's in the second half of lesson 05."""
    out = " ".join(short("05_flash.py")[1].split())
    first, second = (out[out.index(title) :] for title in ("2. Algorithm 1", "7. FlashAttention-2's kernel"))
    first, second = (part[: part.index("cuda.shared.array")] for part in (first, second))
    assert '"Alg. 1" in a comment is the table above' in first and '"Alg. 2, l. 14" is' in first
    assert re.search('"Alg. 1" is that of the FlashAttention-2 paper', second)
    assert '"Alg. 2 of the paper, l. 14" is' in second and '"Alg. 5 of the paper, l. 8" ' in second
    for name in ("09_dropout.py", "10_block_sparse.py"):
        out = " ".join(short(name)[1].split())
        assert "lesson 05, part 7" in out[: out.index("# Alg. 1, l. ")]


@pytest.mark.parametrize("name", LESSONS)
def test_check_yourself_can_be_checked(name):
    end = short(name)[1].split("Check yourself")[1].split("Exercise")[0]
    assert re.search(r"nf\.|--\w|line 12 of the\s+table", end)
    program = "\n".join(re.findall("^ {5}(.*)$", end, re.MULTILINE))
    if program and "..." not in program and "=T)" not in program:
        exec(program, {})


@pytest.mark.parametrize("flags", [(), pytest.param(("--blocks", "16,8"), marks=pytest.mark.course)], ids=" ".join)
def test_what_the_check_of_lesson_07_comes_to(flags):
    out = " ".join((run("07_backward.py", *SHORT, *flags) if flags else short("07_backward.py"))[1].split())
    blocks = (16, 8) if flags else None
    assert f'direction="backward"{", blocks=(16, 8)" if flags else ""})' in out
    bill = nf.predict("flash2", n=64, d=16, direction="backward", blocks=blocks).kernels["backward_dQ"]
    change = 2 * 64**2 - sum(bill[tensor].loads for tensor in ("Q", "dO", "V", "L", "D"))
    assert f"last three digits are {abs(change) % 1000:03}." in out and f"{abs(change):,}" not in out


@pytest.mark.parametrize("name", ["00_cuda.py", "03_tiled.py"])
def test_a_fault_on_purpose_is_introduced(name):
    lines = short(name)[1].splitlines()
    kinds = r" +(OutOfBounds|RaceDetected|BarrierDivergence): "
    faults = [at for at, line in enumerate(lines) if re.match(kinds, line)]
    assert len(faults) == len(FAULTS[name[:2]])
    assert all(lines[at - 2] == " The engine stops it, as intended here, and says:" for at in faults)
    assert re.search(r"\(line \d+ of \w+\.py with line \d+ removed\), block \(", " ".join(" ".join(lines).split()))


def commands(out):
    """The commands to try that a lesson prints; a backslash at the end of a line joins the next."""
    return re.findall(r"^ +python (lessons/\S+\.py .*)$", re.sub(r" \\\n +", " ", out), re.MULTILINE)


NOUNS = "heads?|threads?|blocks?|elements?|columns?|rows?|loads?|stores?|times|tiles?|FLOPs?"
A_FOR_PER = rf"(?<!Which )\b({NOUNS}|once|one) an? (thread|block|element|tile|column|row|byte)\b"
WRONG_PLURAL = r"(?<![\d.,×=*/+-] )(?<![\d.,])\b1 (heads|threads|blocks|elements|columns|rows|loads|stores|tiles)\b"


@pytest.mark.parametrize("name", LESSONS)
def test_wording(name):
    check_wording(short(name)[1], " ".join(SHORT))


def check_wording(out, flags):
    """'per' and not 'a', singulars, and no run that suggests itself."""
    text = " ".join(out.split())
    assert not re.search(A_FOR_PER, text)
    assert not re.search(WRONG_PLURAL, text)
    for command in commands(out):
        assert set(zip(*[iter(re.split("[ =]", command)[1:])] * 2)) != set(zip(*[iter(flags.split())] * 2))


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--n 1 --d 1", marks=pytest.mark.course),
        pytest.param("--n 33 --d 7 --heads 3 --blocks 5 --seed 7 --device cpu", marks=pytest.mark.course),
    ],
)
def test_unusual_sizes_in_ascii(name, flags):
    status, out, err = run(name, *flags.split(), env=environment(PYTHONIOENCODING="ascii"))
    assert (status, err) == (0, "")
    check_wording(out.replace(" x 1 ", " × 1 "), flags)
    assert agrees(out)
    assert out.isascii() and not re.search(r"\?(?!\s)", out)  # nothing that ASCII cannot say
    assert not re.search(r"\^\d[a-z(]", out)  # N^2d would be N to the power 2d
    assert max(map(len, out.splitlines())) <= report.WIDTH


@pytest.mark.course
@pytest.mark.parametrize("name", LESSONS)
def test_commands_to_try_run(name):
    found = commands(short(name)[1])
    assert len(found) >= 2
    for command in found:
        script, *flags = shlex.split(command)
        status, out, err = run(Path(script).name, *flags)
        assert (status, err) == (0, "")
        for value in ("64", "16"):
            assert value in flags or len(flags) == 4  # the learner's own flags stay
        assert out != short(name)[1]


def figures(name, tmp_path, *flags):
    """What --json writes, and the output."""
    file = tmp_path / "figures.json"
    status, out, err = run(name, *flags, "--json", str(file))
    assert (status, err) == (0, "")
    return json.loads(file.read_text()), out


ROWS = [(1, 3, 2, 0, 5, 1, 0, 4), (0, 0, 0, 0, 500)]


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(r, marks=pytest.mark.course) for r in ((-300,) * 3, (7,)))])
def test_the_trace_of_a_row(tmp_path, row):
    written = ",".join(map(str, row))
    found, out = figures("04_online_softmax.py", tmp_path, *SHORT, f"--row={written}")
    S, V = np.array(row, float), np.arange(1, len(row) + 1)
    for (m, l, O), keys in zip(found["trace"], [*range(2, len(row), 2), len(row)], strict=True):
        P = np.exp(S[:keys] - S[:keys].max())
        np.testing.assert_allclose((m, l, O), (S[:keys].max(), P.sum(), P @ V[:keys] / P.sum()), rtol=1e-13)
    if row != (1, 3, 2, 0, 5, 1, 0, 4):
        assert f"--row={written} --blocks 32" in "\n".join(commands(out))
    assert re.search(r"^ -300, -300, -300, -300 +nan +nan +2.5 +2.5 +2.5 +2.5$", out, re.MULTILINE)
    assert re.search(r"^ +add_tile +m = 2 +l = nan$", out, re.MULTILINE)


def test_flash_in_tiles_of_its_own(tmp_path):
    found, out = figures("05_flash.py", tmp_path, *SHORT, "--blocks", "16,8")
    assert found["blocks"] == [16, 8]
    assert "--n 64 --d 16 --blocks=16,4" in " ".join(out.split())
    assert "--blocks=16,8 --d 8" in " ".join(out.split())
    for stage, blocks in (("flash", (16, 8)), ("flash2", (16, 8))):
        predicted = Bill.from_json(json.dumps(found["bills"][stage]["predicted"]))
        assert predicted == nf.predict(stage, n=64, d=16, blocks=blocks)
    assert list(found["errors"]) == ["naive", "tiled", "online_softmax", "flash", "flash2"]


def counted_is_predicted(bills):
    return Bill.from_json(json.dumps(bills["counted"])) == Bill.from_json(json.dumps(bills["predicted"]))


def test_the_backward_pass(tmp_path):
    found, out = figures("07_backward.py", tmp_path, "--n", "96", "--d", "16", "--heads", "2", "--blocks", "32,16")
    for stage in ("flash", "flash2"):
        assert counted_is_predicted(found["bills"][stage])
    assert found["owners"] == {"different": [1, 1, 1], "spread": 0}
    assert found["atomics"]["different"][0] > 1
    assert found["atomics"]["different"][1:] == [1, 1]
    assert 0 < found["atomics"]["spread"] < 1e-4
    assert len(re.findall(r"error of d[qkv] against float64 .* exact$", out, re.MULTILINE)) == 6
    forward, both = (nf.predict("flash2", n=96, d=16, heads=2, direction=part) for part in ("forward", "both"))
    assert f"{forward.elements:,}" in out
    assert f"{nf.flops('flash', n=96, d=16, heads=2, direction='both'):,}" in out
    assert both.elements > forward.elements


def test_the_masks(tmp_path):
    found, out = figures("08_masks.py", tmp_path, "--n", "100", "--d", "16", "--heads", "2", "--blocks", "16,8")
    both = found["bills"]["flash2, causal"]
    assert counted_is_predicted(both)
    assert both["counted"]["kernels"]["flash2"]["K"]["loads"] == 2 * 16 * (sum(range(16, 97, 16)) + 100)
    assert "bit for bit" in out
    assert re.search(r"^ +0 +-inf +0 0 0 0 +0 0 0 0$", out, re.MULTILINE)
    assert re.search(r"^ +/ / \. \.", out, re.MULTILINE)


def test_dropout(tmp_path):
    flags = "--n", "100", "--d", "16", "--heads", "2", "--blocks", "16,8", "--drop", "30", "--seed", "5"
    found, out = figures("09_dropout.py", tmp_path, *flags)
    assert all(map(counted_is_predicted, found["bills"].values()))
    added = Bill.from_json(json.dumps(found["bills"]["naive, dropout"]["counted"]))
    assert list(added.kernels) == ["dropout", "dropout_backward"]
    assert (added.elements, added.total_bytes) == (6 * 2 * 100**2, 18 * 2 * 100**2)
    assert len(re.findall(r"error of (?:out|d[qkv]) against float64 .* exact$", out, re.MULTILINE)) == 4
    assert found["drop"] == 30 and found["mean of Z"] == pytest.approx(dropout.to_dense(5, 0.3, 2, 100, 100).mean())
    same = re.findall(r"^ (naive|tiled|online_softmax|flash2?) +(?:-|\d+ × \d+) +(\d+) +(\d+)$", out, re.MULTILINE)
    assert [stage for stage, *_ in same] == ["naive", "tiled", "online_softmax", "flash", "flash2", "flash2"]
    assert {figure for _, *differ in same for figure in differ} == {"0"}
    assert "L is the same bit for bit." in out
    picture = [line.split()[0] for line in out.splitlines() if re.fullmatch(r" [■·]{16} +[■·]{16} +[■·]{16}", line)]
    Z = dropout.to_dense(5, 0.3, 1, 16, 16)[0]
    assert picture == ["".join("■" if z else "·" for z in row) for row in Z]


@pytest.mark.parametrize("blocks", [("--blocks", "16,8"), ("--blocks", "8,12"), ()], ids=" ".join)
def test_block_sparse(tmp_path, blocks):
    found, out = figures("10_block_sparse.py", tmp_path, "--n", "100", "--d", "16", "--heads", "2", *blocks)
    assert list(found["bills"]) == ["local", "local, step"]
    assert all(map(counted_is_predicted, found["bills"].values()))
    assert len(re.findall(r"error of (?:out|d[qkv]) against float64 .* exact$", out, re.MULTILINE)) == 4
    assert all(found[f"{name}, away from dense"] > 0.1 for name in ("local", "strided", "butterfly"))
    Br, Bc = (int(side) for side in blocks[1].split(",")) if blocks else (13, 13)  # an eighth of N
    Tr, Tc = -(-100 // Br), -(-100 // Bc)
    loads = found["bills"]["local"]["counted"]["kernels"]["flash2"]
    assert loads["block_mask"]["loads"] == 2 * Tr * Br * Tc
    keys = np.repeat(nf.patterns.local(100, 100, (Br, Bc)), Bc, axis=1)[:, :100].sum()
    assert loads["K"]["loads"] == loads["V"]["loads"] == 2 * 16 * keys


def test_the_traffic_of_block_sparse_is_linear(tmp_path):
    """Each line of the fit, and its two lines by the closed forms."""
    found, out = figures("10_block_sparse.py", tmp_path, *SHORT)
    rows = re.findall(r"^ (\d\.\d) +([\d,]+) +([\d,]+) +(\S+) +([\d,]+) +([\d,]+) +(\S+)$", out, re.MULTILINE)
    assert [row[0] for row in rows] == [f"{tenth / 10:.1f}" for tenth in range(1, 11)]
    none, all_ = np.zeros((20, 20), bool), np.ones((20, 20), bool)
    for to, direction in enumerate(("forward", "both")):
        start, end = (
            nf.predict("flash2", n=320, d=64, blocks=(16, 16), block_mask=mask, direction=direction).elements
            for mask in (none, all_)
        )
        assert found["lines"][to] == pytest.approx([start, end - start])
        for s, *figured in rows:
            counted, fitted, residual = figured[3 * to : 3 * to + 3]
            assert counted == fitted == f"{start + round(float(s) * 400) * (end - start) // 400:,}" and residual == "0"
    paper = re.findall(r"^ 0\.\d +(\d+\.\d) +(0\.\d+) +\d+\.\d +(0\.\d+)$", out, re.MULTILINE)
    assert [float(ms) for ms, *_ in paper] == [27.2, 43.4, 60.3, 81.2, 99.4, 117.0, 135.6, 155.6, 175.6]
    assert all(abs(float(theirs) - float(ours)) < 0.02 for _, theirs, ours in paper)


@pytest.mark.parametrize("splits", [1, 3, 6, 40])
def test_decoding(tmp_path, splits):
    """100 keys in 7 tiles of 16. Four splits of two tiles leave one of a single tile; six leave two splits empty."""
    flags = "--n", "100", "--d", "16", "--heads", "2", "--blocks", "16", "--splits", f"{splits}"
    found, out = figures("11_decoding.py", tmp_path, *flags)
    (name, bills), text = *found["bills"].items(), " ".join(out.split())
    assert name == "split" and counted_is_predicted(bills)
    alone = nf.predict("flash2", n=1, n_k=100, d=16, heads=2).elements
    predicted = nf.predict("flash2", n=1, n_k=100, d=16, heads=2, split_kv=splits, blocks=(1, 16)).elements
    more = 6 * splits * 16 + 2 * splits - 16
    assert predicted == alone + 2 * more and f"here {more:,} more than {alone // 2:,}" in text
    assert list(found["errors"]) == ["naive", "flash2", "split"] and re.search(r"naive's own .* exact$", out, re.M)
    filled = {1: (7, 1), 2: (4, 2), 3: (3, 3), 4: (2, 4), 6: (2, 4), 8: (1, 7), 40: (1, 7)}
    table = {n: (longest, used) for n, used, _, longest, _ in found["table"]}
    assert table == {n: filled[n] for n in sorted({1, 2, 4, 8, splits})}
    assert all(busy == 2 * used for _, used, busy, *_ in found["table"])
    for n, *_, elements in found["table"]:
        assert elements == alone + 2 * (6 * n * 16 + 2 * n - 16)
    assert "gives O = 9; in the other order 9; with split 2 as well 9." in text and "with 3 splits, give 9." in text
    assert "8 heads that share 2 heads of K and V load 12,800 elements of K" in text


def test_the_splits_that_cost_one_percent(tmp_path):
    """The largest n that the lesson names, and the next."""
    for flags, n_k in (("--n", "2000", "--d", "16"), 2000), (SHORT, 64):
        out = " ".join(figures("11_decoding.py", tmp_path, *flags)[1].split())
        named = re.search(r"or less (?:up to n = (\d+)|for no n)", out)
        most = int(named[1] or 0)
        alone = nf.predict("flash2", n=1, n_k=n_k, d=16).elements
        for n in range(1, 20):
            more = nf.predict("flash2", n=1, n_k=n_k, d=16, split_kv=n).elements - alone
            assert (100 * more <= alone) == (n <= most)


def test_the_four_claims(tmp_path):
    found, out = figures("06_what_it_is_not.py", tmp_path, "--n", "512", "--d", "16", "--sram", "20000")
    assert found["sram"] == 20000 and "19.53 KiB" in out
    assert found["approximations"].pop("flash2, float64") < 1e-12
    assert found["approximations"].pop("flash2, float32") < 1e-5
    assert len(found["approximations"]) == 5 and min(found["approximations"].values()) > 1e-3
    for stage in ("naive", "flash", "flash2"):
        assert found["errors"][f"{stage}, float64"] < 1e-12
    assert 0.95 < found["flops"]["flash"] / found["flops"]["naive"] < 1.05
    assert "times as much as Algorithm 0: it loses." in " ".join(out.split())
    assert "times as much: it does not lose." in " ".join(out.split())
    assert re.search(r"^ flash2 +flash2 +\S+ × 1 × 1 +\d+ × 1 × 1 +Q K V O L$", out, re.MULTILINE)
    assert "every tensor that these kernels load or store has elements of 4 bytes." in " ".join(out.split())


@pytest.fixture(scope="module")
def lesson_13(tmp_path_factory):
    """Lesson 13 in this process, as if a GPU and ncu were there -> what it prints, and its figures."""
    file = tmp_path_factory.mktemp("lesson 13") / "figures.json"
    moved = {
        stage: {"read": 10**9, "written": at * 10**9, "kernels": {}} for at, stage in enumerate(nf.stages.PORTABLE)
    }
    del moved["naive"]
    clock = {"gpu": "H0", "seconds": {stage: spread([0.7, 0.777, 0.8]) for stage in nf.stages.PORTABLE}, "why": {}}
    script = str(ROOT / "lessons" / "13_figures.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "dram", lambda sizes, stages: {"bytes": moved, "why": {"naive": "it was too slow"}})
        patch.setattr(runs, "times", lambda sizes, passes: clock | {"asked": passes})
        patch.setattr(lesson.profiler, "refuse", lambda **how: None)
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(sys, "argv", [script, "--n", "16", "--d", "8", "--measure", "--json", str(file)])
        patch.setenv("NUMBA_FLASH_DEVICE", "cpu")
        with redirect_stdout(StringIO()) as out:
            runpy.run_path(script)
    return out.getvalue(), json.loads(file.read_text(encoding="utf-8"))


def test_what_dram_moved(lesson_13):
    """The measured bytes add up, and each gap that lesson 13 explains is there."""
    out, found = lesson_13
    one, S = 4 * 1024 * 1024 * 64, 4 * 1024 * 1024**2  # bytes of all 1,024 heads
    requested = {stage: nf.predict(stage, n=1024, d=64, heads=16, batch=64).total_bytes for stage in nf.stages.PORTABLE}
    assert {stage: row[0] for stage, row in found["ladder"].items()} == requested
    for stage, kernels in KERNELS.items():
        assert found["ladder"][stage][1] == sum(one.read + one.written for one in kernels.values())
        assert sum(found["once"][f"{stage} {kernel}"] for kernel in kernels) <= requested[stage]
    assert found["once"]["naive scores"] == found["once"]["naive output"] == 2 * one + S
    assert found["once"]["flash2 flash2"] == 4 * one + 4 * 1024 * 1024
    assert found["once"]["flash flash"] == 5 * one + 4 * 4 * 1024 * 1024
    for claim in (
        "DRAM falls most at `online_softmax`, by 62.9 GB; at `tiled` by 0.15 GB of 78.4, less than two",
        "P is written 4.2 times",
        "a sector of S came 2.5 to 3.9 times per pass.",
        "for, 13.67 GB of 13.69",
        "8.99 MB lie in L2 still",
        "So 33 heads are at work",
        "805,663,488 bytes; Q, K and V are 805,306,368",
        "it forms 9 products where math forms 6, in 5.5 ms each, where math takes 5.6",
    ):
        assert claim in " ".join(out.split()), claim
    assert found["outgrows"] == {"1": 3966, "16": 992, "1024": 124}
    for count, N in found["outgrows"].items():
        assert 4 * int(count) * (N - 1) ** 2 <= 60 * 2**20 < 4 * int(count) * N**2
    assert found["floors"]["flash2"][0] < found["floors"]["flash2"][1] < found["ladder"]["flash2"][2]
    assert not re.search("DIFFER|WRONG", out)


def test_ones_own_measurement(lesson_13):
    out, found = lesson_13
    assert "And yours, on H0:" in out and "Left out: it was too slow." in out
    assert re.search(r"^ naive +78\.4 GB +- +321\.0 +777\.0$", out, re.MULTILINE)
    assert re.search(r"^ flash2 +1\.07 GB +5\.00 GB +14\.4 +777\.0$", out, re.MULTILINE)
    tried = [command.split(".py ")[1] for command in commands(out)]
    assert tried == ["--d 8 --measure --n 32", "--n 16 --measure --d 16"]
    assert found["measure"] is True and list(found["times"]["asked"]) == list(nf.stages.PORTABLE)
    assert all(how["direction"] == "forward" for how in found["times"]["asked"].values())


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LESSONS)
def test_figures_and_picture(name, tmp_path):
    figures, picture, key = tmp_path / "figures.json", tmp_path / "picture.svg", tmp_path / "key.json"
    flags = "--n", "65", "--d", "16", "--seed", "3", "--answers", str(key)
    status, out, err = run(name, *flags, "--json", str(figures), "--svg", str(picture))
    assert (status, err) == (0, "")
    (kept,) = json.loads(key.read_text(encoding="utf-8"))
    assert (kept["lesson"], kept["seed"]) == (name[:2], 3)
    assert not any(question["asked"] or question["given"] or question["correct"] for question in kept["questions"])
    answers.check(kept)
    read = json.loads(figures.read_text())
    assert read.keys() >= KEYS
    assert (read["lesson"], read["n"], read["d"], read["heads"]) == (name[:2], 65, 16, 1)
    assert read["bills"] and read["errors"]
    for bills in read["bills"].values():
        predicted, counted = (Bill.from_json(json.dumps(bills[kind])) for kind in ("predicted", "counted"))
        assert counted.diff(predicted) == []
        assert counted.elements > 0 and counted.launches
    assert all(0 <= error < 1e-4 for error in read["errors"].values())
    assert [fault["kind"] for fault in read["faults"]] == FAULTS.get(name[:2], [])
    assert all(isinstance(fault["line"], int) for fault in read["faults"])
    parts = re.findall(r"(?<=\n\n) (?:(\d+\. .*)|─+ (the answer) ─+)(?=\n\n)", out)
    number, files = 0, []
    for part, _ in parts:
        number += bool(part)
        files.append(tmp_path / f"picture-{number}{'' if part else '-answer'}.svg")
    more = set(tmp_path.glob("*.svg")) - set(files)
    assert set(files) <= set(tmp_path.glob("*.svg")) and all(re.search(r"-[b-f]\.svg$", file.name) for file in more)
    for file, (part, _) in zip(files, parts, strict=True):
        text = re.sub("<[^>]*>|\\s", "", file.read_text(encoding="utf-8").replace("&#160;", ""))
        assert f"Lesson{name[:2]}·" in text and re.sub(r"\s", "", html.escape(part or "the answer")) in text
        assert "Running" not in text
    written = f" written: {figures} written: {key} written: {files[0]} to {files[-1]}"
    assert "".join(written.split()).removesuffix(".svg") in "".join(out.split())


BAD_FILES = [
    ("--json", "missing/x.json", "the folder of 'missing/x.json' does not exist"),
    ("--svg", "missing/x.svg", "the folder of 'missing/x.svg' does not exist"),
    ("--svg", "x.png", "end it in .svg or .html"),
    ("--json", ".", "cannot be written"),
    ("--json", "-", "'-' is no name of a file"),
    ("--answers", "-", "'-' is no name of a file"),
    ("--json", "README/x.json", "cannot be written|does not exist"),
    ("--answers", "missing/x.json", "the folder of 'missing/x.json' does not exist"),
    ("--answers", "pyproject.toml", "'pyproject.toml' exists and is no file of answers: name another file"),
]


def test_two_flags_with_one_file(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lessons/02_naive.py", "--answers", "x.json", "--json", "./x.json"])
    with pytest.raises(SystemExit):
        lesson.start("02 · a lesson", stage="tiled")
    assert "--json and --answers are the same file, 'x.json': name two" in capsys.readouterr().err


# --- bad flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, flag, value, says",
    [
        ("00_cuda.py", "--n", "0", "give a whole number of 1 or more"),
        ("01_memory_bound.py", "--n", "1e3", "give a whole number"),
        ("02_naive.py", "--d", "257", "from 1 to 256"),
        ("03_tiled.py", "--d", "0", "from 1 to 256"),
        ("02_naive.py", "--heads", "-1", "from 1 to 65,535"),
        ("03_tiled.py", "--heads", "65536", "from 1 to 65,535"),
        ("00_cuda.py", "--blocks", "1025", "from 1 to 1,024"),
        ("03_tiled.py", "--blocks", "0", "whole number of 1 or more"),
        ("03_tiled.py", "--blocks", "33", "blocks=(32, 32) fits"),
        ("02_naive.py", "--blocks", "128", "131,072 bytes of shared memory"),
        ("02_naive.py", "--seed", "-1", "whole number from 0 to"),
        ("01_memory_bound.py", "--device", "tpu", "choose from"),
        ("01_memory_bound.py", "--nn", "5", "unrecognized arguments"),
        *[("02_naive.py", *bad) for bad in BAD_FILES],
    ],
)
def test_bad_flags(monkeypatch, capsys, name, flag, value, says):
    monkeypatch.setattr(sys, "argv", [f"lessons/{name}", flag, value])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        lesson.start(f"{name[:2]} · a lesson", stage=None if name == "00_cuda.py" else "tiled")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"usage: {name} ")
    assert re.search(says if "|" in says else re.escape(says), err.splitlines()[-1])
    assert flag in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["00_cuda.py", "03_tiled.py"])
def test_bad_flags_of_a_script(name):
    status, out, err = run(name, "--blocks", "4000")
    assert (status, out) == (2, "")
    assert "argument --blocks: " in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["01_memory_bound.py", "02_naive.py"])
def test_a_lesson_that_only_predicts_takes_any_tile(name):
    status, out, err = run(name, *SHORT, "--blocks", "4000")
    assert (status, err) == (0, "") and "T = 4000" in " ".join(out.split())


@pytest.mark.parametrize(
    "name, flag, value, says",
    [
        ("04_online_softmax.py", "--row", "1,x", "'1,x' is not valid: give 1 to 16 numbers from -1e6 to 1e6"),
        ("04_online_softmax.py", "--row", "nan", "give 1 to 16 numbers"),
        ("04_online_softmax.py", "--row", "1,-inf", "give 1 to 16 numbers"),
        ("04_online_softmax.py", "--row", "", "give 1 to 16 numbers"),
        ("04_online_softmax.py", "--row", ",".join("1" * 17), "give 1 to 16 numbers"),
        ("04_online_softmax.py", "--sram", "5", "unrecognized arguments"),
        ("05_flash.py", "--blocks", "1,2,3", "'1,2,3' is not valid: give Br,Bc or one number for both"),
        ("05_flash.py", "--blocks", "64,0", "whole number of 1 or more"),
        ("05_flash.py", "--blocks", "64,", "whole number of 1 or more"),
        ("05_flash.py", "--blocks", "64,65", "49,920 bytes of shared memory"),
        ("05_flash.py", "--blocks", "342,8", "342 threads of up to 255 registers"),
        ("06_what_it_is_not.py", "--sram", "4095", "whole number from 4,096 to 16,777,216"),
        ("09_dropout.py", "--drop", "4", "whole number from 5 to 95"),
        ("09_dropout.py", "--drop", "0.1", "whole number from 5 to 95"),
        ("10_block_sparse.py", "--blocks", "342,8", "342 threads of up to 255 registers"),
        ("11_decoding.py", "--blocks", "1,64", "whole number of 1 or more"),
        ("11_decoding.py", "--blocks", "1025", "bytes of shared memory, and a block has 49,152"),
        ("11_decoding.py", "--splits", "0", "whole number from 1 to 1,024"),
        ("11_decoding.py", "--splits", "1025", "whole number from 1 to 1,024"),
        ("06_what_it_is_not.py", "--sram", "48K", "whole number from 4,096 to 16,777,216"),
        ("13_figures.py", "--measure", "--device=cpu", "--measure needs a GPU: leave it out, or --device cpu"),
    ],
)
def test_bad_flags_of_one_lesson(name, flag, value, says):
    status, out, err = run(name, flag, value)
    assert (status, out) == (2, "")
    assert flag in err.splitlines()[-1] and says in err.splitlines()[-1]


def test_a_device_that_is_not_there():
    for flags, env, says in (
        (("--device", "sim"), {}, "argument --device: device='sim' needs NUMBA_ENABLE_CUDASIM=1"),
        (
            (),
            {"NUMBA_FLASH_DEVICE": "tpu"},
            "error: environment: NUMBA_FLASH_DEVICE='tpu' is unknown",
        ),
    ):
        status, out, err = run("02_naive.py", *flags, env=environment(**env) | {"NUMBA_ENABLE_CUDASIM": "0"})
        assert (status, out) == (2, "") and says in err and "Traceback" not in err


def test_help():
    status, out, err = run("03_tiled.py", "--help", env=environment(PYTHONIOENCODING="ascii"))
    assert (status, err) == (0, "")
    for flag in ("n", "d", "heads", "blocks", "seed", "device", "step", "svg", "json", "answers"):
        assert f"--{flag}" in out
    for name, says in (
        ("03_tiled.py", "--blocks T T, the side of a tile of tiled: T x T threads per block (default: 16)"),
        ("02_naive.py", "--blocks T T, the side of a tile of tiled: predicted only (default: 16)"),
        ("00_cuda.py", "--blocks B B, the number of threads per block (default: 128)"),
        ("00_cuda.py", "--n N N, the number of elements of the vector X"),
    ):
        assert says in " ".join(run(name, "--help")[1].split())
    out = " ".join(run("04_online_softmax.py", "--help")[1].split())
    assert "--row S,S,..." in out and "(default: 1,3,2,0,5,1,0,4)" in out
    out = " ".join(run("06_what_it_is_not.py", "--help")[1].split())
    assert "--blocks BR,BC Br queries by Bc keys per tile; one number for both (default: what fits)" in out
    assert "--sram BYTES" in out and "(default: 49152)" in out
    out = " ".join(run("11_decoding.py", "--help")[1].split())
    assert "--n N N_k, the number of keys; there is one query (default: 32768)" in out
    assert "--blocks BC Bc, the keys per tile, and threads per block (default: what fits)" in out


# --- errors, the end of a pipe, Ctrl-C --------------------------------------------------------------------------------


def test_an_error_of_numba_flash_is_one_line():
    status, _, err = run("02_naive.py", "--n", "900000", "--d", "1", "--device", "cpu")
    assert status == 1
    assert re.fullmatch(r"02_naive\.py, line \d+: an array of shape \(1, 900000, 900000\) needs .* are free: .*\n", err)


SCRIPT = """\
from numba_flash import lesson
import numba_flash as nf
this = lesson.start("99 · test", stage="tiled")
{line}
"""


@pytest.mark.parametrize(
    "line, status, says",
    [
        ("nf.attention([1], [1], [1])", 1, r"script\.py, line 4: q=\[1\] is a list: .*\n"),
        ("nf.predict('naive', n=-1, d=4)", 1, r"script\.py, line 4: n=-1 is too small.*\n"),
        ("int('x')", 1, r"Traceback(?s:.*)ValueError: invalid literal.*\n"),
        ("undefined", 1, r"Traceback(?s:.*)NameError: .*\n"),
        ("raise KeyboardInterrupt", 130, r"\nstopped by Ctrl-C\n"),
        ("raise SystemExit(3)", 3, ""),
        ("", 0, ""),
    ],
)
def test_the_way_out(tmp_path, line, status, says):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line=line), encoding="utf-8")
    ended, _, err = finished([sys.executable, script])
    assert ended == status
    assert re.fullmatch(says, err)


@unix_only
def test_a_reader_that_leaves_is_no_error():
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with started(lesson_command("03_tiled.py", *SHORT), env=environment(), **both) as process:
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=LIMIT)
        assert process.stderr.read() == ""


@unix_only
@pytest.mark.parametrize("name, when", [("02_naive.py", "5. The run"), ("03_tiled.py", "1. The question")])
def test_ctrl_c(name, when, as_in_the_background):
    assert short(name)[0] == 0  # its kernels are compiled
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    command = lesson_command(name, "--n", "8000", "--device", "cpu")
    with started(command, env=environment(), start_new_session=True, **both) as process:
        for line in process.stdout:
            if when in line:
                break
        time.sleep(1)
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - asked < 2
    assert process.returncode == 130
    assert err == "\nstopped by Ctrl-C\n"


# --- --step -----------------------------------------------------------------------------------------------------------


def test_step_without_a_terminal_does_not_wait():
    name = "02_naive.py"
    plain = short(name)[1]
    assert run(name, *SHORT, "--step") == (0, plain, "")
    assert run(name, *SHORT, "--step", stdin=subprocess.PIPE) == (0, plain, "")  # a pipe at its end


@unix_only
def test_step_with_standard_input_closed():
    command = ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "lessons/02_naive.py", *SHORT, "--step"]
    assert finished(command, stdin=None) == (0, short("02_naive.py")[1], "")


TAKE_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def on_a_terminal(name, *flags, keys):
    """Run a lesson on a pseudo-terminal, type the next of `keys` at each prompt -> (status, all that was on screen)."""
    prompt = re.compile(f"{re.escape(lesson.PROMPT)}|{re.escape(lesson.ANSWER)}".encode())
    terminal, its_end = os.openpty()
    try:
        command = [sys.executable, "-c", TAKE_TERMINAL, sys.executable, f"lessons/{name}", *flags]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)
        with started(command, env=environment(TERM="xterm-256color"), start_new_session=True, **streams) as process:
            os.close(its_end)
            its_end = None
            screen, typed = b"", 0
            while part := _read(terminal):
                screen += part
                while len(prompt.findall(screen)) > typed < len(keys):
                    time.sleep(0.1)  # until it reads: Python loses a Ctrl-C between its prompt and its read
                    os.write(terminal, keys[typed])
                    typed += 1
            status = process.wait(timeout=LIMIT)
    finally:
        for end in (terminal, its_end):
            if end is not None:
                os.close(end)
    return status, screen.decode()


def _read(terminal):
    if not select.select([terminal], [], [], LIMIT)[0]:
        raise TimeoutError(f"nothing on the screen for {LIMIT} s")
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


@unix_only
def test_step_waits_on_a_terminal():
    status, screen = on_a_terminal("02_naive.py", *SHORT, "--step", keys=[b"\n"] * 20)
    assert status == 0
    parts = len(re.findall(r"^ \d+\. ", short("02_naive.py")[1], re.MULTILINE))
    assert (screen.count(lesson.PROMPT), screen.count(lesson.ANSWER)) == (parts - 1, 2) and parts > 9
    lines = re.sub(r"\x1b\[[\d;]*m", "", screen).splitlines()
    for at, line in enumerate(lines):
        if lesson.PROMPT in line:
            assert line.startswith(" [") and lines[at + 1] == "" and re.match(r" \d+\. ", lines[at + 2])
    assert "\x1b[" in screen  # bold and colour


@unix_only
def test_step_and_ctrl_d_goes_on_to_the_end():
    status, screen = on_a_terminal("02_naive.py", *SHORT, "--step", keys=[b"\n", b"\x04"])
    assert status == 0
    assert (screen.count(lesson.PROMPT), screen.count(lesson.ANSWER)) == (2, 0)
    assert "Answer 2: " in screen and "Check yourself" in screen


@unix_only
def test_step_and_ctrl_c_leaves(as_in_the_background):
    status, screen = on_a_terminal("02_naive.py", *SHORT, "--step", keys=[b"\x03"])
    assert status == 130
    assert screen.endswith("stopped by Ctrl-C\r\n") and "Traceback" not in screen


# --- questions on a terminal ------------------------------------------------------------------------------------------


@cache
def key(name):
    """The questions of a lesson in the short form, as --answers writes them without a terminal."""
    return questions_of(name)


def questions_of(name, *flags):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key.json"
        assert run(name, *SHORT, *flags, "--answers", str(file))[::2] == (0, "")
        return json.loads(file.read_text(encoding="utf-8"))[0]["questions"]


def played(tmp_path, name, keys):
    """Type `keys` at the prompts of a lesson -> the words on its screen, without what is typed, and what is kept."""
    file = tmp_path / "answers.json"
    status, screen = on_a_terminal(name, *SHORT, "--answers", str(file), keys=[key + b"\n" for key in keys])
    assert status == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen)
    assert max(map(len, shown.splitlines())) <= report.WIDTH
    return " ".join(shown.split()), json.loads(file.read_text(encoding="utf-8"))


def test_wrong_numbers_of_students_are_known():
    """d - 1 sums for d products and the scale; m and l together, each loaded once per column of O."""
    (flops, _), (*_, m_loads) = key("01_memory_bound.py"), key("04_online_softmax.py")
    N, d, H = (flops["sizes"][name] for name in "NdH")
    for typed in (4 * N * N * d + 7 * N * N, 4 * N * N * d + 7 * N * N - N * d):
        assert "sums start from 0" in flops["wrong"][f"{float(H * typed):.15g}"]
    assert "That is m and l." in m_loads["wrong"][f"{2.0 * math.prod(m_loads['sizes'][name] for name in 'HNd'):.15g}"]


@unix_only
def test_answers_are_judged_and_kept(tmp_path):
    loads, S = key("02_naive.py")
    right, one_head = f"{loads['right']:,}", f"{loads['right'] // loads['sizes']['H']}"
    keys = [b"?", b"many", one_head.encode(), b"H N*N d", b"1", b"2"]
    screen, kept = played(tmp_path, "02_naive.py", keys)
    said = (
        "One thread computes one score\\..*'many' is not known here\\..*That is for one head\\..*Right\\. .*too small"
    )
    assert re.search(said, screen) and f"The answer is {S['right']:,}. Stored once, loaded three times" in screen
    assert "Answer 1:" not in screen and "Write your answer down" not in screen
    assert re.search(r"Stored once, .{,60} ─+ the answer ─+ kernel", screen)
    assert right not in screen  # a right answer is not repeated
    first, second = kept[0]["questions"]
    assert (first["given"], first["correct"], first["asked"]) == ([one_head, "H N*N d"], 2, True)
    assert (second["given"], second["correct"], second["asked"]) == (["1", "2"], None, True)
    assert {name: first[name] for name in ("name", "text", "right")} == {n: loads[n] for n in ("name", "text", "right")}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first["time"])


@unix_only
def test_a_student_who_leaves_early_keeps_the_answers(tmp_path, as_in_the_background):
    file = tmp_path / "answers.json"
    for _ in range(2):
        flags = *SHORT, "--answers", str(file)
        status, screen = on_a_terminal("02_naive.py", *flags, keys=[b"H*N*N*d\n", b"7\n", b"\x03"])
        assert status == 130 and screen.endswith("stopped by Ctrl-C\r\n")
    runs = json.loads(file.read_text(encoding="utf-8"))
    assert [run["questions"][0]["correct"] for run in runs] == [1, 1]
    assert [len(run["questions"]) for run in runs] == [1, 1]


def test_the_seed_draws_the_questions():
    drawn = [
        [question["text"] for question in questions_of("11_decoding.py", *flags)] for flags in ((), ("--seed", "5"))
    ]
    assert drawn[0] == [question["text"] for question in key("11_decoding.py")]
    assert all(ours != theirs for ours, theirs in zip(*drawn, strict=True))


@pytest.mark.course
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", LESSONS)
def test_answers_for_other_seeds(name, seed):
    answers.check({"lesson": name[:2], "questions": questions_of(name, "--seed", f"{seed}")})


# --- the parts of lesson.py -------------------------------------------------------------------------------------------


@cuda.jit
def doubled(X, Y):
    i = cuda.grid(1)
    if i < X.shape[0]:  # the guard
        Y[i] = 2 * X[i]
        cuda.syncthreads()
        cuda.syncthreads()  # a comment


def test_without_takes_out_one_line_and_keeps_the_numbers():
    x = np.ones(3, np.float32)
    with pytest.raises(nf.errors.OutOfBounds) as caught:
        nf.launch(lesson.without(doubled, "if i <"), 1, 4, x, x.copy(), device="cpu")
    line = doubled.py_func.__code__.co_firstlineno + 4 if hasattr(doubled, "py_func") else caught.value.line
    assert caught.value.line == line
    assert f"test_lessons.py with line {line - 1} removed" in caught.value.file
    assert lesson.line_of(doubled, "if i <") == line - 1
    assert lesson.line_of(doubled, "syncthreads", 2) == line + 2
    with pytest.raises(ValueError, match="in 2 lines of doubled"):
        lesson.without(doubled, "syncthreads", 3)
    T, real = 4, float32

    @cuda.jit
    def shared(Y):
        tile = cuda.shared.array(T, real)
        t = cuda.threadIdx.x
        tile[t] = t
        cuda.syncthreads()
        Y[t] = tile[T - 1 - t]

    Y = np.empty(4, np.float32)
    nf.launch(shared, 1, 4, Y, device="cpu", strict=True)
    assert Y.tolist() == [3, 2, 1, 0]
    with pytest.raises(nf.errors.KernelError):
        nf.launch(lesson.without(shared, "syncthreads"), 1, 4, Y, device="cpu", strict=True)


def listing(*lines, number=98):
    printed = [text.plain for text in report.source_lines(list(lines), number, 80)]
    assert max(map(len, printed)) <= 80
    return printed


def test_the_comments_of_a_listing_are_in_one_column():
    long = "    cuda.syncthreads()  # nobody still reads what the next step of the walk overwrites"
    printed = listing("for t0 in range(0, Q.shape[2], T):  # walk", long, "    x = 1", "# alone")
    assert [line[:6] for line in printed] == ["  98  ", "  99  ", "      ", " 100  ", " 101  "]
    assert [line.index("#") for line in printed if "#" in line] == [42, 42, 42, 6]
    assert " ".join(line.partition("# ")[2] for line in printed[1:3]) == long.partition("# ")[2]


def test_a_comment_above_its_line_has_the_number_of_the_line():
    said = "nobody still reads what the next step of the walk along d overwrites, in any of the tiles that are left"
    walk = f"{'for t0 in range(0, Q.shape[2], T):':<60}  # walk"
    printed = listing("i = 1  # one", walk, f"    cuda.syncthreads()  # {said}", number=7)
    above = [at for at, line in enumerate(printed) if not re.match(r" +\d", line)]
    assert above == [2, 3] and printed[4].split() == ["9", "cuda.syncthreads()"]
    assert " ".join(printed[at].strip(" #") for at in above) == f"9: {said}"
    assert all(printed[at].index("#") == printed[4].index("cuda") for at in above)


def test_a_comment_takes_two_lines_beside_its_own_at_most():
    """In every kernel of every stage, as `listing` and the lessons print them: beside a bar, and without."""
    stages = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "numba_flash" / "stages").glob("*.py"))
    kernels = re.findall(r"(?ms)^    @cuda\.jit\n.*?(?=\n\n    return)", stages)
    assert len(kernels) > 30
    for kernel, bar in product(kernels, (0, 16)):
        lines = textwrap.dedent(kernel).splitlines()
        margin = [(" " * bar, "")]
        printed = [text.plain for text in report.source_lines(lines, 90, 80, margin=lambda at, left=margin: left)]
        assert max(map(len, printed)) <= 80 and not any(line.endswith(" ") for line in printed)
        more = [bool(re.match(r" +# (?!\d+: )", line)) for line in printed]
        assert not any(one and next_too for one, next_too in pairwise(more)), kernel
        assert [int(m[1]) for line in printed if (m := re.match(r" +(\d+)  ", line))] == [*range(90, 90 + len(lines))]


def test_a_listing_keeps_within_the_width():
    code = "    K_j[ty, tx] = load_or_zero(K, g, cuda.blockIdx.x * T + ty, t0 + tx)"
    assert listing(code, number=53) == [f" 53  {code}"]
    assert listing("    " + code + " + more", number=53)[1].strip() == "+ more"
    folded = listing("if x:  # short", "    z = 2" + " + 2" * 18 + "  # " + "w" * 40)
    assert [line.partition("#")[2] for line in folded] == [" short", "", " " + "w" * 40]
    above = listing("if x:  # short", "    z = 2" + " + 2" * 14 + "  # " + "w" * 40)
    assert [line.partition("#")[2] for line in above] == [" short", " 99: " + "w" * 40, ""]
    end = listing("P[h, i, j] = math.exp(S[h, i, j] - m) / (l + 12345678)  # Alg. 0, l. 2")
    assert len(end) == 1 and end[0].endswith(")  # Alg. 0, l. 2")


def test_roofline():
    lines = list(lesson.roofline(2.0, {"fast": 64.0, "slow": 8.0}, {"a": 1.0, "b": 32.0, "c": 100.0, "d": 100.0}))
    assert max(map(len, lines)) <= 80
    chart = "\n".join(lines)
    assert all(chart.count(mark) == 1 for mark in "bcd")
    roof = next(line for line in lines if line.startswith(" fast"))
    assert all(mark in roof for mark in "bcd")  # at 32 operations a byte memory is as fast as the roof
    assert roof.index("c") < roof.index("d")
    near = lesson.roofline(2.0, {"fast": 64.0}, {"a": 1.01, "b": 1.02, "c": 1.0})
    assert any("cab" in line for line in near)  # in the order of their intensities
    rows = [next(at for at, line in enumerate(lines) if mark in line.partition("│")[2]) for mark in "ba"]
    assert rows[1] - rows[0] == 5  # five doublings below
    assert all(len(line) <= 60 for line in lesson.roofline(2.0, {"fast": 64.0}, {"a": 1.0}, width=60))
