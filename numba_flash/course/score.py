"""A student's test, scored by the faults it finds: `python -m numba_flash lab --test FILE`.

FILE defines test(attention), test_backward(attention_backward) or both. attention(q, k, v, scale=None, **keywords) is
`numba_flash.attention` with one stage, whose name is attention.stage; attention_backward(q, k, v, dout, scale=None,
**keywords) likewise. A test raises an error, such as an AssertionError, for a kernel it finds wrong. It has to pass on
the right kernels first. Each fault is tried in a process of its own, which is this module:

    python -m numba_flash.course.score RESULT FILE FAULT STAGE ...
"""

import ast
import contextlib
import functools
import json
import os
import random
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import attention, attention_backward, report
from ..stages import PORTABLE
from . import sandbox, symptoms
from .faults import MUTANTS
from .raised import line_of
from .symptoms import INPUTS, installed, plant

SOME = 12  # faults, without --all
EASY = {*symptoms.EASY, "bill", "strict"}  # what shows a fault that needs no more than lessons 00 to 07
LIMIT = 60  # seconds for the right kernels, which may have to be compiled
PASSES = {"forward": "", "backward": ", backward", "atomic": ", atomics", "split": ", split_kv"}
TESTS = {"test": ("forward", "split"), "test_backward": ("backward", "atomic")}  # and the passes they see
NEEDS = {name: one.needs for name, one in INPUTS.items()} | {
    "bill": "the bill: assert bill == nf.predict(…), with what nf.ledger() counted, as below",
    "causal bill": "the bill, with causal=True: tiles that no query sees are not loaded",
    "strict": "strict mode, on several tiles: NUMBA_FLASH_STRICT=1 in os.environ while the kernels run. It finds a "
    "race for certain where there is one, and many a barrier parts one tile from the next",
}
HOW = """
    how = {} if attention.stage == "naive" else {"blocks": (8, 8)}
    with nf.ledger() as bill:
        attention(q, k, v, **how)
    assert bill == nf.predict(attention.stage, n=n, n_k=n_k, d=d, **how)
"""


def needs(fault):
    """What a test has to have for a fault. The results of a race are wrong here, where threads run one after another,
    and may be right on a GPU: strict mode shows it for certain.
    """
    return NEEDS["strict" if fault.aim == "races" else fault.shown_by]


def run(file, *, stage=None, seed=1, level="easy", everything=False):
    """Score the tests of a file -> (exit status, result for JSON, what to print).

    Exit status 0 where every fault is found, 1 where some are not or where a test fails on a right kernel. Raises
    ValueError for a file that holds no test that could run.
    """
    names = tests_of(file)
    passes = [direction for name in names for direction in TESTS[name]]
    drawn = chosen(stage, passes, seed, level, everything)
    stages = [name for name in PORTABLE if name in {mutant.stage for mutant in drawn}]
    result = {"file": str(file), "tests": names, "stage": stage, "seed": seed}
    with report.progress(f"{Path(file).name} on {len(drawn)} faults", len(drawn) + 1, after=0) as advance:
        begin = time.monotonic()
        right = apart(file, "", stages, LIMIT)
        took = time.monotonic() - begin
        advance()
        if right["kind"] == "broken":
            raise ValueError(f"{file}: {right['says']}")
        if right["kind"] != "passed":
            return 1, result | {"right": right}, list(failed(file, right))
        limit = LIMIT / 2 + 5 * took

        def trial(mutant):
            one = apart(file, mutant.name, [mutant.stage], limit)
            advance()
            return one

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers:
            outcomes = list(workers.map(trial, drawn))
    faults = [
        {"fault": mutant.name, "stage": mutant.stage, "direction": mutant.direction, "killed": one["kind"] != "passed",
         "stands_for": mutant.fault.stands_for, "needs": needs(mutant.fault), "by": one}
        for mutant, one in zip(drawn, outcomes, strict=True)
    ]  # fmt: skip
    killed = sum(fault["killed"] for fault in faults)
    result |= {"right": right, "killed": killed, "faults": faults}
    return (0 if killed == len(faults) else 1), result, list(page(file, stages, faults, took, everything, level))


def tests_of(file):
    """The names of the tests that a file defines, from its text. ValueError where it cannot be read or has none."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8-sig"), str(file))
    except FileNotFoundError:
        raise ValueError(f"--test {file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--test {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except SyntaxError as error:
        raise ValueError(f"--test {file} is not Python, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"--test {file} is not Python: {error}") from None
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = [name for name in TESTS if name in defined]
    for node in tree.body:
        if getattr(node, "name", None) in names and (line := yields(node)):
            raise ValueError(f"--test {file}, line {line}: {node.name} yields, so that a call of it runs nothing: "
                             "use assert, and no yield")  # fmt: skip
    if not names:
        raise ValueError(f"--test {file} defines no test: write def test(attention): or def test_backward("
                         "attention_backward):, with an assert in it")  # fmt: skip
    return names


def yields(function):
    """The line of the first yield of a function itself, or None: it makes a call return before anything ran."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return node.lineno
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return None


def chosen(stage, passes, seed, level, everything):
    """The faults to try: all of a level, or some, as many kinds of input among them as can be."""
    drawn = [m for m in MUTANTS if m.file.startswith("stages/") and m.fault.shown_by and m.direction in passes]
    drawn = [m for m in drawn if stage in (None, m.stage) and (everything or m.direction in ("forward", "backward"))]
    if level == "easy":
        drawn = [m for m in drawn if m.fault.shown_by in EASY and m.direction in ("forward", "backward")]
    if everything:
        return drawn
    waiting = random.Random(seed).sample(drawn, len(drawn))
    some, seen = [], {}
    while waiting and len(some) < SOME:
        next_one = min(waiting, key=lambda m: (seen.get(m.fault.shown_by, 0), seen.get(m.stage, 0)))
        for what in (next_one.fault.shown_by, next_one.stage):
            seen[what] = seen.get(what, 0) + 1
        waiting.remove(next_one)
        some.append(next_one)
    return sorted(some, key=MUTANTS.index)


