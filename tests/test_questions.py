"""Questions for a number: what may be typed, what is said of it, and the file of --answers."""

import ast
import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from numba_flash import lesson, questions
from numba_flash.questions import Question, number

SIZES = {"N": 300, "d": 20, "Tc": 3, "N_k": 7}


@pytest.mark.parametrize(
    "typed, value",
    [
        ("4,194,304", 4194304), ("4194304", 4194304), ("4_194_304", 4194304), ("4 194 304", 4194304),
        ("2**22", 2**22), ("2^22", 2**22), ("64*1024*64", 2**22), ("64 × 1,024 · 64", 2**22), ("4.19e6", 4190000),
        ("4.19E+6", 4190000), (".5", Fraction(1, 2)), ("1/2", Fraction(1, 2)), ("0.1", Fraction(1, 10)), ("-3", -3),
        ("7//2", 3), ("(1 + 2)(3 + 4)", 21), ("N²d", 1_800_000), ("2Nd", 12_000), ("3TcN", 2700), ("2(N + d)", 640),
        ("N_k*2", 14), ("N*d*ceil(N/16)", 114_000), ("N·d·⌈N/16⌉", 114_000), ("⌊7/2⌋", 3), ("sqrt(4)", 2),
        ("N d", 6000), ("n_k*tc", 21), ("2nd", 12_000),
        ("4**0.5", 2), ("2**-1", Fraction(1, 2)), ("exp(0)", 1), ("(N)2", 600), ("N 2", 600),
    ],
)  # fmt: skip
def test_what_may_be_typed(typed, value):
    assert number(typed, SIZES) == value


@pytest.mark.parametrize(
    "typed, says",
    [
        ("twelve", "'twelve' is not known here. Known are N, d, Tc, N_k, ceil, floor, exp, log, sqrt."),
        ("M*d", "'M' is not known"), ("1/0", "'1/0' divides by zero"), ("2**999", "too large"),
        ("9**64**64", "too large"), ("(9**64)**64", "too large"), ("1e999", "is no number"),
        ("exp(10000)", "too large"),
        ("9" * 150 + "*1", None), ("9" * 201, "is no number"), ("1,23", "is no number"), ("0,5", "is no number"),
        ("(" * 150, "is no number"), ("-" * 199 + "1", None), ("3 5", "is no number"), ("3 elements", "not known"),
        ("True", "is no number"), ("'a'", "is no number"), ("1j", "not known"), ("[1]", None),
        ("N if 1 else d", "is no"),
        ("__import__('os')", "not known"), ("().__class__", "is no number"), ("ceil(1, 2)", "is no number"),
        ("N.real", "is no number"), ("log(-1)", "is no number"), ("log(0)", "is no number"), ("(-8)**(1/3)", "is no"),
        ("7 % 2", "is no number"), ("1 < 2", "is no number"), ("ceil", "not known"), ("0**-1", "divides by zero"),
        ("2e5e", "not known"), ("sqrt(9**64*9**64*9**64*9**64*9**64*9**64)", "too large"),
    ],
)  # fmt: skip
def test_what_is_not_evaluated(typed, says):
    if says is None:
        number(typed, SIZES)
    else:
        with pytest.raises(ValueError, match="^.{,120}$") as caught:
            number(typed, SIZES)
        assert says in str(caught.value)


def question(**more):
    sizes = SimpleNamespace(**more.pop("sizes", {"N": 30, "H": 3}))
    wrong = {2 * 90: "Twice as many."}
    values = {"text": "how many elements?", "answer": 90, "how": "H·N.", "hint": "Think.", "wrong": wrong} | more
    return Question("all", sizes, **values)


@pytest.mark.parametrize(
    "typed, right, says",
    [
        ("90", True, "Right. H·N."),
        ("HN", True, "Right. H·N."),
        ("60", False, "Twice as many. And there are H = 3 heads."),
        ("180", False, "Twice as many."),
        ("30", False, "That is for one head. There are H = 3."),
        ("360", False, "Those are bytes. The question is for elements, of 4 bytes each."),
        ("91", False, "No, that is too large. Think."),
        ("50", False, "No, that is too small. Think."),
        ("90.5", False, "No, that is too large. But near: count exactly. Think."),
    ],
)
def test_what_is_said_of_an_answer(typed, right, says):
    asked = question()
    assert asked.judge(typed) == (right, says)
    assert asked.given == [typed] and asked.correct == (1 if right else None)


