"""The listing: what each source line loads and stores, summing to the bill exactly, for any kernel."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import numba_flash as nf
from numba_flash import __main__ as cli
from numba_flash import report
from numba_flash.course.exercises import EXERCISES
from numba_flash.engine import launch as engine

from .stages.test_masks import inputs, passes

SIZE = (2, 4, 2, 17, 23, 8)  # batch, heads, kv_heads, N, N_k, d: ragged for every tile below
TILES = {"naive": None, "tiled": 4, "online_softmax": 5, "flash": (5, 3), "flash2": (5, 3),
         "register_tiled": (5, 9)}  # fmt: skip


def cases():
    for stage in nf.stages.PORTABLE:
        yield pytest.param(stage, (0, 0, 0, 0), marks=pytest.mark.course)
        yield stage, (1, 1, 1, stage == "flash2")


@pytest.mark.parametrize("stage, feature", cases(), ids=str)
def test_the_lines_sum_to_the_bill(stage, feature):
    """Of every kernel and tensor, in every pass, with all masks and dropout."""
    q, k, v, dout, how = inputs(SIZE, feature, np.float32)
    how |= {"stage": stage, "blocks": TILES[stage], "device": "cpu"}
    with nf.ledger() as bill, nf.lines() as counted:
        out, lse = nf.attention(q, k, v, return_lse=True, **how)
    check(counted, bill)
    for deterministic, from_lse in passes(stage):
        kept = {"out": out, "lse": lse} if from_lse else {}
        with nf.ledger() as bill, nf.lines() as counted:
            nf.attention_backward(q, k, v, dout, deterministic=deterministic, **kept, **how)
        check(counted, bill)
        assert bool(bill.atomics) != deterministic


def test_the_lines_of_split_keys_sum_to_the_bill():
    q, k, v, _, how = inputs(SIZE, "causal keys", np.float32)
    with nf.ledger() as bill, nf.lines() as counted:
        nf.attention(q, k, v, split_kv=3, blocks=(1, 4), device="cpu", **how)
    check(counted, bill)


def check(counted, bill):
    assert bill.elements
    assert counted.bill == bill, counted.bill.diff(bill)
    rows = json.loads(counted.to_json())
    assert sum(t[kind] for row in rows for t in row["tensors"].values() for kind in ("loads", "stores", "atomics")) == (
        bill.loads + bill.stores + bill.atomics
    )
    for kernel in counted.kernels:  # every line that touches HBM is a line of a function that is shown
        assert sum(len(kernel.at(function)) for function in kernel.functions) == len(kernel.counts)


@cuda.jit(device=True)
def inner(A, i):
    return A[i]


@cuda.jit(device=True)
def outer(B, i):
    return inner(B, i) + B[i]


@cuda.jit
def kernel(X, Y, Z):
    i = cuda.grid(1)
    if i < X.shape[0]:
        a = outer(X, i)
        b = inner(Y, i)
        cuda.atomic.add(Z, 0, a + b + inner(A=Y, i=i))


def number(text):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.strip().startswith(text))


@pytest.fixture(scope="module")
def counted():
    X, Y, Z = np.ones(10, np.float32), np.ones(10, np.float32), np.zeros(1, np.float32)
    with nf.lines() as lines:
        nf.launch(kernel, 1, 32, X, Y, Z)
    assert Z[0] == 40
    return lines


def test_each_line_has_what_it_touches(counted):
    (one,) = counted.kernels
    main, out, inn = one.functions
    assert (main.name, out.name, inn.name) == ("kernel", "outer", "inner")
    here = {line: {t: (c.loads, c.atomics) for t, c in found.items()} for line, found in one.at(main).items()}
    assert here == {number("cuda.atomic.add(Z"): {"Z": (0, 10)}}
    assert one.at(out)[number("return inner(B")]["X"].loads == 10
    assert {t: c.loads for t, c in one.at(inn)[number("return A[i]")].items()} == {"X": 10, "Y": 20}


def test_device_functions_are_shown_where_they_are_called(counted):
    (one,) = counted.kernels
    main, _, inn = one.functions
    through = {
        line: [(callee.name, tensor, count.loads, others) for callee, tensor, count, others in found]
        for line, found in one.through(main).items()
    }
    first, second = number("b = inner(Y"), number("cuda.atomic.add(Z")
    assert through == {
        number("a = outer(X"): [("outer", "X", 20, [])],
        first: [("inner", "Y", 20, [second])],
        second: [("inner", "Y", 20, [first])],
    }
    assert [(caller.name, line) for caller, line in one.callers(inn, "X")] == [("outer", number("return inner(B"))]


def test_the_page(counted):
    page = report.to_text(counted)
    lines = page.splitlines()
    assert max(map(len, lines)) <= 80
    for text in (
        "→ Z 10 atomics",
        "→ X 20 loads, through outer",
        f"→ Y 20 loads, through inner, together with line {number('cuda.atomic.add(Z')}",
        f"→ X 10 loads, called in line {number('return inner(B')} of outer",
        f"→ Y 20 loads, called in lines {number('b = inner(Y')} and {number('cuda.atomic.add(Z')}",
        "Sum of the lines: X 20 loads; Y 20 loads; Z 10 atomics",
    ):
        assert text in page
    assert any(line.startswith(" ██████") and "return A[i]" in line for line in lines)  # the dearest line
    with nf.lines() as nothing:
        pass
    assert "No launch was counted" in str(nothing)


def test_it_stays_readable_after_an_error_and_closes():
    with pytest.raises(KeyError), nf.lines() as counted:
        nf.launch(kernel, 1, 32, *(np.ones(10, np.float32) for _ in range(3)))
        raise KeyError
    assert counted.bill.loads == 40
    nf.launch(kernel, 1, 32, *(np.ones(10, np.float32) for _ in range(3)), device="cpu")
    assert counted.bill.loads == 40


@pytest.mark.parametrize("opened", [nf.lines, nf.recording])
def test_lines_and_recordings_are_made_on_the_cpu_engine(opened, monkeypatch):
    """Also where kernels run on a GPU by default; to ask for the GPU there is an error that says so."""
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "gpu")
    with opened():
        assert nf.device().name == "cpu"
        monkeypatch.setattr(engine, "gpu_problem", lambda: None)
        with pytest.raises(ValueError, match="device='gpu' cannot be recorded or counted by line.* leave device= out"):
            nf.launch(kernel, 1, 32, *(np.ones(10, np.float32) for _ in range(3)), device="gpu")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(capsys, tmp_path):
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    line = f"listing --stage tiled --n 37 --d 8 --heads 2 --causal --html {page} --json {figures}"
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    assert "through load_or_zero" in out
    assert "load_or_zero(Q, h, row" in page.read_text()
    written = json.loads(figures.read_text())
    predicted = nf.predict("tiled", n=37, d=8, heads=2, causal=True)
    assert written["bill"] == json.loads(predicted.to_json())["kernels"]
    assert cli.main(["listing", "--n", "20", "--d", "4", "--direction", "backward", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["kernel"] for row in printed["lines"]} == set(printed["bill"])
    assert "backward_dKdV" in printed["bill"]


SCRIPT = """
import sys
import numpy as np
from numba import cuda
import numba_flash as nf
import beside

