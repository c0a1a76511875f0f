"""Figure 2 (left) of the paper: FLOPs and HBM traffic of a training step, forward and backward pass together."""

from dataclasses import replace
from itertools import pairwise, product

from .. import report
from ..blocks import Blocks, choose_blocks, tiles
from ..engine.model import DYNAMIC_SHARED, STATIC_SHARED, THREADS
from ..hbm.predict import algorithm0, flops, predict
from ..stages import PORTABLE
from . import canvas, runs
from .common import GPT2_MEDIUM, ITEMSIZE, aligned, heads_and_batch, left_out, place

TITLE = "Figure 2 (left): a training step, its FLOPs and HBM traffic"
PAPER = GPT2_MEDIUM  # forward and backward, fp16, on an A100
MEASURED = {  # the table of Figure 2 (left)
    "standard": {"gflop": 66.6, "gb": 40.3, "ms": 41.7},
    "flash": {"gflop": 75.2, "gb": 4.4, "ms": 7.3},
}

MEASURES = True
RUN = {"n": 1024, "d": 64}  # at most, where a head is counted: 15 s on two cores

VARIANTS = {name: (name, True) for name in PORTABLE} | {"flash2, atomics": ("flash2", False)}  # -> stage, deterministic
NOISE = 0.01  # of a measured figure: two runs may differ by so much
STEP = 16  # tiles are tried in multiples of it
FLOAT32 = runs.FLOAT32
STANDARD = "Algorithms 0 and 3"


# --- figures ----------------------------------------------------------------------------------------------------------


def compute(*, n, d, heads, batch, run=True, measure=False):
    """Figure 2 (left) -> figures. Bytes are of all heads, 2 an element.

    run: count a training step of one head of each stage; "equal" is whether the counts are the predictions, None where
    nothing is run. On a GPU, time the stages at the sizes of the figure, too. measure: what DRAM moved in their forward
    pass there, with ncu.

    "stages" are in the tiles in which they run here, None where no tiles fit; "best" is flash2 in the tiles of half
    precision that move least, None where none fit. "paper" is None where the configuration is not the paper's.
    """
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch}
    unit = ITEMSIZE * heads * batch * n
    ideal = {part: ITEMSIZE * algorithm0(**sizes, direction=part).elements for part in ("forward", "backward", "both")}
    best = {}
    for name in ("flash2", "flash2, atomics"):
        for itemsize in (ITEMSIZE, FLOAT32):
            best[f"{name}, {8 * itemsize} bits"] = largest(sizes, VARIANTS[name][1], itemsize)
    figures = {"figure": "left", **sizes, "itemsize": ITEMSIZE, "paper": MEASURED if sizes == PAPER else None}
    figures |= {"pass_bytes": {"N²": unit * n, "Nd": unit * d}, "product_flops": 2 * heads * batch * n * n * d}
    figures |= {"ideal": ideal, "stages": {name: stage(sizes, *variant) for name, variant in VARIANTS.items()}}
    counted = counts(n, d) if run else None
    figures |= {"best": best, "device": place() if run else None, "counted": counted}
    figures |= {"equal": all(row["equal"] for row in counted.values()) if run else None}
    float32 = {name: predict(name, **sizes).total_bytes for name in PORTABLE if figures["stages"][name]}
    figures |= {"float32_bytes": float32, "measured": runs.dram(sizes, float32) if measure else None}
    return figures | {"times": times(sizes) if run else None}


def counts(n, d):
    with report.progress("counting a training step of each stage", len(VARIANTS)) as advance:
        found = {}
        for name, (stage, deterministic) in VARIANTS.items():
            how = {"direction": "both", "deterministic": deterministic}
            found[name] = runs.count(stage, n=min(n, RUN["n"]), d=min(d, RUN["d"]), **how)
            advance()
    return found


def times(sizes):
    """The forward pass and a training step of each stage -> what `runs.times` gives, by "STAGE forward" or both."""
    passes = {}
    for name, (stage, deterministic) in VARIANTS.items():
        for direction in ("forward", "both") if deterministic else ("both",):
            passes[f"{name} {direction}"] = {"stage": stage, "direction": direction, "deterministic": deterministic}
    with report.progress("timing each stage"):
        return runs.times(sizes, passes)


