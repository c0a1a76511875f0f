"""The exercises themselves: their files, their bills, and every solution, unsolved file and wrong answer, judged."""

import ast
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from numba_flash.course.exercise import constants, folder, hole, with_hole
from numba_flash.course.exercises import EXERCISES
from numba_flash.course.judge import fits, judge
from numba_flash.course.rounding import truth_and_limit

from .wrong import WRONG

ALL = pytest.mark.parametrize("name", EXERCISES)


@pytest.fixture(autouse=True)
def as_in_the_sandbox(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "1")


def test_there_is_one_for_each_lesson_and_a_file_for_each():
    assert {exercise.lesson for exercise in EXERCISES.values()} == {f"{number:02}" for number in range(13)}
    for where in (folder(), folder() / "solutions"):
        assert {file.stem for file in where.glob("*.py")} == set(EXERCISES)


@ALL
def test_exercise_and_solution_differ_in_the_hole_alone(name):
    exercise = EXERCISES[name]
    unsolved = exercise.file.read_text(encoding="utf-8")
    _, filling = hole(exercise.solution)
    assert unsolved == exercise.unsolved != exercise.solution == with_hole(unsolved, filling)
    assert exercise.lines == len([line for line in filling if line.strip()])


@ALL
def test_the_text_names_its_lesson_its_bill_and_its_check(name):
    exercise = EXERCISES[name]
    text = ast.get_docstring(ast.parse(exercise.solution))
    lesson = next((folder().parent).glob(f"{exercise.lesson}_*.py")).read_text(encoding="utf-8")
    assert f'this.part("{exercise.part}")' in lesson
    assert f"python -m numba_flash check {name}\n" in text
    for bound in exercise.bill:
        if bound.formula != "0" and bound.tensor != "total":
            assert re.search(rf"^    {bound.tensor} +{bound.kind} +{re.escape(str(bound))}$", text, re.M), bound
    assert all(hint[-1] in ".?)" for hint in (*exercise.hints, *(mistake.says for mistake in exercise.mistakes)))
    assert len(exercise.hints) == 3 and len(WRONG[name]) >= 3


def test_definitions_take_their_constants_from_the_files():
    """A known mistake in other tiles than those of the exercise would explain nothing."""
    assert constants("10_blocks", "Bc", "Br") == [4, 8] and constants("00_reduce", "B") == [64]
    shared_by = {"03": ("03_tile", "03_output"), "05": ("05_rescale", "05_flash2"), "12": ("12_registers",)}
    for lesson, names in shared_by.items():
        module = import_module(f"numba_flash.course.exercises.lesson{lesson}")
        for name in names:
            (shared,) = {"T", "Bc"} & set(vars(module))
            assert constants(name, shared) == [getattr(module, shared)]
    for file in Path(import_module("numba_flash.course.exercises").__file__).parent.glob("lesson*.py"):
        assert not re.search(r"^(T|B|Br|Bc)\b.* = \d", file.read_text(encoding="utf-8"), re.M), file.name


@ALL
def test_known_mistakes_differ_from_the_truth_and_from_each_other(name):
    """On the inputs together: a mistake that is no mistake would explain a right answer."""
    exercise = EXERCISES[name]
    truth = exercise.trusted().specification
    found = {}
    for mistake in exercise.mistakes:
        outputs = []
        with np.errstate(all="ignore"):
            for _, inputs in exercise.inputs():
                pairs = (x if isinstance(x, tuple) else (x,) for x in (mistake.outputs(*inputs), truth(*inputs)))
                outputs += [(np.asarray(a, np.float64), np.asarray(b)) for a, b in zip(*pairs, strict=True)]
        assert any(not np.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in outputs), mistake.says
        key = b"".join(np.round(a, 4).tobytes() for a, _ in outputs)
        assert found.setdefault(key, mistake.says) == mistake.says


@ALL
def test_no_number_among_the_inputs_is_always_the_same(name):
    """Such a number could be written into the kernel."""
    numbers = [[x for x in inputs if not isinstance(x, np.ndarray)] for _, inputs in EXERCISES[name].inputs()]
    assert all(len(set(values)) > 1 for values in zip(*numbers, strict=True))


