"""The lab: every fault that may be drawn loads and shows; answers, nudges and a student's tests are judged rightly."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import __main__ as cli
from numba_flash import report
from numba_flash.course import lab, score
from numba_flash.course.faults import MUTANTS, PACKAGE
from numba_flash.course.symptoms import (
    EASY,
    INPUTS,
    STRICT,
    TILES,
    Finding,
    Right,
    Symptoms,
    examine,
    finding,
    gap,
    inputs_of,
    installed,
    passes_loosely,
    plant,
    strict_mode,
)
from numba_flash.stages import LADDER, PORTABLE, STAGES

ROOT = Path(__file__).resolve().parent.parent.parent
ALL = lab.pool()
FILES = list(dict.fromkeys(mutant.file for mutant in ALL))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_FLASH_DEVICE": "cpu", "PYTHONIOENCODING": "utf-8"}


def mutant(name):
    return next(m for m in MUTANTS if m.name == name)


@pytest.fixture
def run(capsys, monkeypatch):
    """The command in this process -> exit status, standard output, standard error."""
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")

    def run(*args):
        try:
            status = cli.main(["lab", *map(str, args)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def seed_of(name, stage=None, level="easy"):
    """The seed that draws this fault."""
    return next(s for s in range(len(ALL)) if lab.draw(s, stage, level).name == name)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_every_seed_draws_another_fault_until_all_have_been():
    for stage, level in ((None, "easy"), (None, "hard"), ("flash", "easy"), ("flash2", "hard")):
        drawn = lab.pool(stage, level)
        names = [lab.draw(seed, stage, level).name for seed in range(len(drawn))]
        assert sorted(names) == sorted(m.name for m in drawn)
        assert names[2] == lab.draw(2 + len(drawn), stage, level).name == lab.draw(2, stage, level).name
    for stage in LADDER:
        assert len(lab.pool(stage, "easy")) >= 4
    assert len(ALL) > 130


def test_easy_needs_no_more_than_the_first_lessons():
    for one in lab.pool(level="easy"):
        assert one.direction == "forward"
        assert one.fault.shown_by in {*EASY, "bill", "strict"}


def test_the_changed_line_is_in_the_listing_and_no_pass_gives_it_away():
    for one in ALL:
        planted = plant(one)
        source = planted.source.splitlines()
        compile(planted.source, one.file, "exec")
        assert not re.search(r"^\s*pass\b", planted.source, flags=re.MULTILINE), one.name
        right = (PACKAGE / one.file).read_text(encoding="utf-8").splitlines()
        assert planted.lines
        for line in planted.lines:
            assert source[line - 1].strip()
            assert planted.missing or source[line - 1] not in planted.before
        for line in planted.before:
            assert line in right
        case = lab.Case(seed_of(one.name, one.stage, "hard"), one.stage, "hard")
        for line in planted.lines:
            case.check(line)


def test_a_line_that_is_gone_takes_its_empty_loop_along():
    planted = plant(mutant("flash2: O not rescaled"))
    assert planted.missing
    assert [line.split("#")[0].strip() for line in planted.before] == ["for t in range(d):", "O_i[t] *= old"]
    around = [planted.source.splitlines()[line - 1].split("#")[0].strip() for line in planted.lines]
    assert around == ["l_i *= old", "for c in range(min(Bc, keys - j)):"]


LOOP_ENDS = [m for m in ALL if m.fault.stands_for == "a missing barrier" and m.fault.shown_by and plant(m).head]


def test_a_barrier_at_a_loops_end_may_stand_at_its_head():
    assert len(LOOP_ENDS) == 12
    one = mutant("flash: flash without barrier 2")
    planted, case = plant(one), lab.Case(seed_of(one.name, "flash"), "flash")
    source = planted.source.splitlines()
    head, first = planted.head
    assert "for j in range(0, N_k, Bc)" in source[head - 1] and "for e in range(r," in source[first - 1]
    right = [line for line in range(1, len(source) + 1) if case.right(line)]
    assert right == [head, first, *range(planted.lines[0], planted.lines[1] + 1)]


def at_the_head(one):
    """The stage with its missing barrier at the head of the loop."""
    planted = plant(one)
    source = planted.source.splitlines()
    first = source[planted.head[1] - 1]
    source.insert(planted.head[1] - 1, first[: len(first) - len(first.lstrip())] + "cuda.syncthreads()")
    return "\n".join(source) + "\n"


def is_mended(one):
    """No race and no wrong result of it is left."""
    names = [name for name in STRICT if name in inputs_of(one.direction)]
    right = Right(one.stage, one.direction)
    kept = {name: right.of(name) for name in names}
    with installed(one, at_the_head(one)):
        return all(
            strict_mode(one.stage, one.direction, name, kept[name][2]) is None
            and finding(one.stage, one.direction, name, *kept[name]).right
            for name in names
        )


SOME_ENDS = {(one.stage, one.direction): one for one in LOOP_ENDS}.values()


@pytest.mark.parametrize("one", [pytest.param(m, id=m.name, marks=pytest.mark.mutants) for m in SOME_ENDS])
def test_a_barrier_at_the_head_mends_it(one):
    """One of each pass of each stage."""
    assert is_mended(one)


def test_the_lines_around_a_gap_hold_code():
    assert gap(["a", "", "# b", "c"], 1) == [1, 4]


@pytest.mark.parametrize("name", ["tiled: scores without barrier 1", "naive: L without m"])
def test_a_sample_of_the_faults_shows(name):
    assert shows(mutant(name))
    found = examine(mutant(name), plant(mutant(name)).source, list(EASY[:3]))
    assert mutant(name).fault.shown_by in found.kinds
    assert bool(found.strict) == ("barrier" in name)


def shows(one):
    """Whether the input that is said to show a fault does."""
    shown_by, before = one.fault.shown_by, STAGES[one.stage]
    names = {"bill": ["whole"], "causal bill": ["causal"], "strict": STRICT}.get(shown_by, [shown_by])
    right = Right(one.stage, one.direction)
    kept = {name: right.of(name) for name in names}
    with installed(one, plant(one).source):
        if shown_by == "strict":
            return any(strict_mode(one.stage, one.direction, name, kept[name][2]) for name in names)
        found = finding(one.stage, one.direction, names[0], *kept[names[0]])
    assert STAGES[one.stage] is before
    return bool(found.diff) and found.right if "bill" in shown_by else not found.right


def test_the_usual_weak_test_passes_on_right_kernels():
    """Of a stage without tiles in the table it would fail, whatever the kernel."""
    assert list(TILES) == list(PORTABLE)
    for stage in ("naive", "register_tiled"):
        assert passes_loosely(stage, "forward")


SWEEP = """
import sys
from tests.course.test_lab import mutant, shows
print(*(name for name in sys.argv[1:] if not shows(mutant(name))), sep="; ")
"""


def sweep(mutants, folder):
    """In a process that optimises nothing, with a cache of its own: most of the time goes into compiling."""
    environment = ENVIRONMENT | {"NUMBA_OPT": "0", "NUMBA_FLASH_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", SWEEP, *(one.name for one in mutants)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stdout + done.stderr


@pytest.mark.mutants
@pytest.mark.parametrize("file", FILES)
def test_faults_show_where_they_are_said_to(file, tmp_path):
    """All that take an input of their own; of those that any input shows, one barrier and one other."""
    mine = [one for one in ALL if one.file == file]
    anywhere = [one for one in mine if one.fault.shown_by == "whole"]
    some = {"barrier" in one.name: one for one in anywhere}.values()
    sweep([one for one in mine if one not in anywhere or one in some], tmp_path)


@pytest.mark.course
@pytest.mark.parametrize("name", ["flash: O not rescaled", "flash2: O not rescaled", "flash2_split: O not rescaled"])
def test_the_loose_test_takes_the_tiles_that_the_page_names(name):
    """With the tiles that flash would choose, one tile has all 64 keys, and nothing is ever rescaled."""
    one = mutant(name)
    with installed(one, plant(one).source):
        assert not passes_loosely(one.stage, one.direction)


def check_right(file):
    """A right stage shows nothing at all."""
    one = next(m for m in ALL if m.file == file)
    found = examine(one, (PACKAGE / file).read_text(encoding="utf-8"), inputs_of(one.direction))
    assert found.kinds == []
    assert found.orders
    assert found.loose


@pytest.mark.parametrize(
    "file", ["stages/naive.py", pytest.param("stages/naive_backward.py", marks=pytest.mark.course)]
)
def test_a_right_stage_shows_nothing(file):
    check_right(file)


@pytest.mark.mutants
@pytest.mark.parametrize("file", FILES)
def test_no_right_stage_shows_anything(file):
    check_right(file)


# --- the game ---------------------------------------------------------------------------------------------------------


def test_a_case_without_a_terminal(run):
    name = "tiled: scores without barrier 1"
    seed = seed_of(name, "tiled")
    status, out, err = run("--stage", "tiled", "--seed", seed)
    assert status == 0
    assert err == ""
    assert run("--stage", "tiled", "--seed", seed)[1] == out
    assert max(map(len, out.splitlines())) <= 80
    planted = plant(mutant(name))
    for line in planted.lines:
        assert f"\n {line}  " in out
    for text in ("whole tiles: N = N_k = 32", "WRONG", "RaceDetected, see below", "with no barrier between",
                 f"lab --seed {seed} --stage tiled --line NUMBER"):  # fmt: skip
        assert text in " ".join(out.split())
    assert "missing barrier" not in out
    wrong = next(n for n in range(min(planted.lines) - 9, 999) if n not in planted.lines)
    status, out, _ = run("--stage", "tiled", "--seed", seed, "--line", wrong)
    assert status == 1
    assert "Is a barrier missing" in out
    assert "cuda.syncthreads()" not in out
    for line in planted.lines:
        status, out, _ = run("--stage", "tiled", "--seed", seed, "--line", line)
        assert status == 0
        assert "Right: a line is missing" in out
        assert "cuda.syncthreads()\n" in out  # without its comment
        assert "a missing barrier" in out
        text = " ".join(out.split())
        assert "it is a race, which strict mode finds, or on a GPU `compute-sanitizer --tool racecheck`" in text
        assert "any comparison" not in text


def test_words_of_lesson_12_are_not_left_alone():
    """In the easy level, which comes after lesson 05."""
    for seed in range(len(lab.pool(level="easy"))):
        text = " ".join(" ".join(map(report.to_text, lab.listing(lab.Case(seed)))).split())
        words = [word for word in ("uncoalesced", "bank conflicts") if word in text]
        assert not words or f"What is called {' or '.join(words)} costs time, and changes no result: lesson 12." in text


def test_what_gives_a_race_away():
    """Not the results; racecheck where it is in shared memory; and a test needs strict mode."""

    def explained(name, error, wrong=()):
        one = mutant(name)
        case = lab.Case(seed_of(name, one.stage, "hard"), one.stage, "hard")
        case.symptoms = Symptoms(list(wrong), ("whole", error), None, False)
        return lab.gives_away(case)

    slot, added = "flash2: one column for all", "flash2_atomic_backward: dQ added without an atomic"
    text = explained(slot, nf.errors.RaceDetected("", tensor="S_ij"))
    assert "racecheck" in text and "right in every run" in text and "wrong one time" in text
    text = explained(added, nf.errors.RaceDetected("", tensor="dQ"), [Finding("whole", wrong={}, diff=["dQ"])])
    assert "racecheck" not in text and "the bill shows it as well" in text
    text = explained(slot, nf.errors.UninitializedRead("", tensor="S_ij"))
    assert "race" not in text and "strict mode alone" in text
    for one in ALL:
        if one.fault.stands_for == "a missing barrier":
            assert score.needs(one.fault).startswith("strict mode")


def test_what_gives_a_wrong_result_away():
    """A fault that one tile alone does not show needs more of them, whatever the tolerance."""
    case = lab.Case(seed_of("flash: O not rescaled", "flash"), "flash")
    bad = {"out": np.array([True])}
    whole, short = Finding("whole", wrong=bad), Finding("short", wrong=bad)
    for found, loose, says in (
        ([whole], False, "any comparison with float64, on more than one tile."),
        ([whole, short], False, "any comparison with float64."),
        ([whole], True, "a comparison with float64 that allows rounding and no more, on more than one tile."),
    ):
        case.symptoms = Symptoms(found, None, True, loose)
        assert lab.gives_away(case) == says


def test_a_hint_names_lines_of_one_function():
    """Not the lines of its neighbours, nor such as the listing does not have."""
    for seed in range(len(lab.pool(level="hard"))):
        case = lab.Case(seed, level="hard")
        name, low, high = re.search(r"in (\w+), between the lines (\d+) and (\d+)\.", lab.nudge(case, 2)).groups()
        first, last = next((first, last) for one, first, last in case.functions if one == name)
        lines = [line for line in case.planted.lines if first <= line <= last]  # a fault may be in two functions
        assert first <= int(low) <= lines[0] <= lines[-1] <= int(high) <= last


@pytest.mark.course
def test_the_result_as_json(run, tmp_path):
    name = "tiled: K not through its tile"
    seed, line = seed_of(name, "tiled"), plant(mutant(name)).lines[0]
    case = json.loads(run("--stage", "tiled", "--seed", seed, "--json")[1])
    assert "fault" not in case and "line" not in case
    assert case["symptoms"]["inputs"]["whole"]["right"] and case["symptoms"]["inputs"]["whole"]["bill"]
    file = tmp_path / "result.json"
    status, out, _ = run("--stage", "tiled", "--seed", seed, "--line", line + 2, "--json", file)
    assert status == 1
    assert f" and {line} (" in " ".join(out.split())  # the nudge names the lines that touch K
    assert json.loads(file.read_text())["found"] is False
    run("--stage", "tiled", "--seed", seed, "--line", line, "--json", file)
    result = json.loads(file.read_text())
    assert (result["found"], result["fault"], result["tries"]) == (True, "K not through its tile", [line])


def wrong_twice(line):
    return f"{line - 1}\n{line + 1}\n{line}"


def two_hints(line):
    return f"?\n?\n{line}"


def hints_alone(line):
    return "?\n?\n?"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("answers", [wrong_twice, two_hints, hints_alone])
def test_on_a_terminal(answers):
    """Wrong answers and ? are answered by hints, the last ? by the fault; nonsense is asked again."""
    import pty

    name = "naive: L without m"
    seed, (line,) = seed_of(name, "naive"), plant(mutant(name)).lines
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "numba_flash", "lab", "--stage", "naive", "--seed", str(seed)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, close_fds=True)
    os.close(slave)
    os.write(master, f"\nabc\n1\n{answers(line)}\n".encode())
    out = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        out += part
    assert process.wait(60) == 0
    os.close(master)
    out = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.decode()).split())
    assert "or ? for a hint; Ctrl-D leaves." in out
    assert "'abc' is no line number" in out
    assert "line=1 is not in the listing" in out
    assert "out is right, and lse is not" in out
    assert "between the lines" in out
    assert ("Not that line." in out) == (answers is wrong_twice)
    assert ("The fault: line" if answers is hints_alone else "Right: line") in out


def test_a_solution_is_shown(run):
    status, out, _ = run("--stage", "naive", "--seed", seed_of("naive: L without m", "naive"), "--solution")
    assert status == 0
    assert "The fault: " in out
    assert "What gives it away" in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--stage flash9", "invalid choice: 'flash9'"),
        ("--line 0", "'0' is not valid"),
        ("--line 9999", "line=9999 is not in the listing, which has the lines"),
        ("--seed -1", "'-1' is not valid"),
        ("--json no/such/folder/file", "does not exist"),
        ("--test no_such_file.py", "there is no such file"),
        ("--test . ", "cannot be read"),
        ("--test x.py --line 3", "--line does not go with --test"),
        ("--all", "--all is for --test FILE"),
    ],
)
def test_a_value_that_will_not_do(run, line, says):
    status, out, err = run(*line.split())
    assert status == 2
    assert out == ""
    assert says in " ".join(err.split())
    assert "Traceback" not in err


# --- a student's test -------------------------------------------------------------------------------------------------

LOOSE = """
import numpy as np
from numba_flash import reference

