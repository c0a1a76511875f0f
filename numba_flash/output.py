"""What a command hands out: its page on the terminal, and with `--json [FILE]` its figures, the same way everywhere."""

import argparse
import json

from . import report
from .files import write_text
from .lesson import check_writable


def add_json(parser, figures="the figures", page="table"):
    """The flag --json of a command that writes `figures`, in words, where it otherwise prints its `page`."""
    what = f"write {figures} to FILE; without a FILE, or to -, print that instead of the {page}"
    parser.add_argument("--json", type=_json_file, nargs="?", const="-", metavar="FILE", help=what)


def writable(*suffixes):
    """The argparse type of a path that is tried before the run."""

    def path(text):
        try:
            check_writable(text, suffixes)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(report.to_ascii(str(error))) from None
        return text

    return path


def _json_file(text):
    if text.endswith(".py"):  # `--json answer.py` would overwrite the answer
        raise argparse.ArgumentTypeError(f"{text!r} is a Python file: name the files to read first, then --json FILE")
    return text if text == "-" else writable()(text)


def show(page, figures=None, path=None):
    """Print the parts of `page`; with a path, write `figures` as well, with "-" to standard output in its place."""
    if path != "-":
        screen = report.console()
        for part in page:
            screen.print(part)
    write(figures, path)


def write(figures, path):
    """Figures as JSON: to standard output where `path` is "-", to the file of that name, or for None nowhere."""
    text = json.dumps(figures, indent=1)
    if path == "-":
        print(text)
    elif path:
        write_text(path, text + "\n")
        report.console().print(f" written: {path}", soft_wrap=True)
