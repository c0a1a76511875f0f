# %% [markdown]
"""Lesson 06, what FlashAttention is not. Run `python lessons/06_what_it_is_not.py`, or open it as a notebook."""

# %%
import math
from fractions import Fraction

import numpy as np

import numba_flash as nf
from numba_flash import lesson, reference, report, testing
from numba_flash.blocks import choose_blocks, tiles
from numba_flash.engine.model import STATIC_SHARED
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.questions import Question

this = lesson.start("06 · what it is not", stage="flash", blocks=None,
                    extra={"sram": (STATIC_SHARED, lesson.whole_number(4096, 1 << 24), "BYTES",
                                    "shared memory per block in part 7")})  # fmt: skip
N, d, H, where = this.n, this.d, this.heads, this.device
LADDER = "naive", "tiled", "online_softmax", "flash", "flash2"
settings = {stage: {"blocks": this.blocks if stage.startswith("flash") else None} for stage in LADDER}
Br = choose_blocks("flash2", d=d).Br if this.blocks is None else this.blocks[0]
Tr = tiles(N, Br)

this.part("The question")
this.text("""
FlashAttention is often said to be an approximation, or to save arithmetic, or to use less precision, or to move
data to the CPU. None of it is in the kernels of lesson 05. How can one find out, and when does FlashAttention not
pay?
""")

# %% The predictions.
this.part("Predictions")
this.text("""
A claim is worth as much as the test that could refute it. Four claims:

    1  FlashAttention is exact, and aware of HBM
    2  it is no approximation
    3  it is not less work, and not less precise
    4  it is all on the GPU
""")
x = this.draw(N=range(70, 200, 10), d=(8, 12, 16), Br=(8, 16), H=range(2, 7))
there, passes = nf.predict("flash2", n=x.N, d=x.d, heads=x.H, blocks=(x.Br, 8)), tiles(x.N, x.Br)
this.ask("""
What must a test show if they are true? Put a number to each where you can. How large may the error be in float64? How
many FLOPs, compared with naive? How many bytes per element? How many launches, and which tensors do they load or store?
(Masks are tensors of 1 byte per element. Here there are none.) And how many
elements does flash2 move, with Tr tiles of queries (lesson 05)?
""",
    Question("flash2", x, "how many elements does flash2 move, with tiles of Br queries?",
        there.elements, "(2 + 2Tr)·Nd + N per head, with Tr = ⌈N/Br⌉.",
        "Q, O and L once; K and V once per tile of queries.",
        [(x.H * (2 + 2 * passes) * x.N * x.d, "L has N elements per head, too."),
         (x.H * (4 * x.N * x.d + x.N), "K and V are loaded once per tile of queries."),
         (x.H * ((2 + 2 * passes) * x.N * x.d + 2 * x.N), "m and l never leave their thread. L does: one per row."),
         (x.H * ((2 + passes) * x.N * x.d + x.N), "Both K and V are loaded once per tile of queries.")]),
)  # fmt: skip
this.show(report.table(["", "FlashAttention is", "so the test must show"], [
    ["1", "exact, and aware of HBM",
     "an error in float64 of at most 10⁻¹² of the largest output, in float32 as in naive; a smaller bill"],
    ["2", "no approximation", "methods that leave something out have an error that float64 does not remove"],
    ["3", "not less work, not less precise",
     "about as many FLOPs as in naive; every tensor that is loaded or stored with elements of 4 bytes"],
    ["4", "all on the GPU", "one launch of flash2, which loads and stores no tensor but Q, K, V, O and L"],
]), "")
predicted = nf.predict("flash2", n=N, d=d, heads=H, blocks=this.blocks)
assert predicted.elements == H * ((2 + 2 * Tr) * N * d + N)
this.text(f"""
The bill of flash2 by hand, as in lesson 05: (2 + 2Tr)·Nd + N elements per head. With Tr = ⌈N/Br⌉ = {Tr}
that is {plural(predicted.elements, "element")} in all.
""")

# %% Claim 1.
this.part("Claim 1: exact, and aware of HBM")
ideal, bills, outs = algorithm0(n=N, d=d, heads=H), {}, {}
this.running("naive, flash and flash2, each in float32 and in float64")
in_double = [x.astype(np.float64) for x in this.inputs]
errors = this.figures["errors"]
for stage in ("naive", "flash", "flash2"):
    with nf.ledger() as bills[stage]:
        outs[stage] = nf.attention(*this.inputs, stage=stage, **settings[stage], device=where)
    verdict = this.exact(stage, outs[stage], outs["naive"] if stage != "naive" else None)
    out = nf.attention(*in_double, stage=stage, device=where)
    errors[f"{stage}, float64"] = float(np.abs(out - this.reference).max())
