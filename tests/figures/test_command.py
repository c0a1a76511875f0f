"""`python -m numba_flash figures`: the list, bad values, the width of what is printed, ASCII."""

import csv
import json
import math
import re

import pytest

import numba_flash as nf
from numba_flash import report
from numba_flash.figures import FIGURES, canvas, left, memory, middle, right

from ..test_main import command
from .test_canvas import has_matplotlib

FLAGS = ("predict-only", "measure", "csv a.csv", "plot a.png")
SHORT = "--predict-only"
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
        ("--csv figure.txt", "end it in .csv"),
        ("--csv no/such/folder/file.csv", "does not exist"),
        ("--csv -", "end it in .csv"),
        ("--plot figure.gif", "end it in .png or .svg or .pdf"),
        ("--plot no/such/folder/file.svg", "does not exist"),
    ],
)
def test_a_value_that_will_not_do(run, figure, line, says):
    status, out, err = run(f"{figure} {line}")
    assert (status, out) == (2, "")
    assert says in err
    assert err.splitlines()[-1].startswith("python -m numba_flash")


@pytest.mark.parametrize(
    ("line", "says"),
    [("nothing", "invalid choice: 'nothing'"), ("--batch 64", "name one")]
    + [(f"--{flag}", f"--{flag.split()[0]} is for a figure: name one") for flag in FLAGS],
)
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


