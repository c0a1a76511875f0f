"""`python -m numba_flash check`: what it says to every kind of file, and that it survives each."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from numba import cuda, types
from numba.core.registry import cpu_target

from numba_flash import __main__ as cli
from numba_flash import report
from numba_flash.course import check, sandbox
from numba_flash.course.exercise import Share, folder, hole, with_hole
from numba_flash.course.exercises import EXERCISES
from numba_flash.course.judge import judge

GUARD = EXERCISES["00_guard"]
unix_only = pytest.mark.skipif(sys.platform == "win32", reason="processes of Unix")


@pytest.fixture(autouse=True)
def as_in_the_sandbox(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """The command in this process -> exit status, standard output, standard error."""

    def run(*arguments):
        try:
            status = cli.main(["check", *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def plain(text):
    return " ".join(text.split())


def answer(text, name="00_guard.py"):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.resolve()


def solved(old="", new="", exercise=GUARD):
    assert old in exercise.solution
    return exercise.solution.replace(old, new) if old else exercise.solution


def numbered(says):
    """{text} or {text+1} becomes the number of the line of the solution that holds it, or of the next."""

    def number(match):
        text, _, more = match[1].partition("+")
        return str(next(at for at, line in enumerate(solved().splitlines(), 1) if text in line) + int(more or 0))

    return re.sub(r"{(.+?)}", number, says)


# --- what is no answer ------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_found_name_the_exercises(run):
    Path("empty").mkdir()
    for notes in ("notes.txt", "notes.py"):
        Path(notes).write_text("no exercise")
    for name, says in (
        ("nothing.py", "nothing.py: there is no such file, and no exercise of that name"),
        ("deep/00_guard.py", "deep/00_guard.py: there is no such file. The exercises"),
        (300 * "a", "a: there is no such file, and no exercise of that name"),
        ("empty", "empty is a folder without an exercise in it"),
        ("notes.txt", "notes.txt is no Python file"),
        ("notes.py", "notes.py is no exercise"),
    ):
        status, out, err = run(name)
        assert (status, out) == (2, "")
        assert says in err and "00_guard, 00_reduce" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "The file is empty"),
        (b" \n\n", "The file is empty"),
        (b"x = '\xff\xfe'", "not text in UTF-8 (byte 5 is 0xff)"),
        (b"\x00\x01", "The file holds NUL characters"),
        (b"x = " + b"-" * 100_000 + b"1", "nested too deep"),
        ("x = 1  # of\u2028two\ny = = 2\n".encode(), "Line 2 is not Python that can be run: invalid syntax. 2 y = = 2"),
        (b"def add(X:\n    pass\n", "Line 1 is not Python that can be run"),
        (b"x = 1\n  y = 2\n", "Line 2 is not Python that can be run: unexpected indent. 2 y = 2"),
        (b"x = " + b"(" * 5000, "not Python that can be run"),
        (b"x = 1 +" + b" 1" * 5000, "x = 1 + 1 1 1"),
        (b"#" * (check.LARGEST + 1), "more than 1,000,000 bytes"),
    ],
)
def test_files_that_are_no_python_are_not_run(run, monkeypatch, data, says):
    monkeypatch.setattr(sandbox, "run", None)
    Path("00_guard.py").write_bytes(data)
    status, out, err = run("00_guard.py")
    assert status == 1 and err == ""
    assert says in plain(out) and "Not passed yet" in out
    assert len(out) < 2000


# --- what cannot be judged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            solved("import numpy as np", "import numpy as np\nimport torchvision9"),
            "imports 'torchvision9' in line {import numpy+1}, which",
        ),
        (solved("B = 64", "B = undefined + 64"), "stops in line {B = 64} with NameError: name 'undefined'"),
        (solved("B = 64", "import sys\nsys.exit(0)\nB = 64"), "ends Python by sys.exit in line {B = 64+1}"),
        (solved("B = 64", "exit()\nB = 64"), "ends Python by sys.exit in line {B = 64}"),
        (solved("B = 64", "raise KeyboardInterrupt"), "stops in line {B = 64} with KeyboardInterrupt"),
        (
            solved("def add(X, Y, Z, factor)", "def add(X, Y, factor, Z)"),
            "takes (X, Y, factor, Z) in your file, and (X, Y, Z",
        ),
        (
            solved("def add(X, Y, Z, factor)", "def plus(X, Y, Z, factor)"),
            "There is no `add` in your file. Keep that name",
        ),
        (solved("@cuda.jit\n", ""), "`add` is no kernel: it needs `@cuda.jit`"),
        (solved("@cuda.jit\n", "@cuda.jit(device=True)\n"), "`add` is a device function"),
        (solved("B = 64", "B = 32"), "B is 32 in your file and 64 in the exercise"),
        (
            solved("i = cuda.grid(1)", "i = cuda.grid(1)\n    print([1, 2])"),
            "The kernel cannot be run: add (line {i = cuda+1})",
        ),
        (
            solved("Z[i] = factor * X[i] + Y[i]", "Z[i] = specification(X, Y, factor)"),
            "The kernel cannot be run: add (line {Z[i]})",
        ),
        (solved("Z[i] = factor * X[i] + Y[i]", "Z[:] = factor * X + Y"), "The kernel cannot be run: add (line {Z[i]})"),
        (solved("if i < X.shape[0]", "if i < X.shape[3]"), "cannot be run"),
        ("print('all else is gone')", "There is no `add` in your file"),
    ],
)
def test_answers_that_cannot_be_judged(text, says):
    path = answer(text)
    verdict = judge(GUARD, path)
    assert not verdict["passed"]
    assert numbered(says) in verdict["message"]
    assert "Traceback" not in verdict["message"] and str(path.parent) not in verdict["message"]


def test_what_the_compiler_says_is_not_shown():
    text = solved("Z[i] = factor * X[i] + Y[i]", "Z[:] = factor * X + Y")
    message = judge(GUARD, answer(text))["message"]
    assert numbered("add (line {Z[i]}) cannot be compiled.\n\n    {Z[i]}  Z[:] = factor * X + Y\n") in message
    assert message.endswith("nothing on whole arrays.)") and "np.float" not in message and "array(" not in message


SUM = "acc += Q[i, t] * K[j, t]"


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("00_reduce", "half //= 2", "half /= 2", "an index is a float. `/` gives a float"),
        ("00_guard", "Z[i] =", "Z[i / 1] =", "an index is a float"),
        ("00_guard", "i < X.shape[0]", "i < X.shape", "X.shape is a tuple, and X.shape[0] a number"),
        ("00_guard", "i < X.shape[0]", "i < X", "name the element"),
        ("00_guard", "i < X.shape[0]", "i < X.shape[3]", "the shape has fewer axes"),
        ("00_guard", "i < X.shape[0]", "i < X.len", "there is no `.len` here"),
        ("00_guard", "* X[i]", "* X[i, 0]", "there are 2 indices, and the array has 1"),
        ("00_guard", "* X[i]", "* X", "an array, or a row of one, stands where a number should"),
        ("00_guard", "i = cuda.grid(1)", "i, j = cuda.grid(1)", "one number cannot be two"),
        ("00_guard", "i = cuda.grid(1)", "i = cuda.grid(2)", "cuda.grid(2) is a tuple"),
        ("02_scores", "        acc = float32(0)\n", "", "`acc` has no value when it is first used"),
        ("02_scores", "acc = float32(0)", "acc = None", "begin a sum with float32(0)"),
        ("02_scores", SUM, "acc += Q[i] * K[j]", "or a row of one"),
        ("02_scores", SUM, "acc = cuda.fma(Q[i, t], K[j, t], acc)", "which runs every answer here: do without it."),
    ],
)
def test_why_a_kernel_cannot_be_compiled(name, old, new, says):
    exercise = EXERCISES[name]
    message = judge(exercise, answer(solved(old, new, exercise), f"{name}.py"))["message"]
    assert says in message and "on a GPU" not in message and "nf.Tensor" not in message


@pytest.mark.skipif(cuda.is_available(), reason="a GPU")
def test_a_signature_needs_a_gpu():
    text = solved("@cuda.jit", "@cuda.jit('void(float32[:], float32[:], float32[:], float32)')")
    assert "`@cuda.jit` needs no signature" in judge(GUARD, answer(text))["message"]


def test_elements_that_are_wrong_and_others_that_nobody_wrote():
    exercise = EXERCISES["03_output"]
    text = solved("cuda.blockIdx.y * T + ty", "cuda.blockIdx.x * T + tx", exercise)
    text = text.replace("col = cuda.blockIdx.x * T + tx", "col = cuda.blockIdx.y * T + ty")
    message = judge(exercise, answer(text, "03_output.py"))["criteria"]["correct"]["message"]
    assert "were never written" in message and "the guard asks for the wrong lengths" not in message


def test_who_does_all_the_work_is_named():
    loop = solved("Z[i] = factor * X[i] + Y[i]", "pass").replace(
        "i = cuda.grid(1)\n    if i < X.shape[0]:\n        pass",
        "i = cuda.grid(1)\n    if cuda.threadIdx.x == 5 and cuda.blockIdx.x == 1:\n"
        "        for k in range(X.shape[0]):\n            Z[k] = factor * X[k] + Y[k]",
    )
    verdict = judge(GUARD, answer(loop))
    assert not verdict["criteria"]["correct"]["passed"]  # one block, N = 1: nobody is in block 1
    assert verdict["criteria"]["parallel"] == {"passed": None, "message": ""}
    verdict = judge(GUARD, answer(loop.replace("== 5 and cuda.blockIdx.x == 1", "== 5 and cuda.blockIdx.x == 0")))
    parallel = verdict["criteria"]["parallel"]
    assert not verdict["passed"] and not parallel["passed"]
    assert "Thread 5 does all the work of block 0: 3,000 loads and stores in HBM" in parallel["message"]


@pytest.mark.course
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "05_flash2",
            "m_new = max(m_new, S_ij[c, r])",
            "m_new = max(m_new, S_ij[c, r])" + " + S_ij[c, r] - S_ij[c, r]" * 6,
        ),
        ("11_split", "m = max(m, m_i[s])", "m = max(m, m_i[s])" + "\n            m = max(m, m_i[s])" * 5),
    ],
)
def test_who_does_what_the_others_do_does_not_do_their_work(name, old, new):
    """Beyond the share, and all alike."""
    exercise = EXERCISES[name]
    verdict = judge(exercise, answer(solved(old, new, exercise), f"{name}.py"))
    assert verdict["passed"], verdict["criteria"]["parallel"]["message"]
    few = replace(exercise, share=(Share("shared memory", "2", "two"),))
    says = judge(few, answer(exercise.solution, f"{name}.py"))["criteria"]["parallel"]["message"]
    assert "Likely: all threads do this alike, each of them again." in says


def test_too_few_threads_are_not_one_thread():
    exercise = EXERCISES["05_attention"]
    few = replace(exercise, share=(Share("HBM", "2", "two"),))
    says = judge(few, answer(exercise.solution, "05_attention.py"))["criteria"]["parallel"]["message"]
    assert "Likely: its threads are too few" in says


def test_a_likely_mistake_of_the_bill_is_left_out_where_the_output_explains_it():
    exercise = EXERCISES["04_online"]
    text = solved("for j in range(S.shape[1]):", "for j in range(S.shape[1] - 1):", exercise)
    text = text.replace(
        "        O[i] =", "        if S[i, 0] > float32(0):\n            l_i += float32(1)\n        O[i] ="
    )
    criteria = judge(exercise, answer(text, "04_online.py"))["criteria"]
    assert not criteria["correct"]["passed"] and "Likely" not in criteria["bill"]["message"]
    text = text.replace("s = S[i, j]", "s = S[i, j] + S[i, j] - S[i, j]")
    assert "Likely: S is loaded twice" in judge(exercise, answer(text, "04_online.py"))["criteria"]["bill"]["message"]


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("02_scores", "acc = float32(0)", "acc = 0.0", "`acc` begins with 0.0 and is float64"),
        ("02_scores", "acc = float32(0)", "acc = 0", "`acc` begins with 0 and is float64|begin with float32(0)."),
        ("02_scores", "acc * scale", "acc * 1.5", "computes in float64|because of 1.5: write float32(1.5)."),
        ("00_guard", "factor * X[i]", "X[i] / B", "computes in float64|because of B: write float32(B)."),
        ("00_guard", "factor * X[i]", "X[i] / X.shape[0]", "because of X.shape[0]: write float32(X.shape[0])."),
        ("05_flash2", "s * scale", "s / d", "computes in float64|because of d: write float32(d)."),
        (
            "02_softmax",
            "m = float32(-math.inf)\n        for",
            "m = -math.inf\n        for",
            "`m` begins with -math.inf",
        ),
        ("02_softmax", "max(m, S[i, j])", "max(m, S[i, j], 0.0)", "because of 0.0"),
        ("05_attention", "l_i = float32(0)", "l_i = 0.0", "`l_i` begins with 0.0"),
        ("05_attention", "if i < N else float32(0)", "if i < N else 0", "because of 0: write float32(0)."),
        ("07_recompute", "s, dp = float32(0), float32(0)", "s = dp = 0", "`s` begins with 0|"),
    ],
)
def test_a_note_on_float64(name, old, new, says):
    exercise = EXERCISES[name]
    changed = solved(old, new, exercise)
    line = changed[: changed.index(new)].count("\n") + 1
    note, *_ = check.remarks(exercise, changed)
    assert re.match(rf"Line ({line}|{line + 1})\b", note) and all(part in note for part in says.split("|"))


def test_a_name_that_a_kernel_has_of_its_own_is_no_constant_of_the_file():
    own = solved("i = cuda.grid(1)", "i = cuda.grid(1)\n    B = float32(2)", EXERCISES["00_guard"])
    assert check.remarks(EXERCISES["00_guard"], own.replace("factor * X[i]", "X[i] / B")) == []
    other = EXERCISES["00_guard"].solution.replace("B = 64", "B = 64.0").replace("factor * X[i]", "B * X[i]")
    (note,) = check.remarks(EXERCISES["00_guard"], other)
    assert "because of B: write float32(B)" in note


def test_no_note_on_float64_where_there_is_none():
    for exercise in EXERCISES.values():
        assert check.remarks(exercise, exercise.solution) == []
    loop = solved("half //= 2", "half = half // 2\n        k = 0\n        k += 1", EXERCISES["00_reduce"])
    assert check.remarks(EXERCISES["00_reduce"], loop) == []
    power = solved("acc * scale", "acc ** 2 * scale", EXERCISES["02_scores"])
    assert check.remarks(EXERCISES["02_scores"], power) == []
    joined = cpu_target.typing_context.unify_types
    assert joined(types.int64, types.float32) == joined(types.float64, types.float32) == types.float64


def test_paths_in_the_table_of_a_class_stay_in_one_line(capsys):
    verdict = {"exercise": "00_guard", "criteria": {}, "passed": False, "seconds": 12.5}
    files = [f"a/lessons/exercises/{name}/00_guard.py" for name in ("solutions", "b", "of_a_long_long_name")]
    table, *_ = check.page([verdict | {"file": file} for file in files])
    report.console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines[1:]]
    assert shown == ["solutions/00_guard.py", "b/00_guard.py", "…" + files[2][1 - check.PATH :]]


def test_an_answer_that_writes_to_its_input():
    exercise = EXERCISES["00_guard"]
    verdict = judge(exercise, answer(solved("Z[i] = factor", "X[i] = 2 * X[i]\n        Z[i] = factor")))
    assert "Your kernel changed X, its input" in verdict["criteria"]["correct"]["message"]


def test_numpy_in_place_of_a_kernel():
    exercise = EXERCISES["05_attention"]
    text = with_hole(exercise.solution, ["def attention(Q, K, V, scale):", "    return specification(Q, K, V, scale)"])
    verdict = judge(exercise, answer(text, "05_attention.py"))
    assert "launched no kernel: its bill shows no loads" in verdict["message"]
    text = with_hole(exercise.solution, ["def attention(Q, K, V):", "    return Q"])
    assert "takes (Q, K, V) in your file" in judge(exercise, answer(text, "05_attention.py"))["message"]


# --- the process of its own -------------------------------------------------------------------------------------------


def sandboxed(text, seconds=40, exercise=GUARD):
    return sandbox.run(exercise, answer(text, f"{exercise.name}.py"), seconds)


def test_a_right_answer_that_prints_megabytes(run):
    path = answer(
        solved() + "\nprint('hello')\nfor _ in range(40_000):\n    print('x' * 99)\nopen('left_over.txt', 'w')\n"
    )
    started = time.monotonic()
    status, out, _ = run(path)
    assert status == 0 and "Passed." in out
    assert time.monotonic() - started < 40
    assert "Your file printed, the beginning of 4.00 MB:" in out and "hello" in out
    assert len(out) < 5000 and max(map(len, out.splitlines())) <= 80
    assert os.listdir() == ["00_guard.py"]


@pytest.mark.parametrize(
    ("text", "during"),
    [
        (solved("B = 64", "import time\nwhile True:\n    time.sleep(0.1)"), "while your file was imported"),
        (
            solved("if i < X.shape[0]:", "while i >= 0:\n        i += 0 * i\n    if i < 0:"),
            "in the launch for N = 1000",
        ),
    ],
)
def test_an_answer_that_never_ends_is_stopped(text, during):
    started = time.monotonic()
    verdict = sandboxed(text, seconds=4)
    assert time.monotonic() - started < 10
    assert not verdict["passed"]
    assert "It was stopped after 4 s" in verdict["message"] and during in verdict["message"]


@unix_only
@pytest.mark.parametrize("line", ["import os\nos.closerange(3, 100)", "import os, shutil\nshutil.rmtree(os.getcwd())"])
def test_an_answer_that_closes_or_deletes_what_is_not_its_own(line):
    message = sandboxed(solved("B = 64", f"{line}\nB = 64"))["message"]
    assert message is None or "closes or deletes files that are not its own" in message


@unix_only
def test_what_an_answer_starts_is_stopped_with_it():
    children = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "escaped = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\nos._exit(3)\nB = 64"
    )
    started = time.monotonic()
    verdict = sandboxed(solved("B = 64", children))
    assert time.monotonic() - started < 7  # nobody waits for who escaped with the pipe in its hand
    assert "Python ended while your file was imported, with exit status 3" in verdict["message"]
    assert "os._exit" in verdict["message"]
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(int(verdict["printed"]), 0)
            time.sleep(0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a memory limit that the system keeps")
def test_an_answer_that_wants_too_much_memory_or_an_answer_from_the_keyboard():
    verdict = sandboxed(solved("B = 64", "everything = np.ones(10**10)\nB = 64"))
    assert numbered("asks for more memory than check gives it in line {B = 64}") in verdict["message"]
    verdict = sandboxed(solved("B = 64", "input('your name: ')\nB = 64"))
    assert numbered("waits for input in line {B = 64}") in verdict["message"]


def test_ctrl_c_stops_the_answer_too(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        sandboxed(solved("B = 64", "import time\ntime.sleep(600)\nB = 64"))
    assert started[0].returncode is not None


# --- hints, lists, copies, grades -------------------------------------------------------------------------------------


def test_without_a_file_it_lists_the_exercises(run):
    status, out, _ = run()
    assert status == 0
    assert all(name in out for name in EXERCISES)
    assert max(map(len, out.splitlines())) <= 80
    status, out, _ = run("--json")
    assert [entry["exercise"] for entry in json.loads(out)] == list(EXERCISES)


def test_hints_unfold_and_the_solution_is_shown_when_asked_for(run):
    hints = GUARD.hints
    for number in (1, 2, 3):
        status, out, _ = run("00_guard", "--hint", number)
        assert status == 0
        assert [plain(hint) in plain(out) for hint in hints] == [at < number for at in range(3)]
        assert "Z[i] = factor * X[i] + Y[i]" not in out
    status, out, _ = run("00_guard", "--solution")
    assert status == 0 and all(line.strip() in out for line in hole(GUARD.solution)[1])
    assert run("--hint", 1)[0] == 2 and "needs the exercise" in run("--solution")[2]
    for number in (0, 4):
        assert "from 1 to 3" in run("00_guard", "--hint", number)[2]
    assert {len(exercise.hints) for exercise in EXERCISES.values()} == {check.HINTS}


@pytest.mark.parametrize(
    "flags",
    [
        *("--solution --json", "--hint 1 --json", "--copy x --json", "--copy x --hint 1", "--copy x --solution"),
        *("--copy x --seconds 5", "--hint 1 --seconds 30", "--solution --seconds 5", "--hint 1 --solution --json"),
    ],
)
def test_flags_that_do_not_go_together(run, flags):
    status, out, err = run("00_guard", *flags.split())
    assert (status, out) == (2, "") and "judges nothing, and does not go with" in plain(err)
    assert not Path("x").exists()


def test_copies_to_work_on_that_overwrite_nothing(run):
    answer("# mine", "work/00_guard.py")
    status, out, _ = run("--copy", "work")
    assert status == 0 and f"{len(EXERCISES) - 1} exercises; 1 were there" in out
    assert Path("work/00_guard.py").read_text() == "# mine"
    tile = EXERCISES["03_tile"].file.read_text(encoding="utf-8").replace("check 03_tile", "check work/03_tile.py")
    assert Path("work/03_tile.py").read_text(encoding="utf-8") == tile
    assert sorted(file.stem for file in Path("work").iterdir()) == sorted(EXERCISES)
    status, _, err = run("--copy", "work/00_guard.py")
    assert status == 2 and "name a folder" in err
    assert "names no folder" in run("--copy", "")[2] and "--seconds is for judging" in run("--seconds", 5)[2]


def test_json_does_not_overwrite_an_answer(run):
    path = answer(solved())
    status, _, err = run("--json", "00_guard.py")
    assert status == 2 and "is a Python file" in err
    assert path.read_text(encoding="utf-8") == GUARD.solution


def test_notes_on_a_hole_and_on_another_specification():
    unsolved = GUARD.file.read_text(encoding="utf-8")
    number, _ = hole(unsolved)
    assert check.remarks(GUARD, unsolved) == [f"The hole in line {number} is as it was: your code goes there."]
    assert check.remarks(GUARD, solved()) == []
    (note,) = check.remarks(GUARD, solved("return factor * X + Y", "return X"))
    assert "check has its own" in note
    assert check.remarks(GUARD, "pass") == []


def test_who_works_where_the_exercises_are_is_judged_like_others(run, monkeypatch):
    """The exercise's own file holds an answer then: it is no measure of what the hole was, and no source of copies."""
    mine = answer(solved())
    monkeypatch.setitem(vars(GUARD), "file", mine)
    status, out, _ = run("00_guard")
    assert status == 0 and "The hole" not in out
    assert run("00_guard", "--copy", "again")[0] == 0
    assert hole(Path("again/00_guard.py").read_text(encoding="utf-8")) == hole(GUARD.unsolved)


