"""Table 21 of the paper: how much memory a training step of attention takes, against N."""

from functools import cache
from math import prod

import numpy as np

from .. import report
from ..attention import attention_backward
from ..engine.memory import allocations
from ..hbm.predict import kept, predict
from ..stages import LADDER
from ..testing import inputs
from . import canvas
from .common import ITEMSIZE, aligned, chart, heads_and_batch, left_out, place, slope

TITLE = "Table 21: the memory of a training step against N"
PAPER = {"n": 65_536, "d": 64, "heads": 8, "batch": 16}  # fp16, on an A100 with 40 GB; n is the largest of the table
CARD = 40  # GB
MIB = 2**20
MEASURED = {  # N -> MB; None: out of memory
    "PyTorch": dict.fromkeys((128 << k for k in range(10)), None)
    | {128: 36, 256: 104, 512: 336, 1024: 1184, 2048: 4416, 4096: 17024},
    "FlashAttention": dict(
        zip((128 << k for k in range(10)), (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376), strict=True)
    ),
}
POINTS = 10  # values of N, each twice the one before
LARGE = 4  # of them, the last, over which slopes are fitted
RUN = {"n": 512, "d": 64}  # at most, where the stages are run

GIVEN = ("Q", "K", "V", "dO")
THIN = (*GIVEN, "O", "dQ", "dK", "dV")  # N × d elements a head
ROWS = ("l", "m", "L", "D")  # N


# --- what is allocated, what lives ------------------------------------------------------------------------------------


def elements(tensor, n, d):
    """Elements of one tensor for one head; all but THIN and ROWS are N × N."""
    return n * d if tensor in THIN else n if tensor in ROWS else n * n


def made(stage):
    """Tensors that a training step of the stage allocates, in order: those that one of its kernels stores."""
    return stored(predict(stage, n=1, d=1, direction="both").kernels.values())


def living(stage):
    """Tensors that live at the end of the backward pass, where the memory is at its peak.

    Q, K, V, dO and O; what the forward pass keeps; what the kernels of the backward pass store.
    """
    forward = predict(stage, n=1, d=1).kernels
    step = predict(stage, n=1, d=1, direction="both").kernels
    backward = stored(tensors for kernel, tensors in step.items() if kernel not in forward)
    return list(dict.fromkeys([*GIVEN, "O", *kept(stage, n=1), *backward]))


def stored(kernels):
    return list(dict.fromkeys(name for tensors in kernels for name, count in tensors.items() if count.stores))


# --- figures ----------------------------------------------------------------------------------------------------------


def compute(*, n, d, heads, batch, run=True, measure=False):
    """Table 21, and a run of each stage with its allocations recorded -> figures. Bytes are of all heads, 2 an element.

    n is the largest N. "equal": whether every run allocated the predicted elements, None without run. "paper" is None
    where the configuration is not the paper's. (What a GPU's memory holds at its peak is not asked for: numba-cuda
    keeps freed memory for a while.)
    """
    sizes = {"n": n, "d": d, "heads": heads, "batch": batch}
    lengths = list(dict.fromkeys(max(1, n >> k) for k in reversed(range(POINTS))))
    stages = {}
    for stage in LADDER:
        tensors = living(stage)
        in_bytes = {N: ITEMSIZE * heads * batch * sum(elements(t, N, d) for t in tensors) for N in lengths}
        points = list(in_bytes.items())[-LARGE:]
        stages[stage] = {
            "tensors": tensors,
            "bytes": {str(N): moved for N, moved in in_bytes.items()},
            "slope": slope(points) if len(points) > 1 else None,
        }
    runs = {stage: step(stage, min(n, RUN["n"]), min(d, RUN["d"])) for stage in LADDER} if run else None
    paper = {name: {str(N): mb for N, mb in row.items()} for name, row in MEASURED.items()} if sizes == PAPER else None
    figures = {"figure": "memory", **sizes, "itemsize": ITEMSIZE, "lengths": lengths, "paper": paper, "stages": stages}
    equal = all(r["predicted"] == r["allocated"] for r in runs.values()) if run else None
    return figures | {"runs": runs, "equal": equal}