def test(attention):
    q, k, v = np.random.default_rng(0).standard_normal((3, 64, 16), dtype=np.float32)
    assert np.allclose(attention(q, k, v), reference.attention(q, k, v)[0], atol=1e-2)
"""
EXACT = """
import os
import numba_flash as nf
from numba_flash import testing

def test(attention):
    cases = [c for c in testing.cases() if c.name in ("N_q = 33, N_k = 65", "scale 0.3")]
    testing.assert_exact(lambda q, k, v, scale: attention(q, k, v, scale, return_lse=True), cases=cases)
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "mine.py"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def test(attention:\n", "is not Python, line 1"),
        ("def check(attention):\n    pass\n", "defines no test: write def test(attention):"),
        ("def test(attention):\n    pass\x00", "is not Python"),
        (
            "def test(attention):\n    yield\n    assert False\n",
            "line 2: test yields, so that a call of it runs nothing",
        ),
        ("def test(attention):\n    for x in (y := (yield),):\n        pass\n", "line 2: test yields"),
        ("import no_such_module\ndef test(attention):\n    pass\n", "No module named 'no_such_module'"),
    ],
)
def test_a_file_that_is_no_test(run, write, text, says):
    status, out, err = run("--test", write(text))
    assert (status, out) == (2, "")
    assert says in " ".join(err.split())


