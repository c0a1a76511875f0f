# %% [markdown]
"""Lesson 03, the stage `tiled`. Run it with `python lessons/03_tiled.py`, or open it as a notebook."""

# %%
import math
from fractions import Fraction

import numpy as np
from numba import float32

import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.blocks import tiles
from numba_flash.engine.model import STATIC_SHARED, THREADS
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.masks import no_mask
from numba_flash.questions import Question
from numba_flash.stages import tiled

this = lesson.start("03 · tiled", stage="tiled", sizes="N = {n}, d = {d}, float32, {heads}, T = {blocks}")
N, d, H, T = this.n, this.d, this.heads, this.blocks
Tr, Td = tiles(N, T), tiles(d, T)                            # tiles along N, tiles along d

this.part("The question")
this.text("""
In the naive stage (lesson 02) each row of Q is fetched by N threads, each for itself, and so is each row of K.
How much of that goes away if the threads of a block fetch together?

Shared memory, tile and barrier are from lesson 00 (parts 4, 7 and 8), the square block, `g`, `b`, `mask` and `allowed`
from lesson 02 (part 2).
""")

# %% The kernel.
allowed = no_mask().allowed                                  # masks are for lesson 08: here every pair is allowed
scores = tiled.make_scores(T, float32, allowed)
this.part("The kernel")
this.text(f"""
Cut the N × N scores into tiles of T × T, here {T} × {T} (--blocks sets T). A block of T × T threads computes
one tile of S, one element per thread. For that it needs T rows of Q and T rows of K. It reads them in tiles too:
it walks along d, T columns at a time, and in each step the block loads one tile of Q and one of K into shared
memory, one element of each per thread. `load_or_zero` gives 0 outside the matrix, where a tile hangs over the edge,
and loads nothing there. (numba_flash/stages/tiled.py)

A comment with a number before a colon, such as "{lesson.line_of(scores, "real(-math.inf)")}: Alg. 0, l. 1", is that of
the line with this number, beside which it has no room. A comment alone in its line is about the next one.
""")
this.source(scores)
this.text("""
`row` is the query of the thread, `col` its key. A thread does not load what it uses: it loads its share of what
all threads of the block use. Thread (tx, ty) loads Q_i[ty, tx] and K_j[ty, tx]. Row ty of Q_i belongs to the query
of this thread, but row ty of K_j belongs to the key of another: the keys are numbered along x, so the key of this
thread is in row tx. Hence `Q_i[ty, t] * K_j[tx, t]`. For T = 4, this is thread tx = 1, ty = 2:

           Q_i              K_j              S, the tile
    tx     0 1 2 3          0 1 2 3          0 1 2 3
    ty 0   . . . .          . . . .          . . . .
       1   . . . .          u u u u          . . . .
       2   u L u u          . L . .          . w . .
       3   . . . .          . . . .          . . . .

    L  it loads this one            u  it uses these (and L in Q_i)
    w  it writes this one: query in row 2, key in column 1

Shared memory has 32 banks, and a bank serves one address at a time. The comment about banks marks where threads of
a warp (lesson 00) may have to wait for each other; the bill does not see that, and lesson 12 measures it.

The other elements that it uses were loaded by other threads, and each element that was loaded is used by T
threads. The product O = PV is computed in the same way, and softmax is the naive one.
""")

