"""Writes what a command was asked to write."""

from pathlib import Path


def write_text(path, text):
    """Write a text in UTF-8. An OSError says which file it is, also where the disk is full."""
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        error.filename = str(path)
        raise
