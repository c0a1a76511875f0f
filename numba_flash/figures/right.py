"""Figure 2 (right) of the paper: block-sparse attention against the part of the tiles computed, and Proposition 4."""

from fractions import Fraction
from functools import cache

import numpy as np

from .. import patterns, report
from ..attention import attention_backward
from ..blocks import choose_blocks, stream, tiles
from ..hbm.ledger import ledger
from ..hbm.predict import predict
from ..testing import inputs
from . import runs
from .common import aligned, heads_and_batch, left_out, straight_line
from .slopes import number

TITLE = "Figure 2 (right): block-sparse attention, and Proposition 4"
PAPER = {"n": 4096, "d": 64, "heads": 16, "batch": 4}  # the caption names N alone; batch is ours
MILLISECONDS = {10: 27.2, 20: 43.4, 30: 60.3, 40: 81.2, 50: 99.4, 60: 117.0, 70: 135.6, 80: 155.6, 90: 175.6}
DENSE = 188.4  # ms, without a mask
SIDES = (16, 32, 64, 128)  # of square tiles
COUNTED = {"n": 256, "d": 32}  # at most, where kernels are counted
COUNTED_SIDE = 16
PATTERNS = {"local": patterns.local, "strided": patterns.strided, "butterfly": patterns.butterfly}
BARS = ["10 %", "30 %", "50 %", "70 %", "90 %"]
MOST_TILES = 2**22  # of a mask


# --- figures ----------------------------------------------------------------------------------------------------------


def compute(*, n, d, heads, batch, run=True, measure=False):
    """Figure 2 (right) and Proposition 4 -> figures. Elements are those of a training step of flash2, for one head.

    "line" and "shares" are in closed form: exact where tiles divide n, and else the mean over masks with so many tiles.
    They are None and [] where no tiles fit. "counted" is of one head on the CPU engine, "timed" of all on a GPU; None
    without `run`. "equal": whether what was counted is what is predicted with each mask. Nothing is measured.
    """
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch}
    figures = {"figure": "right", **sizes, "paper": of_paper() if sizes == PAPER else None}
    figures |= {"blocks": None, "line": None, "dense": None, "shares": [], "sram": {}, "timed": None}
    try:
        blocks = list(choose_blocks("flash2", d=d, direction="both"))
    except ValueError:  # d is too large for tiles in shared memory
        blocks = None
    if blocks:
        shares = of_tiles(n, d, blocks)
        dense = predict("flash2", n=n, d=d, blocks=blocks, direction="both").elements
        figures |= {"blocks": blocks, "line": line(n, d, blocks), "dense": dense, "shares": shares}
        figures |= {"sram": {str(side): of_side(n, d, side) for side in SIDES}}
        figures |= {"timed": timed(sizes, blocks, shares) if run else None}
    counted = count(min(n, COUNTED["n"]), min(d, COUNTED["d"])) if run else None
    equal = counted is None or all(m["equal"] for m in counted["masks"])
    return figures | {"counted": counted, "equal": equal}


def of_paper():
    times = straight_line([(percent / 100, ms) for percent, ms in MILLISECONDS.items()])
    return {"ms": {str(percent): ms for percent, ms in MILLISECONDS.items()}, "dense": DENSE, "line": times}


def line(n, d, blocks):
    """What a training step of flash2 moves for one head where a part s of the tiles is computed: a + b·s elements.

    "mask": those of a that are elements of the block mask, one byte each.
    """
    forward, backward = forward_line(n, d, blocks), backward_line(n, d, blocks)
    return {part: forward[part] + backward[part] for part in forward}


def forward_line(n, d, blocks):
    """Q, O and L once, and K and V for each tile of queries; each of its threads asks for the mask of each tile."""
    Tr, Tc = (tiles(n, side) for side in blocks)
    mask = blocks[0] * Tr * Tc
    return {"a": 2 * n * d + n + mask, "b": 2 * Tr * n * d, "mask": mask}


def backward_line(n, d, blocks):
    """D from dO and O; the kernel that owns keys, with Q, dO, L and D for each tile; the one that owns queries."""
    (Br, Bc), (Tr, Tc) = blocks, (tiles(n, side) for side in blocks)
    mask = Bc * Tc * tiles(n, stream(Br)) + Br * Tr * tiles(n, stream(Bc))
    return {"a": 9 * n * d + 3 * n + mask, "b": 2 * Tc * n * (d + 1) + 2 * Tr * n * d, "mask": mask}


