"""`python -m numba_flash listing`: a stage's source with what each line loads from HBM and stores there.

from numba_flash import listing
with listing.lines() as counted:                       # any kernel, launched by nf.launch
    nf.launch(kernel, grid, block, *arguments)
print(counted)                                          # counted.bill is the same bill as a ledger's
"""

import json
import textwrap
from pathlib import Path

import numpy as np

from . import output, picture, report, testing
from .attention import MAX_D, attention, attention_backward
from .checks import check_stage
from .engine.launch import device
from .engine.model import GRID_YZ
from .hbm.ledger import KINDS
from .hbm.lines import Lines, lines
from .hbm.predict import DIRECTIONS
from .lesson import check_writable, plural, whole_number
from .stages import STAGES

__all__ = ["Lines", "lines"]
N = 256  # every stage runs in a second or two
BAR = 6  # columns of the longest bar
BYTES = 7  # of a number of bytes


def add_command(command):
    sub = command("listing", show, "print a stage's kernels with the HBM traffic of each source line")
    sub.add_argument("--stage", choices=STAGES, metavar="STAGE", default="flash2", help=f"{', '.join(STAGES)}")
    for flag, least, most, value, meaning in (
        ("n", 1, None, N, "N, the number of queries and of keys (default: %(default)s)"),
        ("d", 1, MAX_D, 64, "d, the number of columns of a head (default: %(default)s)"),
        ("heads", 1, GRID_YZ, 1, "number of heads (default: %(default)s)"),
    ):
        sub.add_argument(
            f"--{flag}", type=whole_number(least, most), default=value, metavar=flag[0].upper(), help=meaning
        )
    tiles = "T for square tiles, Br Bc for those of flash and flash2 (default: what fits)"
    sub.add_argument("--blocks", type=whole_number(1), nargs="+", metavar="B", help=tiles)
    what = "forward, backward (from out and lse), or both (default: %(default)s)"
    sub.add_argument("--direction", choices=DIRECTIONS, metavar="PASS", default="forward", help=what)
    sub.add_argument("--causal", action="store_true", help="query i sees key j where j <= i")
    what = "drop weights with probability P, from 0 to below 1 (default: %(default)s)"
    sub.add_argument("--dropout", type=float, default=0.0, metavar="P", help=what)
    sub.add_argument("--html", metavar="FILE", help="write the page to FILE, which ends in .html")
    output.add_json(sub, page="page")


def show(flags):
    check_writable(flags.html, (".html",))
    blocks = flags.blocks and (flags.blocks[0] if len(flags.blocks) == 1 else tuple(flags.blocks))
    how = {"blocks": blocks, "causal": flags.causal, "dropout_p": flags.dropout}
    counted = count(flags.stage, n=flags.n, d=flags.d, heads=flags.heads, direction=flags.direction, **how)
    figures = {"stage": flags.stage, "n": flags.n, "d": flags.d, "heads": flags.heads, "direction": flags.direction}
    figures |= {**how, "bill": json.loads(counted.bill.to_json())["kernels"], "lines": json.loads(counted.to_json())}
    if flags.json != "-":
        facts = f"N = {flags.n:,}, d = {flags.d}, float32, {plural(flags.heads, 'head')}"
        heading = report.heading(f"Stage {flags.stage}, line by line", facts)
        page = [counted]
        if (where := device()).name != "cpu":
            note = f"Counted on the CPU engine: on {where.name!r} the kernels request the same."
            page.insert(0, report.prose(note))
        screen = report.console()
        for renderable in (heading, *page):
            screen.print(renderable)
        if flags.html:
            picture.save(heading, {"": [page]}, flags.html, title=f"numba_flash, stage {flags.stage}")
            screen.print(f" written: {flags.html}", soft_wrap=True)
    output.write(figures, flags.json)
    return 0


def count(stage, *, n=N, d=64, heads=1, direction="forward", **how):
    """Run one pass of a stage on random input -> Lines. how: the keywords of `attention`."""
    check_stage(stage, STAGES)
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


