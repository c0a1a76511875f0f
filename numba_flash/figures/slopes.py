"""The exponents of Theorems 2 and 5: what `flash` moves in the paper's tiles against M, d and N, in log-log scale."""

from dataclasses import dataclass

from .. import report
from ..blocks import choose_blocks, tiles
from ..hbm.predict import predict
from .common import aligned, chart, slope

FLOAT32 = 4  # bytes
LEAST_KEYS = 8  # of a tile: from here on it matters little that Bc is rounded up
SRAM = (256, 1024)  # M over d where d and N vary
MARKS = "ox+"


@dataclass(frozen=True)
class Pass:
    """A pass of `flash`: its kernel and the tensors that go through it, or into it and out, at each of Tc steps."""

    direction: str
    kernel: str
    tensors: tuple
    part: str  # their name in figures
    form: str  # how many elements they are


FORWARD = Pass("forward", "flash", ("Q", "O"), "q_and_o", "3TcNd")
BACKWARD = Pass("backward", "flash_backward", ("Q", "O", "dO", "dQ"), "at_each_step", "5TcNd")


# --- figures ----------------------------------------------------------------------------------------------------------


def theorem(one, *, n, d, heads=1):
    """Predicted traffic of a pass against M at d/2, d and 2d, and the slopes over M, d and N -> figures.

    In the points, "all" is every element, `one.part` those that go through at each of Tc steps; both are of all heads.
    A slope is left out where N is so small that it has no two points with M ≤ Nd.
    """
    columns = sorted({max(1, d // 2), d, 2 * d})
    more = sorted({max(1, d * quarters // 4) for quarters in (2, 3, 4, 6, 8)})
    least = 2 ** (4 * LEAST_KEYS * columns[-1] - 1).bit_length()

    def at(M, d=d, n=n):
        return point(one, n=n, d=d, M=M, heads=heads)

    over_M = {c: [at(M, c) for M in sram_sizes(least, n * c) or [n * c]] for c in columns}
    fits = []
    for share in (16, 1):  # the theorems hold up to M = Nd
        fits += [fit("M", one, [p for p in over_M[c] if share * p["M"] <= n * c], d=c) for c in columns]
    for M in (d * times for times in SRAM):
        fits.append(fit("d", one, [at(M, c) for c in more if n * more[0] >= M], M=M))
    for M in (d * times for times in SRAM):
        fits.append(fit("n", one, [at(M, n=n >> k) for k in (4, 3, 2, 1, 0) if (n >> 4) * d >= M], M=M))
    points = [p for points in over_M.values() for p in points]
    return {"n": n, "heads": heads, "d": columns, "points": points, "slopes": [f for f in fits if f]}


def sram_sizes(least, most):
    """2^k and 3·2^(k−1), from the power of two `least` to `most`."""
    powers = [2**k for k in range(least.bit_length() - 1, most.bit_length())]
    return [M for twos in powers for M in (twos, 3 * twos // 2) if most >= M]


def point(one, *, n, d, M, heads=1):
    """What a pass moves where M elements of float32 fit on chip, in the tiles of line 1 of Algorithm 1."""
    how = {"d": d, "sram": FLOAT32 * M, "direction": one.direction}
    Br, Bc = choose_blocks("flash", rule="paper", **how)
    kernels = dict(predict("flash", n=n, heads=heads, blocks="paper", **how).kernels)
    kernels.pop("split_lse", None)  # Algorithm 4 is given l and m
    moved = sum(count.elements for tensors in kernels.values() for count in tensors.values())
    again = sum(kernels[one.kernel][tensor].elements for tensor in one.tensors)
    return {"n": n, "d": d, "M": M, "Br": Br, "Bc": Bc, "Tc": tiles(n, Bc), "all": moved, one.part: again}


def fit(over, one, points, **fixed):
    """The slope of log(HBM) over the logarithm of "M", "d" or "n", by least squares; None without two points."""
    if len(points) < 2:
        return None
    slopes = {part: slope([(p[over], p[part]) for p in points]) for part in ("all", one.part)}
    return {"over": over, **fixed, "from": points[0][over], "to": points[-1][over], "points": len(points), **slopes}


def constant(p, heads=1):
    """HBM accesses over N²d²/M, which the theorems keep between two constants."""
    return p["all"] * p["M"] / (heads * (p["n"] * p["d"]) ** 2)


# --- what is printed --------------------------------------------------------------------------------------------------


def points_page(theorem):
    """All terms against M, over N²d²/M in a column for each d, and a chart of them."""
    points, columns, heads = theorem["points"], theorem["d"], theorem["heads"]
    middle = columns[len(columns) // 2]
    there = {(p["d"], p["M"]): p for p in points}
    own = [p for p in points if p["d"] == middle]
    rows = []
    for p in [p for p in own if is_power_of_4(p["M"])] or own:
        others = [there.get((d, p["M"])) for d in columns]
        ratios = [f"{constant(q, heads):5.2f}" if q else f"{'-':>5}" for q in others]
        rows.append([power(p["M"]), number(p["Bc"]), number(p["Tc"]), number(p["all"]), *ratios])
    yield aligned(["M", "Bc", "Tc", "all terms", *(f"d={d}" for d in columns)], rows)
    yield ""
    marks = dict(zip(columns, MARKS))
    series = {marks[d]: [(p["M"], p["all"]) for p in points if p["d"] == d] for d in columns}
    legend = ", ".join(f"{mark} d = {d}" for d, mark in marks.items())
    yield report.prose("\n".join([f"HBM accesses against M: {legend}", *chart(series, "M")]))


def slopes_page(theorem, one):
    """The table of slopes."""
    if not theorem["slopes"]:
        yield report.prose(f"N = {theorem['n']:,} is too small for slopes: the theorem is about large N.")
        return
    yield report.prose("Slope of log(HBM), by least squares over the points M = 2^k and 1.5·2^k, or over d or N:")
    rows = []
    for f in theorem["slopes"]:
        over = f["over"].replace("n", "N")
        fixed = f"d = {f['d']}" if over == "M" else f"M = {power(f['M'])}"
        rows.append([f"log {over}", fixed, f"{over} = {power(f['from'])} to {power(f['to'])}", f["points"]])
        rows[-1] += [f"{f[part]:+.3f}" for part in ("all", one.part)]
    yield report.table(["over", "where", "fitted over", "points", "all terms", f"{one.form} alone"], rows)
    yield ""


def is_power_of_4(number):
    return number.bit_count() == 1 and number.bit_length() % 2 == 1


def power(number):
    """2^k or 1.5·2^k where a large number is one."""
    exponent = number.bit_length() - 1
    if exponent < 10 or number not in (2**exponent, 3 * 2 ** (exponent - 1)):
        return f"{number:,}" if number < 10**6 else f"{number:.4g}"
    return f"2^{exponent}" if number == 2**exponent else f"1.5·2^{exponent}"


def number(value):
    """An integer, at most 15 characters."""
    return f"{value:,}" if value < 10**12 else f"{value:.3e}"