def test_a_warning_of_python_about_a_file_is_not_shown(run, recwarn, monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *_: {"passed": True, "message": None, "criteria": {}, "seconds": 0})
    answer("x = '\\d'\n" + solved())
    assert check.verdict_on(Path("00_guard.py"), 1)["passed"]
    assert not recwarn.list


def test_names_of_files_and_folders(run):
    assert check.named(Path("class/ada/02_scores.py")).name == "02_scores"
    assert check.named(Path("02_scores-ada.py")).name == "02_scores"
    assert check.named(Path("ada_02_scores_v2.py")).name == "02_scores"
    assert check.named(Path("102_scores.py")) is None and check.named(Path("02_scoresheet.py")) is None
    assert check.found("02_scores") == [EXERCISES["02_scores"].file] == check.found("02_scores.py")
    mine = answer(solved(), "02_scores.py")
    assert [file.resolve() for file in check.found("02_scores")] == [mine]
    assert check.exercise_of(answer(solved(), "answer.py")) is GUARD
    answer("", "class/solutions/00_guard.py")
    assert check.found("class/solutions") == [Path("class/solutions/00_guard.py")]
    assert len(check.found(str(folder()))) == len(EXERCISES)


def test_a_class_is_graded_in_one_call(run):
    answer(solved(), "class/ada/00_guard.py")
    answer(solved("factor * X[i] + Y[i]", "X[i] + Y[i]"), "class/bob/00_guard.py")
    answer("def add(", "class/eve/00_guard.py")
    answer("", "class/eve/helpers.py")
    status, out, _ = run("class", "--json", "grades.json")
    assert status == 1 and "1 of 3 passed" in plain(out)
    ada, bob, eve = json.loads(Path("grades.json").read_text(encoding="utf-8"))
    assert (
        ada["passed"] and ada["exercise"] == "00_guard" and ada["file"].endswith("ada/00_guard.py".replace("/", os.sep))
    )
    assert [ada["criteria"][name]["passed"] for name in ("correct", "strict", "bill", "parallel")] == [True] * 4
    assert ada["seconds"] < 15 and ada["criteria"]["bill"]["rows"][0]["counted"] == 1000
    assert bob["passed"] is False and "the factor is left out" in bob["criteria"]["correct"]["message"]
    assert eve["passed"] is False and "Line 1 is not Python" in eve["message"]


