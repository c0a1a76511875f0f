"""The command `figures` in this process."""

import pytest

from numba_flash import __main__ as cli
from numba_flash.figures import left, middle


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """What is counted, and not only predicted, is small here; the marker `course` has a test at full size."""
    for figure in (left, middle):
        monkeypatch.setattr(figure, "RUN", {"n": 64, "d": 8})


@pytest.fixture
def run(capsys, monkeypatch):
    """`figures` with a line of flags -> exit status, standard output, standard error."""
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")

    def run(line):
        try:
            status = cli.main(["figures", *line.split()])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run
