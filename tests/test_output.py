"""--json of every command: the same values will do, tried before the run, and nothing is overwritten by mistake."""

import argparse
import json
from pathlib import Path

import pytest

from numba_flash import __main__ as cli
from numba_flash import output

COMMANDS = ["bill", "figures", "doctor", "bench", "listing", "check", "lab", "exam"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full of Linux")
def test_a_full_disk_names_the_file():
    with pytest.raises(
        OSError, match=r"^'/dev/full' cannot be written \(No space left on device\): name another file$"
    ):
        output.write({"a": 1}, "/dev/full")


def test_every_command_that_has_it_has_the_same():
    parser = cli.make_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    listed = cli.__doc__.partition(": ")[2].rstrip(".").replace(" and ", ", ").split(", ")
    assert listed == list(commands)  # what the module says of itself
    flags = {name: sub._option_string_actions.get("--json") for name, sub in commands.items()}
    assert [name for name, flag in flags.items() if flag] == COMMANDS
    assert {(flag.nargs, flag.const, flag.type) for flag in flags.values() if flag} == {("?", "-", output._json_file)}
    assert all("; without a FILE, or to -, print that instead of the " in flag.help for flag in flags.values() if flag)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("path", "says"),
    [("mine.py", "is a Python file"), ("no/such/folder/file", "does not exist"), (".", "cannot be written")],
)
def test_a_path_that_will_not_do(name, path, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("precious")
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--json", path])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and says in err
    assert (tmp_path / "mine.py").read_text() == "precious"


def test_what_is_shown_and_written(tmp_path, capsys):
    file, figures = tmp_path / "figures.json", {"N": 3}
    output.show(["a page"], figures)
    assert capsys.readouterr().out == "a page\n"
    output.show(["a page"], figures, "-")
    assert json.loads(capsys.readouterr().out) == figures
    output.show(["a page"], figures, str(file))
    assert capsys.readouterr().out == f"a page\n written: {file}\n"
    assert json.loads(file.read_text()) == figures
