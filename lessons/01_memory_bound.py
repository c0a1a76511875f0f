"""Lesson 01, why attention is memory-bound. Run `python lessons/01_memory_bound.py`, or open it as a notebook."""

# %%
import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.hbm.predict import algorithm0

this = lesson.start("01 · memory-bound", stage="tiled")
N, d, H, T = this.n, this.d, this.heads, this.blocks

this.part("The question")
this.text("""
A GPU calculates and moves data at the same time, and the slower of the two sets the pace. Which is it in
attention? And if it is the data, which data?
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

S and P are the large ones: here N = {N:,} and d = {d}, so Q has {N * d:,} elements and S has {N * N:,}.
""")

# %% The prediction, by hand: operations.
this.part("Prediction: operations and bytes")
flops = {"scores": H * N * N * (2 * d + 1), "softmax": H * N * N * 7, "output": H * N * N * 2 * d}
assert sum(flops.values()) == nf.flops("naive", n=N, d=d, heads=H)
moved = {"scores": H * (2 * N * d + N * N), "softmax": H * 2 * N * N, "output": H * (N * N + 2 * N * d)}
ideal = algorithm0(n=N, d=d, heads=H)
assert sum(moved.values()) == ideal.elements
share = 4 * N * N * H / ideal.elements
this.text(f"""
First the arithmetic, in FLOPs, floating-point operations. A score is d products and d sums, and one product
with scale. An element of P takes 1 operation to find m, 3 for l (subtract, exp, add) and 3 for P itself
(subtract, exp, divide). An element of O is N products and N sums. With {H} head{'s' * (H > 1)}:

    scores     N²(2d + 1)   = {flops['scores']:>15,}
    softmax    7N²          = {flops['softmax']:>15,}
    output     2N²d         = {flops['output']:>15,}

Then the traffic between HBM, the memory of the GPU, and its processor, in elements. Algorithm 0 reads the
operands of each step from HBM once and writes the result back:

    scores     Q, K in, S out   2Nd + N²   = {moved['scores']:>13,}
    softmax    S in, P out      2N²        = {moved['softmax']:>13,}
    output     P, V in, O out   N² + 2Nd   = {moved['output']:>13,}
    together                    4N² + 4Nd  = {ideal.elements:>13,}

S and P are 4N² of it, {share:.0%}.
""")

# %% The run: the same three steps by kernels that fetch each operand each time it is used.
this.part("The run")
predicted = nf.predict("naive", n=N, d=d, heads=H)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="naive", device=this.device)
this.text("""
Algorithm 0 is an ideal: a processor that reads each operand of a product once has to keep it somewhere. The
stage `naive`, subject of lesson 02, keeps nothing. Its bill, predicted by `nf.predict` and counted while it
ran:
""")
this.bill("naive", counted, predicted=predicted, algorithm0=ideal, below=this.exact("naive", out))
this.text("""
The last line compares the output with float64 NumPy; "exact" means that the error is one that rounding in
float32 explains.
""")

# %% Operations for each byte.
this.part("Arithmetic intensity")
tiled = nf.predict("tiled", n=N, d=d, heads=H, blocks=T).elements
total = sum(flops.values())
steps = {step: (flops[step], moved[step]) for step in flops}
steps |= {"Algorithm 0": (total, ideal.elements), "naive": (total, counted.elements), f"tiled, T = {T}": (total, tiled)}
steps |= {"S, P on chip": (total, 4 * H * N * d)}
marks = "abcdefg"
this.text(f"""
The ratio of operations to bytes is called arithmetic intensity. It depends on the size of an element: 4 bytes
in float32, 2 bytes in float16. `tiled` is the stage of lesson 03, with --blocks {T}. The last line is a wish:
all of Algorithm 0's arithmetic, but S and P never leave the processor, so that Q, K, V and O alone cross, 4Nd
elements.
""")
this.show(report.table(["", "step", "FLOPs", "elements", "FLOP/byte float32", "float16"], [
    [mark, step, work, elements, work / elements / 4, work / elements / 2]
    for mark, (step, (work, elements)) in zip(marks, steps.items())
]), "")

