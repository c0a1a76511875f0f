"""The exam: the same for the same seed, balanced, without its key; and the key against counts made in another way."""

import ast
import importlib.util
import inspect
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from html import unescape

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import __main__ as cli
from numba_flash import stages
from numba_flash.course import exam
from numba_flash.course.exam_questions import POOL, TOPICS, Question
from numba_flash.course.exam_questions.code import GPU_MAY_SHOW, SLIPS, SYMPTOMS, snippet
from numba_flash.course.exam_questions.kind import EXPERIMENTS, FUNCTION, MEMORY, METHODS, WORK, approximations

SEEDS = range(60)


def make(name, seed) -> Question:
    return POOL[name](random.Random(f"{name} {seed}"))


@pytest.fixture
def run(capsys):
    def run(*args):
        try:
            status = cli.main(["exam", *map(str, args)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def words(text):
    return " ".join(text.split())


# --- the selection ----------------------------------------------------------------------------------------------------


def test_the_seed_makes_the_exam(run):
    status, first, err = run("--seed", 5, "--key")
    assert (status, err) == (0, "")
    code = "from numba_flash.__main__ import main; main(['exam', '--seed', '5', '--key'])"
    again = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True, encoding="utf-8")
    assert again.stdout == first  # in another process, with another hash seed
    assert len({run("--seed", seed)[1] for seed in range(20)}) == 20


@pytest.mark.parametrize("size", [{"count": 3}, {"count": 8}, {"count": 20}, {"minutes": 45}, {"minutes": 90}, {}])
def test_an_exam_is_balanced(size):
    for seed in SEEDS:
        names = exam.balanced(seed, **size)
        topics = Counter(POOL[name].topic for name in names)
        assert topics["kind"] >= 3
        assert len(set(names)) == len(names)
        assert list(topics) == sorted(topics, key=list(TOPICS).index)
        minutes = sum(POOL[name].minutes for name in names)
        if "count" in size:
            assert len(names) == size["count"]
        else:
            left = size.get("minutes", exam.MINUTES) - minutes
            assert 0 <= left < min(build.minutes for name, build in POOL.items() if name not in names)
        others = [topics[topic] for topic in TOPICS if topic != "kind"]
        assert max(others) - min(others) <= (1 if "count" in size else 2)


def test_points_and_minutes_add_up(run):
    for size in ({"count": 12}, {"minutes": 30}):
        questions = exam.select(4, **size)
        minutes = sum(question.minutes for question in questions)
        points = sum(part.points for q in questions for part in q.parts) + sum(n for q in questions for n, _ in q.open)
        assert exam.totals(questions) == (minutes, points)
        _, out, _ = run(
            "--seed", 4, *(x for flag, n in size.items() for x in (f"--{flag.replace('count', 'questions')}", n))
        )
        assert f"{len(questions)} questions, {minutes} minutes, {points} points" in out
        heads = re.findall(r"^ \d+\. (\d+) points, (\d+) minutes, lesson \d\d", out, flags=re.MULTILINE)
        assert (sum(int(m) for _, m in heads), sum(int(p) for p, _ in heads)) == (minutes, points)


def test_all_of_the_pool_can_be_drawn():
    seen = {name for seed in SEEDS for name in exam.balanced(seed)}
    assert seen == set(POOL)
    drawn = {
        text
        for seed in SEEDS
        for name in ("the_function", "the_work", "the_memory")
        for text in make(name, seed).facts["statements"]
    }
    assert drawn == {text for text, *_ in FUNCTION + WORK + MEMORY}
    slips = {make(name, seed).facts["slip"] for seed in SEEDS for name in POOL if POOL[name].topic == "code"}
    assert slips == {slip.name for slip in SLIPS}
    assert {make("experiment", seed).facts["claim"] for seed in SEEDS} == set(EXPERIMENTS)
    assert {method for seed in SEEDS for method in make("same_function", seed).facts["methods"]} == set(METHODS)


def test_each_topic_has_its_share_of_the_pool():
    topics = Counter(build.topic for build in POOL.values())
    assert set(topics) == set(TOPICS)
    assert min(topics.values()) >= 5


def test_everything_a_grader_needs_is_there():
    for name in POOL:
        for seed in range(6):
            question = make(name, seed)
            assert question.parts and question.why and question.wrong and question.text, name
            assert len({part.ask for part in question.parts}) == len(question.parts)
            assert 2 <= question.points <= 10 and 3 <= question.minutes <= 10
            assert all(points > 0 for points, _ in question.open)
            written = [question.text, question.why, question.also, *(f"{a} {b}" for a, b in question.wrong)]
            assert not any("{" in text or ("  " in text.strip() and "\n" not in text) for text in written), (
                name,
                written,
            )
            if question.choices:
                assert len({text for _, text in question.choices}) == len(question.choices) >= 4
                assert question.parts[0].expected in dict(question.choices)
            for part in question.parts:
                value = part.expected
                assert isinstance(value, str | int | float) and not isinstance(value, bool), (name, value)
                assert not isinstance(value, float) or math.isfinite(value)
            verdicts = [part.expected for part in question.parts if part.expected in ("true", "false")]
            assert not verdicts or len(set(verdicts)) == 2, name


def test_letters_of_right_answers_are_spread():
    for name in ("best_sentence", "experiment", "code_loop"):
        letters = Counter(make(name, seed).parts[0].expected for seed in range(200))
        assert len(letters) == 5 and max(letters.values()) < 80


# --- the key stays away -----------------------------------------------------------------------------------------------


def secrets(question):
    yield question.why
    yield from (what for _, what in question.open)
    yield from (reveals for _, reveals in question.wrong)


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_of_the_key_without_key(run, tmp_path, seed):
    page, markdown, data = tmp_path / "exam.html", tmp_path / "exam.md", tmp_path / "exam.json"
    args = "--seed", seed, "--questions", len(POOL), "--html", page, "--md", markdown, "--json", data
    _, with_key, _ = run(*args, "--key")
    held = [words(secret) for question in exam.select(seed, len(POOL)) for secret in secrets(question)]
    for text in (with_key, *(file.read_text(encoding="utf-8") for file in (markdown,))):
        assert all(secret in words(text.replace("> ", "").replace(">", "")) for secret in held if ">" not in secret)
    assert words(json.loads(data.read_text())["questions"][0]["why"]) in held
    _, without, _ = run(*args)
    texts = [words(without), *(words(unescape(f.read_text(encoding="utf-8"))) for f in (page, markdown, data))]
    assert texts[0].partition(" written:")[0] in texts[1]  # the page is what was printed
    texts.append(words(json.dumps(json.loads(data.read_text()), ensure_ascii=False)))
    for text in texts:
        assert not [secret for secret in held if secret in text]
        assert "Answer " not in text and "Reader" not in text
    allowed = {"number", "topic", "lesson", "points", "minutes", "text", "choices", "parts", "also"}
    figures = json.loads(data.read_text())
    assert set(figures) == {"seed", "minutes", "points", "questions"}
    assert all(set(question) == allowed for question in figures["questions"])
    text = data.read_text()
    assert not any(slip.name in text for slip in SLIPS)


def test_it_fits_80_columns_and_ascii(run):
    for seed in range(2):
        _, out, _ = run("--seed", seed, "--questions", len(POOL), "--key")
        assert max(map(len, out.splitlines())) <= 80
    args = [sys.executable, "-m", "numba_flash", "exam", "--questions", str(len(POOL)), "--key"]
    done = subprocess.run(args, capture_output=True, env=cli.os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii() and b"?" not in done.stdout.replace(b"?\n", b"").replace(b"? ", b"")


def test_a_claim_has_an_experiment_and_both_of_its_outcomes():
    for seed in SEEDS:
        question = make("experiment", seed)
        what, shows, if_true = EXPERIMENTS[question.facts["claim"]]
        assert dict(question.choices)[question.parts[0].expected] == what
        assert [shows in text for _, text in question.open] == [True, False]
        assert [if_true in text for _, text in question.open] == [False, True]


# --- grading ----------------------------------------------------------------------------------------------------------


def test_the_key_gets_all_points_and_slips_get_none(run, tmp_path):
    file = tmp_path / "answers.json"
    key = json.loads(run("--seed", 3, "--key", "--json")[1])
    answers = {f"{q['number']}{label}": value for q in key["questions"] for label, value in q["answers"].items()}
    possible = sum(sum(q["points_of_parts"].values()) for q in key["questions"])
    file.write_text(json.dumps(answers))
    status, out, _ = run("--seed", 3, "--grade", file)
    assert status == 0 and f"{possible} of {possible} points" in out and "wrong" not in out
    figures = json.loads(run("--seed", 3, "--grade", file, "--json")[1])
    assert (figures["points"], figures["of"]) == (possible, possible)
    assert figures["for_a_reader"] == key["points"] - possible
    file.write_text(json.dumps(dict.fromkeys(answers, "Z")))
    assert json.loads(run("--seed", 3, "--grade", file, "--json")[1])["points"] == 0
    file.write_text("{}")
    _, out, _ = run("--seed", 3, "--grade", file)
    assert out.count("missing") == len(answers)
    assert not any(words(secret) in words(out) for question in exam.select(3) for secret in secrets(question))


@pytest.mark.parametrize(
    ("given", "expected", "right"),
    [
        (4096, 4096, True), ("4,096", 4096, True), (4096.0, 4096, True), (4097, 4096, False), (True, 1, False),
        ("97/18", 97 / 18, True), (5.4, 97 / 18, True), (5.5, 97 / 18, False), ("−3/2", -1.5, True), ("x", 1, False),
        ("nan", 1.5, False), ("1/0", 1.5, False), (True, "true", True), ("F", "false", True), ("yes", "no", False),
        ("n", "no", True), ("b", "B", True), (" B ", "B", True), ("A", "B", False), ("true", "B", False),
        (None, 0, False),
        ("1e999999999", 3, False), (0, 0, True), ("9" * 9999, 3, False), (1e-05, 1e-05, True), ("", 1, False),
        ("2**22", 2**22, True), ("4_194_304", 2**22, True), ("64 × 64", 4096, True), ("⌈300/16⌉", 19, True),
        ("ceil(300/16)", 19, True), ("1/3", 1 / 3, True), ("1/3", 0, False), ("-3/8", -0.375, True), ("4^0", 1, True),
        ("N·d·⌈N/16⌉", 114_000, True), ("2Nd", 12_000, True), ("Tc", 19, False), ("__import__('os')", 1, False),
    ],
)  # fmt: skip
def test_what_counts_as_right(given, expected, right):
    assert (exam.verdict_on(given, expected, {"N": 300, "d": 20}) == "right") is right


HOW_MANY = "How many elements does a tile move?"


@pytest.mark.parametrize(
    ("given", "expected", "verdict"),
    [
        ("(e)", "E", "right"), ("E)", "E", "right"), ("e.", "E", "right"), ("Answer: E", "E", "right"),
        ("E, since S stays", "E", "right"), ("[D]", "E", "wrong"), ("E, A", "E", "not understood"),
        ("A or E", "E", "not understood"), ("E and A", "E", "not understood"), ("a tile is", "A", "not understood"),
        ("false.", "false", "right"), ("False, since M", "false", "right"), ("F", "false", "right"),
        ("(true)", "false", "wrong"), ("true or false", "true", "not understood"), ("t/f", "true", "not understood"),
        ("not true", "false", "not understood"), ("maybe", "false", "not understood"), ("", "no", "not understood"),
        ("No.", "no", "right"), ("no, it does not", "no", "right"), ("Yes: it is exact", "no", "wrong"),
        ("11664 elements", 11664, "right"), ("11,664 Elements.", 11664, "right"), ("= 11664", 11664, "right"),
        ("11664.", 11664, "right"), ("11664 bytes", 11664, "not understood"), ("5 elements", 11664, "wrong"),
        ("many", 11664, "not understood"), (True, 1, "not understood"), (None, 1, "missing"),
        ("≈ 0.33", 1 / 3, "right"), ("yes, N is large", "yes", "right"), ("y/n", "yes", "not understood"),
    ],
)  # fmt: skip
def test_answers_as_they_are_written(given, expected, verdict):
    assert exam.verdict_on(given, expected, asked=HOW_MANY) == verdict


def test_a_reader_is_told_what_was_not_understood(run, tmp_path):
    file = tmp_path / "answers.json"
    file.write_text('{"1a": "well"}')
    status, out, _ = run("--grade", file)
    assert status == 0 and "For a reader as well, since no program could tell: 1a." in out


def test_a_formula_may_use_the_sizes_that_were_drawn(run, tmp_path):
    """Those that stand on the paper, and none that is asked for."""
    known = {name: exam.sizes(make(name, 0)) for name in POOL}
    names = {"flash_bill": "N d Br Bc", "tile_moves": "Tr Tc", "tiled_bill": "T N d", "theorem_2": "M d N"}
    names |= {"causal_keys": "N d Br", "when_flash_loses": "d Br Bc N", "decoding": "N_k d n Bc", "trace": "d"}
    assert {name: " ".join(known[name]) for name in names} == names
    facts = make("flash_bill", 0).facts
    assert list(known["flash_bill"].values()) == [facts["n"], facts["d"], *facts["blocks"]]
    assert known["theorem_2"]["M"] == make("theorem_2", 0).facts["M"] > 1000
    seed, number = next(
        (seed, at)
        for seed in SEEDS
        for at, question in enumerate(exam.select(seed), 1)
        if question.name == "flash2_bill"
    )
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({f"{number}a": "⌈N/Br⌉", f"{number}b": "Nd ceil(N/Br)", f"{number}c": "Nd"}))
    assert json.loads(run("--seed", seed, "--grade", file, "--json")[1])["points"] == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "holds no answers by part"),
        ('{"1b": "true", "1a": {"x": 1}}', "1a is no answer, but several"),
        ('{"99a": 1}', "99a is no part of this exam"),
    ],
)
def test_a_file_that_holds_no_answers(run, tmp_path, text, says):
    file = tmp_path / "answers.json"
    if text is not None:
        file.write_text(text)
    status, out, err = run("--grade", file)
    assert (status, out) == (2, "") and says in err and err.count("\n") == 1