@pytest.mark.parametrize(
    "typed, says",
    [
        (("180", "180"), ("Twice as many.", "No, for the same reason. Think.")),
        (("180", "?", "180"), ("Twice as many.", "Think.", "No, for the same reason.")),
        (("180", "1"), ("Twice as many.", "No, that is too small. Think.")),
        (("7", "45"), ("No, that is too small. Think.", "No, that is too small: 0.5 times the answer.")),
        (("?", "-2**9"), ("Think.", "No, that is too small.")),
        (("?", "9**64*9**64*9**64*9**64*9**64*9**64"), ("Think.", "No, that is too large.")),
        (("?", "270"), ("Think.", "No, that is too large: 3 times the answer.")),
        (("?", "90.5"), ("Think.", "No, that is too large. But near: count exactly.")),
    ],
)
def test_nothing_is_said_twice(typed, says):
    asked = question()
    assert tuple(asked.help() if text == "?" else asked.judge(text)[1] for text in typed) == says


@pytest.mark.parametrize(
    "sizes, typed, value",
    [
        ({"N": 30, "Br": 8, "Bc": 7}, "Tr*100 + Tc", 405),
        ({"N": 30, "N_k": 40, "Bc": 7}, "Tc", 6),
        ({"Tr": 4, "Br": 8}, "N*1000 + 10Tc + Bc", 32048),
        ({"Tc": 3, "N": 30}, "tc n", 90),
        ({"N_k": 40, "n": 3}, "n*n_k", 120),
    ],
)
def test_names_that_follow_from_the_sizes(sizes, typed, value):
    assert question(sizes=sizes, answer=value, wrong={}).judge(typed)[0]


def test_a_name_that_does_not_follow():
    for typed in ("Tc", "Tr", "N"):
        with pytest.raises(ValueError, match="not known here. Known are N_k, n, ceil"):
            question(sizes={"N_k": 40, "n": 3}).judge(typed)


@pytest.mark.parametrize("typed", ["90 elements", "90 Element", "H*N elements.", "(H N) elements"])
def test_a_unit_may_follow(typed):
    assert question().judge(typed)[0]
    with pytest.raises(ValueError, match="'bytes' is not known here"):
        question().judge("90 bytes")


def test_about_allows_one_percent():
    assert [question(about=True).judge(typed)[0] for typed in ("90.9", "89.1", "91", "89")] == [
        True,
        True,
        False,
        False,
    ]
    assert not question().judge("90.1")[0]


def test_the_second_try_counts_as_the_second():
    asked = question()
    with pytest.raises(ValueError):
        asked.judge("ninety")
    asked.judge("1")
    asked.judge("90")
    kept = asked.kept()
    assert (kept["given"], kept["correct"], kept["sizes"]) == (["1", "90"], 2, {"N": 30, "H": 3})
    assert kept["text"] == "For N = 30, H = 3 heads: how many elements?"
    assert kept["time"].endswith("+00:00")


@pytest.mark.parametrize("holds", ["{}", "[1]", '[{"lesson": "00"}]', "not json", b"\xff\xfe"])
def test_a_file_that_holds_something_else(tmp_path, holds):
    file = tmp_path / "answers.json"
    file.write_bytes(holds if isinstance(holds, bytes) else holds.encode())
    with pytest.raises(ValueError, match=r"answers\.json' exists and is no file of answers: name another file"):
        questions.earlier(str(file))


def test_runs_are_added(tmp_path):
    file = tmp_path / "answers.json"
    assert questions.earlier(file) == []
    file.touch()
    assert questions.earlier(file) == []
    one = {"lesson": "00", "questions": [question().kept()]}
    kept = questions.keep(file, one)
    other = {"lesson": "01", "questions": []}
    questions.keep(file, other)  # a lesson that is open at the same time
    one["questions"].append(question().kept())
    questions.keep(file, one, kept)
    assert questions.earlier(file) == [json.loads(json.dumps(one)), other]
    assert os.listdir(tmp_path) == [file.name]


def test_runs_of_lessons_that_are_open_at_once_are_all_kept(tmp_path):
    file = tmp_path / "answers.json"

    def play(lesson):
        kept = None
        for length in range(8):
            kept = questions.keep(file, {"lesson": lesson, "questions": [{}] * length}, kept)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, "abcd"))
    assert sorted((run["lesson"], len(run["questions"])) for run in questions.earlier(file)) == [
        (lesson, 7) for lesson in "abcd"
    ]


