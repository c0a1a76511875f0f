"""Lines as text: each kernel's source with the bytes of each line beside it."""

import textwrap
from pathlib import Path

from .. import report
from .ledger import KINDS

BAR = 6  # columns of the longest bar
BYTES = 7  # of a number of bytes


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

    return report.Drawing(draw)


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
    yield from (
        [f" {line}"] for line in textwrap.wrap(clean("Sum of the lines: " + ("; ".join(parts) or "nothing")), width - 2)
    )


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
        bar = report.bar_of(length, clean is report.to_ascii) if moved else ""
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