def test_nothing_of_lessons_that_were_not_taught(run):
    kept = lambda question: max(map(int, re.findall(r"(\d\d), part", question.lesson)))  # noqa: E731
    assert any(kept(question) > 7 for seed in range(9) for question in exam.select(seed))
    assert all(kept(question) <= 7 for seed in range(9) for question in exam.select(seed, upto=7))
    assert len(exam.select(1, upto=6)) > 5
    status, out, _ = run("--seed", 21, "--upto", 7, "--key")
    assert status == 0 and "lesson 10" not in out
    assert run("--upto", 5)[0] == 2


def test_grades_do_not_overwrite_answers(run, tmp_path):
    file = tmp_path / "answers.json"
    file.write_text('\ufeff{" 1A ": "true"}', encoding="utf-8")  # as PowerShell writes, and typed by hand
    status, _, err = run("--grade", file, "--json", file)
    assert status == 2 and "--grade and --json are the same file" in err
    assert run("--grade", file)[0] == 0


def test_a_truth_value_answers_yes_or_no():
    for given, expected in ((True, "yes"), (False, "no"), (True, "true")):
        assert exam.verdict_on(given, expected) == "right"
    assert exam.verdict_on(True, "no") == "wrong"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--questions", 2), "pass 3 to"),
        (("--questions", 999), "pass 3 to"),
        (("--minutes", 5), "too short"),
        (("--questions", 5, "--minutes", 50), "not allowed with"),
        (("--seed", "x"), "give a whole number"),
        (("--html", "exam.pdf"), "end it in .html"),
        (("--md", "no/such/folder/x.md"), "does not exist"),
        (("--md", "-"), "end it in .md"),
        (("--html", "-"), "end it in .html"),
        (("--md", "x.html"), "end it in .md"),
        (("--grade", "x.json", "--key"), "--key is for an exam, and --grade makes none"),
    ],
)
def test_a_value_that_will_not_do(run, args, says):
    status, _, err = run(*args)
    assert status == 2 and says in err


