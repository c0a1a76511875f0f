# %% [markdown]
"""Lesson 01, why attention is memory-bound. Run `python lessons/01_memory_bound.py`, or open it as a notebook."""

# %%
import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.hbm.predict import algorithm0
from numba_flash.questions import Question

this = lesson.start("01 · memory-bound", stage="tiled", predict_only=True)
N, d, H, T = this.n, this.d, this.heads, this.blocks

this.part("The question")
this.text("""
A GPU calculates and moves data at the same time, and the slower of the two sets the pace. Which is it in
attention? And if it is the data, which data? (This lesson builds on lesson 00: HBM, load, store, bill.)
""")

# %% What attention computes.
this.part("Attention")
this.text(f"""
Attention has three inputs: the queries Q, the keys K and the values V. Each is a matrix of N rows and d
columns, a row for each token (word, or part of a word) of a text. The output O has the same shape. These are
the names of the FlashAttention paper (Dao et al. 2022, arXiv:2205.14135), and its Algorithm 0 computes O in
three steps:

    scores     N × N     S = scale·QKᵀ, with scale = 1/√d
    softmax    N × N     P = softmax(S), row by row
    output     N × d     O = PV

S_ij says how well query i matches key j. Softmax turns a row of S into weights between 0 and 1 whose sum is 1:
P_ij = exp(S_ij - m_i) / l_i, with m_i the largest score of row i and l_i the sum of the exponentials. O_i is
the mean of the rows of V with these weights. A model does this for many heads, each with a Q, K and V of its
own.

Q, K, V and O have N·d elements each, S and P have N² each. Here N = {N:,} and d = {d}, so N·d = {N * d:,} and
N² = {N * N:,}. A longer text makes S and P grow with the square of its length.
""")

# %% The prediction, by hand: operations and bytes.
flops = {"scores": H * N * N * (2 * d + 1), "softmax": H * N * N * 7, "output": H * N * N * 2 * d}
assert sum(flops.values()) == nf.flops("naive", n=N, d=d, heads=H)
moved = {"scores": H * (2 * N * d + N * N), "softmax": H * 2 * N * N, "output": H * (N * N + 2 * N * d)}
ideal = algorithm0(n=N, d=d, heads=H)
assert sum(moved.values()) == ideal.elements
share = 4 * N * N * H / ideal.elements
of_heads = f" The formulas are for one head, the figures for {H:,}." if H > 1 else ""
this.part("A prediction: operations and elements")
this.text("""
FLOPs are floating-point operations: a product, sum, difference, quotient, maximum or exponential counts as 1. A sum
starts from 0, so d products take d sums, and a maximum starts from -∞.
Softmax passes over a row of S three times, for m, for l and for P, and computes the exponential in each of the
last two.

Traffic is what crosses the border between HBM, the memory of the GPU, and its processor. Algorithm 0 reads the
operands of each step from HBM once, and writes the result back.
""")
x = this.draw(N=range(100, 500, 20), d=(16, 24, 40, 48), H=range(2, 7))
this.ask("""
How many FLOPs do the three steps take, as formulas in N and d? How many elements does each of them read and
write? And which share of those are elements of S and P?
""",
    Question("FLOPs", x, "how many FLOPs do the three steps take together?",
        nf.flops("naive", n=x.N, d=x.d, heads=x.H), "N²(2d + 1) + 7N² + 2N²d for each head.",
        "Count for one element of S, one of P and one of O. How many of each are there?",
        [(x.H * x.N**2 * 4 * x.d, "Those are the two products. The scale and softmax count, too."),
         (x.H * x.N**2 * (4 * x.d + 7), "Nearly: sums start from 0, so d products take d sums, plus the scale."),
         *((x.H * (x.N**2 * (4 * x.d + 7) - x.N * x.d - more * x.N),
            "Nearly: sums start from 0, so n numbers take n sums, and not n - 1.") for more in (0, 1, 2)),
         (x.H * x.N**2 * (4 * x.d + 1), "That leaves out softmax."),
         (x.H * x.N**2 * (4 * x.d + 5), "Softmax computes the difference and the exponential twice: 7 per score."),
         (x.H * x.N**2 * (2 * x.d + 8), "A product of two numbers is one FLOP, and adding it is another.")]),
    Question("Algorithm 0", x, "how many elements does Algorithm 0 read and write?",
        algorithm0(n=x.N, d=x.d, heads=x.H).elements, "4N² + 4Nd for each head.",
        "Go through the steps. What does each read, and what does it write back?",
        [(x.H * 4 * x.N * x.d, "Those are Q, K, V and O. S and P go out and come back, too."),
         (x.H * 4 * x.N**2, "Those are S and P. Q, K, V and O count, too."),
         (x.H * (2 * x.N**2 + 4 * x.N * x.d), "S and P are written by one step and read by the next: twice each.")]),
)  # fmt: skip
this.show(report.table(["step", "per element of the result", "formula", "FLOPs"], [
    ["scores", "d products, d sums, scale", "N²(2d + 1)", flops["scores"]],
    ["softmax", "1 for m, 3 for l, 3 for P", "7N²", flops["softmax"]],
    ["output", "N products, N sums", "2N²d", flops["output"]],
]), "")
this.show(report.table(["step", "in", "out", "formula", "elements"], [
    ["scores", "Q, K", "S", "2Nd + N²", moved["scores"]],
    ["softmax", "S", "P", "2N²", moved["softmax"]],
    ["output", "P, V", "O", "N² + 2Nd", moved["output"]],
    ["together", "", "", "4N² + 4Nd", ideal.elements],
]), "")
this.text(f"""
For m, softmax takes a maximum; for l it subtracts, takes the exponential and adds; for P it subtracts, takes the
exponential and divides. S and P are written once and read once each, 4N² elements: {share:.0%} of the
traffic.{of_heads}
""")

