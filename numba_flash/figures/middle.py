"""Figure 2 (middle) of the paper: HBM traffic against the block size, and the slopes of Theorem 2."""

from .. import report
from ..blocks import check_blocks, tiles
from ..engine.model import STATIC_SHARED
from ..hbm.predict import predict
from . import canvas, runs, slopes
from .common import GPT2_MEDIUM, ITEMSIZE, aligned, heads_and_batch, left_out, place

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
RUN = {"n": 1024, "d": 64}  # at most, where a head is counted
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


def compute(*, n, d, heads, batch, run=True, measure=False):
    """Figure 2 (middle) and Theorem 2 -> figures. Elements a head are exact; bytes are of all heads, 2 an element.

    "shown" are the terms that the paper's bars show, "full" all. "paper" is None where the configuration is not the
    paper's; so is "equal_bars", whether ours equal its bars to three digits. run: count a head for each block size,
    and on a GPU time those that fit there. "equal": whether all that was compared is equal, None where nothing was.
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
    bars = paper and all(f"{ours[Bc]['shown_bytes'] / 1e9:.3g}" == f"{paper[Bc]['gb']:.3g}" for Bc in paper)
    figures = {"figure": "middle", **configuration, "itemsize": ITEMSIZE, "paper": paper, "blocks": ours}
    counted = {Bc: count(n, d, row["Bc"]) for Bc, row in ours.items()} if run else None
    compared = [bars] * bool(paper) + [row["equal"] for row in (counted or {}).values()]
    figures |= {"equal_bars": bars, "equal": all(compared) if compared else None}
    figures |= {"theorem2": slopes.theorem(slopes.FORWARD, n=LARGE_N, d=LARGE_D)}
    figures |= {"device": place() if run else None, "counted": counted}
    return figures | {"times": times(configuration) if run else None}


def count(n, d, Bc):
    """The forward pass of one head with tiles of Bc keys, at the largest d at which a block of threads holds them."""
    fitting = (c for c in range(min(d, RUN["d"]), 0, -1) if check_blocks("flash", (min(Bc, c), Bc), d=c).fits)
    d = next(fitting)
    return {"Br": min(Bc, d)} | runs.count("flash", n=min(n, RUN["n"]), d=d, blocks=(min(Bc, d), Bc))


def times(sizes):
    """The forward pass of flash for each block size, in float32 on a GPU -> what `runs.times` gives."""
    forward = {"stage": "flash", "direction": "forward"}
    with report.progress("timing flash"):
        return runs.times(sizes, {str(Bc): {**forward, "blocks": (min(Bc, sizes["d"]), Bc)} for Bc in BARS})


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
    if figures["counted"]:
        yield from counted_page(figures)
    if figures["times"]:
        yield from times_page(figures)
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
    equal = figures["equal_bars"]
    verdict = "equal the paper's bars in all digits it prints" if equal else "DIFFER FROM THE PAPER'S BARS"
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


def counted_page(figures):
    rows = [
        [int(Bc), row["d"], row["Br"], row["predicted"], row["counted"], row["counted"] - row["predicted"]]
        for Bc, row in figures["counted"].items()
    ]
    first, place = next(iter(figures["counted"].values())), runs.PLACES[figures["device"]]
    yield report.prose(f"""
        Counted: what the threads of flash requested for one head of N = {first["n"]:,} in float32, all terms, as the
        kernels ran on {place}. Many keys fit a block's shared memory, {STATIC_SHARED // 1024} KiB, only where d is
        small; Tc does not depend on d.
    """)
    yield report.table(["Bc", "d", "Br", "predicted", "counted", "diff"], rows)
    yield ""
    yield report.prose(runs.verdict(figures["counted"]))


def times_page(figures):
    paper, times, rows = figures["paper"] or {}, figures["times"], []
    for Bc in figures["blocks"]:
        spread = times["seconds"].get(Bc)
        ours = [f"{1000 * seconds:.2f}" for seconds in spread.values()] if spread else ["-"] * 3
        rows.append([Bc, *ours, *([f"{paper[Bc]['ms']:.2f}"] if paper else [])])
    yield report.prose(f"""
        Timed: the forward pass of flash in float32 on {times["gpu"]}, all heads, in ms: the median of
        {times["repeats"]} runs, the least and the largest.
        {"The paper's is fp16 on an A100." if paper else ""}
    """)
    yield aligned(["Bc", "median", "least", "largest", *["paper"] * bool(paper)], rows)
    yield ""
    for Bc, why in times["why"].items():
        yield report.prose(f"Bc = {Bc} is not timed.\n    {why}")


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


# --- rows and picture -------------------------------------------------------------------------------------------------


def rows(figures):
    """The figures as rows, one number each."""
    sizes = {name: figures[name] for name in PAPER}

    def row(source, Bc, quantity, unit, value, **other):
        about = {"source": source, "Bc": Bc, "M": None, "quantity": quantity, "unit": unit, "value": value}
        return about | sizes | {"bytes_per_element": figures["itemsize"]} | other

    found, one, in_float32 = [], {"heads": 1, "batch": 1}, {"bytes_per_element": runs.FLOAT32}
    for Bc, bar in (figures["paper"] or {}).items():
        found += [row("paper", Bc, "HBM", "GB", bar["gb"]), row("paper", Bc, "time", "ms", bar["ms"])]
    for Bc, ours in figures["blocks"].items():
        found.append(row("predicted", Bc, "HBM", "B", ours["shown_bytes"]))
        found.append(row("predicted", Bc, "HBM, all terms", "B", ours["full_bytes"]))
        found += [row("predicted", Bc, name, "elements", value, **one) for name, value in ours["terms"].items()]
    for Bc, count in (figures["counted"] or {}).items():
        alone = {"n": count["n"], "d": count["d"], **one, **in_float32}
        found.append(row("counted", Bc, "HBM, all terms", "elements", count["counted"], **alone))
    for Bc, spread in (figures["times"] or {"seconds": {}})["seconds"].items():
        found += [row("timed", Bc, f"time, {kind}", "ms", 1000 * s, **in_float32) for kind, s in spread.items()]
    for p in figures["theorem2"]["points"]:
        there = {"M": p["M"], "n": figures["theorem2"]["n"], "d": p["d"], **one, **in_float32}
        found.append(row("predicted", p["Bc"], "HBM, theorem 2", "elements", p["all"], **there))
    return found


def plot(figures, on):
    """Bars of GB and ms for each block size, the paper's beside ours; the traffic against M, of Theorem 2."""
    paper, blocks, times = figures["paper"], figures["blocks"], figures["times"]
    timed = bool(times and times["seconds"])
    top = ["hbm"] * 4 + ["time"] * 3 * bool(paper or timed)
    axes = on.subplot_mosaic([top, ["theorem"] * len(top)])
    sizes = "N = {n:,}, d = {d:,}, ".format(**figures) + heads_and_batch(figures)
    on.suptitle(f"{TITLE}\n{sizes}, forward, fp16")
    series = {"paper": ([bar["gb"] for bar in paper.values()], canvas.PAPER)} if paper else {}
    series["ours, predicted"] = ([ours["shown_bytes"] / 1e9 for ours in blocks.values()], canvas.OURS)
    series["ours, all terms"] = ([ours["full_bytes"] / 1e9 for ours in blocks.values()], canvas.MORE)
    labels = {"xlabel": "block size Bc (keys)", "title": "HBM traffic of Algorithm 1", "ylabel": "GB"}
    canvas.bars(axes["hbm"], list(blocks), series, **labels)
    axes["hbm"].legend()
    series = {"paper, A100, fp16": ([bar["ms"] for bar in paper.values()], canvas.PAPER)} if paper else {}
    if timed:
        medians = [1000 * times["seconds"][Bc]["median"] if Bc in times["seconds"] else None for Bc in blocks]
        series[f"ours, {times['gpu']}, float32"] = medians, canvas.OURS
    if series:
        labels = {"xlabel": "block size Bc (keys)", "title": "Time of the forward pass", "ylabel": "ms"}
        canvas.bars(axes["time"], list(blocks), series, **labels)
        axes["time"].legend(loc="upper right")
    theorem = figures["theorem2"]
    for at, d in enumerate(sorted({p["d"] for p in theorem["points"]})):
        points = [(p["M"], p["all"]) for p in theorem["points"] if p["d"] == d]
        ink = canvas.INKS[at]
        axes["theorem"].plot(*zip(*points), f"{canvas.MARKERS[at]}-", color=ink, markersize=5, label=f"d = {d}")
    title = f"Theorem 2: Θ(N²d²/M) accesses, one head, N = {theorem['n']:,}"
    axes["theorem"].set(xlabel="on-chip memory M (elements)", ylabel="HBM accesses (elements)", title=title)
    axes["theorem"].set_xscale("log", base=2)
    axes["theorem"].set_yscale("log")
    axes["theorem"].legend()
