"""A lesson as a Jupyter notebook: the script's `# %%` cells, each under its title."""

import ast
import json
import re
from pathlib import Path

from .files import write_text

HOW = """
Run the cells one after another. Their code is folded where the viewer can do that, since each prints its text and the
kernels it is about: unfold a cell to change it. There are no flags here; sizes are arguments of `lesson.start` in the
first cell.
"""


def write(script, path):
    """Write the lesson `script`, a file, as a notebook to `path`. It needs `numba_flash` where it runs."""
    source = Path(script).read_text(encoding="utf-8")
    _, *parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    said = ast.get_docstring(ast.parse(source)) or ""
    cells = [_cell("markdown", f"# {said.partition('. ')[0].rstrip('.')}\n{HOW}")]
    for title, code in zip(parts[::2], parts[1::2], strict=True):
        title = title.strip().rstrip(".")
        if title == "[markdown]":  # the docstring
            continue
        if title:
            cells.append(_cell("markdown", f"## {title}"))
        cells.append(_cell("code", re.sub(r" *# fmt: skip$", "", code, flags=re.MULTILINE)))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    about["language_info"] = {"name": "python"}
    notebook = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _cell(kind, source):
    cell = {"cell_type": kind, "metadata": {}, "source": source.strip("\n").splitlines(keepends=True)}
    if kind == "code":
        cell |= {"metadata": {"jupyter": {"source_hidden": True}}, "execution_count": None, "outputs": []}
    return cell
