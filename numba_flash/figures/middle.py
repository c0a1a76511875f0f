"""Figure 2 (middle) of the paper: HBM traffic against the block size, and the slopes of Theorem 2."""

from .. import report
from ..blocks import tiles
from ..hbm.predict import predict
from . import slopes
from .common import GPT2_MEDIUM, ITEMSIZE, heads_and_batch, left_out

TITLE = "Figure 2 (middle): HBM traffic against the block size, and Theorem 2"
PAPER = GPT2_MEDIUM  # forward, fp16, on an A100
BARS = {64: (6.58, 8.60), 128: (3.36, 4.70), 256: (1.74, 3.30), 512: (0.94, 3.20)}  # block size -> GB, ms

SHOWN = {  # what the paper's bars show -> its closed form for a head
    "Q read": "TcNd",
    "K read": "Nd",
    "V read": "Nd",
    "O read again": "(Tc−1)Nd",
    "O written": "TcNd",
}
LEFT_OUT = {
    "O read first": "Nd",
    "l read, written": "2TcN",
    "m read, written": "2TcN",
    "O, l, m set up": "Nd + 2N",
}

LARGE_N, LARGE_D = 65_536, 64  # Theorem 2 is about large N


# --- Figure 2 (middle) ------------------------------------------------------------------------------------------------


def terms(n, d, blocks):
    """What Algorithm 1 moves for one head, in elements -> {term: elements}. They add up to the prediction."""
    bill = predict("flash", n=n, d=d, blocks=blocks)
    flash, first = bill.kernels["flash"], n * d
    elements = (
        flash["Q"].loads,
        flash["K"].loads,
        flash["V"].loads,
        flash["O"].loads - first,
        flash["O"].stores,
        first,
        flash["l"].elements,
        flash["m"].elements,
        sum(count.elements for count in bill.kernels["initialise"].values()),
    )
    return dict(zip(SHOWN | LEFT_OUT, elements, strict=True))


def compute(*, n, d, heads, batch):
    """Figure 2 (middle) and Theorem 2 -> figures. Elements a head are exact; bytes are of all heads, 2 an element.

    "shown" are the terms that the paper's bars show, "full" all. "paper" is None where the configuration is not the
    paper's; so is "equal", whether ours equal its bars to three digits.
    """
    configuration = {"n": n, "d": d, "heads": heads, "batch": batch}
    ours = {}
    for Bc in BARS:
        Br = min(Bc, d)  # line 1 of Algorithm 1; the traffic does not depend on it
        parts = terms(n, d, (Br, Bc))
        sums = {"shown": sum(parts[name] for name in SHOWN), "full": sum(parts.values())}
        in_bytes = {f"{name}_bytes": ITEMSIZE * heads * batch * elements for name, elements in sums.items()}
        ours[str(Bc)] = {"Br": Br, "Bc": Bc, "Tc": tiles(n, Bc), "terms": parts, **sums, **in_bytes}
    paper = {str(Bc): {"gb": gb, "ms": ms} for Bc, (gb, ms) in BARS.items()} if configuration == PAPER else None
    equal = paper and all(f"{ours[Bc]['shown_bytes'] / 1e9:.3g}" == f"{paper[Bc]['gb']:.3g}" for Bc in paper)
    figures = {"figure": "middle", **configuration, "itemsize": ITEMSIZE, "paper": paper, "blocks": ours}
    return figures | {"equal": equal, "theorem2": slopes.theorem(slopes.FORWARD, n=LARGE_N, d=LARGE_D)}


# --- what is printed --------------------------------------------------------------------------------------------------


def page(figures):
    """The figures of `compute` as report prints them."""
    sizes = "N = {n:,}, d = {d:,}, ".format(**figures) + heads_and_batch(figures)
    yield report.heading("Figure 2 (middle)", f"{sizes}, forward, fp16")
    yield ""
    yield report.prose("""
        HBM traffic of Algorithm 1 against the block size Bc. Q and O are passed over once for each of the
        Tc = ⌈N/Bc⌉ tiles of keys. The rows of a tile of queries, Br, do not change the traffic.
    """)
    yield from bars(figures)
    yield from convention(figures)
    yield from theorem_page(figures["theorem2"])


