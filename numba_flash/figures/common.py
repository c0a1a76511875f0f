"""What several figures share: the paper's configuration, and what is drawn and fitted in log-log scale."""

import math
from statistics import linear_regression

from .. import report
from ..engine.launch import device

GPT2_MEDIUM = {"n": 1024, "d": 64, "heads": 16, "batch": 64}  # Figure 2, left and middle
COLUMNS = 64  # of a chart
ITEMSIZE = 2  # bytes of an element in half precision, which the paper measures in


def place():
    """What figures run kernels on: the GPU, or else the CPU engine, since Numba's simulator would take hours."""
    return "gpu" if device().name == "gpu" else "cpu"


def slope(points):
    """The slope of log(y) over log(x), by least squares over `points`, pairs (x, y)."""
    x, y = zip(*points, strict=True)
    return linear_regression(list(map(math.log, x)), list(map(math.log, y))).slope


def straight_line(points):
    """The line a + b·x through `points`, pairs (x, y), by least squares, and how far y is off it at most.

    None where all x are the same.
    """
    x, y = zip(*points, strict=True)
    if len(set(x)) < 2:
        return None
    b, a = linear_regression(x, y)
    return {"a": a, "b": b, "off": max(abs(y - a - b * x) for x, y in points)}


def chart(series, across):
    """Points in log-log scale, a line for each doubling of y and up to 4 columns for each of x -> lines of text.

    series: mark -> [(x, y)]; what is drawn later covers what is there. `across` names x.
    """
    xs, ys = zip(*(xy for points in series.values() for xy in points), strict=True)
    left, top, bottom = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(ys))), math.floor(math.log2(min(ys)))
    wide = next((wide for wide in (4, 3, 2) if wide * (math.log2(max(xs)) - left) <= COLUMNS), 1)
    columns = round((math.log2(max(xs)) - left) * wide) + 1
    lines = [[" "] * columns for _ in range(top - bottom + 1)]
    for mark, points in series.items():
        for x, y in points:
            lines[round(top - math.log2(y))][round((math.log2(x) - left) * wide)] = mark
    for exponent, line in zip(range(top, bottom - 1, -1), lines, strict=True):
        yield f"  {f'2^{exponent}' if exponent % 2 == 0 else '':>5} │{''.join(line)}".rstrip()
    yield f"  {'':>5} ─" + "─" * columns
    step = 2 if wide > 2 else 8 // wide  # doublings from one tick to the next
    ticks = [f"{f'2^{left + at}':<{step * wide}}" for at in range(0, columns // wide + 1, step)]
    yield f"  {across:>5}  {''.join(ticks)}".rstrip()


def aligned(header, rows, names=1):
    """`report.table` of texts, of which all columns but the first `names` stand to the right."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [row[:names] + [f"{cell:>{w}}" for cell, w in zip(row[names:], wide[names:], strict=True)] for row in cells]
    return report.table(texts[0], texts[1:])


def heads_and_batch(figures):
    """The heads and the batch, for a heading: 16 heads, batch 64."""
    return f"{figures['heads']:,} head{'s' * (figures['heads'] > 1)}, batch {figures['batch']:,}"


def left_out(what, paper, lengths="N ="):
    """The sentence for a configuration that is not `paper`, the paper's."""
    theirs = f"{lengths} {paper['n']:,}, d = {paper['d']}, {heads_and_batch(paper)}"
    return report.prose(f"The paper's {what} are left out: they are for {theirs}.")