# %% The run: the same three steps by kernels that fetch each operand each time it is used.
this.part("The run")
this.text("""
Algorithm 0 is an ideal. To read each operand of a product from HBM only once, a processor has to keep all of it
until the product is done, and it may not have the room. The stage `naive`, subject of lesson 02, is the other
extreme: it keeps nothing, and fetches an operand each time it is used. Its bill, predicted by `nf.predict` and
counted:
""")
this.running("naive")
predicted = nf.predict("naive", n=N, d=d, heads=H)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="naive", device=this.device)
this.bill("naive", counted, predicted=predicted, algorithm0=ideal, below=this.exact("naive", out))
this.text("""
The last line of the bill itself compares the output with NumPy's in float64, which has 16 digits. float32 has 7
and rounds after each operation, so no kernel gets all of them right. "worst case of rounding" is what that could
add up to at most. An error beyond it would be a fault of the kernel; an error within it does not prove that there
is none.
""")

# %% Operations for each byte.
this.part("Arithmetic intensity")
tiled = nf.predict("tiled", n=N, d=d, heads=H, blocks=T).elements
total = sum(flops.values())
steps = {step: (flops[step], moved[step]) for step in flops}
steps |= {"Algorithm 0": (total, ideal.elements), "naive, requests": (total, counted.elements)}
steps |= {"tiled, requests": (nf.flops("tiled", n=N, d=d, heads=H, blocks=T), tiled)}
steps |= {"S, P on chip": (total, 4 * H * N * d)}
marks = "abcdefg"
this.text(f"""
The ratio of operations to bytes is called arithmetic intensity. It depends on the size of an element: 4 bytes
in float32, 2 bytes in float16. `tiled` is the stage of lesson 03, predicted for T = {T} (--blocks). The last
line is a wish: all of Algorithm 0's arithmetic, but S and P never leave the processor, so that only Q, K, V and
O cross the border, 4Nd elements.
""")
this.show(report.table(["", "step", "FLOPs", "elements", "FLOP/byte: float32", "float16"], [
    [mark, step, work, elements, work / elements / 4, work / elements / 2]
    for mark, (step, (work, elements)) in zip(marks, steps.items())
]), "")
this.text("""
The elements of e and f are requests, not traffic of HBM: threads of a warp (lesson 00) that ask for the same
element get it by one load, and caches answer many other requests, so that such a kernel may run faster than HBM
could serve them all.
""")

# %% The roofline.
this.part("The roofline")
FP32, TENSOR, BANDWIDTH = 19.5e12, 312e12, 1.555e12          # NVIDIA A100 datasheet, 40 GB: FLOP/s, FLOP/s, bytes/s
this.text(f"""
An A100 with 40 GB moves {BANDWIDTH / 1e12:.3f} TB/s from and to HBM. It computes {FP32 / 1e12} TFLOP/s in
float32, and {TENSOR / 1e12:.0f} TFLOP/s on its tensor cores, which multiply matrices of float16 (NVIDIA A100
datasheet; the paper gives 1.5–2.0 TB/s).

A step with x FLOP per byte of HBM traffic runs no faster than x times {BANDWIDTH / 1e12:.3f} TB/s, which is the slope
in the chart, and no faster than the units compute, which are the two roofs. The slope reaches the float32 roof at
{FP32 / BANDWIDTH:.1f} FLOP/byte and the tensor roof at {TENSOR / BANDWIDTH:.1f}. Under a roof, a step to the left
of that point waits for memory, and a step to the right of it for the units.

The steps in float16, by the letters of the table, against FLOP/byte; without e and f, which are no traffic:
""")
intensity = {
    mark: work / elements / 2 for mark, (step, (work, elements)) in zip(marks, steps.items()) if "requests" not in step
}
roofs = {f"tensor {TENSOR / 1e12:.0f} TFLOP/s": TENSOR, f"float32 {FP32 / 1e12} TFLOP/s": FP32}
this.show(*lesson.roofline(BANDWIDTH, roofs, intensity), "")