@cache
def step(stage, n, d):
    """Run a training step of one head in float32 -> elements that were predicted, and that were allocated."""
    q, k, v = inputs((n, d), (n, d))
    dout = np.random.default_rng(1).standard_normal((n, d), np.float32)
    with allocations() as arrays:
        attention_backward(q, k, v, dout, stage=stage, device=place())
    tensors = made(stage)
    predicted = sum(elements(tensor, n, d) for tensor in tensors)
    return {
        "n": n,
        "d": d,
        "tensors": tensors,
        "predicted": predicted,
        "allocated": sum(prod(shape) for shape, _ in arrays),
        "arrays": len(arrays),
        "dtypes": sorted({dtype.name for _, dtype in arrays}),
    }


# --- what is printed --------------------------------------------------------------------------------------------------


def page(figures):
    """The figures of `compute` as report prints them."""
    facts = "N up to {n:,}, d = {d:,}, ".format(**figures) + heads_and_batch(figures)
    yield report.heading("Table 21: memory", facts)
    yield ""
    yield report.prose(f"""
        How much HBM, the GPU's own memory, a training step of attention fills. Its peak is the end of the backward
        pass. Then there live Q, K, V, O and their gradients dQ, dK, dV, dO, each N × d elements a head; what the
        forward pass has kept; and what the backward pass has made for itself. Ours is predicted, × {ITEMSIZE} bytes an
        element, as half precision (fp16) has:
    """)
    yield report.table(["stage", "N × N", "N × d", "N", "beside Q to dV"], list(formulas(figures)))
    yield ""
    yield from sizes_page(figures)
    if figures["paper"]:
        yield from units(figures)
    if figures["runs"]:
        yield from runs_page(figures)


def formulas(figures):
    for stage, row in figures["stages"].items():
        counts = [0, 0, 0]
        for tensor in row["tensors"]:
            counts[1 if tensor in THIN else 2 if tensor in ROWS else 0] += 1
        yield [stage, *counts, ", ".join(tensor for tensor in row["tensors"] if tensor not in THIN)]


def mib(number):
    """A number of MiB, at most 9 characters."""
    return f"{number:,.0f}" if 100 <= number < 1e7 else f"{number:.3g}"


def sizes_page(figures):
    stages, paper = figures["stages"], figures["paper"]
    columns = {}  # stages with equal memory share one
    for stage, row in stages.items():
        same = next((names for names in columns if stages[names[0]]["bytes"] == row["bytes"]), ())
        columns[(*same, stage)] = columns.pop(same, None) or row["bytes"]
    rows = []
    for N in map(str, figures["lengths"]):
        theirs = [mib(mb) if (mb := row[N]) is not None else "-" for row in (paper or {}).values()]
        rows.append([f"{int(N):,}", *(mib(column[N] / MIB) for column in columns.values()), *theirs])
    slopes = [stages[names[0]]["slope"] for names in columns]
    for row in (paper or {}).values():
        slopes.append(slope([(int(N), mb) for N, mb in row.items() if mb is not None][-LARGE:]))
    if None not in slopes:
        rows.append(["slope", *(f"{s:.3f}" for s in slopes)])
    heads = ["online" if names == ("online_softmax",) else ", ".join(names) for names in columns]
    beside = "To the right are the paper's MB, as it measured them on an A100."
    fitted = f"""
        The slope is that of log(memory) over log(N), by least squares over the last {LARGE} numbers of a column: 2 is
        quadratic, 1 is linear.
    """.strip()
    yield report.prose(f"""
        The peak in MiB, of 2^20 bytes; `online` is online_softmax. {beside if paper else ""}
        {fitted if None not in slopes else ""}
    """)
    theirs = ["paper, PyTorch", "paper, flash"] if paper else []
    yield aligned(["N", *heads, *theirs], rows, names=0)
    yield ""
    if not paper:
        yield left_out("measurements", PAPER, "N up to")
    drawn = {"o": "naive", "x": "flash2"}
    series = {mark: [(int(N), b / MIB) for N, b in stages[stage]["bytes"].items()] for mark, stage in drawn.items()}
    yield report.prose("\n".join(["MiB against N: o naive, x flash2 (also where both are)", *chart(series, "N")]))