def of_tiles(n, d, blocks):
    """The elements on the line, for each share of the paper's figure in whole tiles."""
    all_tiles = tiles(n, blocks[0]) * tiles(n, blocks[1])
    a, b = (line(n, d, blocks)[part] for part in "ab")
    found = []
    for percent in MILLISECONDS:
        s = Fraction(round(Fraction(percent * all_tiles, 100)), all_tiles)
        found.append({"percent": percent, "tiles": int(s * all_tiles), "s": float(s), "elements": round(a + b * s)})
    return found


def of_side(n, d, side):
    """b, forward and in a training step, with square tiles of `side` = M/4d."""
    blocks = side, side
    return {"M": 4 * d * side, "forward": forward_line(n, d, blocks)["b"], "both": line(n, d, blocks)["b"]}


def masks(n, blocks, counts, seed=0):
    """Random masks of so many tiles each, of which each holds those before it."""
    shape = tiles(n, blocks[0]), tiles(n, blocks[1])
    order = np.random.default_rng(seed).permutation(shape[0] * shape[1]).reshape(shape)
    return [order < count for count in counts]


@cache
def count(n, d):
    """A training step of one head on the CPU engine with random masks and the ready-made patterns -> figures."""
    blocks = COUNTED_SIDE, COUNTED_SIDE
    named = [("random", mask) for mask in masks(n, blocks, [share["tiles"] for share in of_tiles(n, d, blocks)])]
    named += [(name, make(n, n, blocks)) for name, make in PATTERNS.items()]
    q, k, v = inputs((n, d), (n, d))
    found = []
    with report.progress("flash2 with block masks on the CPU engine", len(named)) as advance:
        for name, mask in named:
            how = {"block_mask": mask, "blocks": blocks}
            with ledger() as bill:
                attention_backward(q, k, v, q, **how, device="cpu")
            predicted = predict("flash2", n=n, d=d, **how, direction="both")
            ours = {"predicted": predicted.elements, "counted": bill.elements, "equal": bill == predicted}
            found.append({"mask": name, "tiles": int(mask.sum()), "s": float(mask.mean()), **ours})
            advance()
    fitted = straight_line([(m["s"], m["counted"]) for m in found if m["mask"] == "random"])
    return {"n": n, "d": d, "side": COUNTED_SIDE, "line": fitted, "masks": found}


def timed(sizes, blocks, shares):
    """Times of all heads with random masks, and without one, on a GPU -> figures; None without a GPU."""
    few = tiles(sizes["n"], blocks[0]) * tiles(sizes["n"], blocks[1]) <= MOST_TILES
    how = {"stage": "flash2", "direction": "both", "blocks": blocks}
    drawn = masks(sizes["n"], blocks, [share["tiles"] for share in shares]) if few else []
    passes = {f"{share['percent']} %": how | {"block_mask": mask} for share, mask in zip(shares, drawn)}
    found = runs.times(sizes, passes | {"dense": how})
    if found is None:
        return None
    s = {f"{share['percent']} %": share["s"] for share in shares}
    points = [(s[name], 1000 * t["median"]) for name, t in found["seconds"].items() if name in s]
    return found | {"line": straight_line(points) if points else None}  # of ms


# --- what is printed --------------------------------------------------------------------------------------------------


def page(figures):
    """The figures of `compute` as report prints them."""
    yield report.heading("Figure 2 (right)", "N = {n:,}, d = {d:,}, ".format(**figures) + heads_and_batch(figures))
    yield ""
    yield report.prose("""
        Block-sparse attention computes only those tiles of S whose element of a block mask is not zero: a part s of
        them, here drawn at random. The times are of a forward and a backward pass. Ours is what flash2 reads and writes
        in HBM then, in elements, predicted for one head.
    """)
    if not figures["blocks"]:
        yield report.prose(f"No tiles of flash2 fit at d = {figures['d']:,}.")
    else:
        yield from shares_page(figures)
        yield from lines_page(figures)
        yield from proposition_page(figures)
    if figures["counted"]:
        yield from counted_page(figures["counted"])


def columns(figures):
    """What there is at each share and last without a mask, None where it is not -> {"paper", "time", "HBM": values}."""
    paper, timed = figures["paper"], figures["timed"]
    found = {}
    if paper:
        found["paper"] = [*paper["ms"].values(), paper["dense"]]
    if timed and timed["seconds"]:
        seconds = map(timed["seconds"].get, names(figures))
        found["time"] = [t and 1000 * t["median"] for t in seconds]
    return found | {"HBM": [*(share["elements"] for share in figures["shares"]), figures["dense"]]}