def test_a_test_that_fails_on_a_right_kernel(run, write):
    text = "def test(attention):\n    print('x' * 10**7)\n    assert attention.stage == 'flash', 'not flash'\n"
    status, out, _ = run("--test", write(text), "--stage", "naive")
    assert status == 1
    assert "fails on the right kernel of stage 'naive'" in " ".join(out.split())
    assert "test in line 3: AssertionError: not flash" in out
    assert "It printed:" in out
    assert len(out) < 3000


def test_a_test_without_end_is_stopped(run, write, monkeypatch):
    monkeypatch.setattr(score, "LIMIT", 3)
    text = "import subprocess, sys\ndef test(attention):\n"
    text += "    subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    status, out, _ = run("--test", write(text), "--stage", "naive")
    assert status == 1
    assert "it did not end within 3 seconds" in " ".join(out.split())


def test_what_a_test_finds(write):
    """In this process: the loose test sees a wrong product, not a wrong lse; the exact one does."""
    product, lse = "naive: scores not scaled", "naive: L without m"
    for text, fault, kind in (
        (LOOSE, "", "passed"), (LOOSE, product, "failed"), (LOOSE, lse, "passed"), (EXACT, "", "passed"),
        (EXACT, lse, "failed"),
    ):  # fmt: skip
        assert score.trial(write(text), fault, ["naive"])["kind"] == kind, (text, fault)