@pytest.mark.course
@ALL
def test_a_solution_passes_and_its_bill_is_the_bound(name):
    exercise = EXERCISES[name]
    verdict = judge(exercise, folder() / "solutions" / f"{name}.py")
    assert verdict["passed"] and verdict["message"] is None
    rows = verdict["criteria"]["bill"]["rows"]
    assert {(row["tensor"], row["kind"]) for row in rows} == {
        (b.tensor, b.kind) for b in exercise.bill if b.formula != "0"
    }
    if name not in ("04_merge", "05_rescale", "05_attention"):  # who has no key loads no O; a tile may be larger
        assert all(row["counted"] == row["bound"] for row in rows)


@pytest.mark.course
@ALL
def test_a_solution_runs_on_the_device_of_this_machine(name, monkeypatch):
    """Not strict, and on a GPU where there is one."""
    monkeypatch.delenv("NUMBA_FLASH_DEVICE")
    monkeypatch.delenv("NUMBA_FLASH_STRICT")
    exercise = EXERCISES[name]
    solution = exercise.trusted()
    launch = getattr(solution, "launch", getattr(solution, exercise.answer))
    for case, inputs in exercise.inputs():
        got = launch(*inputs)
        expected = truth_and_limit(solution.specification, inputs)
        for x, (truth, limit) in zip(got if isinstance(got, tuple) else (got,), expected, strict=True):
            assert fits(x, truth, limit).all(), case


def test_no_start_below_which_scores_can_be():
    """A row of scores far below any number that one may choose, and the limit for it is that of rounding."""
    for name in ("02_softmax", "04_online", "05_flash2", "05_attention", "06_no_matrix", "11_split"):
        exercise = EXERCISES[name]
        specification = exercise.trusted().specification
        told = False
        for _, inputs in exercise.inputs():
            mistakes = [m for m in exercise.mistakes if "begins at a finite number" in m.says]
            (truth, limit), *_ = truth_and_limit(specification, inputs)
            with np.errstate(all="ignore"):
                told |= all((~fits(m.outputs(*inputs), truth, limit)).any() for m in mistakes)
            assert mistakes and np.median(limit) < 1e-2, name
        assert told, name


RIGHT_REASON = {
    "00_reduce": "correct: nothing was added",
    "03_tile": "correct: S[0, 0] is 0",
    "05_rescale": "correct: O[0, 0] is 0",
    "05_flash2": "correct: O[0, 0] is nan",
    "05_attention": "message: launched no kernel",
    "07_recompute": "correct: dQ[0, 0] is 0",
    "08_skip": "bill: `keys` is too large",
    "10_blocks": "strict: no thread loaded",
    "12_registers": "correct: S_ij is still 0",
}


@pytest.mark.course
@ALL
def test_an_unsolved_file_fails_for_the_right_reason(name):
    exercise = EXERCISES[name]
    expect(judge(exercise, exercise.file), RIGHT_REASON.get(name, "correct: No element of "))


@pytest.mark.course
@pytest.mark.parametrize(
    ("name", "number"), [(name, at) for name, answers in WRONG.items() for at in range(len(answers))]
)
def test_a_wrong_answer_gets_a_message_that_teaches(tmp_path, name, number):
    old, new, says = WRONG[name][number]
    exercise = EXERCISES[name]
    assert old in exercise.solution
    file = tmp_path / f"{name}.py"
    file.write_text(exercise.solution.replace(old, new), encoding="utf-8")
    expect(judge(exercise, file), says)


def expect(verdict, says):
    """That the criterion before the colon failed, and that its message has all parts between the bars."""
    criterion, _, parts = says.partition(": ")
    assert not verdict["passed"]
    failed = [name for name, found in verdict["criteria"].items() if found["passed"] is False]
    message = verdict["message"] or verdict["criteria"][failed[0]]["message"]
    assert criterion == ("message" if verdict["message"] else failed[0]), message
    assert all(part in message for part in parts.split("|")), message