@unix_only
def test_a_folder_holds_what_is_no_answer(run, monkeypatch):
    answer(solved(), "class/ann/guard_00.PY")  # its first line says which exercise it is
    answer("x = 1\n", "class/ann/other.py")
    answer(solved(), "class/bob/solutions/00_guard.py")
    os.mkfifo("class/02_scores.py")
    os.symlink("nothing", "class/00_guard.py")
    os.symlink("loop.py", "class/loop.py")
    os.symlink("/dev/zero", "class/03_tile.py")
    status, out, err = run("class", "--json")
    assert status == 0 and [Path(v["file"]).name for v in json.loads(out)] == ["guard_00.PY"]
    assert "left out, since neither name nor first line is that of an exercise: ann/other.py" in plain(err)
    assert "since a folder called solutions holds no answers: bob/solutions/00_guard.py" in plain(err)
    assert "it is no file, or a link to none: 00_guard.py, 02_scores.py, 03_tile.py, loop.py" in plain(err)
    run("--copy", "mine")
    assert check.found(str(folder())) and "left out" not in run("mine", "--hint", 1)[2]
    monkeypatch.setattr(check, "MOST", 3)
    status, out, err = run("class")
    assert (status, out) == (2, "") and "class holds more than 3 files and folders" in plain(err)