def matrices(N):
    """MiB of one N × N and of one N × d matrix of all heads, in the paper's configuration."""
    one = ITEMSIZE * PAPER["heads"] * PAPER["batch"] * N / MIB
    return one * N, one * PAPER["d"]


def of_paper(figures):
    """The paper's measurements in matrices -> a and b of aN² + bNd for PyTorch, and {N: matrices of Nd} for flash.

    a and b are those of its two largest N.
    """
    pytorch, flash = ({int(N): mb for N, mb in row.items() if mb is not None} for row in figures["paper"].values())
    (N0, y0), (N1, y1) = list(pytorch.items())[-2:]
    (s0, t0), (s1, t1) = matrices(N0), matrices(N1)
    a = (y1 * t0 - y0 * t1) / (s1 * t0 - s0 * t1)
    return a, (y1 - a * s1) / t1, {N: mb / matrices(N)[1] for N, mb in flash.items()}


def units(figures):
    """The paper's measurements in matrices, as they are printed."""
    a, b, thins = of_paper(figures)
    pytorch, flash = ({int(N): mb for N, mb in row.items() if mb is not None} for row in figures["paper"].values())
    formula, rows = {}, []
    for N in flash:
        square, thin = matrices(N)
        formula[N] = a * square + b * thin
        theirs = [mib(pytorch[N]), f"{pytorch[N] / square:.2f}", mib(formula[N])] if N in pytorch else "---"
        rows.append([f"{N:,}", *theirs, mib(flash[N]), f"{thins[N]:.4f}"])
    yield report.prose(f"""
        The paper's measurements in matrices of all heads, N × N and N × d, of {ITEMSIZE} bytes an element; and what
        {a:.3g}N² + {b:.3g}Nd comes to:
    """)
    head = ["N", "PyTorch", "in N x N", f"{a:.3g}N^2 + {b:.3g}Nd", "flash", "in N x d"]
    yield aligned(head, rows, names=0)
    yield ""
    met = sum(round(formula[N]) == mb for N, mb in pytorch.items())
    before, last = list(pytorch)[-2:]
    of_a_million = MIB / 1e6
    yield report.prose(f"""
        PyTorch. The two factors are fitted to N = {before:,} and {last:,}; they give {met} of the {len(pytorch)}
        numbers to the last digit. In MB of 10^6 bytes they would be {a / of_a_million:.2f} and
        {b / of_a_million:.2f}. In MiB they are whole numbers, so the paper's MB are MiB. At N = {2 * last:,} the
        formula comes to {mib(formula[2 * last])} MiB, more than the {CARD} GB of the card: out of memory. naive has
        {squares(figures, "naive")}N² + {len(THIN)}Nd, online_softmax {squares(figures, "online_softmax")}N² and as
        many Nd. Which matrices PyTorch's are does not follow from the numbers. Conjecture: naive's P, dP and dS, and
        one for dropout.
    """)
    short, long = thins[min(thins)], thins[max(thins)]
    step = max(N for N in thins if long - thins[N] > 1)
    rest = long - int(long)  # what the rows take; short N hide it in whole MB
    exact = sum(int((short + rest if step >= N else long) * matrices(N)[1]) == mb for N, mb in flash.items())
    yield report.prose(f"""
        FlashAttention. With {short + rest:.4f} matrices of N × d up to N = {step}, and {long:.4f} from there on, cut to
        whole MB, {exact} of {len(thins)} numbers are met: linear in N. Ours has {len(THIN)}, and 2 numbers a row. The
        {rest:.4f} are 2 numbers of 4 bytes a row, as much as L and D in float32. The step of {long - short - rest:.0f}
        is as much as one N × d matrix in float32: the first version of the authors' package (fmha_api.cpp) allocates
        one in the backward pass, to sum dQ, if there are more than {step} keys. flash adds to dQ itself, and flash2
        sums it in registers. Conjecture: the other {short - len(THIN):.0f} are copies of Q, K and V or of their
        gradients.
    """)


