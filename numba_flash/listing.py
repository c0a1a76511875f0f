"""`python -m numba_flash listing`: kernels' source with what each line loads from HBM and stores there."""

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np

from . import output, picture, report, testing
from .attention import MAX_D, attention, attention_backward
from .blocks import SIDES, from_sides
from .checks import check_stage
from .course.check import exercise_of
from .course.raised import at_line
from .engine.launch import device
from .engine.model import GRID_YZ
from .hbm.lines import lines
from .hbm.predict import DIRECTIONS, flops
from .lesson import check_distinct, check_writable, plural, whole_number
from .stages import PORTABLE

N = 256  # every stage runs in a second or two
OF_STAGE = {  # the flags of a stage, and what they are when left out
    "stage": "flash2", "n": N, "d": 64, "heads": 1, "blocks": None, "direction": "forward", "causal": False,
    "dropout": 0.0,
}  # fmt: skip
MOST = 2e11  # floating-point operations, about a minute on a CPU


def add_command(command):
    sub = command("listing", show, "print kernels, a stage's or your own, with the HBM traffic of each source line")
    what = "a script that launches kernels with nf.launch, or an exercise's file, which is run; without one, a stage"
    sub.add_argument("file", nargs="?", metavar="FILE", help=what)
    what = f"{', '.join(PORTABLE)} (default: flash2)"
    sub.add_argument("--stage", choices=PORTABLE, metavar="STAGE", help=what)
    for flag, least, most, meaning in (
        ("n", 1, None, "N, the number of queries and of keys"),
        ("d", 1, MAX_D, "d, the number of columns of a head"),
        ("heads", 1, GRID_YZ, "number of heads"),
    ):
        meaning += f" (default: {OF_STAGE[flag]})"
        sub.add_argument(f"--{flag}", type=whole_number(least, most), metavar=flag[0].upper(), help=meaning)
    sub.add_argument("--blocks", type=whole_number(1), nargs="+", metavar="B", help=f"{SIDES} (default: what fits)")
    what = "forward, backward (from out and lse), or both (default: forward)"
    sub.add_argument("--direction", choices=DIRECTIONS, metavar="PASS", help=what)
    sub.add_argument("--causal", action="store_true", default=None, help="query i sees key j where j <= i")
    what = "drop weights with probability P, from 0 to below 1 (default: 0)"
    sub.add_argument("--dropout", type=float, metavar="P", help=what)
    sub.add_argument("--html", metavar="FILE", help="write the page to FILE, which ends in .html")
    output.add_json(sub, page="page")


def show(flags):
    check_writable(flags.html, (".html",))
    check_distinct(json=flags.json, html=flags.html)
    if flags.file:
        for name in OF_STAGE:
            if getattr(flags, name) is not None:
                raise ValueError(f"--{name} is for a stage, and {flags.file} is run as it is: leave one of the two out")
        counted, facts = of_file(flags.file, printing=flags.json == "-")
        return write(flags, counted, {"file": flags.file}, f"{Path(flags.file).name}, line by line", facts)
    for name, default in OF_STAGE.items():
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    blocks = flags.blocks and from_sides(flags.stage, flags.blocks)
    how = {"blocks": blocks, "causal": flags.causal, "dropout_p": flags.dropout}
    work = flops(flags.stage, n=flags.n, d=flags.d, heads=flags.heads, direction=flags.direction, **how)
    refuse_long(work, flags.n)
    counted = count(flags.stage, n=flags.n, d=flags.d, heads=flags.heads, direction=flags.direction, **how)
    figures = {"stage": flags.stage, "n": flags.n, "d": flags.d, "heads": flags.heads, "direction": flags.direction}
    facts = f"N = {flags.n:,}, d = {flags.d}, float32, {plural(flags.heads, 'head')}"
    return write(flags, counted, figures | how, f"Stage {flags.stage}, line by line", facts)


def refuse_long(work, n, other=""):
    """ValueError where so many floating-point operations on a CPU take minutes. other: what else would help."""
    if work > MOST:
        raise ValueError(f"--n {n} takes {work:.1e} operations, which would run for minutes: pass a smaller --n{other}")


def write(flags, counted, figures, title, facts):
    figures |= {"bill": json.loads(counted.bill.to_json())["kernels"], "lines": json.loads(counted.to_json())}
    heading, page = report.heading(title, facts), [counted]
    if (where := device()).name != "cpu":
        note = f"Counted on the CPU engine: on {where.name!r} the kernels request the same."
        page.insert(0, report.prose(note))
    output.show([heading, *page], figures, flags.json)
    if flags.html:
        picture.save(heading, {"": [page]}, flags.html, title=f"numba_flash: {title}")
        if flags.json != "-":
            report.console().print(f" written: {flags.html}", soft_wrap=True)
    return 0


def of_file(path, printing=False):
    """Run a script as `python FILE` does, and an exercise's `launch` on its first input -> (Lines, the input's name).

    printing: what the file prints goes to stderr. ValueError, with the line, where the file stops.
    """
    file = Path(path)
    if not os.path.isfile(file) or file.suffix.lower() != ".py":
        raise ValueError(f"{path} is no Python file: name a script that launches kernels with nf.launch")
    name, argv = "", sys.argv
    sys.argv, sys.path[:0] = [path], [str(file.resolve().parent)]
    try:
        with lines() as counted, contextlib.redirect_stdout(sys.stderr) if printing else contextlib.nullcontext():
            names = runpy.run_path(path, run_name="__main__")
            if {"launch", "specification"} <= set(names):
                name, inputs = next(exercise_of(file).inputs())
                names["launch"](*inputs)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno} is not Python: {error.msg}") from None
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code:
            raise ValueError(f"{path} stops{at_line(path, error)} with {type(error).__name__}: {error}") from None
    finally:
        sys.argv = argv
        sys.path.remove(str(file.resolve().parent))
    if not counted.kernels:
        raise ValueError(f"{path} launches no kernel: only what nf.launch starts while the file runs is counted")
    return counted, name


def count(stage, *, n=N, d=64, heads=1, direction="forward", **how):
    """Run one pass of a stage on random input -> Lines. how: the keywords of `attention`."""
    check_stage(stage, PORTABLE)
    q, k, v = testing.inputs((heads, n, d), (heads, n, d))
    how |= {"stage": stage, "device": "cpu"}
    if direction == "forward":
        with lines() as counted:
            attention(q, k, v, **how)
        return counted
    dout = np.random.default_rng(1).standard_normal(q.shape, q.dtype)
    kept = {}
    if direction == "backward":
        forward = how | {"blocks": None}
        kept = dict(zip(("out", "lse"), attention(q, k, v, return_lse=True, **forward), strict=True))
    with lines() as counted:
        attention_backward(q, k, v, dout, **kept, **how)
    return counted