@pytest.mark.parametrize("line", ["figures", "figures --help", *(f"figures {name} {SHORT}" for name in FIGURES)])
def test_output_is_ascii_where_there_is_no_unicode(line):
    done = command(*line.split(), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "?" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= report.WIDTH


def test_the_defaults_are_the_papers(run):
    for name, figure in (("left", left), ("middle", middle), ("right", right), ("memory", memory)):
        found = json.loads(run(f"{name} --predict-only --json")[1])
        assert {size: found[size] for size in figure.PAPER} == figure.PAPER
        assert found["figure"] == name
        assert found["paper"]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("size", ["n", "d", "heads", "batch"])
def test_each_flag_reaches_the_figure(run, name, size):
    value = FIGURES[name].PAPER[size] // 2 or 2
    found = json.loads(run(f"{name} --{size} {value} --predict-only --json")[1])
    assert {size: found[size] for size in FIGURES[name].PAPER} == FIGURES[name].PAPER | {size: value}
    assert found["paper"] is None


# --- all, csv, plot, measure ------------------------------------------------------------------------------------------

TINY = "--n 16 --d 4 --heads 1 --batch 2"


def test_all_prints_every_figure_in_turn(run):
    status, out, err = run(f"all {TINY}")
    assert (status, err) == (0, "")
    alone = [run(f"{name} {TINY}")[1] for name in FIGURES]
    assert out == "".join(alone)
    found = json.loads(run(f"all {TINY} --json")[1])
    assert found == {name: json.loads(run(f"{name} {TINY} --json")[1]) for name in FIGURES}


def test_all_fails_where_one_does(run, monkeypatch):
    monkeypatch.setattr(middle, "compute", lambda **how: {"equal": False})
    monkeypatch.setattr(middle, "page", lambda figures: [])
    assert run(f"all {TINY}")[0] == 1


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("sizes", ["", TINY])
def test_rows_are_numbers_with_what_they_are_about(run, tmp_path, name, sizes):
    file = tmp_path / "figure.csv"
    status, out, err = run(f"{name} {sizes} {'' if sizes else SHORT} --csv {file}")
    assert (status, err) == (0, "")
    assert out.endswith(f" written: {file}\n")
    assert file.read_bytes().count(b"\r") == 0
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert {row["figure"] for row in rows} == {name}
    assert all(math.isfinite(float(row["value"])) and row["unit"] and row["source"] for row in rows)
    about = [tuple(value for key, value in row.items() if key != "value") for row in rows]
    assert len(set(about)) == len(about)  # each says what it alone is
    assert ("paper" in {row["source"] for row in rows}) is (not sizes and name != "theorem5")


def test_rows_of_a_run_have_the_same_keys(run, tmp_path):
    for name, figure in FIGURES.items():
        found = json.loads(run(f"{name} {TINY} --json")[1])
        assert len({tuple(row) for row in figure.rows(found)}) == 1


def test_the_rows_of_all_in_one_file(run, tmp_path):
    file = tmp_path / "all.csv"
    assert run(f"all {TINY} --csv {file}")[0] == 0
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert list(dict.fromkeys(row["figure"] for row in rows)) == list(FIGURES)
    (counted,) = [row["value"] for row in rows if (row["source"], row["name"]) == ("counted", "flash2")]
    assert int(counted) == nf.predict("flash2", n=16, d=4, direction="both").elements


def test_where_json_is_printed_nothing_else_is(run, tmp_path):
    status, out, err = run(f"left {TINY} --json --csv {tmp_path}/left.csv")
    assert (status, err) == (0, "")
    assert json.loads(out)["figure"] == "left"
    assert (tmp_path / "left.csv").exists()


def test_measure_is_for_the_figures_that_do(run):
    status, out, err = run("memory --measure")
    assert (status, out) == (2, "")
    assert "--measure is for figures left: leave it out" in err
    for name in ("left", "all"):
        status, out, err = run(f"{name} --measure")
        assert (status, out) == (2, "")
        assert "--measure needs a GPU, and kernels run on cpu" in err
    assert "--predict-only runs nothing: leave one of them out" in run("left --measure --predict-only")[2]


def test_one_file_for_two_is_refused(run, tmp_path):
    status, _, err = run(f"left --csv {tmp_path}/a.csv --json {tmp_path}/a.csv")
    assert status == 2
    assert "are the same file" in err


@pytest.mark.parametrize("name", ["left", "all"])
def test_no_picture_is_drawn_over_the_figures(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr(canvas, "refuse", lambda: None)
    file = tmp_path / ("x.png" if name == "left" else "x-left.png")
    status, out, err = run(f"{name} --predict-only --json {file} --plot {tmp_path}/x.png")
    assert (status, out) == (2, "")
    assert f"--json and --plot of left are the same file, '{file}': name two" in err


@has_matplotlib
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("line", ["", TINY, LARGEST, "--n 100 --d 200 --heads 3", "--d 10000"])
def test_every_figure_is_drawn(run, tmp_path, name, line):
    file = tmp_path / "figure.svg"
    status, out, err = run(f"{name} {line} --predict-only --plot {file}")
    assert (status, err) == (0, "")
    assert out.endswith(f" written: {file}\n")
    again = tmp_path / "again.svg"
    run(f"{name} {line} --predict-only --plot {again} --json {tmp_path}/figure.json")
    assert file.read_bytes() == again.read_bytes()


@has_matplotlib
def test_the_pictures_of_all(run, tmp_path):
    status, out, _ = run(f"all {TINY} --plot {tmp_path}/slide.png")
    assert status == 0
    pictures = [f"slide-{name}.png" for name in FIGURES]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(pictures)
    assert [line.rpartition("/")[2] for line in out.splitlines() if line.startswith(" written")] == pictures


@has_matplotlib
@pytest.mark.parametrize("name", ["left", "middle", "memory"])
def test_a_picture_has_a_title_units_and_the_papers_bars_beside_ours(name):
    from matplotlib.figure import Figure

    on = Figure(figsize=canvas.SLIDE, layout="constrained")
    figure = FIGURES[name]
    figure.plot(figure.compute(**figure.PAPER, run=False), on)
    assert figure.TITLE in on.get_suptitle()
    for axes in on.axes:
        assert re.search(r"GB|ms|GFLOP|MiB|elements", axes.get_ylabel())
    legends = [text.get_text() for axes in on.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    assert any("paper" in text for text in legends) and any("paper" not in text for text in legends)


@has_matplotlib
def test_the_bars_are_the_papers_and_ours():
    from matplotlib.figure import Figure

    on = Figure(figsize=canvas.SLIDE, layout="constrained")
    found = left.compute(**left.PAPER, run=False)
    left.plot(found, on)
    heights = [[bar.get_height() for bar in bars] for axes in on.axes for bars in axes.containers]
    best = found["best"]["flash2, 16 bits"]
    assert heights == [
        [66.6, 75.2],
        [found["stages"]["naive"]["flops"] / 1e9, best["flops"] / 1e9],
        [40.3, 4.4],
        [found["ideal"]["both"] / 1e9, best["bytes"] / 1e9],
        [41.7, 7.3],
    ]


@has_matplotlib
def test_times_are_drawn_where_there_are_some(tmp_path):
    from matplotlib.figure import Figure

    spread = {"median": 0.01, "min": 0.01, "max": 0.02}
    times = {"gpu": "H0", "repeats": 5, "why": {}}
    for figure, seconds in ((left, {"naive both": spread, "flash2 forward": spread}), (middle, {"64": spread})):
        for paper in (True, False):
            found = figure.compute(**figure.PAPER | ({} if paper else {"n": 100}), run=False)
            on = Figure(figsize=canvas.SLIDE, layout="constrained")
            figure.plot(found | {"times": times | {"seconds": seconds}}, on)
            on.savefig(tmp_path / "a.svg")
            assert any("H0" in axes.get_title() + str(axes.get_legend_handles_labels()[1]) for axes in on.axes)
            assert any(axes.get_ylabel() == "ms" for axes in on.axes)
            rows = figure.rows(found | {"times": times | {"seconds": seconds}})
            assert {row["value"] for row in rows if row["source"] == "timed"} == {10, 20}
