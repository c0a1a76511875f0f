"""Lesson 03, the stage `tiled`. Run it with `python lessons/03_tiled.py`, or open it as a notebook."""

# %%
import math

import numpy as np
from numba import float32

import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.engine.model import STATIC_SHARED, THREADS
from numba_flash.hbm.predict import algorithm0
from numba_flash.stages import tiled, tiles

this = lesson.start("03 · tiled", stage="tiled", sizes="N = {n}, d = {d}, float32, {heads}, T = {blocks}")
N, d, H, T = this.n, this.d, this.heads, this.blocks
Tr, Td = tiles(N, T), tiles(d, T)                            # tiles along N, tiles along d

this.part("The question")
this.text("""
In the naive stage (lesson 02) thousands of threads fetch the same rows of Q and K, each for itself. How much of
that goes away if the threads of a block fetch together?
""")

# %% The kernel.
scores = tiled.make_scores(T, float32)
this.part("The kernel")
this.text(f"""
Cut the N × N scores into tiles of T × T, here {T} × {T}. A block of T × T threads computes one tile of S, one
element a thread. For that the block needs T rows of Q and T rows of K, and it reads them in tiles too: it walks
along d, {T} columns at a time, and at each step every thread loads one element of Q and one of K into shared
memory. (numba_flash/stages/tiled.py)
""")
this.source(scores, "Q_i = cuda.shared")
this.text("""
Each element that was loaded is now used by T threads. `load_or_zero` gives 0 outside the matrix, where a tile
hangs over the edge, and loads nothing there. The product O = PV is computed in the same way, and softmax is the
naive one.
""")

# %% The prediction, by hand.
this.part("The prediction")
by_hand = [
    ("scores", "Q loads", "once a column of tiles", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "K loads", "once a row of tiles", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "S stores", "as before", "N²", N * N),
    ("softmax", "S loads", "as before", "3N²", 3 * N * N),
    ("", "P stores", "as before", "N²", N * N),
    ("output", "P loads", "once a column of tiles", "N²·⌈d/T⌉", N * N * Td),
    ("", "V loads", "once a row of tiles", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "O stores", "as before", "Nd", N * d),
]
predicted = nf.predict("tiled", n=N, d=d, heads=H, blocks=T)
assert predicted.elements == H * sum(elements for *_, elements in by_hand)
this.text(f"""
In naive each element of Q was loaded once for each of N columns of S. Now it is loaded once for each column of
tiles, and there are ⌈N/T⌉ = {Tr}. So N²d becomes N²d/T. The tiles of O are fewer, ⌈d/T⌉ = {Td} columns. For one
head:
""")
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")

# %% The run.
this.part("The run and its bill")
ideal = algorithm0(n=N, d=d, heads=H)
with nf.ledger() as before:
    naive_out = nf.attention(*this.inputs, stage="naive", device=this.device)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="tiled", blocks=T, device=this.device)
this.bill("tiled", counted, predicted=predicted, previous=("naive", before), algorithm0=ideal,
          below=this.exact("tiled", out, naive_out))  # fmt: skip
this.text(f"""
`x naive` is the count divided by that of naive: about 1/T = {1 / T:.3f} for the operands of both products, 1
for the rest. "exact" means an error of at most twice naive's own and a few roundings
(`numba_flash.testing.bound`).
""")
totals = {"naive": before.elements, "tiled": counted.elements, "Algorithm 0": ideal.elements}
this.show(report.bars(totals, "elements"), "")

# %% The picture.
by, bx = Tr // 3, Tr // 2
this.part("What one block reads")
this.show(report.tile_map(
    report.Tiles("Q", Tr, Td, [(by, t) for t in range(Td)], f"row {by} of tiles, read from left to right"),
    report.Tiles("K", Tr, Td, [(bx, t) for t in range(Td)], f"row {bx} of tiles"),
    report.Tiles("S", Tr, Tr, [(by, bx)], "the tile it writes"),
), "")
this.text(f"""
The block at column {bx} and row {by} of the grid reads T × d elements of Q and as many of K, and writes T × T
of S. The {Tr} blocks of its row read the same part of Q, and the {Tr} of its column the same part of K: those
are the loads that are left.
""")

# %% The price.
this.part("What a larger tile costs")
sizes = sorted({4, 8, 16, 32, T})
bills = {size: nf.predict("tiled", n=N, d=d, heads=H, blocks=size).elements for size in sizes}
threads, memory = math.isqrt(THREADS), math.isqrt(STATIC_SHARED // 8)
this.show(report.table(["T", "threads", "shared bytes", "elements", "x ideal"], [
    [size, size * size, 2 * size * size * 4, bills[size], bills[size] / ideal.elements] for size in sizes
]), "")
this.text(f"""
A block has T² threads, and two tiles of T² elements of 4 bytes are 2·T²·4 bytes of shared memory. A block may
have up to {THREADS:,} threads and {STATIC_SHARED:,} bytes, so T = {threads} is the end, because of the threads.
Shared memory would have room for T = {memory}. A thread that computes more than one element lifts that limit (a
later stage).
""")

# %% The barriers.
this.part("Two barriers, and what each is for")
small = 4
Q, K, S = (np.ones((1, small, columns), np.float32) for columns in (2 * small, 2 * small, small))
for which, why in (
    (1, "A thread may read an element of a tile that its neighbour has not loaded yet. Barrier 1 says: complete."),
    (2, "A fast thread is a step ahead and overwrites a tile that a slow one still reads. Barrier 2 says: finished."),
):
    this.text(f"The same kernel (tiles of {small} × {small}) without barrier {which}, in strict mode:")
    try:
        broken = lesson.without(tiled.make_scores(small, float32), "cuda.syncthreads()", which)
        nf.launch(broken, 1, (small, small), Q, K, S, np.float32(1), device="cpu", strict=True)
    except nf.errors.KernelError as error:
        this.fault(error)
    this.text(why)

# %% What changed and why.
this.part("What changed, and what did not")
trips_before, trips_now = (5 * H * N * N / bill.elements for bill in (before, counted))
work = [nf.flops(stage, n=N, d=d, heads=H, blocks=blocks) for stage, blocks in (("naive", None), ("tiled", T))]
this.figures["flops"] = dict(zip(("naive", "tiled"), work))
this.text(f"""
The arithmetic is the same, {work[0]:,} FLOPs in naive and {work[1]:,} here. (More where tiles hang over an
edge: their zeros are multiplied too.) So are the numbers, up to the order of the sums. The loads of the
operands are divided by T.

S and P stay. The three steps are three kernels, and a kernel hands its result to the next through HBM: softmax
needs a whole row of S, which {Tr} blocks have written. S stored, S loaded three times and P stored are 5N²
elements, {trips_before:.1%} of naive's bill and {trips_now:.0%} of this one. Larger tiles leave them as they
are. Lesson 04 begins to take them out.
""")

this.part("Your turn")
other, ragged = (32 if T != 32 else 16), N - N // 40
Q_loads, Q_then = counted["Q"].loads, H * N * d * tiles(N, other)
this.tries({
    f"--blocks {other}": f"Loads of Q: {Q_then:,} instead of {Q_loads:,} elements. The total: {bills[other]:,}.",
    f"--n {ragged}": "Where N is no multiple of T, tiles hang over the edges. The bill is still exact.",
})
this.text(f"""
Check yourself: at which T would the scores kernel load as many elements of Q and K together as it stores of S?
Work it out from the table of the prediction, check it with `nf.predict("tiled", n={N}, d={d}, blocks=T)`, which
takes any T, and find out with --blocks why the kernel cannot run with it.
""")
this.end()