products = {step: flops[step] / TENSOR for step in ("scores", "output")}
fast = flops["softmax"] / FP32                               # each of its 7 operations at the rate of the datasheet
slow = H * N * N * (4 + 3 * 4) / (FP32 / 2)                  # 4 at a half of the rate, 3 at an eighth
arithmetic = {step: (work, work) for step, work in products.items()} | {"softmax": (fast, slow)}
for name in ("Algorithm 0", "S, P on chip"):
    arithmetic[name] = tuple(sum(products.values()) + softmax for softmax in (fast, slow))
ratios, bound_by = {}, {}
for step in (*flops, "Algorithm 0", "S, P on chip"):
    ratios[step] = [2 * steps[step][1] / BANDWIDTH / work for work in arithmetic[step]]
    low, high = min(ratios[step]), max(ratios[step])
    bound_by[step] = "memory" if low > 1 else "arithmetic" if high <= 1 else "too close to say"
this.text("""
Which of the two takes longer, in float16, with the products on tensor cores and softmax on other units? The
figures above allow the products these times at the least; they are no measurements.
""")
this.show(report.table(["step", "its traffic takes", "bound by"], [
    [step, f"{f'{low:,.0f}' if low > 10 else f'{low:.2g}'} × as long as its arithmetic" if step in products else "–",
     bound_by[step]] for step, (low, _) in ratios.items()
]), "")
this.text(f"""
There is no factor where softmax takes part: how fast its 7 operations per score run depends on the instructions. Two
guesses enclose it.

    fast   all 7 run at {FP32 / 1e12} TFLOP/s, the full rate
    slow   4 run at a half of it: the full rate counts a product and a sum
           in one instruction as two operations, and here each is alone
           3 run at an eighth of it: the exponentials and the quotient need
           special-function units, of which there are a quarter as many

"bound by" says what comes out by both guesses.
""")
this.figures |= {"flops": flops, "moved": moved, "bound_by": bound_by}
this.figures |= {"traffic_over_arithmetic": {step: ratios[step][0] for step in products}}

# %% What follows.
seven = flops["softmax"] // (H * N * N)
lowest = min(flops, key=lambda step: flops[step] / moved[step])
bound = [", ".join(step for step in flops if under(step)) or "none of them" for under in (
    lambda step: flops[step] / moved[step] / 4 < FP32 / BANDWIDTH, lambda step: bound_by[step] == "memory"
)]
whole, ridge = total / ideal.elements / 4, FP32 / BANDWIDTH
about = "half precision on tensor cores, and about softmax" if bound_by["Algorithm 0"] == "memory" else bound[1]
float32 = f"""to the right of {ridge:.1f}: where its products run on float32 units, those units set the pace. So
"memory-bound" is a statement about {about}.""" if whole > ridge else f"""to the left of {ridge:.1f}: at these sizes
memory sets the pace there, too, as far as these figures go."""
this.part("What would have to change")
this.text(f"""
Softmax does {seven} operations for one element that comes from HBM and one that goes back, whatever N and d are. The
step with the lowest intensity at these sizes is {lowest}.

Faster units do not help a step that waits for memory: the higher the roof, the further to the right it begins,
and the more steps may wait. Steps that wait for memory in float32, on its own units: {bound[0]}. In float16, with
tensor cores: {bound[1]}.

In float32, Algorithm 0 as a whole has {whole:.3g} FLOP/byte, {float32}

Fewer operations do not help such a step either. Fewer bytes do, and S and P are {share:.0%} of Algorithm 0's.
Nobody asked for S and P: they go out to HBM only to come back. FlashAttention, which this course builds up to,
never writes them. It does more arithmetic than Algorithm 0, and took 7.3 ms where that took 41.7 ms (GPT-2
medium on an A100, forward and backward: the paper's Figure 2).
""")

this.part("Your turn")
longer, other = 4 * N, 2 * d if d <= 128 else d // 2
grown, then = longer / (longer + d), (2 * other + 1) * N / (2 * (2 * other + N))
this.tries({
    f"--n {longer}": f"The share of S and P in Algorithm 0 grows to {grown:.1%}; softmax's intensity stays as it is.",
    f"--d {other}": f"Scores has {then:.3g} FLOP/byte in float16 then. Softmax does not see d: {7 / 4}, as before.",
})
this.text("""
Check yourself: for which N are S and P half of Algorithm 0's traffic, when d = 64? Run the lesson with that --n
and --d and read the end of part 3.
""")
this.end()