@cuda.jit
def double(A, B):
    i = cuda.grid(1)
    if i < A.shape[0]:
        B[i] = 2 * A[i]  # the line

if __name__ == "__main__" and len(sys.argv) == 1:
    print("ran on", nf.device().name)
    A, B = nf.to_device(np.arange(beside.N, dtype=np.float32)), nf.empty(beside.N, np.float32)
    nf.launch(double, 2, 32, A, B)
    assert nf.to_host(B)[1] == 2
    {end}
"""


@pytest.fixture
def script(tmp_path):
    def script(end="pass", text=SCRIPT):
        (tmp_path / "beside.py").write_text("N = 40\n")
        (tmp_path / "mine.py").write_text(text.replace("{end}", end))
        return str(tmp_path / "mine.py")

    return script


@pytest.mark.parametrize("end", ["pass", "sys.exit()"])
def test_a_script_of_ones_own(script, capsys, end):
    before = list(sys.argv), list(sys.path)
    assert cli.main(["listing", script(end)]) == 0
    assert (list(sys.argv), list(sys.path)) == before
    out = capsys.readouterr().out
    assert "mine.py, line by line" in out and "double  in mine.py: 320 B" in out and "ran on cpu" in out
    assert "→ A 40 loads" in out and "→ B 40 stores" in out
    assert cli.main(["listing", script(end), "--json"]) == 0
    printed = capsys.readouterr()
    assert "ran on cpu" in printed.err
    assert json.loads(printed.out)["bill"]["double"]["A"]["loads"] == 40


def test_an_unsolved_exercise_moves_nothing(capsys):
    assert cli.main(["listing", str(EXERCISES["02_scores"].file)]) == 0
    out = capsys.readouterr().out
    assert "scores  in 02_scores.py: 0 B" in out and "Sum of the lines: nothing" in out


def test_the_file_of_an_exercise(capsys, tmp_path):
    mine = tmp_path / "answer.py"  # its first line says which one it is
    mine.write_text(EXERCISES["01_fuse"].solution, encoding="utf-8")
    assert cli.main(["listing", str(mine)]) == 0
    name, inputs = next(EXERCISES["01_fuse"].inputs())
    with nf.ledger() as bill:
        EXERCISES["01_fuse"].trusted().launch(*inputs)
    out = capsys.readouterr().out
    assert name in out and bill.total_bytes
    for kernel, tensors in bill.kernels.items():
        assert f" {kernel}  in answer.py" in out
        assert all(f"{tensor} {count.loads:,} loads" in out for tensor, count in tensors.items() if count.loads)


@pytest.mark.parametrize(
    "end, says",
    [
        ("A[0, 0, 0]", "mine.py stops in line 19 with IndexError: too many indices"),
        ("sys.exit(3)", "mine.py stops in line 19 with SystemExit: 3"),
        ("nf.launch(double, 2, 32, A, B[:3])", "with OutOfBounds: double"),
        ("nf.launch(double, 2, 32, A, B, device='sim')", "stops in line 19 with "),
        ("1 +", "mine.py, line 19 is not Python: invalid syntax"),
    ],
)
def test_a_script_that_stops(script, capsys, end, says):
    assert cli.main(["listing", script(end)]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    "args, says",
    [
        (["none.py"], "none.py is no Python file"),
        ([300 * "a" + ".py"], "a.py is no Python file"),
        (["."], ". is no Python file"),
        (["EMPTY"], "launches no kernel: only what nf.launch starts"),
        (["EMPTY", "--n", "8"], "--n is for a stage"),
        (["EMPTY", "--stage", "flash2"], "--stage is for a stage"),
        (["EMPTY", "--dropout", "0"], "--dropout is for a stage"),
        (["--json", "EMPTY"], "is a Python file: name the files to read first"),
    ],
)
def test_a_file_that_will_not_do(args, says, script, capsys):
    empty = script(text="x = 1\n")
    try:
        status = cli.main(["listing", *(empty if arg == "EMPTY" else arg for arg in args)])
    except SystemExit as end:
        status = end.code
    assert status == 2 and says in " ".join(capsys.readouterr().err.split())
    assert Path(empty).read_text() == "x = 1\n"


@pytest.mark.parametrize(
    "line, says",
    [
        ("--stage naive --blocks 8", "'naive' has no tiles"),
        ("--stage tiled --blocks 8 4", "pass one side T"),
        ("--dropout 1", "dropout_p=1"),
        ("--html page.txt", "end it in .html"),
        ("--html -", "end it in .html"),
        ("--json no/such/folder/file", "does not exist"),
        ("--n 0", "'0' is not valid"),
        ("--n 100000000 --d 1", "would run for minutes: pass a smaller --n"),
        ("--n 20 --json same.html --html same.html", "--json and --html are the same file, 'same.html': name two"),
    ],
)
def test_a_value_that_will_not_do(line, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(["listing", *line.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("columns", [20, 40])
def test_a_narrow_terminal(columns, monkeypatch, capsys):
    monkeypatch.setattr(report, "WIDTH", columns)
    assert cli.main(["listing", "--stage", "flash", "--n", "8", "--d", "4"]) == 0
    assert "K_j" in capsys.readouterr().out