def squares(figures, stage):
    """How many N × N matrices of a stage live at the peak."""
    return sum(tensor not in THIN and tensor not in ROWS for tensor in figures["stages"][stage]["tensors"])


def runs_page(figures):
    rows = []
    for stage, r in figures["runs"].items():
        off = r["allocated"] - r["predicted"]
        rows.append([stage, r["predicted"], r["allocated"], off, " ".join(r["tensors"])])
    first = next(iter(figures["runs"].values()))
    yield report.prose(f"""
        And a run: `attention_backward` of each stage with N = {first["n"]:,}, d = {first["d"]} and 1 head, in
        {" and ".join(first["dtypes"])}, the forward pass included. Recorded is every array that it allocates, in
        elements; Q, K, V and dO are there before.
    """)
    yield report.table(["stage", "predicted", "allocated", "diff", "arrays"], rows)
    yield ""
    verdict = "Predicted and allocated are equal." if figures["equal"] else "PREDICTED AND ALLOCATED DIFFER."
    yield report.prose(f"""
        {verdict} Not all of it lives at the peak: S of naive and tiled is gone by then. online_softmax keeps S, and
        makes P of it beside it: without P in the forward pass, it takes more memory in training, not less.
    """)


# --- rows and picture -------------------------------------------------------------------------------------------------


def rows(figures):
    """The figures as rows, one number each."""
    sizes = {"d": figures["d"], "heads": figures["heads"], "batch": figures["batch"]}

    def row(source, name, n, unit, value, **other):
        about = {"source": source, "name": name, "quantity": "memory", "unit": unit, "value": value, "n": n}
        return about | sizes | {"bytes_per_element": figures["itemsize"]} | other

    found = []
    for name, column in (figures["paper"] or {}).items():
        found += [row("paper", name, N, "MB", mb) for N, mb in column.items() if mb is not None]
    for name, ours in figures["stages"].items():
        found += [row("predicted", name, N, "B", moved) for N, moved in ours["bytes"].items()]
    for name, one in (figures["runs"] or {}).items():
        alone = {"d": one["d"], "heads": 1, "batch": 1, "bytes_per_element": np.dtype(one["dtypes"][0]).itemsize}
        for source in ("predicted", "allocated"):
            found.append(row(source, name, one["n"], "elements", one[source], quantity="allocations", **alone))
    return found


def plot(figures, on):
    """The memory against N: ours, and the paper's measurements."""
    axes = on.subplots()
    on.suptitle(f"{TITLE}\nd = {figures['d']:,}, {heads_and_batch(figures)}, fp16")
    columns = {}  # stages with equal memory share a line
    for stage, row in figures["stages"].items():
        columns.setdefault(tuple(row["bytes"].items()), []).append(stage)
    for at, (points, stages) in enumerate(columns.items()):
        line = [int(N) for N, _ in points], [moved / MIB for _, moved in points]
        ink, marker = canvas.INKS[at], canvas.MARKERS[at]
        axes.plot(*line, f"{marker}-", color=ink, label=f"{', '.join(stages)} (predicted)")
    for marker, (name, row) in zip("x+", (figures["paper"] or {}).items()):
        line = zip(*((int(N), mb) for N, mb in row.items() if mb is not None))
        axes.plot(*line, f"{marker}--", color="black", markersize=10, label=f"paper, {name} (measured)")
    if figures["paper"]:
        axes.axhline(CARD * 1e9 / MIB, color="black", linestyle=":", label=f"{CARD} GB, the paper's A100")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="N, queries and keys", ylabel="memory at the peak of a training step (MiB)")
    axes.legend()
