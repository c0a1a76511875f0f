"""--plot: pictures that are complete, the same in every run, drawn without a display and without a warning."""

import builtins
import os
import subprocess
import sys
import xml.etree.ElementTree as tree

import pytest

from numba_flash.figures import FIGURES, canvas


def has_matplotlib(test):
    """For `pytest -m course`, whose gate has matplotlib."""
    return pytest.mark.course(pytest.mark.skipif(canvas.missing() is not None, reason="needs matplotlib")(test))


HEADS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def drawn(figures, on):
    axes = on.subplots()
    axes.plot([1, 2], [figures["a"], 4], label="N²d²/M ⌈x⌉")
    axes.legend()


@pytest.fixture
def no_matplotlib(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **how):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", without)


@has_matplotlib
@pytest.mark.parametrize("suffix", canvas.SUFFIXES)
def test_a_picture_is_the_same_in_every_run(tmp_path, suffix, monkeypatch):
    one, other = tmp_path / f"1{suffix}", tmp_path / f"2{suffix.upper()}"
    for file, date in ((one, "abc"), (other, "86400")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
        canvas.save(drawn, {"a": 3}, file)
        assert os.environ["SOURCE_DATE_EPOCH"] == date
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes().startswith(HEADS[suffix])
    canvas.save(drawn, {"a": 2}, other)
    assert one.read_bytes() != other.read_bytes()
    if suffix == ".svg":
        tree.parse(one)


@has_matplotlib
def test_no_display_no_warning_and_no_setting_of_the_user_matters(tmp_path):
    """In a process of its own: matplotlib has settings that it reads as it is imported."""
    (tmp_path / "matplotlibrc").write_text("backend: TkAgg\nno.such.setting: 1\nfont.size: 40\ntext.usetex: True\n")
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from tests.figures.test_canvas import canvas, drawn\n"
        "canvas.save(drawn, {'a': 3}, sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    ours, theirs = tmp_path / "ours.svg", tmp_path / "theirs.svg"
    canvas.save(drawn, {"a": 3}, ours)
    settings = {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc"), "MPLCONFIGDIR": str(tmp_path / "new" / "folder")}
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | settings
    done = subprocess.run([sys.executable, "-c", code, theirs], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert ours.read_bytes() == theirs.read_bytes()


def test_without_matplotlib_one_sentence_says_how_to_install_it(no_matplotlib):
    with pytest.raises(ValueError, match="--plot needs matplotlib") as raised:
        canvas.refuse()
    assert 'python -m pip install "matplotlib>=3.9"' in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_matplotlib_nothing_is_computed(no_matplotlib, run, monkeypatch, tmp_path):
    monkeypatch.setattr(FIGURES["left"], "compute", lambda **how: pytest.fail("computed"))
    status, out, err = run(f"left --plot {tmp_path}/left.png")
    assert (status, out) == (2, "")
    assert err.startswith("python -m numba_flash figures: error: --plot needs matplotlib")
    assert list(tmp_path.iterdir()) == []


def test_a_matplotlib_that_cannot_be_loaded_is_told(monkeypatch):
    real = builtins.__import__

    def spoilt(name, *args, **how):
        if name.partition(".")[0] == "matplotlib":
            raise RuntimeError("built for\nanother NumPy")
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", spoilt)
    why = r"--plot needs matplotlib, and it cannot be loaded \(built for another NumPy\): python -m pip install "
    with pytest.raises(ValueError, match=why):
        canvas.refuse()


@has_matplotlib
def test_a_drawing_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError):
        canvas.save(lambda figures, on: 1 / 0, {}, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