def names(figures):
    return [*(f"{share['percent']} %" for share in figures["shares"]), "dense"]


def shares_page(figures):
    found, lengths = columns(figures), {}
    head = {"paper": "paper, ms", "time": "flash2, ms", "HBM": "flash2, elements"}
    label = {"paper": "paper's time", "time": "flash2's time", "HBM": "flash2's HBM"}
    rows = [[name] for name in names(figures)]
    for column, values in found.items():
        for row, value in zip(rows, values):
            known = value is not None and values[-1] is not None
            written = "-" if value is None else number(value) if column == "HBM" else f"{value:.1f}"
            row += [written, f"{value / values[-1]:.3f}" if known else "-"]
            if known and row[0] in BARS:
                lengths[f"{row[0]}  {label[column]}"] = value / values[-1]
    yield aligned(["s", *(text for column in found for text in (head[column], "/ dense"))], rows)
    yield ""
    yield report.bars(dict(sorted(lengths.items(), key=lambda bar: BARS.index(bar[0][:4]))), "of dense")
    yield ""
    if figures["paper"]:
        yield report.prose("The paper measured on an A100. Its caption names N alone; d, heads and batch are ours.")
    else:
        yield left_out("times", PAPER)
    if any(figures["n"] % side for side in figures["blocks"]):
        yield report.prose("The last tiles are short. Ours is the mean over all masks with as many tiles.")
    if timed := figures["timed"]:
        if timed["seconds"]:
            yield report.prose(f"flash2 ran on {timed['gpu']}: medians of {timed['repeats']} runs, taken in turn.")
        for why in dict.fromkeys(timed["why"].values()):
            yield report.prose(f"Not timed: {why}.")


def lines_page(figures):
    """How far each column is a straight line."""
    ours, fitted = figures["line"], {"paper": figures["paper"], "time": figures["timed"]}
    Br, Bc = figures["blocks"]
    rows = []
    for column in columns(figures):
        if column == "HBM":
            rows.append(["flash2, elements", *map(number, (ours["a"], ours["b"], 0, ours["a"] + ours["b"]))])
        elif f := fitted[column]["line"]:
            name = "paper, ms" if column == "paper" else "flash2, ms"
            rows.append([name, *(f"{x:.1f}" for x in (f["a"], f["b"], f["off"], f["a"] + f["b"]))])
    yield report.heading("Linear in s", f"a + b·s; tiles of {Br} × {Bc}")
    yield ""
    yield aligned(["", "a", "b", "off, at most", "a + b"], rows)
    yield ""
    yield report.prose(f"""
        A line through times is fitted by least squares; `off` is how far a time is from it. That of the elements is a
        closed form: a = 11Nd + 4N, and {number(ours["mask"])} elements of the mask, of one byte each, since every
        thread of a block reads that of its tile; b = 4TrNd + 2TcN(d + 1), to which each tile adds as much. (s is
        rounded to whole tiles.) Dense attention reads no mask, and Proposition 4 leaves it out.
    """)


def proposition_page(figures):
    N, d = figures["n"], figures["d"]
    rows, constants = [], {"forward": [], "both": []}
    for side, found in figures["sram"].items():
        rows.append([int(side), number(found["M"])])
        for part, values in constants.items():
            values.append(found[part] * found["M"] / (N * d) ** 2)
            rows[-1] += [number(found[part]), f"{values[-1]:.2f}"]
    falls = all(max(values) < 1.05 * min(values) for values in constants.values())  # not where tiles are short
    yield report.heading("Proposition 4", "Θ(Nd + N²d²s/M) HBM accesses")
    yield ""
    law = "b falls as 1/M: it is a constant times N²d²/M, in the forward pass and in a training step."
    yield report.prose(f"""
        N²d²s/M is the part b·s. Tiles are square, of side M/4d. {law * falls}
    """)
    yield aligned(["side", "M", "b, forward", "/ (N²d²/M)", "b, both passes", "/ (N²d²/M)"], rows)
    yield ""