@pytest.mark.course
def test_what_is_said_of_tiles_bill_and_strict_mode_holds(write, monkeypatch):
    """The lines that the page of a score shows run, pass on every right kernel, and find a fault of the bill; in strict
    mode a missing barrier, which one tile hides.
    """
    shown = textwrap.dedent(score.HOW).strip()
    text = f"""
import os
import numpy as np
import numba_flash as nf

def test(attention):
    os.environ["NUMBA_FLASH_STRICT"] = "1"
    n, n_k, d = 20, 70, 16
    q, k, v = (np.random.default_rng(0).standard_normal((rows, d)).astype(np.float32) for rows in (n, n_k, n_k))
{textwrap.indent(shown, "    ")}
"""
    assert all(name in shown for name in ("attention.stage", "nf.ledger()", "nf.predict(", "blocks"))
    barrier = "flash: flash without barrier 2"
    one_tile = text.replace('{"blocks": (8, 8)}', "{}")
    assert one_tile != text
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "")  # and as it was, afterwards
    for test, fault, stages, kind in (
        (text, "", list(PORTABLE), "passed"), (text, "tiled: K not through its tile", ["tiled"], "failed"),
        (text, barrier, ["flash"], "failed"), (one_tile, barrier, ["flash"], "passed"),
    ):  # fmt: skip
        one = score.trial(write(test), fault, stages)
        assert one["kind"] == kind, (fault, one)
    alive = {"stage": "flash", "direction": "forward", "stands_for": "a missing barrier", "killed": False}
    faults = [alive | {"needs": score.NEEDS[needs]} for needs in ("strict", "bill", "whole")]
    out = "\n".join(map(report.to_text, score.page("mine.py", ["flash"], faults, 1, False, "easy")))
    said = " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    for line in shown.splitlines():
        assert line in out
    assert "strict mode, on several tiles" in said and "N_k larger than Bc" in said