# %% The prediction, by hand.
this.part("A prediction: the loads")
x = this.draw(N=range(70, 200, 10), d=(20, 36, 44), T=(8, 16), H=(7, 11, 13))
there, across = nf.predict("tiled", n=x.N, d=x.d, heads=x.H, blocks=x.T), tiles(x.d, x.T)
this.ask("""
Which lines of naive's bill change? Take an element of Q: how many blocks load it, and how often does each of
them? Do the same for K, and then, in O = PV, for P and V; O has N rows and d columns. ⌈N/T⌉ is the number of
tiles along N, ⌈d/T⌉ along d.
""",
    Question("Q loads", x, "how many elements of Q does `scores` load?",
        there["Q"].loads, "H·N·d·⌈N/T⌉.", "S has ⌈N/T⌉ columns of tiles. Which of their blocks need a given row of Q?",
        [(x.H * x.N**2 * x.d, "That is naive: once per column of S. Now it is once per column of tiles."),
         (x.H * x.N * x.d * (x.N // x.T), "The last tile hangs over the edge, and its block loads, too: round up."),
         (Fraction(x.H * x.N**2 * x.d, x.T), "The last tile hangs over the edge, and its block loads, too: round up."),
         (x.H * x.N * x.d * across, "⌈d/T⌉ is how many steps a block takes. How many blocks load the same row of Q?"),
         (x.H * x.N * x.d, "So many there are. But every block of a row of the grid loads them.")]),
    Question("P loads", x, "how many elements of P does `output` load?",
        there["P"].loads, "H·N²·⌈d/T⌉.", "O has N rows and d columns. How many columns of tiles does that make?",
        [(x.H * x.N**2 * x.d, "That is naive: once per column of O. Now it is once per column of tiles."),
         (x.H * x.N**2, "That would be once. But each column of tiles of O needs all of P."),
         (x.H * x.N**2 * (x.d // x.T), "The last tile hangs over the edge, and its block loads, too: round up."),
         (Fraction(x.H * x.N**2 * x.d, x.T), "The last tile hangs over the edge, and its block loads, too: round up."),
         (x.H * x.N**2 * tiles(x.N, x.T), "⌈N/T⌉ is along N. Which side of O runs along x in this product?")]),
)  # fmt: skip
by_hand = [
    ("scores", "Q loads", "once per column of tiles of S", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "K loads", "once per row of tiles of S", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "S stores", "as before", "N²", N * N),
    ("softmax", "S loads", "as before", "3N²", 3 * N * N),
    ("", "P stores", "as before", "N²", N * N),
    ("output", "P loads", "once per column of tiles of O", "N²·⌈d/T⌉", N * N * Td),
    ("", "V loads", "once per row of tiles of O", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "O stores", "as before", "Nd", N * d),
]
predicted = nf.predict("tiled", n=N, d=d, heads=H, blocks=T)
assert predicted.elements == H * sum(elements for *_, elements in by_hand)
whole = ", which is N²d/T because T divides N" if N % T == 0 else ", more than N²d/T, because T does not divide N"
this.text(f"""
In naive each element of Q was loaded once per column of S, N times. Now it is loaded once per column of tiles,
⌈N/T⌉ = {Tr:,}. So N²d becomes N·d·⌈N/T⌉{whole}. O has ⌈d/T⌉ = {plural(Td, "column")} of tiles. For one head:
""")
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")

# %% The run.
this.part("The run and its bill")
this.running("naive, then tiled")
ideal = algorithm0(n=N, d=d, heads=H)
with nf.ledger() as before:
    naive_out = nf.attention(*this.inputs, stage="naive", device=this.device)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="tiled", blocks=T, device=this.device)
this.bill("tiled", counted, predicted=predicted, previous=("naive", before), algorithm0=ideal,
          below=this.exact("tiled", out, naive_out))  # fmt: skip
equal, apart = np.array_equal(out, naive_out), float(np.abs(out - naive_out).max())
this.figures["equal_to_naive"] = equal
found = "the same, to the last bit" if equal else f"not the same, but differ by {apart:.1e} at most"
verdict = f"""Compared with `np.array_equal`, the two outputs are {found}.
{"On a GPU they may differ in the last bits: its" if equal else "A"} compiler"""
this.text(f"""
`/ naive` is the count divided by that of naive: ⌈N/T⌉/N = {Tr / N:.4g} for Q, K and V, ⌈d/T⌉/d = {Td / d:.4g} for P,
and 1 for the rest.

Both stages compute in float32, with 7 digits, and each operation rounds; so both differ a little from NumPy's
float64. "exact" means that tiled's error is at most twice naive's, plus a few roundings
(`numba_flash.testing.bound`).

tiled adds in the same order as naive: t from 0 up, then the zeros past the edge, which change nothing.
{verdict} may fuse a product and a sum into one operation with one rounding, and not at the same places in
both kernels.
""")
totals = {"naive": before.elements, "tiled": counted.elements, "Algorithm 0": ideal.elements}
this.show(report.bars(totals, "elements"), "")

# %% The picture.
by, bx, tall, wide = min(3, Tr - 1), min(7, Tr - 1), min(Tr, 12), min(Td, 12)
queries, keys = min(T, N - by * T), min(T, N - bx * T)       # fewer than T at the edge
along = ", from left to right" if Td > 1 else ""
part = ", corner" if max(Tr, Td) > 12 else ""
this.part("What one block reads")
this.show(report.tile_map(
    report.Tiles(f"Q{part}", tall, wide, [(by, t) for t in range(wide)], f"row {by} of tiles{along}"),
    report.Tiles(f"K{part}", tall, wide, [(bx, t) for t in range(wide)], f"row {bx} of tiles{along}"),
    report.Tiles(f"S{part}", tall, tall, [(by, bx)], "the tile it writes"),
), "")
again = f"""All {Tr:,} blocks in that row of the grid read the same part of Q, and all {Tr:,} in that column the same
part of K: those are the loads that are left."""
this.text(f"""
A cell here is a tile, of {T} × {T} elements{" or fewer at an edge" if N % T or d % T else ""}. The block in row {by}
and column {bx} of the grid reads {queries} × {d} elements of Q and {keys} × {d} of K, and writes {queries} × {keys}
of S. {again if Tr > 1 else "It is the only one, so nothing is read twice."}
""")

# %% The price.
this.part("What a larger tile costs")
sizes = sorted({4, 8, 16, 32, T})
bills = {size: nf.predict("tiled", n=N, d=d, heads=H, blocks=size).elements for size in sizes}
threads, memory = math.isqrt(THREADS), math.isqrt(STATIC_SHARED // 8)
this.show(report.table(["T", "threads", "shared bytes", "elements", "/ ideal"], [
    [size, size * size, 2 * size * size * 4, bills[size], bills[size] / ideal.elements] for size in sizes
]), "")
this.text(f"""
A block has T² threads, and two tiles of T² elements of 4 bytes take 2·T²·4 bytes of shared memory. A block may
have up to {THREADS:,} threads and {STATIC_SHARED:,} bytes. Beyond T = {threads} the threads are too many; beyond
T = {memory} the bytes are, too, and the error message names those. So T = {threads} is the end, because of the
threads. A thread that computes more than one element lifts that limit (lesson 12).

A tile may be wider than what it covers. From T = d on, P is loaded once, and a larger T saves nothing more on it;
the columns of Q_i and K_j past d hold zeros. From T = N on, Q, K and V are loaded once, too.
""")

# %% The barriers.
small = 4
Q, K, S = (np.ones((1, small, columns), np.float32) for columns in (2 * small, 2 * small, small))
this.part("Two barriers, and what each is for")
this.text(f"""
The same kernel in tiles of {small} × {small}, first with one barrier removed, then with the other, in strict mode,
which looks for races (lesson 00).
""")
for which, why in (
    (1, "A thread may read an element of a tile that its neighbour has not loaded yet. Barrier 1 says: complete."),
    (2, "A fast thread is a step ahead and overwrites a tile that a slow one still reads. Barrier 2 says: finished."),
):
    kernel = tiled.make_scores(small, float32, allowed)
    this.running(f"without barrier {which}, line {lesson.line_of(kernel, 'cuda.syncthreads()', which)}")
    try:
        broken = lesson.without(kernel, "cuda.syncthreads()", which)
        nf.launch(broken, 1, (small, small), Q, K, no_mask("cpu").keys, S, np.float32(1), device="cpu", strict=True)
    except nf.errors.KernelError as error:
        this.fault(error)
    this.text(why)

# %% What changed and why.
this.part("What changed, and what did not")
trips_before, trips_now = (5 * H * N * N / bill.elements for bill in (before, counted))
work = [nf.flops(stage, n=N, d=d, heads=H, blocks=blocks) for stage, blocks in (("naive", None), ("tiled", T))]
this.figures["flops"] = dict(zip(("naive", "tiled"), work))
same = f"The arithmetic is the same, {work[0]:,} FLOPs in both stages."
more = f"""The arithmetic is {work[0]:,} FLOPs in naive and {work[1]:,} here, more because tiles hang over an edge and
their zeros are multiplied too."""
this.text(f"""
{same if work[0] == work[1] else more} The results are the same{"" if equal else ", but for rounding"}.

The loads of Q, K and V are divided by N/⌈N/T⌉ = {N / Tr:.4g}, those of P by d/⌈d/T⌉ = {d / Td:.4g}. That is T where T
divides N, or d for P, and less where it does not; for P it is never more than d, however large T is.

S and P stay. The three steps are three kernels, and a kernel hands its result to the next through HBM: softmax
needs a whole row of S, which {plural(Tr, "block")} wrote. S stored, S loaded three times and P stored are 5N²
elements, {trips_before:.1%} of naive's bill and {trips_now:.0%} of this one. Larger tiles leave them as they are. The
next lessons take them out.
""")

this.part("Your turn")
other = 32 if T != 32 else 16
ragged = next((n for n in (N - N // 40, N + 1, N + 2) if n % T and n != N), None)
Q_loads, Q_then = counted["Q"].loads, H * N * d * tiles(N, other)
enough = -(-N // (N // (2 * d))) if N >= 2 * d else None     # the smallest T with 2·N·d·⌈N/T⌉ ≤ N²
then = "Then run the lesson with that T as --blocks." if enough else ""
then += " Which limits refuse it: threads, shared memory or both (part 6)?" if enough and enough > threads else ""
this.tries({
    f"--blocks {other}": f"Loads of Q: {Q_then:,}, where now there are {Q_loads:,}. The total: {bills[other]:,}.",
    **({f"--n {ragged}": "N is not a multiple of T, and tiles hang over the edges. The bill is still exact."}
       if ragged else {f"--n {2 * N}": "Twice the length. Which lines of the bill are 4 times as much?"}),
})  # fmt: skip
this.text(f"""
Check yourself: from which T on, if from any, does the scores kernel load no more elements of Q and K together
than it stores of S? Work it out from the table of the prediction, and check it with

    nf.predict("tiled", n={N}, d={d}, blocks=T)

which takes any T. {then}
""")
this.end()
