"""The command `figures` in this process."""

import pytest

from numba_flash import __main__ as cli


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