def stage(sizes, name, deterministic):
    """A training step of a stage in the tiles in which it runs here, or None where none fit."""
    both = {"direction": "both", "deterministic": deterministic}
    try:
        forward, step = predict(name, **sizes), predict(name, **sizes, **both)
    except ValueError:  # d is too large for tiles in shared memory
        return None
    moved = {"forward": forward.elements, "backward": step.elements - forward.elements, "both": step.elements}
    moved = {part: ITEMSIZE * elements for part, elements in moved.items()}
    return {**moved, "products": products(name, deterministic), "flops": flops(name, **sizes, **both)}


def products(name, deterministic, side=1024):
    """Products of N × N × d in a training step: its FLOPs where N and d are so large that nothing else matters."""
    work = flops(name, n=side, d=side, direction="both", sram=2**40, deterministic=deterministic)
    return round(work / (2 * side**3))


def largest(sizes, deterministic, itemsize):
    """flash2 in the tiles that move least, forward and backward, of those that fit -> figures; None where none fit."""
    tilings = {"forward": "forward", "backward": "backward" if deterministic else "atomic"}
    tried = {part: fitting(tiling, sizes["n"], sizes["d"], itemsize) for part, tiling in tilings.items()}
    if not all(tried.values()):
        return None
    found, moved, work = {}, 0, 0
    for direction, choices in tried.items():
        how = {**sizes, "direction": direction, "deterministic": deterministic}

        def cost(blocks, how=how):  # a tie is for the least work, then for the least shared memory
            chosen = how | {"blocks": tuple(blocks)}
            return predict("flash2", **chosen).elements, flops("flash2", **chosen), blocks.shared_bytes

        best = min(choices, key=cost)
        found[direction] = {"Br": best.Br, "Bc": best.Bc, "shared_bytes": best.shared_bytes, "threads": best.threads}
        moved, work = moved + cost(best)[0], work + cost(best)[1]
    return {**found, "row_bits": 8 * itemsize, "bytes": ITEMSIZE * moved, "flops": work}


def fitting(direction, n, d, itemsize):
    """All tiles of flash2 in half precision that a block can hold, a thread's rows in registers, `itemsize` each."""
    sides = range(STEP, min(THREADS, STEP * tiles(n, STEP)) + 1, STEP)
    found = []
    for Br, Bc in product(sides, sides):
        blocks = Blocks("flash2", Br, Bc, d, ITEMSIZE, DYNAMIC_SHARED, direction)
        rows = replace(blocks, itemsize=itemsize)
        if blocks.shared_bytes <= blocks.sram and rows.threads_fit and rows.rows_in_registers:
            found.append(blocks)
    return found


# --- what is printed --------------------------------------------------------------------------------------------------


def page(figures):
    """The figures of `compute` as report prints them."""
    yield report.heading("Figure 2 (left)", facts(figures))
    yield ""
    count = figures["heads"] * figures["batch"]
    yield report.prose(f"""
        A training step of attention: the forward pass, then the backward pass. HBM is the GPU's own memory. Ours is
        predicted: elements by the closed forms, × {ITEMSIZE} bytes, as half precision (fp16) has, times {count:,}
        head{"s" * (count > 1)}. No stage computes in fp16. An N² pass reads or writes one matrix of N × N elements a
        head, {size(figures["pass_bytes"]["N²"])} here; an Nd pass one of N × d, {size(figures["pass_bytes"]["Nd"])}.
    """)
    best = figures["best"]["flash2, 16 bits"]
    yield from headline(figures, best)
    yield from ladder(figures)
    yield from tiles_page(figures)
    if figures["paper"] and best:
        yield from difference(figures, best)
    yield from work_page(figures)
    if figures["counted"]:
        yield from counted_page(figures)
    if figures["times"]:
        yield from hardware_page(figures)


def facts(figures):
    return "N = {n:,}, d = {d:,}, ".format(**figures) + heads_and_batch(figures)