def test_a_lock_that_was_left_behind_does_not_count(tmp_path):
    file = tmp_path / "answers.json"
    lock = tmp_path / "answers.json.lock"
    lock.touch()
    os.utime(lock, (1, 1))
    questions.keep(file, {"questions": []})
    assert questions.earlier(file) == [{"questions": []}] and not lock.exists()


def test_answers_are_added_to_the_file_behind_a_link(tmp_path):
    file, link = tmp_path / "there" / "answers.json", tmp_path / "link.json"
    file.parent.mkdir()
    try:
        link.symlink_to(file)
    except OSError:
        pytest.skip("links cannot be made here")
    questions.keep(link, {"questions": []})
    assert link.is_symlink() and questions.earlier(file) == [{"questions": []}]


# --- what is said of a known wrong number, in every lesson, whatever the seed draws -----------------------------------


def test_where_two_mistakes_give_one_number_neither_is_asserted():
    """4·N² is one head of two and, where two heads are drawn, twice what each of them stores."""
    sizes, wrong = {"N": 30, "H": 2}, {2 * 2 * 30**2: "Softmax passes over a row more than once."}
    for typed in ("4*N*N", "2 H N N"):
        asked = question(sizes=sizes, answer=4 * 2 * 30**2, wrong=wrong)
        assert asked.judge(typed) == (False, "No, that is too small. Think.")
        assert asked.judge(typed) == (False, "No, that is too small: 0.5 times the answer.")
    wrong = {2 * 3 * 30**2: "Softmax passes over a row more than once."}
    asked = question(sizes=sizes | {"H": 3}, answer=4 * 3 * 30**2, wrong=wrong)
    assert asked.judge("4*N*N")[1] == "That is for one head. There are H = 3."


def test_one_head_of_two_mistakes_is_neither():
    """One head of 4·H and two heads of 2·H: with the heads counted in, either may be meant."""
    wrong = {12: "Four.", 6: "Two."}
    assert question(sizes={"H": 2}, answer=100, wrong=wrong).judge("6")[1] == "No, that is too small. Think."
    assert question(sizes={"H": 2}, answer=100, wrong=wrong).judge("12")[1] == "Four."
    assert question(sizes={"H": 2}, answer=100, wrong={12: "So.", 6: "So."}).judge("6")[1] == "So."


def drawn_questions(file, seed):
    """The Questions of a lesson for a seed. Nothing is run but what stands between a draw and its questions."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    asked = []

    class This:
        n, d, heads, blocks = 64, 16, 1, 16

        def __init__(self):
            self.dice = random.Random(seed)

        draw = lesson.Lesson.draw

        def ask(self, text, *questions):
            asked.extend(questions)

    names = {"this": This(), "N": 64, "N_k": 64, "d": 16, "H": 1}
    between = False
    for node in body:
        between = between or "this.draw(" in ast.unparse(node)
        asks = isinstance(node, ast.Expr) and ast.unparse(node).startswith("this.ask(")
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) or between or asks:
            exec(compile(ast.Module([node], []), str(file), "exec"), names)
        between = between and not asks
    return asked


LESSONS = sorted((Path(__file__).parent.parent / "lessons").glob("[0-9]*.py"))


@pytest.mark.course
@pytest.mark.parametrize("file", LESSONS, ids=lambda file: file.stem)
def test_known_wrong_numbers_are_told_apart(file):
    """A reason is given where no other fits, and most of the time none does."""
    given = {}
    for seed in range(100):
        for asked in drawn_questions(file, seed):
            heads = vars(asked.sizes).get("H", 1)
            for value, why in asked.known:
                for typed in (Fraction(value), Fraction(value) / heads):
                    if asked._is(typed, asked.answer):
                        continue
                    fits = {
                        why for number, why in asked.known for times in (1, heads) if asked._is(typed * times, number)
                    }
                    told = asked._why(typed)
                    assert told is None if len(fits) > 1 else told.startswith(*fits), (seed, vars(asked.sizes), fits)
                    given.setdefault((asked.name, re.sub("[0-9]+", "n", why)), []).append(len(fits) == 1)
    rare = {reason: sum(times) / len(times) for reason, times in given.items() if sum(times) < 0.6 * len(times)}
    assert given and not rare  # what is hardly ever said need not be known
