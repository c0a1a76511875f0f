"""`python -m numba_flash figures`: the list, bad values, the width of what is printed, ASCII."""

import json

import pytest

from numba_flash import report
from numba_flash.figures import FIGURES, left, memory, middle, right

from ..test_main import command

LARGEST = "--n 100000000 --d 10000 --heads 10000 --batch 10000"


def test_no_name_lists_the_figures(run):
    status, out, err = run("")
    assert (status, err) == (0, "")
    assert list(FIGURES) == ["left", "middle", "right", "memory", "theorem5"]
    for name, figure in FIGURES.items():
        assert any(line.split() == [name, *figure.TITLE.split()] for line in out.splitlines())
    assert "python -m numba_flash figures left" in out
    assert json.loads(run("--json")[1]) == {name: figure.TITLE for name, figure in FIGURES.items()}


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--n 0", "argument --n: '0' is not valid: give a whole number from 1 to 100,000,000"),
        ("--n 1e3", "'1e3' is not valid"),
        ("--d -1", "argument --d: '-1' is not valid: give a whole number from 1 to 10,000"),
        ("--heads 10001", "argument --heads: '10001' is not valid"),
        ("--batch many", "argument --batch: 'many' is not valid"),
        ("--json no/such/folder/file", "does not exist"),
        ("more", "unrecognized arguments: more"),
    ],
)
def test_a_value_that_will_not_do(run, figure, line, says):
    status, out, err = run(f"{figure} {line}")
    assert (status, out) == (2, "")
    assert says in err
    assert err.splitlines()[-1].startswith("python -m numba_flash")


@pytest.mark.parametrize(("line", "says"), [("nothing", "invalid choice: 'nothing'"), ("--batch 64", "name one")])
def test_no_such_figure(run, line, says):
    status, out, err = run(line)
    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    "line",
    ["", *(f"{name} {sizes}" for name in FIGURES for sizes in ("", "--n 1 --d 1 --heads 1 --batch 1", LARGEST))]
    + ["left --n 1000 --d 97 --heads 1", "left --d 256", "memory --n 1000 --d 100"],
)
def test_output_is_80_columns_wide(run, line):
    status, out, err = run(line)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert all(text[:1] in ("", " ") for text in lines)  # where a line is folded, its end has no margin


@pytest.mark.parametrize("line", ["figures", "figures --help", *(f"figures {name}" for name in FIGURES)])
def test_output_is_ascii_where_there_is_no_unicode(line):
    done = command(*line.split(), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "?" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= report.WIDTH


def test_the_defaults_are_the_papers(run):
    for name, figure in (("left", left), ("middle", middle), ("right", right), ("memory", memory)):
        found = json.loads(run(f"{name} --json")[1])
        assert {size: found[size] for size in figure.PAPER} == figure.PAPER
        assert found["figure"] == name
        assert found["paper"]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("size", ["n", "d", "heads", "batch"])
def test_each_flag_reaches_the_figure(run, name, size):
    value = FIGURES[name].PAPER[size] // 2 or 2
    found = json.loads(run(f"{name} --{size} {value} --json")[1])
    assert {size: found[size] for size in FIGURES[name].PAPER} == FIGURES[name].PAPER | {size: value}
    assert found["paper"] is None