def size(number):
    """Bytes, at most 9 characters."""
    return report.in_bytes(number) if number < 9.995e17 else f"{number:.1e} B"


def gflop(number):
    return f"{number / 1e9:,.1f}" if 1e8 <= number < 1e15 else f"{number / 1e9:.2g}"


def headline(figures, best):
    """The paper's numbers, and ours for the same two rows."""
    rows, stages = [], figures["stages"]
    if figures["paper"]:
        standard, flash = figures["paper"].values()
        for name, row in figures["paper"].items():
            rows.append([f"paper, {name}", row["gflop"], f"{row['gb']} GB", row["ms"]])
        more, moved, time = flash["gflop"] / standard["gflop"], *(standard[x] / flash[x] for x in ("gb", "ms"))
        rows.append(["", f"x {more:.2f}", f"/ {moved:.1f}", f"/ {time:.1f}"])
    rows.append([f"ours, {STANDARD}", gflop(stages["naive"]["flops"]), size(figures["ideal"]["both"]), "-"])
    if best:
        rows.append(["ours, flash2", gflop(best["flops"]), size(best["bytes"]), "-"])
        more, less = best["flops"] / stages["naive"]["flops"], figures["ideal"]["both"] / best["bytes"]
        rows.append(["", f"x {more:.2f}", f"/ {less:.1f}", ""])
    yield aligned(["", "GFLOP", "HBM", "ms"], rows)
    yield ""
    yield report.prose(f"""
        Algorithms 0 and 3 are standard attention, forward and backward, each step reading its operands once; their
        FLOPs are those of naive. {"flash2 is in the largest tiles that fit, see below. " * bool(best)}We predict no
        times.
    """)
    if not figures["paper"]:
        yield left_out("numbers", PAPER)


def ladder(figures):
    ideal = figures["ideal"]
    yield report.prose(f"""
        Every stage, in the tiles in which it runs here: those that fit {STATIC_SHARED // 1024} KiB of shared memory in
        float32. The backward pass finds what its stage keeps. `/ ideal` divides by Algorithms 0 and 3. `products` are
        matrix products of N × N × d; GFLOP counts all else too:
    """)
    rows = [[STANDARD, *map(size, ideal.values()), "1.00", "-", "-"]]
    for name, row in figures["stages"].items():
        if row is None:
            rows.append([name, *"------"])
            continue
        moved = [row[part] for part in ideal]
        ratio = moved[-1] / ideal["both"]
        ratio = f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"
        rows.append([name, *map(size, moved), ratio, row["products"], gflop(row["flops"])])
    yield aligned(["", "forward", "backward", "both", "/ ideal", "products", "GFLOP"], rows)
    yield ""
    if None in figures["stages"].values():
        yield report.prose(f"A line of dashes: no tiles fit at d = {figures['d']:,}.")
    elif not choose_blocks("flash2", d=figures["d"]).rows_in_registers:
        yield report.prose(f"""
            At d = {figures["d"]} the rows of a thread of flash and flash2 are too much for its registers. They go to
            local memory, which is in HBM behind the caches, and no bill here counts it.
        """)


def tiles_page(figures):
    ideal, Nd = figures["ideal"]["both"], figures["pass_bytes"]["Nd"]
    rows = []
    for name, best in figures["best"].items():
        if best:
            forward, backward = ("{Br}, {Bc}".format(**best[part]) for part in ("forward", "backward"))
            if "atomics" in name:  # of these blocks, no one owns queries
                backward = f"-, {best['backward']['Bc']}"
            moved = [size(best["bytes"]), f"{best['bytes'] / Nd:.1f}", f"{ideal / best['bytes']:.2f}"]
            rows.append([name, forward, backward, *moved])
    if not rows:
        yield report.prose(f"""
            flash2 in half precision. No tiles fit: a thread's rows of d = {figures["d"]:,} are too much for its
            registers.
        """)
        return
    yield report.prose(f"""
        flash2 in half precision. Of all tiles (Br, Bc) in multiples of {STEP}, those that move least and fit: elements
        of {ITEMSIZE} bytes in {DYNAMIC_SHARED // 1024} KiB ({DYNAMIC_SHARED:,} B) of shared memory, what an A100 gives
        a block that asks for it; at most {THREADS:,} threads; registers for all of them. A thread keeps its own rows
        in registers. In 16 bits, two numbers share a register. Sums are often kept in 32 bits, which fp16 needs to be
        accurate; `32 bits` has all rows so.
    """)
    yield aligned(["", "forward", "backward", "HBM", "in Nd", "ideal / it"], rows)
    yield ""
    yield report.prose(f"""
        With atomics Br has no part in the backward pass, and an atomic is one read and one write.
        {"Rows in 32 bits do not fit." if len(rows) < len(figures["best"]) else ""}
    """)


