"""Lesson 02, the stage `naive`. Run it with `python lessons/02_naive.py`, or open it as a notebook."""

# %%
from numba import float32

import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.hbm.predict import algorithm0
from numba_flash.stages import naive

this = lesson.start("02 · naive", stage="tiled")
N, d, H, T = this.n, this.d, this.heads, this.blocks

this.part("The question")
this.text("""
What does attention cost if every thread fetches from HBM whatever it needs, whenever it needs it?
""")

# %% Three kernels, one for each step of Algorithm 0.
scores, softmax, output = naive.make_scores(float32), naive.make_softmax(float32), naive.make_output(float32)
this.part("The kernels")
this.text("""
The stage is in numba_flash/stages/naive.py. It has a kernel for each step of Algorithm 0 (lesson 01). The first
computes the scores, S = scale·QKᵀ, one thread for each element of S:
""")
this.source(scores)
this.text("""
The grid has two axes over S and a third over the heads. `g` is the head of K and V, the same as `h` here.
`real` is the type of the numbers, float32; `acc` is in a register. The comment at the end names the line of the
paper's algorithm.

Softmax has one thread for each row of S, which passes over it three times, for the maximum m, for the sum l,
and for P:
""")
this.source(softmax, "m = real", "P[h")
this.text("""
And O = PV, one thread for each element of O:
""")
this.source(output, "acc = real", "O[h")

# %% The prediction, by hand.
this.part("The prediction")
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
this.text("""
Read off the kernels how many threads there are and what each of them loads and stores. For one head:
""")
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")
this.text(f"""
The total is 4N²d + 5N² + Nd. For {H} head{'s' * (H > 1)} that is {predicted.elements:,} elements, and
`nf.predict` says the same.
""")

# %% The run.
this.part("The run and its bill")
ideal = algorithm0(n=N, d=d, heads=H)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="naive", device=this.device)
this.bill("naive", counted, predicted=predicted, algorithm0=ideal, below=this.exact("naive", out))
this.text(f"""
Predicted and counted agree in each line. Algorithm 0, which reads the operands of each step once, would move
{ideal.elements:,} elements; this stage asks for {counted.elements / ideal.elements:.3g} times as many.

The error is the largest over all elements of O, against NumPy in float64. "exact" means that it is within the
bound for this sum in float32, which `numba_flash.testing.naive_bound` derives. Later lessons compare their own
error with this one.
""")

# %% The picture.
i, j, corner, width = min(3, N - 1), min(7, N - 1), min(N, 12), min(d, 12)
this.part("What one thread reads")
this.show(report.tile_map(
    report.Tiles("Q, corner", corner, width, [(i, t) for t in range(width)], f"row {i}: {d} loads"),
    report.Tiles("K, corner", corner, width, [(j, t) for t in range(width)], f"row {j}: {d} loads"),
    report.Tiles("S, corner", corner, corner, [(i, j)], "one store"),
), "")
this.text(f"""
A cell here is an element. The thread that computes S[{i}, {j}] reads row {i} of Q and row {j} of K. All N =
{N:,} threads of that row of S read row {i} of Q again, and those of its column row {j} of K. So each element of
Q and of K is loaded {counted['Q'].loads // (H * N * d):,} times, and each of V as often. A row of O has d = {d}
threads that read the same row of P, so each element of P is loaded {d} times.
""")

# %% Why the two columns agree, and what they do not say.
this.part("Why counted equals predicted")
this.text("""
No load here depends on a value: the guards and the loops look at sizes alone. So the bill is arithmetic in N
and d, and a count that differs by one means that the formula or the kernel is wrong. That is what makes a bill
worth predicting.
""")
this.part("What the bill does not say")
kilobytes = report.in_bytes(4 * H * N * d)
this.text(f"""
Counted is what the threads request. On a GPU not every request reaches HBM: caches keep what was read a moment
ago. Q is {kilobytes} here, and the L2 cache of an A100 holds 40 MB (NVIDIA's A100 whitepaper), so most of the
repeated loads end there. The traffic in the memory chips is nearer to Algorithm 0 than this bill is.

But a request that a cache answers still takes its turn in the cache, on the way to it and in the kernel. And
which requests a cache answers depends on what else runs at the time: nobody can predict it to the last element.
A kernel that asks for less does not depend on luck.
""")

# %% What comes next.
tiled = nf.predict("tiled", n=N, d=d, heads=H, blocks=T)
this.part("What to delete first")
share = sum(counted[tensor].loads for tensor in "QKPV") / counted.elements
this.text(f"""
{share:.1%} of the bill are loads of Q, K, P and V by the two products: the same elements over and over, often
by threads of one block. Lesson 03 lets a block share what it loads: with tiles of side T = {T} the bill is
{tiled.elements:,} elements.
""")
this.part("Your turn")
double = nf.predict("naive", n=2 * N, d=d, heads=H)
this.tries({
    f"--n {2 * N}": f"Twice the length, {double.elements / predicted.elements:.2f} times the bill.",
    f"--heads {4 * H}": f"Each line of the bill is 4 times as much, {4 * predicted.elements:,} in all.",
})
this.text(f"""
Check yourself: how often is each element of S loaded, in all kernels together? And how often would an element
of K be loaded if there were {N:,} queries and only one key? Answer, then ask:

    import numba_flash as nf
    nf.predict("naive", n={N}, d={d})["S"].loads / {N}**2
    nf.predict("naive", n={N}, d={d}, n_k=1)["K"].loads / {d}
""")
this.end()