def failed(file, right):
    """What to say of a test that fails on the right kernels."""
    where = f" in line {right['line']}" if right.get("line") else ""
    yield report.prose(
        f"{file} fails on the right kernel of stage {right['stage']!r}, so that it says nothing about wrong ones."
    )
    says = right["says"] if right["kind"] != "endless" else f"it did not end within {LIMIT} seconds"
    yield report.prose(f"    {right['test']}{where}: {says}")
    if right.get("printed"):
        lines = [part for line in right["printed"].splitlines() for part in textwrap.wrap(line, 70)]
        yield report.prose(
            "It printed:\n\n" + "\n".join(f"    {line}" for line in lines[:10]) + "\n    …" * (len(lines) > 10)
        )


def page(file, stages, faults, took, everything, level):
    killed = sum(fault["killed"] for fault in faults)
    yield report.heading("Lab: your test", f"{Path(file).name}, {len(faults)} faults")
    yield ""
    yield report.prose(f"It passes on the right kernels of {', '.join(stages)} ({took:.0f} s).")
    yield report.prose(f"Your test kills {killed} of {len(faults)}.")
    alive = [fault for fault in faults if not fault["killed"]]
    if alive:
        yield report.prose("To kill the others, it needs an input, or a check, of these kinds:")
    for needs in dict.fromkeys(fault["needs"] for fault in alive):
        yield from (f"{line}" for line in textwrap.wrap(f"{needs}:", 75, initial_indent=" • ", subsequent_indent="   "))
        for fault in alive:
            if fault["needs"] == needs:
                text = f"{fault['stage'] + PASSES[fault['direction']]:<24} {fault['stands_for']}"
                yield from textwrap.wrap(text, 79, initial_indent="     ", subsequent_indent=" " * 30)
        yield ""
    if alive:
        yield report.prose(f"""
`attention.stage` is the name of the stage. A test may count the bill, and use strict mode. It gets several tiles by
`blocks`, or by an N_k larger than Bc, which for flash is 128 by default where d = 16:
{HOW}""")
        yield ""
    more = [] if everything else ["`--seed` draws others, `--all` takes all"]
    more += ["`--stage` takes those of one stage"]
    more += ["`--level hard` those of masks and dropout as well"] if level == "easy" else []
    yield report.prose(f"These are some of the faults: {', '.join(more)}.")


# --- a process of its own ---------------------------------------------------------------------------------------------


def apart(file, fault, stages, limit):
    """Run the file's tests on these stages, one of which has the fault, in a process that ends after `limit` seconds.

    -> {"kind": "passed", "failed", "broken" or "endless", "says", "stage", "test", "line", "printed"}
    """
    with tempfile.TemporaryDirectory(prefix="numba_flash_", ignore_cleanup_errors=True) as folder:
        result = Path(folder, "result.json")
        command = "numba_flash.course.score", str(result), str(Path(file).resolve()), fault, *stages
        ended = sandbox.run_apart(command, limit, folder, {})
        about = {"stage": stages[0], "test": "test", "printed": ended.printed}
        if ended.timed_out:
            return {"kind": "endless", "says": f"stopped after {limit:.0f} seconds", **about}
        try:
            return json.loads(result.read_text(encoding="utf-8")) | {"printed": ended.printed}
        except (OSError, ValueError):
            return {"kind": "failed", "says": "the process ended without a result", **about}


def trial(file, fault, stages):
    """The outcome of the file's tests in this process, see `apart`."""
    names = {"__name__": "student", "__file__": str(file)}
    try:
        exec(compile(Path(file).read_text(encoding="utf-8-sig"), str(file), "exec"), names)
    except (Exception, SystemExit) as error:
        return {"kind": "broken", **told(file, error)}
    mutant = next((m for m in MUTANTS if m.name == fault), None)
    with installed(mutant, plant(mutant).source) if mutant else contextlib.nullcontext():
        for stage in stages:
            for name in TESTS:
                if name not in names or (mutant and mutant.direction not in TESTS[name]):
                    continue
                try:
                    names[name](forward(stage) if name == "test" else backward(stage))
                except (Exception, SystemExit) as error:
                    return {"kind": "failed", "stage": stage, "test": name, **told(file, error)}
    return {"kind": "passed", "says": ""}


def told(file, error):
    """What an error says, and the last line of the file that led to it."""
    says = " ".join(str(error).split())[:300]
    return {"says": f"{type(error).__name__}: {says}".rstrip(": "), "line": line_of(file, error)}


def forward(stage):
    def attention_of_stage(q, k, v, scale=None, **how):
        return attention(q, k, v, scale=scale, **{"stage": stage, **how})

    attention_of_stage.stage = stage
    return functools.update_wrapper(attention_of_stage, attention, assigned=("__doc__",))


def backward(stage):
    def attention_backward_of_stage(q, k, v, dout, scale=None, **how):
        return attention_backward(q, k, v, dout, scale=scale, **{"stage": stage, **how})

    attention_backward_of_stage.stage = stage
    return functools.update_wrapper(attention_backward_of_stage, attention_backward, assigned=("__doc__",))


if __name__ == "__main__":
    outcome = trial(sys.argv[2], sys.argv[3], sys.argv[4:])
    Path(sys.argv[1]).write_text(json.dumps(outcome), encoding="utf-8")