def difference(figures, best):
    """Why the paper's ratio is not ours: both its sides, in passes."""
    square, thin = figures["pass_bytes"].values()
    standard, flash = (row["gb"] for row in figures["paper"].values())
    ideal, wide = figures["ideal"]["both"], figures["best"]["flash2, 32 bits"]
    thins = 12 * thin
    yield report.heading(f"Why the paper has {standard / flash:.1f} and we have {ideal / best['bytes']:.1f}")
    yield ""
    yield report.prose(f"""
        The standard side. Algorithms 0 and 3 move 11N² + 12Nd elements a head, {size(ideal)}. The paper's
        implementation moved {standard} GB, as much as {1e9 * standard / square:.1f} N² passes. With the same 12Nd there
        remain {(1e9 * standard - thins) / square:.1f}N², {(1e9 * standard - thins) / square - 11:.1f} passes more than
        the algorithms ask for. This much is arithmetic. Conjecture: a step of its own that reads an N × N matrix and
        writes one costs two passes. A mask, dropout and copies between formats are such steps, and Algorithms 0 and 3
        have none of them. The figure does not say which there were.

        The flash side. {flash} GB is {1e9 * flash / thin:.1f} Nd passes. Ours is {best["bytes"] / thin:.1f}, and
        {wide["bytes"] / thin:.1f} with rows in 32 bits. So our flash side is near the paper's.
        {standard} GB over ours is {1e9 * standard / best["bytes"]:.1f}, in 32 bits
        {1e9 * standard / wide["bytes"]:.1f}. What sets the ratios apart is the standard side.
    """)


def work_page(figures):
    stages, one = figures["stages"], figures["product_flops"]
    naive, paper = stages["naive"], figures["paper"]
    few, more = naive["products"], products("flash", True)
    caption = ""
    if paper:
        standard, flash = (row["gflop"] for row in paper.values())
        caption = f"""
        The paper's {standard} and {flash} GFLOP do not follow from its caption: at the configuration it names, the
        products alone are {few * one / 1e9 / standard:.1f} and {more * one / 1e9 / flash:.1f} times that, which is not
        even one factor. So only the ratio of the two can be compared, {flash / standard:.2f}.
        """
    ratios = ", ".join(
        f"{row['flops'] / naive['flops']:.2f} for {name.replace(', ', ' with ')}"
        for name, row in stages.items()
        if row and name.startswith("flash")
    )
    yield report.prose(f"""
        FLOPs: one product of N × N × d is 2N²d a head, {gflop(one)} GFLOP in all. A standard step has {few} of them,
        {gflop(few * one)} GFLOP: two forward, and four backward. The flash step has {more}, {gflop(more * one)} GFLOP:
        it computes S again instead of reading P. {" ".join(caption.split())} {more}/{few} is {more / few:.2f}.
        {f"With all else counted, ours over naive is {ratios}." if ratios else ""}

        flash2 has {products("flash2", True)} products: one kernel owns tiles of dK and dV, the other tiles of dQ, and
        both compute S and dP. That is the price of sums without atomics, which are the same in every run. With atomics
        one kernel does it all, with {products("flash2", False)} products.
    """)