def bars(figures):
    paper, rows, lengths = figures["paper"], [], {}
    for Bc, ours in figures["blocks"].items():
        sizes = {"ours": ours["shown_bytes"], "all terms": ours["full_bytes"]}
        if paper:
            gb, ms = paper[Bc].values()
            sizes = {"paper": 1e9 * gb, **sizes}
            rows.append([int(Bc), ours["Tc"], *(f"{size / 1e9:.2f}" for size in sizes.values()), f"{ms:.2f}", gb / ms])
        else:
            rows.append([int(Bc), ours["Tc"], *map(report.in_bytes, sizes.values())])
        lengths |= {f"Bc = {Bc:>3}  {name}": size / 1e9 if paper else size for name, size in sizes.items()}
    head = ["paper, GB", "ours, GB", "all terms, GB", "paper, ms", "TB/s"] if paper else ["ours", "all terms"]
    yield report.table(["Bc", "Tc", *head], rows)
    yield ""
    yield report.bars(lengths, "GB" if paper else "bytes")
    yield ""
    if not paper:
        yield left_out("bars", PAPER)
        return
    verdict = "equal the paper's bars in all digits it prints" if figures["equal"] else "DIFFER FROM THE PAPER'S BARS"
    first, last = (paper[Bc]["gb"] / paper[Bc]["ms"] for Bc in (min(paper, key=int), max(paper, key=int)))
    yield report.prose(f"""
        Ours {verdict}. The paper's times are measured on an A100, whose HBM moves 1.5 to 2.0 TB/s. Its GB over its ms
        fall from {first:.2f} to {last:.2f} TB/s: the larger the blocks, the less it is HBM that takes the time.
    """)


def convention(figures):
    columns = list(figures["blocks"].values())
    largest = max(ours["full"] for ours in columns)
    write = "{:,}".format if largest < 10**8 else "{:.3e}".format
    wide = max(len(write(largest)), len("Bc = 512"))

    def row(name, form, values):
        return [name, form, *(f"{write(value):>{wide}}" for value in values)]

    rows = [row(name, form, [ours["terms"][name] for ours in columns]) for name, form in (SHOWN | LEFT_OUT).items()]
    rows.insert(len(SHOWN), row("= ours", "(1+3Tc)Nd", [ours["shown"] for ours in columns]))
    rows.append(row("= all terms", "", [ours["full"] for ours in columns]))
    yield report.prose("""
        The convention that gives the paper's bars: (1 + 3Tc)Nd elements a head. It leaves out the first read of O,
        which is all zeros then, the traffic of l and m, and line 2 of Algorithm 1, which sets up O, l and m in HBM.
        Elements a head, one term a row; what stands below `= ours` is left out:
    """)
    heads = [f"{'Bc = ' + Bc:>{wide}}" for Bc in figures["blocks"]]
    yield report.table(["term", "a head", *heads], rows)
    yield ""
    count = figures["heads"] * figures["batch"]
    yield report.prose(f"""
        All terms together are `predict("flash", blocks=(Br, Bc))`, element for element. No stage computes in float16,
        so the bytes are elements × {ITEMSIZE} (l and m too), times {count:,} head{"s" * (count > 1)}.
    """)


def theorem_page(theorem):
    yield report.heading("Theorem 2", f"Θ(N²d²/M) HBM accesses for d ≤ M ≤ Nd; N = {theorem['n']:,}")
    yield ""
    yield report.prose(f"""
        Θ means: within constant factors. M is how many elements fit on chip. Line 1 of Algorithm 1 makes Bc = ⌈M/4d⌉,
        so twice the M is half the tiles.
        Below, all terms for one head of d = {LARGE_D}; and all terms over N²d²/M at several d. The theorem keeps that
        ratio between two constants. 3TcNd is 12 of it, since Tc = 4Nd/M.
    """)
    yield from slopes.points_page(theorem)
    yield from slopes.slopes_page(theorem, slopes.FORWARD)
    yield report.prose("""
        Why not exactly −1 and +2: 3TcNd, which is Q read, O read and O written, departs from them only because Bc and
        Tc are rounded up. All terms add what does not depend on M (K, V and the set-up, 3Nd + 2N), which flattens the
        curve near M = Nd, and the traffic of l and m, 4TcN, which grows as d and not as d².
    """)
