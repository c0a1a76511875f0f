"""Theorem 5 of the paper: the HBM accesses of the backward pass, against M, d and N."""

from functools import cache

from .. import report
from ..attention import attention, attention_backward
from ..hbm.ledger import ledger
from ..hbm.predict import predict
from ..testing import inputs
from . import slopes
from .common import aligned, heads_and_batch

TITLE = "Theorem 5: HBM traffic of the backward pass against M, d and N"
PAPER = {"n": 65_536, "d": 64, "heads": 1, "batch": 1}  # ours: the paper has no numbers for it
COUNTED = {"n": 512, "d": 32}  # at most, where the kernel runs
KERNELS = ("initialise_dQ", "flash_backward")  # Algorithm 4, which is given O, l and m
POINTS = (32, 64, 128, 256)  # M over d, where the kernel runs


# --- figures ----------------------------------------------------------------------------------------------------------


def compute(*, n, d, heads, batch, run=True, measure=False):
    """Theorem 5 -> figures. Elements are of all heads; "constant" is elements over N²d²/M for one.

    "counted" are points of one head that ran on the CPU engine, none without `run`. "equal": whether each moved what
    is predicted, and each constant lies within its bounds. There is nothing to measure or to time.
    """
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch}
    theorem = slopes.theorem(slopes.BACKWARD, n=n, d=d, heads=heads * batch)
    for p in theorem["points"]:
        p["constant"] = slopes.constant(p, heads * batch)
    counted = count(min(n, COUNTED["n"]), min(d, COUNTED["d"])) if run else []
    bounded = all(bounds(p["d"])[0] <= p["constant"] <= bounds(p["d"])[1] for p in theorem["points"] + counted)
    equal = bounded and all(p["equal"] for p in counted)
    return {"figure": "theorem5", **sizes, "paper": None, "theorem": theorem, "counted": counted, "equal": equal}


def bounds(d):
    """What the constant lies between for all d ≤ M ≤ Nd.

    All terms are (5 + 5Tc)Nd + 2TcN. Tc = ⌈N/⌈M/4d⌉⌉ is at least 1/5 of 4Nd/M, and at most 5/4 of it.
    """
    return (20 + 8 / d) / 5, 5 + (20 + 8 / d) * 5 / 4


@cache
def count(n, d):
    """Points of one head of n rows, predicted and counted on the CPU engine."""
    q, k, v = inputs((n, d), (n, d))
    out, lse = attention(q, k, v, return_lse=True, device="cpu")
    points = []
    for M in sorted({min(times, n) * d for times in POINTS}):
        p = slopes.point(slopes.BACKWARD, n=n, d=d, M=M)
        blocks = p["Br"], p["Bc"]
        with ledger() as bill:
            attention_backward(q, k, v, q, out=out, lse=lse, stage="flash", blocks=blocks, device="cpu")
        moved = sum(count.elements for name in KERNELS for count in bill.kernels[name].values())
        equal = bill == predict("flash", n=n, d=d, blocks=blocks, direction="backward")
        points.append(p | {"counted": moved, "equal": equal, "constant": slopes.constant(p)})
    return points


# --- what is printed --------------------------------------------------------------------------------------------------


def page(figures):
    """The figures of `compute` as report prints them."""
    theorem, d = figures["theorem"], figures["d"]
    low, high = bounds(d)
    yield report.heading("Theorem 5", "N = {n:,}, d = {d:,}, ".format(**figures) + heads_and_batch(figures))
    yield ""
    yield report.prose(f"""
        The backward pass of FlashAttention, Algorithm 4, makes Θ(N²d²/M) HBM accesses for d ≤ M ≤ Nd, as the forward
        pass does (Theorem 2). M is how many elements fit on chip; a tile has Bc = ⌈M/4d⌉ keys. For each of Tc = ⌈N/Bc⌉
        tiles Q, O, dO and dQ are read and dQ is written: 5TcNd elements where the forward pass has 3TcNd. All terms are
        (5 + 5Tc)Nd + 2TcN for one head. The standard backward pass, Algorithm 3, has 7N² + 8Nd.

        Below, all terms; and in the columns for d, all terms over N²d²/M for one head. 5TcNd is 20 of that ratio, since
        Tc = 4Nd/M. So 20d²/M is less than the 7 of Algorithm 3 where M is larger than about 3d². The theorem keeps the
        ratio between two constants. At d = {d:,} they are {low:.1f} and {high:.1f}, for any N and any M from d to Nd:
    """)
    yield from slopes.points_page(theorem)
    yield from slopes.slopes_page(theorem, slopes.BACKWARD)
    yield from counted_page(figures)


def counted_page(figures):
    if not (counted := figures["counted"]):
        return
    n, d = counted[0]["n"], counted[0]["d"]
    rows = []
    for p in counted:
        sizes = p["Br"], p["Bc"], p["Tc"], f"{p['all']:,}", f"{p['counted']:,}"
        rows.append([slopes.power(p["M"]), *sizes, f"{p['constant']:.2f}"])
    yield report.prose(f"Run and counted on the CPU engine, at N = {n:,} and d = {d}, one head:")
    yield aligned(["M", "Br", "Bc", "Tc", "predicted", "counted", "/ (N²d²/M)"], rows)
    yield ""
    equal = all(p["equal"] for p in counted)
    yield report.prose(
        "Predicted and counted are equal, tensor by tensor." if equal else "PREDICTED AND COUNTED DIFFER."
    )


# --- what is written --------------------------------------------------------------------------------------------------


def rows(figures):
    """A row for each predicted point, and for each that ran one predicted and one counted."""
    theirs = {"heads": figures["heads"], "batch": figures["batch"]}
    found = [row("predicted", p, p["all"], **theirs) for p in figures["theorem"]["points"]]
    for p in figures["counted"]:
        found += [
            row(source, p, p[part], heads=1, batch=1) for source, part in (("predicted", "all"), ("counted",) * 2)
        ]
    return found


def row(source, p, elements, *, heads, batch):
    sizes = {name: p[name] for name in ("n", "d", "M", "Br", "Bc", "Tc")}
    about = {"source": source, **sizes, "heads": heads, "batch": batch}
    return about | {"quantity": "HBM", "unit": "elements", "value": elements}


def plot(figures, canvas):
    """HBM accesses against M, a line for each d, and the points that were counted."""
    theorem, axes = figures["theorem"], canvas.add_subplot()
    for d, line in zip(theorem["d"], ("o-", "s--", "^:")):
        points = [(p["M"], p["all"]) for p in theorem["points"] if p["d"] == d]
        axes.plot(*zip(*points), line, color="black", markersize=4, label=f"d = {d:,}, N = {figures['n']:,}")
    if counted := figures["counted"]:
        label = f"counted, d = {counted[0]['d']:,}, N = {counted[0]['n']:,}, one head"
        axes.plot(*zip(*((p["M"], p["counted"]) for p in counted)), "kx", label=label)
    axes.set(xlabel="M, elements on chip", ylabel="HBM accesses, elements", title=TITLE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.legend()