def test_the_choice_of_faults():
    """Some: of as many kinds as can be, others for another seed; none whose pass the tests do not call."""
    some = score.chosen(None, score.TESTS["test"], 1, "hard", False)
    assert len(some) == score.SOME == len({m.name for m in some})
    assert {m.direction for m in some} == {"forward"}
    assert {m.stage for m in some} == set(LADDER)
    assert len({m.fault.shown_by for m in some}) >= 9
    again, other = (score.chosen(None, score.TESTS["test"], seed, "hard", False) for seed in (1, 2))
    assert some == again != other
    everything = score.chosen("flash2", score.TESTS["test"], 1, "hard", True)
    assert {m.direction for m in everything} == {"forward", "split"}
    easy = score.chosen(None, sum(score.TESTS.values(), ()), 1, "easy", True)
    assert {m.direction for m in easy} == {"forward", "backward"}
    assert {m.fault.shown_by for m in easy} <= {*EASY, "bill", "strict"}
    assert all(m.fault.shown_by in score.NEEDS for m in ALL)


@pytest.mark.course
def test_a_score(run, write, tmp_path):
    file = tmp_path / "score.json"
    status, out, _ = run("--test", write(LOOSE), "--seed", 3, "--json", file)
    assert status == 1
    result = json.loads(file.read_text())
    assert len(result["faults"]) == score.SOME
    assert 1 <= result["killed"] < score.SOME / 2
    assert f"Your test kills {result['killed']} of {score.SOME}" in out
    assert max(map(len, out.splitlines())) <= 80
    for fault in result["faults"]:
        assert fault["killed"] or fault["needs"].split(",")[0] in " ".join(out.split())


def test_the_stages_are_as_they_were():
    one = mutant("naive: L without m")
    before = dict(STAGES)
    with pytest.raises(KeyError), installed(one, plant(one).source):
        assert STAGES["naive"] is not before["naive"]
        assert list(STAGES) == list(before)
        q = np.ones((1, 3, 4), np.float32)
        assert np.allclose(nf.attention(q, q, q, stage="naive", return_lse=True, device="cpu")[1], np.log(3))
        raise KeyError
    assert before == STAGES
    assert len(INPUTS) == len({x.what for x in INPUTS.values()})
