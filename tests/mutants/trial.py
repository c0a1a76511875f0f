"""One trial, in a process of its own: the tests of a stage, then the loose check that a fault may well pass.

    python -m tests.mutants.trial RESULT STAGE DIRECTION [argument of pytest ...]

RESULT, a JSON file, gets pytest's exit code, the first test that failed and what it said, and the loose check.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest


class Recorder:
    """The first report of a failure."""

    failed = {"test": None, "when": None, "says": ""}

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failed["test"] is None:
            self.failed = {"test": report.nodeid, "when": report.when, "says": report.longreprtext}


def passes_loosely(stage, direction):
    """np.allclose(atol=1e-2) on one head of standard normal numbers, N = 64, d = 16, dO = 1: the usual weak test."""
    import numba_flash as nf
    from numba_flash import reference

    q, k, v = np.random.default_rng(0).standard_normal((3, 64, 16), dtype=np.float32)
    dout = np.ones_like(q)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if direction in ("forward", "split"):
                how = {"split_kv": 4} if direction == "split" else {}
                got, expected = [nf.attention(q, k, v, stage=stage, **how)], [reference.attention(q, k, v)[0]]
            else:
                got = nf.attention_backward(q, k, v, dout, stage=stage, deterministic=direction != "atomic")
                expected = reference.attention_backward(q, k, v, dout)
    except Exception:  # whatever the fault leads to
        return False
    return all(np.allclose(one, other, atol=1e-2) for one, other in zip(got, expected, strict=True))


def main(result, stage, direction, *arguments):
    recorder = Recorder()
    code = pytest.main(list(arguments), plugins=[recorder])
    import numba_flash

    assert Path(numba_flash.__file__).is_relative_to(Path.cwd()), numba_flash.__file__
    outcome = {"code": int(code), **recorder.failed, "loose": passes_loosely(stage, direction)}
    Path(result).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