# %% The roofline.
this.part("The roofline")
FP32, TENSOR, BANDWIDTH = 19.5e12, 312e12, 1.555e12          # NVIDIA A100 datasheet, 40 GB: FLOP/s, FLOP/s, bytes/s
this.text(f"""
An A100 with 40 GB moves {BANDWIDTH / 1e12:.3f} TB/s from and to HBM. It computes {FP32 / 1e12} TFLOP/s in
float32, and {TENSOR / 1e12:.0f} TFLOP/s on its tensor cores, which multiply matrices of float16 (NVIDIA A100
datasheet; the paper gives 1.5–2.0 TB/s). At x FLOP/byte it cannot compute faster than x times
{BANDWIDTH / 1e12:.3f} TB/s, the slope, nor faster than its units, the roofs. They meet at
{FP32 / BANDWIDTH:.1f} and {TENSOR / BANDWIDTH:.1f} FLOP/byte. Left of that the units wait for memory.

The steps in float16, by their letters, against FLOP/byte:
""")
intensity = {mark: work / elements / 2 for mark, (work, elements) in zip(marks, steps.values())}
roofs = {f"tensor {TENSOR / 1e12:.0f} TFLOP/s": TENSOR, f"float32 {FP32 / 1e12} TFLOP/s": FP32}
this.show(*lesson.roofline(BANDWIDTH, roofs, intensity), "")

seconds = {step: (flops[step] / (FP32 if step == "softmax" else TENSOR), 2 * moved[step] / BANDWIDTH) for step in flops}
arithmetic = sum(work for work, _ in seconds.values())
ratios = {step: memory / work for step, (work, memory) in seconds.items()}
for name, elements in (("Algorithm 0", ideal.elements), ("S, P on chip", 4 * H * N * d)):
    ratios[name] = 2 * elements / BANDWIDTH / arithmetic
this.text("""
Which of the two takes longer, in float16, with the products on tensor cores and softmax on the float32 units?
These are the least times that the figures above allow, and no measurements.
""")
this.show(report.table(["step", "its traffic takes", "bound by"], [
    [step, f"{ratio:.2g} × as long as its arithmetic", "memory" if ratio > 1 else "arithmetic"]
    for step, ratio in ratios.items()
]), "")
this.figures |= {"flops": flops, "moved": moved, "traffic_over_arithmetic": ratios}

# %% What follows.
seven = flops["softmax"] // (H * N * N)
lowest = min(flops, key=lambda step: flops[step] / moved[step])
bound = [", ".join(step for step in flops if under(step)) or "nothing" for under in (
    lambda step: flops[step] / moved[step] / 4 < FP32 / BANDWIDTH, lambda step: ratios[step] > 1
)]
this.part("What would have to change")
this.text(f"""
Softmax does {seven} operations for an element that comes from HBM and one that goes back, whatever N and d are.
The lowest intensity at these sizes is that of {lowest}.

Faster units do not help a step that waits for memory; they made more steps wait. In float32 on its own units,
memory bounds these: {bound[0]}. In float16, with tensor cores: {bound[1]}.

Fewer operations do not help either. What helps is fewer bytes, and S and P are {share:.0%} of them. Nobody
asked for S and P; they go out to HBM to come back. FlashAttention never writes them (lesson 05). It does more
arithmetic than Algorithm 0, and took 7.3 ms where that took 41.7 ms (GPT-2 medium on an A100, forward and
backward: the paper's Figure 2).
""")

this.part("Your turn")
longer, other = 4 * N, 2 * d if d <= 128 else d // 2
grown, products = longer / (longer + d), (2 * other + 1) * N / (2 * (2 * other + N))
this.tries({
    f"--n {longer}": f"The share of S and P in Algorithm 0 grows to {grown:.1%}; softmax's intensity stays as it is.",
    f"--d {other}": f"In float16 scores has {products:.3g} FLOP/byte then. Softmax does not see d: {7 / 4}, as before.",
})
this.text("""
Check yourself: for which N are S and P half of Algorithm 0's traffic, when d = 64? Run the lesson with that --n
and --d and read the end of part 3.
""")
this.end()
