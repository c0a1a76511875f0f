"""lessons/README.md: its commands exist, what it says they print is printed, and its tables add up."""

import glob
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import numba_flash as nf
from numba_flash import __main__ as cli
from numba_flash import questions
from numba_flash.course import check, exam
from numba_flash.course.exercises import EXERCISES
from numba_flash.engine import model
from numba_flash.figures import memory
from numba_flash.stages import LADDER

ROOT = Path(__file__).resolve().parents[2]
KIT = (ROOT / "lessons" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(.*?)\n(.*?)^```", KIT, flags=re.DOTALL | re.MULTILINE)
LESSONS = {file.stem[:2]: file for file in sorted((ROOT / "lessons").glob("[0-9][0-9]_*.py"))}


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", KIT, flags=re.DOTALL | re.MULTILINE)[1]


def rows(title):
    """The cells of the last table of a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def commands():
    """Every command of the file: those of shell blocks, and those in backquotes."""
    lines = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    lines += re.findall(r"`(python [^`]+)`", re.sub(r"^```.*?^```", "", KIT, flags=re.DOTALL | re.MULTILINE))
    return sorted({" ".join(line.split()) for line in lines})


def claims():
    """(command, what it must print) of the table of misconceptions."""
    for _, run, shows in rows("What students believe, and what answers it"):
        printed = [text for text in re.findall(r"`([^`]+)`", shows) if text not in ("--stage naive", "--n 4096", "old")]
        yield run.strip("`"), printed


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("python -m numba_flash ")])
def test_a_command_takes_these_flags(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[3:]
    for word in words:
        if word.endswith((".py", "answers.json")):
            file = tmp_path / word.replace("*", "ann")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
    words = [found for word in words for found in (sorted(glob.glob(word)) or [word])]
    assert cli.make_parser().parse_args(words).command == words[0]


def test_the_commands_are_seen():
    lines = commands()
    assert len(lines) > 30
    for name in ("check", "lab", "listing", "play", "exam", "bill", "figures", "doctor"):
        assert any(line.startswith(f"python -m numba_flash {name}") for line in lines), name
    for line in lines:
        words = line.split()
        module = words[2] if words[1] == "-m" else None
        assert module in ("numba_flash", "pip") if module else (ROOT / words[1]).is_file(), line


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("python -m numba_flash exam")])
def test_an_exam_is_made(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.json").write_text('{"1a": "true"}')
    words = shlex.split(line)[3:]
    assert cli.main(words) == 0
    assert "Exam 1" in capsys.readouterr().out
    assert all((tmp_path / word).stat().st_size > 100 for word in words if word.startswith("exam."))


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        pytest.param(*claim, marks=[pytest.mark.course] * ("figures" in claim[0]))
        for claim in claims()
        if "numba_flash" in claim[0]
    ],
)
def test_what_a_command_prints(line, printed, capsys):
    assert cli.main(shlex.split(line)[3:]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert printed and all(text in out for text in printed)


def test_the_numbers_that_are_compared():
    step = nf.flops("naive", n=1024, d=64, direction="both")
    assert f"has {step:,}. Bytes" in KIT
    long, short = (nf.predict("flash2", n=n, d=64).elements for n in (8192, 4096))
    assert f"{long / short:.2f} times those of `--n 4096`" in KIT
    part, whole = (nf.predict("flash2", n=1024, d=64, causal=causal)["K"].loads for causal in (True, False))
    assert f"loads {int(1000 * part / whole) / 1000} of K" in KIT
    assert nf.predict("naive", n=1024, d=64) == nf.predict("naive", n=1024, d=64, causal=True)
    both = {"n": 1024, "d": 64, "direction": "both"}
    assert nf.predict("flash2", **both) == nf.predict("flash2", dropout_p=0.1, **both)
    decoding = {"n": 1, "n_k": 65536, "d": 64}
    assert nf.predict("flash2", **decoding)["K"] == nf.predict("flash2", split_kv=64, **decoding)["K"]


@pytest.mark.course
def test_the_numbers_that_the_library_knows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ideal = nf.predict("naive", n=64, d=16), nf.hbm.predict.algorithm0(n=64, d=16)
    assert ideal[1].elements == 4 * 64**2 + 4 * 64 * 16 < ideal[0].elements
    held = {stage: figure["tensors"] for stage, figure in memory.compute(**memory.PAPER)["stages"].items()}
    square = {stage: len({"S", "P", "dP", "dS"} & set(tensors)) for stage, tensors in held.items()}
    text, words = " ".join(KIT.split()), ("none", "one", "two", "three", "four", "five")
    for phrase in (
        f"Python {project['requires-python'].removeprefix('>=')} or newer",
        f"is stopped after {check.SECONDS} (`--seconds`)",
        f"At least {words[exam.LEAST['kind']]} questions ask what kind",
        f"Integers must be exact, decimals within {100 * questions.NEAR} %",
        "The exam takes an hour more" if exam.MINUTES == 60 else "",
        f"d² = {128**2:,} is large against the {model.STATIC_SHARED // 4:,} elements of "
        f"{model.STATIC_SHARED // 1024} KiB",
        f"N × N matrices at the peak: {square['naive']} for naive, {words[square['flash']]} for flash",
        f"all {words[len(LADDER)]} stages differ",
        f"| block | Up to {model.THREADS:,} threads",
        f"| warp | {model.WARP} threads",
        f"{words[nf.patterns.local(8, 8, (4, 4)).itemsize].title()} byte per tile of S",
        "the yardstick of every bill, 4N² + 4Nd elements",
    ):
        assert phrase and phrase in text, phrase
    points = {name.strip("`"): (C, S, B) for name, _, _, C, S, B, _ in rows("Exercises")}["02_scores"]
    assert "check class/*/02_scores.py" in KIT
    assert 'POINTS = {{"correct": {}, "strict": {}, "bill": {}}}'.format(*points) in KIT


@pytest.mark.parametrize(("title", "hours"), [("Three hours", 3), ("Six hours", 6), ("Ten hours", 10)])
def test_a_syllabus_adds_up(title, hours):
    table = rows(title)
    assert sum(int(minutes) for minutes, *_ in table) == 60 * hours
    named = [exercise for _, what, _ in table for exercise in re.findall(r"\d\d_\w+", what)]
    named += re.findall(r"\d\d_\w+", section(title))
    assert set(named) <= set(EXERCISES) and named
    assert "Left out" in section(title)
    times = {name.strip("`"): int(minutes) for name, _, minutes, *_ in rows("Exercises")}
    for minutes, what, _ in table:
        for exercise in re.findall(r"\d\d_\w+", what):
            assert int(minutes) == times[exercise] or exercise == "06_no_matrix", (title, exercise)


def test_every_lesson_has_its_goals():
    table = rows("Lessons and goals")
    assert [lesson[:2] for lesson, *_ in table] == list(LESSONS)
    assert all(30 <= int(minutes) <= 90 for _, minutes, *_ in table)
    for lesson, _, builds, _ in table:
        assert all(earlier < lesson[:2] for earlier in re.findall(r"\d\d", builds))


def test_every_exercise_has_its_rubric():
    table = rows("Exercises")
    assert [name.strip("`") for name, *_ in table] == list(EXERCISES)
    for name, goal, minutes, C, S, B, mistakes in table:
        assert int(C) + int(S) + int(B) == (30 if name == "`05_attention`" else 10)
        assert goal and mistakes and 5 <= int(minutes) <= 120
    folder = ROOT / "lessons" / "exercises"
    if folder.is_dir():  # another part of the course
        assert {file.stem for file in folder.glob("*.py")} == set(EXERCISES)


def test_the_points_of_a_class(tmp_path, monkeypatch, capsys):
    passed, failed, unjudged = {"passed": True}, {"passed": False}, {"passed": None}
    verdicts = [
        ("ann.py", None, {"correct": passed, "strict": passed, "bill": passed, "parallel": passed}),
        ("bob.py", None, {"correct": passed, "strict": failed, "bill": unjudged, "parallel": unjudged}),
        ("one.py", None, {"correct": passed, "strict": passed, "bill": passed, "parallel": failed}),
        ("eve.py", "stopped after 30 s", {}),
    ]
    keys = "file", "message", "criteria"
    (tmp_path / "grades.json").write_text(json.dumps([dict(zip(keys, verdict, strict=True)) for verdict in verdicts]))
    monkeypatch.chdir(tmp_path)
    exec(next(text for language, text in BLOCKS if language == "python grades"), {})
    assert capsys.readouterr().out == "ann.py\t10\t\nbob.py\t5\t\none.py\t7\t\neve.py\t0\tstopped after 30 s\n"


def test_the_glossary_is_in_order_and_the_lessons_use_its_terms():
    table = rows("Glossary")
    terms = [term for term, *_ in table]
    assert terms == sorted(terms, key=str.casefold) and len(set(terms)) == len(terms) > 50
    for term, what, lesson in table:
        assert what.endswith(".") and what.count(". ") < 3
        source = " ".join(LESSONS[lesson].read_text(encoding="utf-8").casefold().split())
        used = [word.casefold() for word in re.split(", | \\(", term)]
        assert any(word in source for word in used), (term, lesson)


def test_every_paper_of_the_lessons_is_cited():
    used = {
        paper
        for file in LESSONS.values()
        for paper in re.findall(r"arXiv:(\d+\.\d+)", file.read_text(encoding="utf-8"))
    }
    assert used == set(re.findall(r"arXiv:(\d+\.\d+)", section("Licence and sources")))


def test_flash_decoding_is_cited():
    """Which is no paper, and has no number."""
    for text in (LESSONS["11"].read_text(encoding="utf-8"), section("Licence and sources")):
        assert all(word in text for word in ("Flash-Decoding", "Haziza", "Massa", "Sizov"))


def lesson(line, *more):
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    words = [sys.executable, *shlex.split(line)[1:], *more]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=300)


@pytest.mark.course
@pytest.mark.parametrize(("line", "printed"), [claim for claim in claims() if "lessons/" in claim[0]])
def test_a_claim_that_a_lesson_shows(line, printed):
    done = lesson(line, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    out = " ".join(done.stdout.split())
    assert all(text in out for text in printed), printed


@pytest.mark.course
@pytest.mark.parametrize("line", [line for line in commands() if "--svg" in line or "--answers" in line])
def test_a_lesson_takes_these_flags(line):
    words = line.split()
    help = lesson(" ".join([*words[:2], "--help"])).stdout
    assert all(word in help for word in words if word.startswith("--"))


def test_when_the_lab_comes_is_said_in_one_way():
    """Easy after lesson 05, hard after lesson 09, in the README and in each row of the kit."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = [line for line in KIT.splitlines() if re.match(r"\| `python -m numba_flash lab ", line)]
    assert len(rows) == 2 and all("| after lesson 05 |" in row for row in rows) and "After lesson 05 you can" in readme
    for text in (readme, *rows):
        assert re.findall(r"`--level hard` (?:is for )?after lesson (\d\d)", text) == ["09"]
