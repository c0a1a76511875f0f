"""What a command writes is there whole, or what was there before still is."""

import os
import re
import sys
from pathlib import Path

import pytest

from numba_flash import files, lesson


def test_a_file_is_written_and_nothing_else(tmp_path):
    files.write_bytes(tmp_path / "a", b"1")
    files.write_text(tmp_path / "b", "√2\n")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a": b"1", "b": "√2\n".encode()}


@pytest.mark.parametrize("there", [None, b"before"])
def test_what_was_there_stays_where_the_disk_is_full(tmp_path, monkeypatch, there):
    file = tmp_path / "figure.png"
    if there:
        file.write_bytes(there)

    def half(path, data):
        with open(path, "wb") as opened:
            opened.write(data[:2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", half)
    says = rf"^'{re.escape(str(file))}' cannot be written \(No space left on device\): name another file$"
    with pytest.raises(OSError, match=says):
        files.write_bytes(file, b"after")
    assert [path.name for path in tmp_path.iterdir()] == ([file.name] if there else [])
    assert not there or file.read_bytes() == there


@pytest.mark.skipif(sys.platform == "win32", reason="modes and links of Unix")
def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"before")
    file.chmod(0o600)
    link.symlink_to(file)
    files.write_bytes(link, b"after")
    assert link.is_symlink() and file.read_bytes() == b"after"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe of Unix")
def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    files.write_bytes(os.devnull, b"1")
    assert not Path(os.devnull).is_file()


def test_a_folder_in_which_nothing_can_be_put_is_told_before_the_run(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_bytes(b"before")
    lesson.check_writable(str(file))
    assert list(tmp_path.iterdir()) == [file]

    def denied(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(lesson.tempfile, "TemporaryFile", denied)
    with pytest.raises(ValueError, match=rf"^the folder of '{file}' cannot be written \(Permission denied\): name "):
        lesson.check_writable(str(file))
    lesson.check_writable(os.devnull)  # in its place nothing is put
    assert file.read_bytes() == b"before"


@pytest.mark.skipif(os.name != "posix", reason="what Unix says of a long name")
def test_a_name_that_is_too_long_is_told_before_the_run():
    name = 300 * "a"
    with pytest.raises(ValueError, match=rf"^'{name}' cannot be written \(File name too long\): name another file$"):
        lesson.check_writable(name)


def test_another_ending_is_told_the_right_one():
    with pytest.raises(ValueError, match=r"^'x.txt' will not do: end it in .svg or .html$"):
        lesson.check_writable("x.txt", (".svg", ".html"))
