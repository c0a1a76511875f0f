"""`python -m numba_flash play`."""

import os
import sys

from .. import lesson, report
from ..attention import MAX_D
from ..blocks import SIDES, TILINGS, from_sides
from ..stages import LADDER
from . import page, terminal
from .play import play

BESIDE = {"flash": "flash2"}  # what a page shows beside a stage where nobody says otherwise
NO_SCREEN = "dumb", "unknown"  # terminals on which nothing can be drawn over


def add_command(command):
    sub = command("play", run, "play a stage tile by tile, in the terminal or on a page")
    sub.epilog = f"Keys in a terminal: {terminal.KEYS}. Through a pipe it prints some of the steps."
    number = lesson.whole_number
    what = f"{', '.join(LADDER)} (default: %(default)s)"
    sub.add_argument("--stage", choices=LADDER, metavar="STAGE", default="flash", help=what)
    what = "N, the number of queries and of keys (default: %(default)s)"
    sub.add_argument("--n", type=number(1), default=64, metavar="N", help=what)
    what = "d, the number of columns of a head (default: %(default)s)"
    sub.add_argument("--d", type=number(1, MAX_D), default=16, metavar="D", help=what)
    what = f"{SIDES} (default: about 4 x 4 tiles)"
    sub.add_argument("--blocks", type=number(1), nargs="+", metavar="B", help=what)
    what = "the query whose m, l and O are followed (default: 5, or the last)"
    sub.add_argument("--row", type=number(0), metavar="I", help=what)
    sub.add_argument("--causal", action="store_true", help="query i sees keys up to i")
    sub.add_argument("--seed", type=number(0), default=0, metavar="S", help="seed of the random input (default: 0)")
    sub.add_argument("--speed", type=number(1, 60), default=4, metavar="F", help="steps per second (default: 4)")
    sub.add_argument("--html", metavar="FILE", help="write a page instead, which needs no network")
    beside = sub.add_argument("--beside", choices=[*LADDER, "none"], metavar="STAGE")
    beside.help = "with --html: a second stage beside the first (default: flash2 for flash, else none)"


def run(flags):
    stages = [flags.stage]
    if flags.beside and flags.html is None:
        raise ValueError(f"--beside {flags.beside} is for a page: add --html FILE")
    if flags.html is not None:
        lesson.check_writable(flags.html, (".html",))
        beside = flags.beside or BESIDE.get(flags.stage, "none")
        if beside == flags.stage:
            raise ValueError(f"--beside {beside} is the stage itself: name another one, or none")
        stages += [beside] * (beside != "none")
    plays = [recorded(stage, flags) for stage in stages]
    if flags.html:
        size = page.write(plays, flags.html, flags.speed)
        report.console().print(f" written: {flags.html} ({report.in_bytes(size)})", soft_wrap=True)
    elif all(map(lesson.is_terminal, (sys.stdin, sys.stdout))) and os.environ.get("TERM") not in NO_SCREEN:
        terminal.watch(plays[0], flags.speed)
    else:
        terminal.digest(plays[0])
    return 0


def recorded(stage, flags):
    """The Play of a stage. --blocks is for the stages whose tiles are of one kind with those of --stage."""
    kinds = {name: tiling and tiling.square for name, tiling in TILINGS["forward"].items()}
    blocks = from_sides(stage, flags.blocks) if flags.blocks and kinds[stage] == kinds[flags.stage] else None
    names = ("n", "d", "row", "causal", "seed")
    return play(stage, blocks=blocks, **{name: getattr(flags, name) for name in names})