def drawing(counted):
    """Each kernel's source with the bytes of each line beside it, for rich."""

    def draw(width, clean):
        if not counted.kernels:
            yield [" No launch was counted: kernels are counted where nf.launch starts them."]
            return
        total = counted.bill.total_bytes
        longest = max(map(_bytes, (tensors for k in counted.kernels for tensors in k.counts.values())), default=0)
        longest = max(
            [longest, *(_bytes(t) for k in counted.kernels for f in k.functions for t in _called(k, f).values())]
        )
        for kernel in counted.kernels:
            yield from _kernel(kernel, total, longest, width, clean)
        yield []
        share = "A bar is a line's share of the longest. "
        passed = "A light one, with brackets, is counted in the device function that the line calls. "
        called = any(_called(kernel, function) for kernel in counted.kernels for function in kernel.functions)
        text = clean(share + passed * called + report.CONVENTION.format(what="Counted"))
        yield from ([f" {line}"] for line in textwrap.wrap(text, width - 2))

    return report._Drawing(draw)


def _kernel(kernel, total, longest, width, clean):
    own = kernel.total()
    for function in kernel.functions:
        here, called = kernel.at(function), _called(kernel, function)
        if not here and not called and function is not kernel.functions[0]:
            continue
        yield []
        if function is kernel.functions[0]:
            moved = _bytes(own)
            share = f", {moved / total:.0%} of the total" if total and moved != total else ""
            yield [
                (f" {kernel.name}", "bold"),
                clean(f"  in {Path(function.file).name}: {report.in_bytes(moved)}{share}"),
            ]
        else:
            yield [(f" {function.name}", "bold"), clean(f"  called by {kernel.name}")]
        yield from _source(kernel, function, here, called, longest, width, clean)
    yield []
    parts = [f"{tensor} {_counts(count)}" for tensor, count in own.items()]
    yield from ([f" {line}"] for line in textwrap.wrap(clean("Sum of the lines: " + "; ".join(parts)), width - 2))


def _source(kernel, function, here, called, longest, width, clean):
    text = textwrap.dedent(function.source).splitlines()
    start = next((at for at, line in enumerate(text) if line.lstrip().startswith("def ")), 0)  # after its decorators
    through = kernel.through(function)

    def margin(at):
        if at in here:
            moved, style, fill, shown = _bytes(here[at]), report.ACCENT, None, "{}"
        elif at in called:
            moved, style, fill, shown = _bytes(called[at]), "dim", "░", "({})"
        else:
            return None
        length = moved / longest * BAR if longest else 0
        bar = report._bar(length, clean is report.to_ascii) if moved else ""
        bar = clean(fill) * max(round(length), 1) if fill and moved else bar
        return [(f" {bar:<{BAR}}", style), (f" {shown.format(report.in_bytes(moved)):>{BYTES + 2}}", "")]

    def below(at):
        for tensor, touched in here.get(at, {}).items():
            places = [] if function is kernel.functions[0] else kernel.callers(function, tensor)
            yield clean(f"→ {tensor} {_counts(touched)}{_called_in(places, kernel)}")
        for callee, tensor, touched, others in through.get(at, ()):
            yield clean(f"→ {tensor} {_counts(touched)}, through {callee.name}{_together(others)}")

    return ([line] for line in report.source_lines(
        list(map(clean, text[start:])), function.first + start, width, margin=margin, below=below))  # fmt: skip


def _called(kernel, function):
    """{line: {tensor: Count}} of what calls in a function touch, where one line alone does."""
    return {
        line: {tensor: touched for _, tensor, touched, others in found if not others}
        for line, found in kernel.through(function).items() if any(not others for *_, others in found)
    }  # fmt: skip


def _counts(count):
    return ", ".join(f"{getattr(count, kind):,} {kind}" for kind in KINDS if getattr(count, kind))


def _called_in(places, kernel):
    if not places:
        return ""
    lines = [line for _, line in places]
    within = {caller.name for caller, _ in places} - {kernel.name}
    of = f" of {' and '.join(sorted(within))}" if within else ""
    return f", called in line{'s' * (len(lines) > 1)} {_and(lines)}{of}"


def _together(others):
    return f", together with line{'s' * (len(others) > 1)} {_and(others)}" if others else ""


def _and(numbers):
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _bytes(tensors):
    return sum(count.read_bytes + count.write_bytes for count in tensors.values())