# --- the numbers of the key, counted in another way -------------------------------------------------------------------


def sides(size, T):
    """How much each tile of T covers."""
    return [min(T, size - at) for at in range(0, size, T)]


def square_product(rows, inner, columns, T):
    """Elements that a tiled product loads of its two operands, block by block and step by step."""
    first = second = 0
    for r in sides(rows, T):
        for c in sides(columns, T):
            for t in sides(inner, T):
                first += r * t
                second += t * c
    return first, second


def naive_bill(n, d, **_):
    per_thread = {"scores": (d, d, 1), "row": (3 * n, n), "output": (n, n, 1)}
    Q = sum(per_thread["scores"][0] for _ in range(n * n))
    S = sum(per_thread["row"][0] for _ in range(n))
    P = sum(per_thread["output"][0] for _ in range(n * d))
    return [Q, S, P, n * n * sum(per_thread["scores"]) + n * sum(per_thread["row"]) + n * d * sum(per_thread["output"])]


def tiled_bill(n, d, blocks, **_):
    Q, _ = square_product(n, d, n, blocks)
    P, V = square_product(n, n, d, blocks)
    return [Q, P, V, sum(n for _ in range(n) for _ in range(3))]


def online_bill(n, d, blocks, **_):
    return [sum(n for _ in range(n)), square_product(n, n, d, blocks)[0], 0, 2 * len(range(n))]