def counted_page(counted):
    n, d, side, line = (counted[name] for name in ("n", "d", "side", "line"))
    yield report.heading("Counted", f"N = {n:,}, d = {d}, one head, tiles of {side} × {side}")
    yield ""
    off = [m["counted"] - line["a"] - line["b"] * m["s"] for m in counted["masks"]]
    rows = []
    for m, away in zip(counted["masks"], off):
        rows.append([m["mask"], f"{m['s']:.3f}", m["tiles"], f"{m['predicted']:,}", f"{m['counted']:,}"])
        rows[-1].append(f"{round(away):+,}" if round(away) else "0")
    yield aligned(["mask", "s", "tiles", "predicted", "counted", "off the line"], rows)
    yield ""
    if not all(m["equal"] for m in counted["masks"]):
        yield report.prose("PREDICTED AND COUNTED DIFFER.")
        return
    on_it = "All masks lie on it: which tiles are computed does not matter, only how many."
    near = "The last tiles are short, and cost less than others: so not all masks lie on it."
    yield report.prose(f"""
        Predicted and counted are equal, tensor by tensor; the kernels ran on the CPU engine. The line through the
        random masks is {line["a"]:,.0f} + {line["b"]:,.0f}·s. {near if any(map(round, off)) else on_it}
    """)


# --- what is written --------------------------------------------------------------------------------------------------


def rows(figures):
    """A row for each time and each number of elements. "s" is 1 without a mask; elements are of one head."""
    sizes, found = {name: figures[name] for name in PAPER}, []
    one, at = {"heads": 1, "batch": 1}, [(share["s"], "random") for share in figures["shares"]] + [(1.0, "none")]
    if paper := figures["paper"]:
        times = [(int(percent) / 100, "", ms) for percent, ms in paper["ms"].items()]
        found += [row("paper", mask, s, "ms", ms, **sizes) for s, mask, ms in [*times, (1.0, "none", paper["dense"])]]
    if figures["blocks"]:
        there, sides = columns(figures), dict(zip(("Br", "Bc"), figures["blocks"]))
        found += [
            row("predicted", mask, s, "elements", x, **sizes | one | sides) for (s, mask), x in zip(at, there["HBM"])
        ]
        times = zip(at, there.get("time", []))
        found += [row("timed", mask, s, "ms", ms, **sizes, **sides) for (s, mask), ms in times if ms is not None]
    if counted := figures["counted"]:
        one |= {"n": counted["n"], "d": counted["d"], "Br": counted["side"], "Bc": counted["side"]}
        for source in ("predicted", "counted"):
            found += [row(source, m["mask"], m["s"], "elements", m[source], **one) for m in counted["masks"]]
    return list({tuple(one.values()): one for one in found}.values())  # few tiles have few shares


def row(source, mask, s, unit, value, *, n, d, heads, batch, Br=None, Bc=None):
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch, "Br": Br, "Bc": Bc}
    quantity = "time" if unit == "ms" else "HBM"
    return {"source": source, "mask": mask, "s": s, **sizes, "quantity": quantity, "unit": unit, "value": value}


def plot(figures, canvas):
    """Times and HBM traffic over those without a mask, against s; and what was counted, on its line."""
    counted = figures["counted"]
    shares, *counts = canvas.subplots(1, 1 + bool(counted), squeeze=False)[0]
    gpu = figures["timed"]["gpu"] if figures["timed"] else ""
    looks = {
        "paper": ("o", "paper, ms"),
        "time": ("s", f"flash2 on {gpu}, ms"),
        "HBM": ("^--", "flash2, HBM, predicted"),
    }
    for column, values in columns(figures).items() if figures["blocks"] else ():
        points = [(100 * share["s"], y / values[-1]) for share, y in zip(figures["shares"], values) if y and values[-1]]
        if points:
            look, label = looks[column]
            shares.plot(*zip(*points), look, color="black", fillstyle="none", label=label)
    shares.set(xlabel="tiles computed, %", ylabel="of what it is without a mask", title="Figure 2 (right)")
    if shares.lines:
        shares.legend()
    for axes in counts:
        for name, look in zip(("random", *PATTERNS), "ox+^"):
            points = [(100 * m["s"], m["counted"]) for m in counted["masks"] if m["mask"] == name]
            axes.plot(*zip(*points), look, color="black", fillstyle="none", label=name)
        ends = [(100 * s, counted["line"]["a"] + counted["line"]["b"] * s) for s in (0, 1)]
        axes.plot(*zip(*ends), "-", color="gray", label="least squares")
        axes.set(xlabel="tiles computed, %", ylabel="HBM accesses counted, elements")
        axes.set_title("N = {n:,}, d = {d}, one head".format(**counted))
        axes.legend()
