# %% [markdown]
"""Lesson 02, the stage `naive`. Run it with `python lessons/02_naive.py`, or open it as a notebook."""

# %%
from numba import float32

import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.blocks import tiles
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.masks import no_mask
from numba_flash.questions import Question
from numba_flash.stages import naive

this = lesson.start("02 · naive", stage="tiled", predict_only=True)
N, d, H, T = this.n, this.d, this.heads, this.blocks

this.part("The question")
this.text("""
What does attention cost if every thread fetches from HBM whatever it needs, whenever it needs it?

The words thread, block, grid, load and store are from lesson 00; Q, K, V, S, P, O and Algorithm 0 are from
lesson 01.
""")

# %% The first kernel, and a grid of two axes.
side, across = naive.SIDE, tiles(N, naive.SIDE)
scores = naive.make_scores(float32, no_mask().allowed)
softmax, output = naive.make_softmax(float32), naive.make_output(float32)
this.part("The scores, one thread per element")
this.text("""
The stage is in numba_flash/stages/naive.py. It has one kernel per step of Algorithm 0. The first computes the
scores, S = scale·QKᵀ, with one thread per element of S.

In its listing, `h` is the head. `g` is the head of K and V: in some models several heads of Q share one, but here
there are as many, and g equals h. `mask`, its batch `b` and `allowed` are for masks, which hide keys (lesson 08): here
`allowed` is True for every pair, and no mask is read. `real` is the type of the numbers, float32. `acc` is in a
register. N queries meet `N_k` keys, here as many.

A comment such as "Alg. 0, l. 1" names the line of the paper's algorithm, here its first step.
""")
this.source(scores)
this.text(f"""
A thread needs two numbers here, a row and a column of S. So the block is a square of {side} × {side} threads, and a
thread has two numbers in it, `cuda.threadIdx.x` and `cuda.threadIdx.y`, from 0 to {side - 1}. The grid has as many
blocks as cover S, ⌈N/{side}⌉ = {across:,} along x and as many along y; its third axis, z, is for the heads.
`cuda.grid(2)` is short for the two numbers of a thread in the whole grid, x first:

    cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x,
    cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y

In a matrix x counts to the right: it is the column, here the key j. y counts downwards: it is the row, here the
query i. So `j, i = cuda.grid(2)` has the column first, and S[h, i, j] has the row first. In the first block, the
thread with x = 7 and y = 3 is the one for S[h, 3, 7]{"" if N > 7 else ", if S were that large"}.
""")

# %% The other two.
this.part("Softmax and output")
this.text("""
Softmax has one thread per row of S. It passes over the row three times, for the maximum m, for the sum l, and
for P. `weight(s, m)` is exp(s - m), and 0 where s is -∞, as it is for a key that a mask hides:
""")
this.source(softmax)
this.text("""
O = PV has one thread per element of O. Here x counts the columns of O, t, and y the queries, i:
""")
this.source(output)

# %% The prediction, by hand.
this.part("A prediction: the bill")
x = this.draw(N=range(60, 200, 10), d=(8, 12, 20, 24), H=(7, 11, 13))
there = nf.predict("naive", n=x.N, d=x.d, heads=x.H)
this.ask("""
For one head: how many threads of each kernel get past its guard, and how many elements of each tensor does one
of them load or store? Write a formula in N and d for each of these:

    scores     loads of Q, loads of K, stores of S
    softmax    loads of S, stores of P
    output     loads of P, loads of V, stores of O
""",
    Question("Q loads", x, "how many elements of Q does `scores` load?",
        there["Q"].loads, "N² threads per head load d each: H·N²d.",
        "One thread computes one score. How long is the row of Q that it reads, and how many threads are there?",
        [(x.H * x.N * x.d, "So many there are. But each of N threads in a row of S reads that row of Q for itself."),
         (x.H * x.N**2, "So many threads there are. How many elements of Q does one of them load?"),
         (2 * x.H * x.N**2 * x.d, "That is Q and K together.")]),
    Question("S", x, "how many elements of S do the three kernels load and store together?",
        there["S"].elements, "Stored once, loaded three times: 4N² for each head.",
        "Which kernel stores S? Which one loads it, and how often does its loop pass over a row?",
        [(x.H * x.N**2, "That is one access each. S is stored by one kernel and loaded by another."),
         (2 * x.H * x.N**2, "Softmax passes over a row more than once."),
         (3 * x.H * x.N**2, "Those are the loads. They were stored, too.")]),
)  # fmt: skip
by_hand = [
    ("scores", "Q loads", "N² threads, d each", "N²d", N * N * d),
    ("", "K loads", "N² threads, d each", "N²d", N * N * d),
    ("", "S stores", "N² threads, 1 each", "N²", N * N),
    ("softmax", "S loads", "N threads, 3N each", "3N²", 3 * N * N),
    ("", "P stores", "N threads, N each", "N²", N * N),
    ("output", "P loads", "Nd threads, N each", "N²d", N * N * d),
    ("", "V loads", "Nd threads, N each", "N²d", N * N * d),
    ("", "O stores", "Nd threads, 1 each", "Nd", N * d),
]
predicted = nf.predict("naive", n=N, d=d, heads=H)
assert predicted.elements == H * sum(elements for *_, elements in by_hand)
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")
this.text(f"""
The total is 4N²d + 5N² + Nd. For {plural(H, "head")} that makes {plural(predicted.elements, "element")}, and
`nf.predict` says the same.
""")