counted = bills["flash2"]
this.bill("flash2", counted, predicted=predicted, previous=("flash", bills["flash"]), algorithm0=ideal, below=verdict)
this.text("""
The largest error of O against NumPy in float64, with kernels that compute in float32 and in float64:
""")
this.show(report.table(["stage", "elements moved", "/ ideal", "error, float32", "error, float64"], [
    [stage, bill.elements, bill.elements / ideal.elements, f"{errors[stage]:.1e}", f"{errors[stage + ', float64']:.1e}"]
    for stage, bill in bills.items()
]), "")
assert all(errors[f"{stage}, float64"] <= testing.bound(this.reference, dtype="float64") for stage in bills)
this.text(f"""
In float64 the error is below 10⁻¹² of the largest output. What is left is rounding, and it shrinks with the number
of digits. An algorithm with an error of its own could not do that. And naive moves
{bills['naive'].elements / counted.elements:.3g} times as many elements as flash2.
""")


# %% Claim 2.
def windowed(Q, K, V, reach):
    S = Q @ K.T / math.sqrt(Q.shape[1])
    i, j = np.indices(S.shape)
    S[abs(i - j) > reach] = -np.inf                          # a query sees only the keys near it
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P @ V / P.sum(axis=1, keepdims=True)


def low_rank(Q, K, V, ranks):
    S = Q @ K.T / math.sqrt(Q.shape[1])
    P = np.exp(S - S.max(axis=1, keepdims=True))
    A, sizes, B = np.linalg.svd(P / P.sum(axis=1, keepdims=True))
    return {r: (A[:, :r] * sizes[:r]) @ (B[:r] @ V) for r in ranks}


