"""`python -m pytest -m mutants --dist load`: each fault is put into a copy of the package, and its stage's tests run.

The fault is killed when one of these tests fails by itself; a copy that does not import or compile kills nothing. All
copies share one cache of compiled kernels. That is safe: an entry's name holds a hash of the kernel's text and of all
that it calls, so a kernel with a fault in it has an entry of its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from .faults import FAULTS, MUTANTS, PACKAGE

ROOT = PACKAGE.parent
FORWARD, BACKWARD, MASKS, ORDERS = (
    f"tests/{name}.py::"
    for name in ("stages/test_forward", "stages/test_backward", "stages/test_masks", "engine/test_orders")
)
# Both passes: those that a fault aims at go first.
TESTS = {
    "forward": {
        "exact": [
            f"{FORWARD}test_exact_on_every_case",
            f"{FORWARD}test_scores_that_overflow_to_minus_infinity",
            f"{FORWARD}test_bill_equals_the_closed_form",
        ],
        "masks": [
            f"{MASKS}test_exact",
            f"{MASKS}test_hidden_tiles_change_no_bit",
            f"{MASKS}test_a_hidden_key_has_no_weight_beside_scores_far_below",
        ],
        "races": [f"{ORDERS}test_stages_have_no_races_and_read_nothing_unwritten"],
    },
    "backward": {
        "exact": [f"{BACKWARD}test_exact_on_every_case", f"{BACKWARD}test_bill_equals_the_closed_form"],
        "masks": [f"{MASKS}test_exact", f"{MASKS}test_no_key_at_all"],
        "races": [f"{ORDERS}test_stages_have_no_races_and_read_nothing_unwritten"],
    },
}
TESTS["atomic"] = TESTS["backward"]
NOT_OF = {"flash": "not flash2", ("flash2", "backward"): "not False", ("flash2", "atomic"): "not True"}
NO_KILL = "Unsupported|NameError|SyntaxError|ImportError|AttributeError|TypeError|UnboundLocalError"
PASSES = sorted({(mutant.stage, mutant.direction) for mutant in MUTANTS})


def arguments(stage, direction, aim):
    """What pytest is called with: the tests of one pass of one stage."""
    tests = TESTS[direction]
    first = sorted(tests, key=lambda kind: kind != aim)
    only = [stage, *(NOT_OF[key] for key in (stage, (stage, direction)) if key in NOT_OF)]
    return [*(test for kind in first for test in tests[kind]), "-k", " and ".join(only)]


def trial(folder, stage, direction, aim):
    """The outcome of tests/mutants/trial.py in `folder`."""
    result = folder / "result.json"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NUMBA_FLASH_STRICT"))}
    environment = kept | {"PYTHONPATH": str(folder), "NUMBA_FLASH_DEVICE": "cpu"}
    command = [sys.executable, "-m", "tests.mutants.trial", str(result), stage, direction]
    options = ["-x", "-n0", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, *options, *arguments(stage, direction, aim)],
        cwd=folder, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text(encoding="utf-8")), done.stdout


def copied(folder):
    """A copy of what the tests need, with its compiled modules."""
    for name in ("numba_flash", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_every_fault_fits_its_file():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(map(len, FAULTS.values())) >= 30
    for mutant in MUTANTS:
        source = (PACKAGE / mutant.file).read_text(encoding="utf-8")
        mutated = mutant.apply(source)
        assert mutated != source
        compile(mutated, mutant.file, "exec")


@pytest.mark.mutants
@pytest.mark.parametrize("stage, direction", PASSES)
def test_without_a_fault_all_passes(stage, direction, tmp_path):
    outcome, output = trial(copied(tmp_path), stage, direction, "exact")
    assert outcome["code"] == 0, output
    assert outcome["loose"]


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_killed(mutant, tmp_path, record_property):
    folder = copied(tmp_path)
    file = folder / "numba_flash" / mutant.file
    file.write_text(mutant.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
    outcome, output = trial(folder, mutant.stage, mutant.direction, mutant.fault.aim)
    killed = outcome["code"] == 1 and outcome["when"] == "call" and not re.search(NO_KILL, outcome["says"])
    killer = outcome["test"].rpartition("::")[2] if killed else None
    record_property("mutant", [mutant.name, mutant.fault.stands_for, killer, outcome["loose"]])
    assert outcome["code"] != 0, f"the mutant {mutant.name!r} lives: no test of its stage finds the fault"
    assert killed, f"the mutant {mutant.name!r} was not killed by a test that fails: {output}"