def counted_page(figures):
    first = next(iter(figures["counted"].values()))
    rows = [
        [name, row["predicted"], row["counted"], row["counted"] - row["predicted"]]
        for name, row in figures["counted"].items()
    ]
    yield report.heading("Counted", f"N = {first['n']:,}, d = {first['d']}, 1 head, float32, both passes")
    yield ""
    yield report.prose(f"""
        What the threads of each stage requested in a training step of one head, in elements, as the kernels ran on
        {runs.PLACES[figures["device"]]}:
    """)
    yield report.table(["stage", "predicted", "counted", "diff"], rows)
    yield ""
    yield report.prose(runs.verdict(figures["counted"]))


def hardware_page(figures):
    """The forward pass on the GPU, stage by stage in their order: DRAM and time, and where they do not fall."""
    times, measured = figures["times"], figures["measured"] or {"bytes": {}, "why": {}}
    ms = {name: {k: 1000 * s for k, s in spread.items()} for name, spread in times["seconds"].items()}
    moved = {name: row["read"] + row["written"] for name, row in measured["bytes"].items()}
    rows = []
    for name, predicted in figures["float32_bytes"].items():
        forward, both = ms.get(f"{name} forward"), ms.get(f"{name} both")
        around = "{min:.3g} to {max:.3g}".format(**forward) if forward else "-"
        dram = size(moved[name]) if name in moved else "-"
        rows.append(
            [name, size(predicted), dram, *(f"{x['median']:.3g}" if x else "-" for x in (forward, both)), around]
        )
    yield report.heading("On the GPU", f"{times['gpu']}, float32")
    yield ""
    yield report.prose("""
        The stages in the order of the ladder, at the sizes of the figure. `predicted` is what the threads request in
        the forward pass, of which caches answer a part; `DRAM` is what it read and wrote. `forward` and `step`, the
        forward pass and a training step, are in ms, with memory allocated, and filled with NaN, on the way: medians,
        and the least and largest time of the forward pass.
    """)
    yield aligned(["stage", "predicted", "DRAM", "forward", "step", "forward, from to"], rows)
    yield ""
    forward = {name: ms[f"{name} forward"]["median"] for name in figures["float32_bytes"] if f"{name} forward" in ms}
    lines = [*falls("Predicted bytes", figures["float32_bytes"], size), *falls("DRAM bytes", moved, size)]
    yield report.prose(" ".join([*lines, *falls("The time of the forward pass", forward, "{:.3g} ms".format)]))
    for what, why in (("Not timed", times["why"]), ("DRAM not measured", measured["why"])):
        for reason in dict.fromkeys(why.values()):
            yield report.prose(f"{what}: {', '.join(name for name in why if why[name] == reason)}.\n    {reason}")


def falls(what, values, number):
    """Sentences: whether a figure falls at every step of the ladder, by more than what runs differ, or where not."""
    steps = [(a, b) for a, b in pairwise(values) if values[b] >= (1 - NOISE) * values[a]]
    if len(values) < 2:
        return
    if not steps:
        yield f"{what}: less at every step."
    for a, b in steps:
        yield f"{what}: not less in {b}, {number(values[b])}, than in {a}, {number(values[a])}."


# --- rows and picture -------------------------------------------------------------------------------------------------


