"""Lessons as notebooks: what is written, and in full, each executed by Jupyter."""

import json
import re

import pytest

from numba_flash import notebook, report

from .test_lessons import LESSONS, ROOT

MISSING = "needs jupytext, nbclient and ipykernel: python -m pip install -e '.[notebooks]'"


def written(name, folder):
    file = folder / "lesson.ipynb"
    notebook.write(ROOT / "lessons" / name, file)
    return json.loads(file.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


@pytest.mark.parametrize("name", LESSONS)
def test_cells_and_titles(name, tmp_path):
    book, text = written(name, tmp_path), (ROOT / "lessons" / name).read_text(encoding="utf-8")
    first, *cells = book["cells"]
    assert first["cell_type"] == "markdown" and source(first).startswith(f"# Lesson {name[:2]}")
    titles = re.findall(r"^# %% (?!\[)(.*?)\.?$", text, re.MULTILINE)
    assert [source(cell)[3:] for cell in cells if cell["cell_type"] == "markdown"] == titles
    code = [source(cell) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == len(titles) + 1 and "lesson.start(" in code[0] and code[-1].endswith("this.end()")
    lines = [line for line in text.splitlines() if not line.startswith(("# %%", '"""Lesson'))]
    assert re.sub(r"\s*# fmt: skip|\s", "", "".join(lines)) == re.sub(r"\s", "", "".join(code))
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert written(name, tmp_path) == book


def test_the_flag(tmp_path, capsys, monkeypatch):
    from numba_flash import __main__ as command

    file = tmp_path / "03.ipynb"
    with pytest.raises(SystemExit) as ended:
        command.main(["lessons", "03", "--notebook", str(file)])
    assert not ended.value.code
    assert "".join(capsys.readouterr().out.split()) == f"written:{file}"
    assert json.loads(file.read_text(encoding="utf-8")) == written("03_tiled.py", tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(["lessons", "03", "--notebook", "03.txt"])
    assert ended.value.code == 2 and "'03.txt' will not do: end it in .ipynb" in capsys.readouterr().err
    for flag in ("--json", "--answers", "--svg"):
        with pytest.raises(SystemExit) as ended:
            command.main(["lessons", "03", "--notebook", str(file), flag, str(tmp_path / "other.svg")])
        assert ended.value.code == 2 and f"nothing for {flag} to write" in " ".join(capsys.readouterr().err.split())


@pytest.mark.course
@pytest.mark.parametrize("name", LESSONS)
def test_executes(name, tmp_path):
    """By jupytext's reading of the script, which a learner's editor uses; its code cells are those of --notebook."""
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason=MISSING)
    import jupytext
    from nbclient import NotebookClient

    book = jupytext.read(ROOT / "lessons" / name)
    ours = [source(cell) for cell in written(name, tmp_path)["cells"] if cell["cell_type"] == "code"]
    theirs = [re.sub(r" *# fmt: skip$", "", c.source, flags=re.M) for c in book.cells if c.cell_type == "code"]
    assert theirs == ours and book.cells[0].cell_type == "markdown"
    how = {"timeout": 300, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(book, coalesce_streams=True, **how).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream"}  # no error, no picture, no progress
    assert {output.name for output in outputs} == {"stdout"}
    assert all(len(cell.outputs) == 1 for cell in book.cells if cell.cell_type == "code")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(output.text for output in outputs))
    assert "\x1b[" in outputs[0].text  # bold
    assert "HBM bill in elements" in shown and "Check yourself" in shown and "Answer 2:" in shown
    assert max(map(len, shown.splitlines())) <= report.WIDTH
    assert not re.search(r"  differs$|WRONG", shown, re.MULTILINE)
