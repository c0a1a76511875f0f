"""One trial, in a process of its own: the tests of a stage, then the loose check that a fault may well pass.

    python -m tests.mutants.trial RESULT STAGE DIRECTION [argument of pytest ...]

RESULT, a JSON file, gets pytest's exit code, the first test that failed and what it said, and the loose check.
"""

import json
import sys
from pathlib import Path

import pytest


class Recorder:
    """The first report of a failure."""

    failed = {"test": None, "when": None, "says": ""}

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failed["test"] is None:
            self.failed = {"test": report.nodeid, "when": report.when, "says": report.longreprtext}


def main(result, stage, direction, *arguments):
    recorder = Recorder()
    code = pytest.main(list(arguments), plugins=[recorder])
    import numba_flash  # only now, because pytest has chosen a cache
    from numba_flash.course.symptoms import passes_loosely

    assert Path(numba_flash.__file__).is_relative_to(Path.cwd()), numba_flash.__file__
    outcome = {"code": int(code), **recorder.failed, "loose": passes_loosely(stage, direction)}
    Path(result).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