def flash_bill(n, d, blocks, **_):
    Br, Bc = blocks
    K = Q = O = lm = steps = 0
    for keys in sides(n, Bc):
        steps += 1
        K += keys * d
        for queries in sides(n, Br):
            Q += queries * d
            O += 2 * queries * d
            lm += 4 * queries
    return [steps, K, Q, O, lm]


def flash2_bill(n, d, blocks, **_):
    Br, Bc = blocks
    K = V = Q = O = L = 0
    for queries in sides(n, Br):
        Q += queries * d
        for keys in sides(n, Bc):
            K += keys * d
            V += keys * d
        O += queries * d
        L += queries
    return [len(sides(n, Br)), K, O, Q + K + V + O + L]


def tile_moves(Tr, Tc):
    first = sum(2 + sum(3 for _ in range(Tr)) for _ in range(Tc))
    return [first, sum(1 + sum(2 for _ in range(Tc)) + 1 for _ in range(Tr))]


def tiles_that_fit(d, sram):
    M = sram // 4
    Bc = max(b for b in range(1, M) if 4 * (2 * b * d + 64 * b) <= sram)
    paper = math.ceil(M / (4 * d))
    shapes = [(paper, d)] * 2 + [(min(paper, d), d)] * 2 + [(min(paper, d), paper)]
    return [Bc, paper, sum(np.zeros(shape, np.float32).nbytes for shape in shapes)]


def when_flash_loses(n, d, blocks, **_):
    _, K, Q, O, lm = flash_bill(n, d, blocks)
    flash = 2 * K + Q + O + lm + n * d + 2 * n
    ideal = np.size(np.zeros((n, n), bool)) * 4 + 4 * n * d
    return [flash, ideal, "yes" if flash < ideal else "no"]


def causal_keys(n, d, blocks, **_):
    seen = np.tril(np.ones((n, n), bool))
    rows = sum(seen[at : at + blocks[0]].any(axis=0).sum() for at in range(0, n, blocks[0]))
    return [int(rows) * d, rows / (n * len(sides(n, blocks[0]))), 1]


def kept_between(n, heads, batch):
    P, L = np.dtype(np.float16), np.dtype(np.float32)
    return [sum(batch * heads * n * x for _ in range(n)) for x in (P.itemsize, L.itemsize / n)]


def backward_bill(n, d, Bc):
    passes = dQ = 0
    for _ in sides(n, Bc):
        passes += sum(np.size(np.zeros((n, d), bool)) for _ in ["Q", "O", "dO"])
        dQ += 2 * n * d
    N2, Nd = n * n, n * d
    steps = {"dV": (N2, Nd, Nd), "dP": (Nd, Nd, N2), "dS": (N2, N2, N2), "dQ": (N2, Nd, Nd), "dK": (N2, Nd, Nd)}
    return [
        passes,
        dQ,
        sum(map(sum, steps.values())),
        len({"dV", "dP", "dQ", "dK"}),
        len({"S", "dV", "dP", "dQ", "dK"}),
    ]


def training_products(n, d, ratio):
    assert 1.1 < ratio < 1.25
    forward, backward = ["S", "O"], ["dV", "dP", "dQ", "dK"]
    owners = ["S", "dP", "dV", "dK"] + ["S", "dP", "dQ"]
    return [
        len(forward + backward),
        len(forward + ["S"] + backward),
        len(forward + owners),
        n * n * sum(2 for _ in range(d)),
    ]


def intensity(n, d, itemsize):
    operands = {"scores": 2 * n * d + n * n, "softmax": 2 * n * n, "output": n * n + 2 * n * d}
    per_byte = 7 * n * n / (operands["softmax"] * itemsize)
    return [sum(operands.values()), 4 * n * n / sum(operands.values()), per_byte, per_byte]


def decoding(n_k, d, splits, Bc):
    whole = 2 * n_k * d + d + d + 1
    split = 2 * n_k * d + splits * (d + d + 2) + sum(splits * (1 + 2 + 1) for _ in range(d)) + d + 1
    tiles = len(sides(n_k, Bc))
    chain = next(c for c in range(1, tiles + 1) if c * splits >= tiles)
    return [whole, split - whole, chain, 2 * 2 * n_k * d / (2 * n_k * d * 4)]


def dropout_bytes(n, d):
    scores = np.zeros((n, n), np.float32)
    return [4 * scores.nbytes + 2 * scores.astype(np.uint8).nbytes, 0]