@unix_only
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_who_ends_check_ends_the_answer(run, name):
    path = answer("while True:\n    pass\n")
    command = [sys.executable, "-m", "numba_flash", "check", path]
    with subprocess.Popen(command, env=sandbox.environment() | {"NUMBA_FLASH_STRICT": "1"}) as process:
        deadline = time.monotonic() + 30
        while not (judges := children(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(getattr(signal, name))
        assert process.wait(timeout=30) == 128 + getattr(signal, name)
    while any(map(runs, judges)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert judges and not any(map(runs, judges))


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, encoding="utf-8").stdout
    return [int(line) for line in listed.split()]


def runs(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, encoding="utf-8").stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize(
    "raised", ["BaseException('x')", "KeyboardInterrupt", "ValueError('\\ud800 \\x1b[2J')", "Odd"], ids=str
)
def test_odd_errors_are_told(raised):
    odd = "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\n\n\n"
    message = sandbox.clean(judge(GUARD, answer(f"{odd}raise {raised}\n")))["message"]
    assert "it stops in line 6 with" in message and "\x1b" not in message and message.encode("utf-8")


def test_copies_name_themselves(run):
    run("--copy", "work", "02_scores")
    text = Path("work/02_scores.py").read_text(encoding="utf-8")
    assert "check work/02_scores.py --hint 1" in text and "check 02_scores" not in text
    status, out, _ = run("work/02_scores.py")
    assert status == 1 and out.splitlines()[1] == " work/02_scores.py"
    assert run("")[0] == 2


def test_the_report_of_a_wrong_answer(run):
    path = answer(solved("factor * X[i] + Y[i]", "X[i] + Y[i]"))
    status, out, err = run(path)
    assert status == 1 and err == ""
    says = "Likely: That is X + Y: the factor is left out."
    for part in ("00_guard", "correct NO", "strict yes", "bill yes", "Z[0] is", "N = 1000", says, "00_guard --hint 1"):
        assert part in plain(out)
    assert max(map(len, out.splitlines())) <= 80


def test_constants_of_the_launch_stay_as_they_are():
    exercise = EXERCISES["06_no_matrix"]
    verdict = judge(exercise, answer(solved("B, d = 32, 8", "B, d = 32, 16", exercise), "06_no_matrix.py"))
    assert "d is 16 in your file and 8 in the exercise" in verdict["message"]


def test_a_terminal_without_unicode_gets_ascii():
    path = answer(GUARD.unsolved)
    command = [sys.executable, "-m", "numba_flash", "check", str(path)]
    environment = sandbox.environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 1 and done.stderr == b""
    assert done.stdout.isascii() and b"No element of Z was written" in done.stdout
