"""`python -m pytest -m mutants`: each fault is put into a copy of the package, and its stage's tests run.

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
import tempfile
from pathlib import Path

import pytest

from numba_flash.course.faults import FAULTS, MUTANTS, PACKAGE

ROOT = PACKAGE.parent
RACES = ["tests/engine/test_orders.py::test_stages_have_no_races_and_read_nothing_unwritten"]  # strict, 3 tiles or more
FORWARD, BACKWARD, MASKS, SPLIT = (
    f"tests/stages/test_{name}.py::" for name in ("forward", "backward", "masks", "split")
)
EXACT, BILL = "test_exact_on_every_case", "test_bill_equals_the_closed_form"
TESTS = {  # of each pass; those that a fault aims at go first
    "forward": {
        "exact": [FORWARD + EXACT],
        "masks": [MASKS + "test_exact", MASKS + "test_hidden_tiles_change_no_bit"],
        "bill": [FORWARD + BILL, MASKS + BILL],
        "races": RACES,
        "dropout": ["tests/test_dropout.py", MASKS + "test_one_generator_for_all"],
        "blocks": [MASKS + "test_patterns_are_block_masks"],
    },
    "backward": {
        "exact": [BACKWARD + "test_naive_within_a_bound", BACKWARD + EXACT],
        "masks": [
            MASKS + "test_exact",
            MASKS + "test_no_key_at_all",
            MASKS + "test_hidden_keys_weigh_nothing",
        ],
        "bill": [BACKWARD + BILL, MASKS + BILL],
        "races": RACES,
    },
    "split": {"exact": [SPLIT + "test_exact_and_its_bill", SPLIT + "test_empty_splits_change_nothing"], "races": RACES},
}
TESTS["atomic"] = TESTS["backward"]
ONLY = {  # for -k: the tests of the stage, and of these what is fast
    "forward": "(test_dropout or test_patterns or STAGE) and (naive or flash2 and not test_masks or not float64)",
    "backward": "STAGE and (naive or not float64) and not False",  # deterministic
    "atomic": "STAGE and not float64 and not True",
    "split": "split",
}
NO_KILL = "Unsupported|NameError|SyntaxError|ImportError|AttributeError|TypeError|UnboundLocalError"


def arguments(stage, direction, aim):
    """What pytest is called with: the tests of one pass of one stage."""
    tests = TESTS[direction]
    first = sorted(tests, key=lambda kind: kind != aim)
    stage = "flash and not flash2" if stage == "flash" else stage
    return [*(test for kind in first for test in tests[kind]), "-k", ONLY[direction].replace("STAGE", f"({stage})")]


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A copy of what the tests need, with its Python compiled, which makes every trial a second shorter."""
    folder = tmp_path_factory.mktemp("original")
    for part in ("numba_flash", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    run(folder, "pytest", "-n0", "--collect-only", "tests/stages", "tests/engine/test_orders.py")
    return folder


def run(folder, *command):
    """`python -m` in `folder`, on the CPU engine -> what it prints."""
    ours = ("PYTEST_", "NUMBA_FLASH_STRICT", "PYTHONDONTWRITEBYTECODE")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder, env=inherited | {"PYTHONPATH": str(folder), "NUMBA_FLASH_DEVICE": "cpu"},
        capture_output=True, encoding="utf-8", errors="replace", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trial(original, stage, direction, aim, mutant=None):
    """The outcome of trial.py for a copy of the package, with the mutant's fault in it, and what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "copy")
        shutil.copytree(original, folder)
        if mutant:
            file = folder / "numba_flash" / mutant.file
            file.write_text(mutant.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
        options = ["-x", "-n0", "-p", "no:cacheprovider", "--tb=short", *arguments(stage, direction, aim)]
        output = run(folder, "tests.mutants.trial", "result.json", stage, direction, *options)
        return json.loads((folder / "result.json").read_text(encoding="utf-8")), output


def short(outcome):
    """The test that failed, without its parameters, and the case of `assert_exact` that it failed on."""
    file, name = re.fullmatch(r".*test_(\w+)\.py::test_(\w+).*", outcome["test"], re.DOTALL).groups()
    case = re.search(r"case '(.+?)'", outcome["says"])
    return f"{file}: {name.replace('_', ' ')}" + (f" ({case[1]})" if case else "")


def test_every_fault_fits_its_file():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(map(len, FAULTS.values())) >= 30
    for mutant in MUTANTS:
        source = (PACKAGE / mutant.file).read_text(encoding="utf-8")
        mutated = mutant.apply(source)
        assert mutated != source
        compile(mutated, mutant.file, "exec")


@pytest.mark.mutants
@pytest.mark.parametrize("stage, direction", [("naive", "forward"), ("flash2", "split")])
def test_without_a_fault_all_passes(stage, direction, original):
    """A copy is enough for the tests: the others have passed where they are before this is asked for."""
    outcome, output = trial(original, stage, direction, "exact")
    assert outcome["code"] == 0, output
    assert outcome["loose"]


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_killed(mutant, original, record_property):
    outcome, output = trial(original, mutant.stage, mutant.direction, mutant.fault.aim, mutant)
    killed = outcome["code"] == 1 and outcome["when"] == "call" and not re.search(NO_KILL, outcome["says"])
    killer = short(outcome) if killed else None
    record_property("mutant", [mutant.file, mutant.fault.name, mutant.fault.stands_for, killer, outcome["loose"]])
    assert outcome["code"] != 0, f"the mutant {mutant.name!r} lives: no test of its stage finds the fault"
    assert killed, f"the mutant {mutant.name!r} was not killed by a test that fails by itself: {output}"