# %% The run.
this.part("The run and its bill")
this.running("naive")
ideal = algorithm0(n=N, d=d, heads=H)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="naive", device=this.device)
this.bill("naive", counted, predicted=predicted, algorithm0=ideal, below=this.exact("naive", out))
this.text(f"""
Predicted and counted agree in each line. Algorithm 0, which reads the operands of each step once, would move
{plural(ideal.elements, "element")}; this stage asks for {counted.elements / ideal.elements:.3g} times as many.

The error is the largest over all elements of O, against NumPy in float64. float32 has 7 digits and rounds after
each operation, so some error is to be expected. "worst case of rounding" is what it could add up to if every
rounding went the same way (`numba_flash.testing.naive_bound` derives it). An error beyond that would be a fault of
the kernel. Most roundings cancel, so an error within it proves little. Later lessons compare their own error with
this kernel's, which is a much closer test.
""")

# %% The picture.
i, j, corner, width = min(3, N - 1), min(7, N - 1), min(N, 12), min(d, 12)
times, again = counted["Q"].loads // (H * N * d), counted["P"].loads // (H * N * N)
part = ", corner" if max(N, d) > 12 else ""
this.part("What one thread reads")
this.show(report.tile_map(
    report.Tiles(f"Q{part}", corner, width, [(i, t) for t in range(width)], f"row {i}: {plural(d, 'load')}"),
    report.Tiles(f"K{part}", corner, width, [(j, t) for t in range(width)], f"row {j}: {plural(d, 'load')}"),
    report.Tiles(f"S{part}", corner, corner, [(i, j)], "one store"),
), "")
this.text(f"""
A cell here is an element. The thread that computes S[{i}, {j}] reads row {i} of Q and row {j} of K. Each of the N
threads in that row of S reads row {i} of Q, and each of the N threads in that column reads row {j} of K. So each
element of Q and of K is loaded N times, here {times:,}, and each element of V as often. The d threads of a row of O
all read the same row of P, so each element of P is loaded d times, here {again}.
""")

# %% Why the two columns agree, and what they do not say.
this.part("Why counted equals predicted")
this.text("""
No load here depends on a value: the guards and the loops look at sizes alone. So the bill is arithmetic in N
and d, and a count that differs by one means that the formula or the kernel is wrong. That is what makes a bill
worth predicting.
""")
this.part("What the bill does not say")
operands = 4 * H * (3 * N * d + N * N)
fit = "so most of the repeated loads end there" if operands < 40e6 else "so part of the repeated loads ends there"
this.text(f"""
Counted is what the threads request. On a GPU not every request reaches HBM: caches keep what was read a moment
ago. Q, K, V and P take {report.in_bytes(operands)} together here, and the L2 cache of an A100 holds 40 MB (NVIDIA's
A100 whitepaper), {fit}. The traffic in the HBM chips is less than this bill, and nearer to Algorithm 0.

But a request that a cache answers still takes its turn in the cache, on the way to it and in the kernel. And
which requests a cache answers depends on what else runs at the time: nobody can predict it to the last element.
A kernel that asks for less does not depend on luck.
""")

# %% What comes next.
tiled = nf.predict("tiled", n=N, d=d, heads=H, blocks=T)
this.part("What to delete first")
share = sum(counted[tensor].loads for tensor in "QKPV") / counted.elements
this.text(f"""
The loads of Q, K, P and V by the two products make up {share:.1%} of the bill: the same elements over and over,
often by threads of one block. Lesson 03 lets the threads of a block share what they load: with tiles of T × T
elements, T = {T} (--blocks), the bill would be {plural(tiled.elements, "element")}.
""")
this.part("Your turn")
double = nf.predict("naive", n=2 * N, d=d, heads=H)
this.tries({
    f"--n {2 * N}": f"Twice the length, {double.elements / predicted.elements:.2f} times the bill.",
    f"--heads {4 * H}": f"Each line of the bill is 4 times as much, {4 * predicted.elements:,} in all.",
})
this.text(f"""
Check yourself: how often is each element of S loaded, in all kernels together? And how often would an element
of K be loaded if there were only one key, and as many queries as now? Answer, then ask:

    import numba_flash as nf
    nf.predict("naive", n={N}, d={d})["S"].loads / {N}**2
    nf.predict("naive", n={N}, d={d}, n_k=1)["K"].loads / {d}
""")
this.end()