def local_pattern(n, d, side):
    near = [(i, j) for i in range(n // side) for j in range(n // side) if abs(i - j) <= 1]
    return [len(near), sum(side * d for _ in near), sum(side for _ in range(n // side) for _ in range(n // side))]


def a_warp_asks(s, width, R, C):
    banks = [row * width % 32 for row in range(32)]
    return [len({4 * s * i // 32 for i in range(32)}), max(map(banks.count, banks)), 1 / R + 1 / C]


def what_dram_moves(n, d, heads):
    Q, S = (np.broadcast_to(np.float32(0), (heads, n, columns)) for columns in (d, n))
    fits = "no" if S.nbytes > 60 * 1024 * 1024 else "yes"
    return [S.nbytes, fits, Q.nbytes + Q.nbytes + S.nbytes, sum(Q.nbytes for _ in "QKV")]


def trace(exponents, values):
    S, V = np.log(2.0) * np.ravel(exponents), np.ravel(values).astype(float)
    rows = []
    for end in (2, 4, 6):
        weights = np.exp(S[:end] - S[:end].max())
        rows.append((weights.sum(), weights @ V[:end] / weights.sum()))
    return [l for l, _ in rows] + [O for _, O in rows]


def merging(sums, outs):
    return [sum(sums), (sums[0] * outs[0] + sums[1] * outs[1]) / sum(sums), math.exp(-math.inf)]


def softmax_gradient(P, dP):
    """dS by differences of softmax, at scores that have these weights."""
    S, dP = np.log([float(Fraction(p)) for p in P]), np.array(dP, float)

    def loss(S):
        return (np.exp(S) / np.exp(S).sum()) @ dP

    step = 1e-6 * np.eye(len(S))
    return [loss(S), *((loss(S + h) - loss(S - h)) / 2e-6 for h in step)]


def causal_rows(n, n_k, i):
    seen = np.tril(np.ones((n, n_k), bool), k=n_k - n)
    return [int(seen[i].sum()), int(seen.sum()), int((~seen.any(axis=1)).sum())]


def line_12(l, l_tile, rise, O, O_tile):
    old = 2.0**-rise
    return [old * l + l_tile, old * l / (old * l + l_tile), (old * l * O + l_tile * O_tile) / (old * l + l_tile)]


def two_forms_of_D(P, V, dO):
    P = np.array([float(Fraction(p)) for p in P])
    dP = np.array(V) @ np.array(dO)
    return [P @ dP]  # the first form; the key has the second


def why_the_factor(rise):
    return [math.exp(-rise * math.log(2))]


def theorem_2(n, d, M):
    Bc = math.ceil(M / (4 * d))
    return [len(sides(n, Bc)), sum(n * d for _ in sides(n, Bc))]


def softmax_jacobian(P):
    S = np.log([float(Fraction(p)) for p in P])

    def first(S):
        return np.exp(S[0]) / np.exp(S).sum()

    return [(first(S + h) - first(S - h)) / 2e-6 for h in 1e-6 * np.eye(2)]


def does_recomputing_pay(d, per_byte, itemsize):
    loads = (d + d) / per_byte / itemsize
    stored, loaded = 1, 2  # P alone: dP and dS are not spared by computing P again
    return [loads, "yes" if loads < stored + loaded else "no"]


def read_errors(seed, names):
    return ["yes" if name.startswith("tiles") else "no" for name in names]


COUNTS = {f.__name__: f for f in (
    naive_bill, tiled_bill, online_bill, flash_bill, flash2_bill, tile_moves, tiles_that_fit, when_flash_loses,
    causal_keys, kept_between, backward_bill, training_products, intensity, decoding, dropout_bytes, local_pattern,
    a_warp_asks, what_dram_moves,
    trace, merging, softmax_gradient, causal_rows, line_12, two_forms_of_D, why_the_factor, theorem_2,
    softmax_jacobian, does_recomputing_pay, read_errors,
)}  # fmt: skip


def test_recomputing_does_not_always_pay():
    found = [make("does_recomputing_pay", seed) for seed in range(40)]
    answers = [question.parts[1].expected for question in found]
    assert 10 < answers.count("no") < 30
    assert all(abs(question.parts[0].expected - 3) > 0.1 for question in found)


def test_no_reason_says_that_a_number_is_itself():
    for name in POOL:
        for seed in range(25):
            assert not re.search(r"(?<![^\s(])(\S+) = \1(?![^\s,;.)])", make(name, seed).why), (name, seed)


def test_every_numeric_question_is_counted():
    numeric = {name for name in POOL if any(not isinstance(p.expected, str) for p in make(name, 0).parts)}
    assert numeric <= set(COUNTS) <= set(POOL)


@pytest.mark.parametrize("name", COUNTS)
def test_the_key_is_what_another_count_gives(name):
    for seed in range(3 if name == "read_errors" else 25):
        question = make(name, seed)
        facts = {key: value for key, value in question.facts.items() if key not in ("stage", "sram", "causal")}
        if name == "tiles_that_fit":
            facts = question.facts
        counted = COUNTS[name](**facts)
        assert len(counted) == len(question.parts)
        for value, part in zip(counted, question.parts, strict=True):
            if isinstance(part.expected, str):
                assert value == part.expected, (seed, part)
            else:
                assert value == pytest.approx(part.expected, rel=1e-7, abs=1e-7), (seed, part)


def causal_slip(n, n_k, i):
    """Keys of query i, aligned at the top left; where that is right, those before its own place."""
    top_left, before = (int(np.tril(np.ones((n, n_k)), k=k)[i].sum()) for k in (0, n_k - n - 1))
    return before if top_left == causal_rows(n, n_k, i)[0] else top_left


# What each slip gives that the key names by a number -> the parts that it is a slip of, by their place, and the number.
SLIPPED = {
    "naive_bill": lambda n, d, **_: [(0, n * d), (2, sum(n for _ in range(n))), (1, sum(n for _ in range(n)))],
    "tiled_bill": lambda n, d, blocks, **_: [
        (0, Fraction(n * n * d, blocks)),
        (1, square_product(n, n, n, blocks)[0]),
        (3, sum(n for _ in range(n))),
    ],
    "online_bill": lambda n, **_: [(0, sum(n for _ in ("m", "l", "P")) * n), (1, n * n), (2, n * n)],
    "flash_bill": lambda n, d, blocks: [
        (1, sum(n * d for _ in sides(n, blocks[0]))),
        (2, n * d),
        (3, sum(n * d for _ in sides(n, blocks[1]))),
    ],
    "flash2_bill": lambda n, d, blocks: [
        (1, sum(n * d for _ in sides(n, blocks[1]))),
        (3, flash2_bill(n, d, blocks)[3] - n),
    ],
    "tile_moves": lambda Tr, Tc: [
        (0, sum(2 + sum(len(("Q in", "O out")) for _ in range(Tr)) for _ in range(Tc))),
        (1, sum(1 + sum(len(("K in", "V in", "O out")) for _ in range(Tc)) for _ in range(Tr))),
    ],
    "tiles_that_fit": lambda d, sram: [
        (0, max(b for b in range(1, sram) if 4 * 2 * b * d <= sram)),
        (1, math.ceil(sram / (4 * d))),
    ],
    "causal_keys": lambda **_: [(1, 0.5), (2, 2)],
    "kept_between": lambda n, heads, batch: [
        (0, sum(2 * batch * heads * n * n for _ in "SP")),
        (1, 0),
        (1, np.zeros((batch, heads, n), np.float16).nbytes),
    ],
    "backward_bill": lambda n, d, **_: [(4, len({"dV", "dP", "dQ", "dK"})), (1, n * d + n * d)],
    "training_products": lambda **_: [
        (1, len(["S", "O"] + ["dV", "dP", "dQ", "dK"])),
        (2, len(["S", "O"] + ["S", "dV", "dP", "dQ", "dK"])),
    ],
    "intensity": lambda itemsize, **_: [(2, 7 / itemsize)],
    "decoding": lambda **_: [(3, 2 / 2)],
    "dropout_bytes": lambda n, **_: [
        (0, 6 * np.zeros((n, n), np.float32).nbytes),
        (1, 3 * np.zeros((n, n), bool).nbytes),
    ],
    "local_pattern": lambda n, side, **_: [(0, 3 * (n // side)), (2, sum(n // side for _ in range(n // side)))],
    "a_warp_asks": lambda R, C, **_: [(0, 128 / 32), (1, 1), (2, R * C * 2 / (R * C))],
    "what_dram_moves": lambda n, d, heads: [
        (0, heads * n * n),
        (2, sum(4 * heads * n * n * d for _ in "QK") + 4 * heads * n * n),
        (3, sum(4 * heads * n * d for _ in "QK")),
    ],
    "merging": lambda outs, **_: [(1, np.mean(outs)), (1, np.mean([*outs, 0]))],
    "softmax_gradient": lambda P, dP: [(t + 1, float(Fraction(P[t])) * dP[t]) for t in range(3)],
    "causal_rows": lambda n, n_k, i: [(0, causal_slip(n, n_k, i))],
    "line_12": lambda l, l_tile, rise, **_: [(1, 2.0**-rise), (0, l + l_tile)],
}  # fmt: skip


def numbers_of(question):
    """The numbers that the key lists as wrong answers, in their order."""
    for answer, _ in question.wrong:
        if given := re.match(
            r"(?:(?:O|dS|l_new) = |the factor |a factor of )?((?:-?\d(?:[\d./]|,\d)*(?:, )?)+)", answer
        ):
            yield from (float(Fraction(number.replace(",", ""))) for number in given[1].removesuffix(", ").split(", "))


@pytest.mark.parametrize("name", POOL)
def test_a_wrong_number_is_what_its_slip_gives(name):
    for seed in range(25):
        question = make(name, seed)
        facts = {key: value for key, value in question.facts.items() if key != "stage"}
        slipped = SLIPPED[name](**facts) if name in SLIPPED else []
        assert list(numbers_of(question)) == pytest.approx([float(x) for _, x in slipped], rel=5e-3), (
            seed,
            question.wrong,
        )
        for at, value in slipped:
            assert exam.verdict_on(float(value), question.parts[at].expected) != "right", (
                seed,
                at,
                value,
                question.parts,
            )


def test_answers_differ_between_seeds():
    for name in COUNTS:
        if name not in ("why_the_factor", "two_forms_of_D"):
            assert len({str(make(name, seed).parts) for seed in range(12)}) > 2, name


def test_statements_say_what_the_library_says():
    both = [nf.flops(stage, n=1024, d=64, direction="both") for stage in ("naive", "flash")]
    assert both[1] > both[0]
    bill = nf.predict("flash2", n=1024, d=64)
    assert {"S", "P"}.isdisjoint({tensor for tensors in bill.kernels.values() for tensor in tensors})
    half, whole = (nf.predict("flash", n=65536, d=64, sram=sram).elements for sram in (65536, 131072))
    assert 1.8 < half / whole < 2.2
    assert nf.predict("flash", n=1024, d=128).elements > 4 * 1024**2 + 4 * 1024 * 128
    kernels = {stage: list(nf.predict(stage, n=64, d=16).kernels) for stage in ("flash2", "flash")}
    assert kernels == {"flash2": ["flash2"], "flash": ["initialise", "flash"]}
    shows = EXPERIMENTS["FlashAttention holds parts of S in the memory of the CPU"][1]
    assert "flash2 has one launch" in shows and "flash has two, the first for line 2" in shows
    assert set(nf.predict("flash2", n=64, d=16).kernels["flash2"]) == set("QKVOL")
    assert 0.99 < nf.flops("flash2", n=1024, d=64) / nf.flops("naive", n=1024, d=64) < 1  # it saves next to none
    truths = [truth for _, truth, *_ in FUNCTION + WORK + MEMORY]
    assert 0.25 < sum(truths) / len(truths) < 0.5


@pytest.mark.course
@pytest.mark.parametrize(
    "name", ["naive_bill", "tiled_bill", "online_bill", "flash_bill", "flash2_bill", "causal_keys"]
)
def test_the_ledger_counts_the_same(name):
    for seed in range(3):
        question = make(name, seed)
        facts = question.facts
        q, k, v = np.random.default_rng(0).standard_normal((3, facts["n"], facts["d"]), np.float32)
        how = {key: facts[key] for key in ("blocks", "causal") if key in facts}
        with nf.ledger() as bill:
            nf.attention(q, k, v, stage=facts["stage"], device="cpu", **how)
        answers = [part.expected for part in question.parts]
        kernels, parts = bill.kernels, answers
        if name in ("naive_bill", "tiled_bill"):
            found = [bill[x].loads for x in ("QSP" if name == "naive_bill" else "QPVS")]
            found += [bill.elements] * (name == "naive_bill")
        elif name == "online_bill":
            found = [
                kernels["statistics"]["S"].loads,
                kernels["output"]["S"].loads,
                0,
                bill["m"].stores + bill["l"].stores,
            ]
        elif name == "flash_bill":
            flash = kernels["flash"]
            found = [parts[0], *(flash[x].elements for x in "KQO"), flash["l"].elements + flash["m"].elements]
        elif name == "flash2_bill":
            found = [parts[0], bill["K"].loads, bill["O"].elements, bill.elements]
        else:
            found = [bill["K"].loads, *parts[1:]]
        assert found == answers


# --- the slips of the code -------------------------------------------------------------------------------------------


def test_a_slip_fits_its_stage_and_is_seen():
    for slip in SLIPS:
        lines = snippet(slip)
        assert 4 <= len(lines) <= 24 and max(map(len, lines)) <= 74, slip.name
        assert not any("#" in line or "allowed" in line or "keep(" in line for line in lines), slip.name
        assert not lines[0].startswith(" "), slip.name  # a head that is not shown would look like the fault
        whole = snippet(type(slip)(**{**vars(slip), "new": slip.old}))
        assert whole != lines, slip.name
        assert slip.symptom in SYMPTOMS
        assert not re.search(r"\bg\b|\bmask\b", "\n".join(lines)), slip.name
    assert {slip.symptom for slip in SLIPS} == set(SYMPTOMS)
    with pytest.raises(ValueError, match="stands 0 times"):
        SLIPS[0].apply("")


def test_a_whole_kernel_defines_its_names():
    """A name that is defined nowhere would be a right answer, too."""
    whole = {slip.name: text for slip in SLIPS if (text := "\n".join(snippet(slip))).startswith("def ")}
    assert len(whole) == 3
    for name, text in whole.items():
        tree = ast.walk(ast.parse(text))
        names = [node for node in tree if isinstance(node, ast.Name | ast.arg)]
        known = {node.arg if isinstance(node, ast.arg) else node.id for node in names if not is_read(node)}
        read = {node.id for node in names if is_read(node)}
        assert read <= known | {"cuda", "real", "weight", "math", "range", "max"}, name
        assert set(re.search(r"\((.*)\)", text)[1].split(", ")) <= read, name


def is_read(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def test_what_a_gpu_may_show_is_no_wrong_choice():
    h, i, j, N, N_k = 1, 2, 11, 5, 10
    assert np.unravel_index((h * N + i) * N_k + j, (3, N, N_k)) == (h, i + 1, j - N_k)
    assert "start of row i + 1" in next(slip.then for slip in SLIPS if slip.symptom == "bounds")
    assert all("on a GPU" in SYMPTOMS[symptom] for symptom in ("bounds", "race", "divergence"))
    asked = [make(name, seed) for name in POOL if POOL[name].topic == "code" for seed in SEEDS]
    for symptom, others in GPU_MAY_SHOW.items():
        for question in asked:
            choices = dict(question.choices)
            if choices[question.parts[0].expected] == SYMPTOMS[symptom]:
                assert set(choices.values()).isdisjoint(SYMPTOMS[other] for other in others)


@pytest.fixture
def broken(tmp_path):
    """The module of a stage with a slip in it."""

    def load(slip):
        module = importlib.import_module(f"numba_flash.stages.{slip.module}")
        source = inspect.getsource(module)
        factory = inspect.getsource(getattr(module, slip.factory))
        source = source.replace(factory, slip.apply(factory))
        source = source.replace("from ..", "from numba_flash.").replace(
            "from . import", "from numba_flash.stages import"
        )
        source = source.replace("from .", "from numba_flash.stages.")
        file = tmp_path / f"{slip.name}.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(slip.name, file)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return load


def rows_that_are_wrong(module, q, k, v, blocks):
    out = forward(module, q, k, v, blocks)[0]
    truth = nf.reference.attention(q, k, v)[0]
    return ~(np.abs(out - truth) <= 1e-4 * np.abs(truth).max()).all(axis=1)


def forward(module, q, k, v, blocks):
    Q, K, V = (nf.to_device(x[None], "cpu") for x in (q, k, v))
    scale = np.float32(1 / math.sqrt(q.shape[1]))
    O, L = module.forward(Q, K, V, scale, blocks=blocks, return_lse=True, device="cpu")
    return nf.to_host(O)[0], nf.to_host(L)[0]


@pytest.mark.course
@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_a_slip_shows_as_the_key_says(slip, broken, monkeypatch):
    """At sizes where it must show, and at sizes where it must not."""
    from numba_flash import errors, reference

    module = broken(slip)
    square = slip.module in ("naive", "tiled", "online_softmax")
    blocks = None if slip.module == "naive" else 4 if square else (4, 4)
    rng = np.random.default_rng(1)

    def inputs(n, n_k, d=8, shift=0.0):
        q, k, v = rng.standard_normal((n, d)), rng.standard_normal((n_k, d)), rng.standard_normal((n_k, d)) + 1
        q, k = 2 * np.abs(q) + shift, k - shift
        return [x.astype(np.float32) for x in (q, k, v)]

    raised = {"bounds": errors.OutOfBounds, "race": errors.RaceDetected, "divergence": errors.BarrierDivergence}
    if slip.symptom in raised:
        monkeypatch.setenv("NUMBA_FLASH_STRICT", "1")
        n = 32 if slip.symptom == "race" else 37
        with pytest.raises(raised[slip.symptom]):
            forward(module, *inputs(n, n), blocks)
        if slip.symptom != "race":
            assert not rows_that_are_wrong(module, *inputs(32, 32), blocks).any()
        return
    q, k, v = inputs(8, 16)
    if slip.symptom == "rising":
        first = 1 if slip.module == "online_softmax" else 4
        S = reference.scores(q.astype(float), k.astype(float))
        k[0] = 4 * np.abs(k[0])
        S = reference.scores(q.astype(float), k.astype(float))
        later = S.argmax(axis=1) >= first
        wrong = rows_that_are_wrong(module, q, k, v, blocks)
        assert (wrong == later).all() and not later.all()
        q, k, v = inputs(8, 16)
        later = reference.scores(q.astype(float), k.astype(float)).argmax(axis=1) >= first
        assert later.any() and (rows_that_are_wrong(module, q, k, v, blocks) == later).all()
    elif slip.symptom == "second_tile":
        assert rows_that_are_wrong(module, q, k, v, blocks).all()
        assert not rows_that_are_wrong(module, *inputs(8, 4), blocks).any()
    elif slip.symptom == "one_tile":
        assert all(rows_that_are_wrong(module, *inputs(n, n, d=n), blocks).all() for n in (4, 8, 11))
    elif slip.symptom == "tail":
        assert not rows_that_are_wrong(module, q, k, v, blocks).any()
        assert rows_that_are_wrong(module, *inputs(8, 15), blocks).any()
    elif slip.symptom == "low":
        assert not rows_that_are_wrong(module, q, k, v, blocks).any()
        low = inputs(8, 16, shift=15.0)
        assert reference.scores(*(x.astype(float) for x in low[:2])).max() < -104
        assert rows_that_are_wrong(module, *low, blocks).all()
    else:
        correct = importlib.import_module(f"numba_flash.stages.{slip.module}")
        dout = rng.standard_normal(q.shape).astype(np.float32)
        truth = reference.attention_backward(*(x.astype(float) for x in (q, k, v, dout)))
        plain = stages.flash2
        O, L = forward(module if slip.symptom == "gradients" else plain, q, k, v, blocks)
        assert np.abs(O - reference.attention(q, k, v)[0]).max() < 1e-4
        Q, K, V, dO, O, L = (nf.to_device(x[None], "cpu") for x in (q, k, v, dout, O, L))
        backward = module if slip.symptom == "dQ" else importlib.import_module("numba_flash.stages.flash2_backward")
        scale = np.float32(1 / math.sqrt(8))
        found = backward.backward(Q, K, V, dO, scale, O=O, L=L, blocks=(8, 8), device="cpu")
        off = [np.abs(nf.to_host(x)[0] - y).max() > 1e-3 * np.abs(y).max() for x, y in zip(found, truth, strict=True)]
        assert off == ([True, False, False] if slip.symptom == "dQ" else [True] * 3)
        assert correct is not module
    if slip.symptom == "dQ":
        how = {"O": O, "L": L, "blocks": (8, 8), "device": "cpu"}
        bills = []
        for one in (module, correct):
            with nf.ledger() as bill:
                one.backward(Q, K, V, dO, scale, **how)
            bills.append(bill)
        assert (bills[0] == bills[1]) == (slip.bill == "no")
    elif slip.bill:
        with nf.ledger() as faulty:
            forward(module, *inputs(8, 16), blocks)
        with nf.ledger() as right:
            forward(importlib.import_module(f"numba_flash.stages.{slip.module}"), *inputs(8, 16), blocks)
        assert (faulty == right) == (slip.bill == "no")


def test_only_float64_tells_every_wrong_method_from_rounding():
    for seed in range(10):  # as many as are drawn
        found = approximations(seed)
        hidden = {name for name in found if name.startswith(("tiles", "weights"))}
        assert all(1e-7 < found[name][0] < 1e-5 for name in hidden), found
        assert all(found[name][1] < 1e-12 for name in hidden if name.startswith("tiles"))
        assert all(1e-7 < found[name][1] < 1e-5 for name in hidden if name.startswith("weights"))
        assert all(min(found[name]) >= 0.1 for name in set(found) - hidden)
        assert len(hidden) == 3


def test_the_float32_column_hides_one():
    for seed in SEEDS:
        question = make("read_errors", seed)
        rows = re.findall(r"^    ([a-e]) +(.*?)  +(.*)$", question.text, flags=re.MULTILINE)
        verdicts = {"10⁻⁷ to 10⁻⁵": set(), "0.1 or more": set()}
        for (_, single, double), part in zip(rows, question.parts, strict=True):
            verdicts[single].add(part.expected)
            assert (double == "below 10⁻¹²") == (part.expected == "yes")
        assert list(verdicts.values()) == [{"yes", "no"}, {"no"}]
