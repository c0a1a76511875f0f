"""The README's Python runs as it stands, and what it shows of a lesson is what the lesson prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(.*?)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_python_of_the_readme(tmp_path, monkeypatch, capsys):
    """One module after the other in a file, since a kernel needs a source file."""
    source = "\n".join(text for language, text in BLOCKS if language == "python")
    assert source.count("nf.") > 8
    (tmp_path / "readme_example.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import numba_flash as nf

    module = __import__("readme_example")
    assert np.array_equal(nf.to_host(module.B), 2 * np.arange(1000))
    module.test_mine()
    out = capsys.readouterr().out
    assert "scores" in out
    (shown,) = re.findall(r"print\(nf\.to_host\(B\).*# (.*)", source)
    assert shown in out.splitlines()


def test_the_output_it_shows():
    shown = next(text for language, text in BLOCKS if language == "" and "HBM bill" in text)
    lesson = [sys.executable, str(ROOT / "lessons" / "03_tiled.py"), "--device", "cpu"]
    env = {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(lesson, capture_output=True, encoding="utf-8", env=os.environ | env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize("kind", ["lessons", "numba_flash/stages"])
def test_every_lesson_and_stage_is_in_it(kind):
    for file in (ROOT / kind).glob("*.py"):
        if file.stem != "__init__" and not file.stem.endswith("_backward"):
            assert (f"`{file.name}`" if kind == "lessons" else f"`{file.stem}`") in README