def rows(figures):
    """The figures as rows, one number each."""
    sizes = {name: figures[name] for name in PAPER}

    def row(source, name, part, quantity, unit, value, **other):
        about = {"source": source, "name": name, "pass": part, "quantity": quantity, "unit": unit, "value": value}
        return about | sizes | {"bytes_per_element": figures["itemsize"]} | other

    found = []
    for name, paper in (figures["paper"] or {}).items():
        for quantity, unit, key in (("work", "GFLOP", "gflop"), ("HBM", "GB", "gb"), ("time", "ms", "ms")):
            found.append(row("paper", name, "both", quantity, unit, paper[key]))
    for part, moved in figures["ideal"].items():
        found.append(row("predicted", STANDARD, part, "HBM", "B", moved))
    for name, ours in figures["stages"].items():
        if ours:
            found += [row("predicted", name, part, "HBM", "B", ours[part]) for part in figures["ideal"]]
            found.append(row("predicted", name, "both", "work", "FLOP", ours["flops"]))
    for name, best in figures["best"].items():
        if best:
            name = f"{name}, largest tiles"
            found.append(row("predicted", name, "both", "HBM", "B", best["bytes"]))
            found.append(row("predicted", name, "both", "work", "FLOP", best["flops"]))
    in_float32 = {"bytes_per_element": FLOAT32}
    for name, one in (figures["counted"] or {}).items():
        alone = {"n": one["n"], "d": one["d"], "heads": 1, "batch": 1, **in_float32}
        found.append(row("counted", name, "both", "HBM", "elements", one["counted"], **alone))
    for name, moved in (figures["measured"] or {"bytes": {}})["bytes"].items():
        for kind in ("read", "written"):
            found.append(row("measured", name, "forward", f"DRAM {kind}", "B", moved[kind], **in_float32))
    for name, spread in (figures["times"] or {"seconds": {}})["seconds"].items():
        name, _, part = name.rpartition(" ")
        for kind, seconds in spread.items():
            found.append(row("timed", name, part, f"time, {kind}", "ms", 1000 * seconds, **in_float32))
    return found


def plot(figures, on):
    """The paper's bars beside ours; below, the ladder, and its times where there are some."""
    paper, stages, best = figures["paper"], figures["stages"], figures["best"]["flash2, 16 bits"]
    seconds = (figures["times"] or {"seconds": {}})["seconds"]
    top = ["work"] * 2 + ["hbm"] * 2 + ["time"] * 2 if paper else ["work"] * 3 + ["hbm"] * 3
    axes = on.subplot_mosaic([top, ["ladder"] * 3 + ["times"] * 3 if seconds else ["ladder"] * 6])
    on.suptitle(f"{TITLE}\n{facts(figures)}, fp16")
    ours = {
        "work": (stages["naive"]["flops"] / 1e9, best and best["flops"] / 1e9),
        "hbm": (figures["ideal"]["both"] / 1e9, best and best["bytes"] / 1e9),
    }
    theirs = {part: [row[key] for row in (paper or {}).values()] for part, key in (("work", "gflop"), ("hbm", "gb"))}
    for part, title, unit in (("work", "Floating-point operations", "GFLOP"), ("hbm", "HBM traffic", "GB")):
        series = {"paper, measured": (theirs[part], canvas.PAPER)} if paper else {}
        series["ours, predicted"] = (ours[part], canvas.OURS)
        canvas.bars(axes[part], ["standard", "flash"], series, title=title, ylabel=unit)
    axes["hbm"].legend()
    if paper:
        series = {"paper, A100": ([row["ms"] for row in paper.values()], canvas.PAPER)}
        canvas.bars(axes["time"], ["standard", "flash"], series, title="Time on an A100", ylabel="ms")
    ladder = {name: row for name, row in stages.items() if row}
    labels = [name.replace(", ", ",\n").replace("_", "_\n") for name in ladder]
    for at, part in enumerate(figures["ideal"]):
        points = [row[part] / 1e9 for row in ladder.values()]
        axes["ladder"].plot(labels, points, canvas.MARKERS[at], color=canvas.INKS[at], markersize=8, label=part)
    axes["ladder"].axhline(figures["ideal"]["both"] / 1e9, color="black", linestyle="--", label=f"{STANDARD}, both")
    axes["ladder"].set(yscale="log", ylabel="GB", title="The ladder: HBM traffic, predicted")
    axes["ladder"].legend(ncols=2)
    if seconds:
        for at, part in ((0, "forward"), (2, "both")):
            there = {name.rpartition(" ")[0]: row for name, row in seconds.items() if name.endswith(part)}
            names = [label for label, name in zip(labels, ladder, strict=True) if name in there]
            points = [1000 * row["median"] for row in there.values()]
            axes["times"].plot(names, points, canvas.MARKERS[at], color=canvas.INKS[at], markersize=8, label=part)
        axes["times"].set(yscale="log", ylabel="ms", title=f"The ladder in float32: time on {figures['times']['gpu']}")
        axes["times"].legend()