n = min(N, 512)                                              # svd takes seconds beyond
Q, K, V = (x[0, :n] for x in in_double)
truth, budget = reference.attention(Q, K, V)[0], nf.predict("flash2", n=n, d=d, blocks=this.blocks).elements
equal = min(max((budget - 2 * n * d) // (2 * n + 2 * d), 1), max(n // 2, 1))
this.part("Claim 2: no approximation")
this.source(windowed)
this.source(low_rank)
this.text(f"""
Two real approximations, in NumPy and float64, for {f"the first {n} queries and keys" if n < N else
"all queries and keys"} of head 0: in this part N = {n}. In the first a query sees only the keys near it. The second
replaces P by a product of N × r and r × N numbers, a matrix of rank r. The singular value decomposition, `svd`,
gives the one with the least sum of squared errors. It needs P for that; methods that avoid P choose the two factors
without it, and come less close to P.

What would they move? A windowed flash2 would load, for each tile of Br = {Br} queries, the K and V in reach. The other
loads its two factors and V, stores and loads their r × d product, and stores O: 2Nr + 2Nd + 2rd. With r = {equal}
that is {(2 * n * (equal + d) + 2 * equal * d) / budget:.2f} times the traffic of flash2.
""")
this.running("flash2 and the approximations")
tried = {
    f"flash2, {dtype}": (budget, nf.attention(*(x.astype(dtype) for x in (Q, K, V)), stage="flash2", device=where))
    for dtype in ("float64", "float32")
}
for reach in (n // 4, n // 8, n // 16):
    keys = sum(min(i + Br + reach, n) - max(i - reach, 0) for i in range(0, n, Br))
    tried[f"window of {2 * reach + 1}"] = 2 * n * d + 2 * keys * d + n, windowed(Q, K, V, reach)
for r, out in low_rank(Q, K, V, (equal, max(equal // 4, 1))).items():
    tried[f"rank {r}"] = 2 * n * (r + d) + 2 * r * d, out
relative = {name: float(np.abs(out - truth).max() / np.abs(truth).max()) for name, (_, out) in tried.items()}
this.figures["approximations"] = relative
this.show(report.table(["method", "elements", "/ flash2", "largest error / largest |O|"], [
    [name, moved, moved / budget, f"{relative[name]:.1e}"] for name, (moved, _) in tried.items()
]), "")
this.text("""
The same as a picture, in correct digits of O:
""")
digits = {name: round(max(-math.log10(max(error, 1e-16)), 0), 1) for name, error in relative.items()}
this.show(report.bars(digits, "digits"), "")
least = min(error for name, error in relative.items() if "flash2" not in name)
if least > 1e-9:
    this.text(f"""
    An approximation here is off by {least:.0%} of the largest output or more, and it is computed in float64 already:
    more digits cannot help. The input is random, so that near keys matter no more than far ones, and a wider window
    need not err less. On a trained model the keys that matter may be near, and the error smaller, but it stays.

    With the traffic of flash2 a window would reach all keys. To move less, it has to leave some out.
    """)
else:
    this.text("With so few keys an approximation leaves out nothing. Run with a larger --n.")

# %% Claim 3.
this.part("Claim 3: not less work, not less precise")
work = {stage: nf.flops(stage, n=N, d=d, heads=H, **settings[stage]) for stage in LADDER}
training = {stage: nf.flops(stage, n=N, d=d, heads=H, direction="both") for stage in ("naive", "flash")}
moved = {stage: nf.predict(stage, n=N, d=d, heads=H, **settings[stage]) for stage in LADDER}
this.figures["flops"] = work | {f"{stage}, both passes": flops for stage, flops in training.items()}
touched = [count for bill in bills.values() for kernel in bill.kernels.values() for count in kernel.values()]
itemsizes = " and ".join(map(str, sorted({count.itemsize for count in touched if count.elements})))
ratios = {stage: work[stage] / work["naive"] for stage in LADDER}
share = moved["flash2"].elements / moved["naive"].elements
this.show(report.table(["stage", "FLOPs", "/ naive", "elements moved", "FLOP/byte"], [
    [stage, work[stage], f"{ratios[stage]:.4f}", moved[stage].elements, work[stage] / moved[stage].total_bytes]
    for stage in LADDER
]), "")
this.text(f"""
flash does {ratios['flash']:.4f} times the work of naive, and flash2 {ratios['flash2']:.4f} times. The two products are
4d per score in each. Beside them naive has 8 per score (scale; a maximum; twice a difference and an exponential; a sum;
a quotient), flash 6 and flash2 5: they divide rows of O, and not each score. In return they rescale: 2d + 8 per row and
tile of keys in flash, d + 3 in flash2. (Square tiles, and those of flash2, are computed in full where they hang over
the end: that counts at short N.) What falls is the traffic, to {share:.4f} of naive's.

With the backward pass FlashAttention does more. Attention has 2 matrix products forward and 4 backward, all of
the same size. FlashAttention's backward pass computes S again instead of reading P (lesson 07): 7 products instead
of 6, {7 / 6:.2f} times the work. `nf.flops` with direction="both": naive {training['naive']:,}, flash
{training['flash']:,}, {training['flash'] / training['naive']:.2f} times. The paper's Figure 2 has 66.6 and 75.2 GFLOP,
{75.2 / 66.6:.2f} times, and 7.3 ms instead of 41.7. (Its GFLOP do not follow from its caption: six products of 64 × 16
heads with N = 1024 and d = 64 are {6 * 64 * 16 * 2 * 1024**2 * 64 / 1e9:.1f} GFLOP. So only the ratio is of use,
and it is near ours.)

Precision: every tensor that these kernels load or store has elements of {itemsizes} bytes. They compute in the type of
their input.
""")

# %% Claim 4.
this.part("Claim 4: all on the GPU")
rows = []
for stage in ("naive", "flash2"):
    for at, launch in enumerate(bills[stage].launches):
        counts = bills[stage].kernels[launch.kernel]
        sizes = [" × ".join(map(str, size)) for size in (launch.grid, launch.block)]
        moved_by_it = " ".join(tensor for tensor, count in counts.items() if count.elements)
        rows.append([stage if at == 0 else "", launch.kernel, *sizes, moved_by_it])
this.text("""
`bill.launches` lists what ran between the input and the output. The last column has the tensors of which elements were
loaded or stored. (The kernels have arguments `mask` and `block_mask`, too. Without a mask these are one byte each, and
nobody reads it.)
""")
this.show(report.table(["stage", "kernel", "grid", "block", "loads or stores"], rows), "")
this.text(f"""
For flash2 that is one launch. Its tensors are in HBM, and what it keeps between loads and stores is in SRAM. Both
are the GPU's own: HBM beside its processor, SRAM (shared memory and registers) within it. The memory of the CPU
has no part in it. Beside Q, K, V and O, naive needs S and P in HBM, 2N² = {2 * N * N:,} elements per head, and flash2
needs L, N = {N:,}.
""")

# %% When it loses.
this.part("When it loses: d² against M")
def against_ideal(stage, d, sram):
    return nf.predict(stage, n=N, d=d, sram=sram).elements / algorithm0(n=N, d=d).elements


kib = sorted({16, 48, 163, 1024, this.sram / 1024})
rows, limit = [], 4096
for width in sorted({16, 32, 64, 96, 128, 256, d}):
    first = next((s for s in range(4, limit + 1) if against_ideal("flash", width, s * 1024) < 1), None)
    ratios = [against_ideal("flash", width, int(s * 1024)) for s in kib]
    wins = (f"{first} KiB", f"{first * 256 / width**2:.1f}") if first else ("-", "-")
    rows.append([width, *(f"{ratio:.2f}{' *'[ratio >= 1]}" for ratio in ratios), *wins,
                 f"{against_ideal('flash2', width, this.sram):.2f}"])  # fmt: skip
this.text("""
flash passes over Q and O once for each tile of keys. With M elements of shared memory a tile has about M/(2d + Br)
keys, so that it moves about 3N²d(2d + Br)/M elements, against 4N² of Algorithm 0.
""")
x = this.draw(d=(48, 80, 96, 112), Br=(32, 48, 64))
least = Fraction(3 * x.d * (2 * x.d + x.Br), 4)
this.ask("",
    Question("M", x, """by this, from how many bytes of shared memory on does flash move less than Algorithm 0, with
        elements of 4 bytes?""", int(4 * least), "M = ¾·d·(2d + Br) elements, of 4 bytes each.",
        "Set 3N²d(2d + Br)/M equal to 4N². N drops out. M is in elements.",
        [(least, "Those are elements: that is M. A float32 has 4 bytes."),
         (3 * x.d * 2 * x.d, "That leaves out S_ij, the Br in 2d + Br.")]),
)  # fmt: skip
this.text(f"""
flash wins where M is larger than ¾·d·(2d + Br): with large d, than 1.5 d². The formula leaves out that a tile has
whole keys and that Tc is rounded up, and it leaves out l, m, and what does not grow like N². So the table below, which
is exact, asks for a little more shared memory.

The paper's Theorem 2 gives the growth: accesses in proportion to N²d²/M with FlashAttention, to Nd + N² without, for
d ≤ M ≤ Nd. By its Proposition 3, no exact algorithm can stay below the order of N²d²/M for all these M.

Elements of flash, predicted, divided by those of Algorithm 0, for N = {N:,} and float32. A star: flash loses. (48 KiB
is what a block may have of shared memory by itself, 163 KiB what an A100 has for a block that asks for more.)
""")
this.show(report.table(
    ["d", *(f"{s:.4g} KiB" for s in kib), "wins from", "M/d²", "flash2"], rows
), "")
at = {stage: against_ideal(stage, 128, STATIC_SHARED) for stage in ("flash", "flash2")}
loses = {stage: "it loses" if ratio >= 1 else "it does not lose" for stage, ratio in at.items()}
this.figures["against_algorithm0"] = {row[0]: row[1:] for row in rows}
this.text(f"""
"wins from" is the least shared memory with which flash moves less than Algorithm 0, and M/d² the same in elements,
over d². The last column is flash2, whose bill has no M: it reads K and V once for each tile of Br queries, and
their rows are in registers.

At d = 128 and the 48 KiB of our blocks, flash moves {at['flash']:.2f} times as much as Algorithm 0: {loses['flash']}.
flash2 moves {at['flash2']:.2f} times as much: {loses['flash2']}. But there 2d numbers are too many for the 255
registers of a thread. In our compilations Q_i and O_i are in registers up to d = 96, and at d = 128 in local memory,
which is in HBM behind the caches; no bill here counts it. So the ratios of both stages for d ≥ 128 are those of a chip
with more registers.

Algorithm 0 is an ideal: to read each operand of a product once, a kernel would need a whole operand on chip.

At --d {d} and --sram {this.sram} ({this.sram / 1024:.4g} KiB):
""")
for stage in ("flash", "flash2"):
    tiling = str(choose_blocks(stage, d=d, sram=this.sram))
    this.text(f"{tiling} It moves {against_ideal(stage, d, this.sram):.3g} times as much as Algorithm 0.")

this.part("Your turn")
other_sram = 2 * this.sram if this.sram <= 1 << 23 else this.sram // 2
other_d = 2 * d if d == 1 or (d <= 128 and not this.blocks) else d // 2
there = against_ideal("flash", other_d, this.sram)
this.tries({
    f"--sram {other_sram}": f"""flash would move {against_ideal('flash', d, other_sram):.3g} times as much as Algorithm
    0. (The prediction alone: a block of our device has {STATIC_SHARED:,} bytes.)""",
    f"--d {other_d}": f"""With {this.sram / 1024:.4g} KiB flash moves {there:.3g} times as much as Algorithm 0 then (the
    last lines of part 7).""",
})
n = max(N, 1024)                                             # with few keys flash never wins
this.text(f"""
Check yourself: with elements of 8 bytes, how much shared memory does flash need to win at d = 64? Work it out from
{"the table above" if n == N else f"the formula, for N = {n} (it says a little too few)"}, then ask for the ratio on
both sides of it, in bytes:

    import numba_flash as nf
    bill = nf.predict("flash", n={n}, d=64, dtype="float64", sram=...)
    bill.elements / (4 * {n}**2 + 4 * {n} * 64)
""")
this.end()
