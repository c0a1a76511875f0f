# %% [markdown]
"""Lesson 10, block-sparse attention. Run `python lessons/10_block_sparse.py`, or open it as a notebook."""

# %%
import numpy as np
from numba import float32

import numba_flash as nf
from numba_flash import lesson, masks, patterns, reference, report, testing
from numba_flash.blocks import choose_blocks, fitting_blocks, tiles
from numba_flash.figures.measured import SPARSE
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.questions import Question
from numba_flash.stages import flash2

this = lesson.start("10 · block-sparse", stage="flash2", blocks=None)
N, d, H, where = this.n, this.d, this.heads, this.device
fit = choose_blocks("flash2", d=d, direction="both")


def sides_for(n):
    return this.blocks or tuple(min(tiles(n, 8), side) for side in fit)  # for both passes, and not too few


Br, Bc = sides = sides_for(N)
fitting_blocks("flash2", sides, d=d, dtype="float32", direction="backward")
Tr, Tc = tiles(N, Br), tiles(N, Bc)
size, q, k, v, dout = {"n": N, "d": d, "heads": H}, *this.inputs, this.dout

this.part("The question")
this.text("""
Each query sees each key, so the work of attention grows like N². FlashAttention does all of it, and its traffic grows
like N²/Br. In a long text most weights are small. To leave out a single score saves nothing, since its tile is loaded
all the same (lesson 08). To leave out a whole tile saves all that it would load and compute.

Which tiles does one leave out, what does that save, and what does it cost?
""")

# %% Which tiles.
this.part("Patterns of tiles")
T = 16
makers = {"local": patterns.local, "strided": patterns.strided, "butterfly": patterns.butterfly}
shapes = {name: make(T, T, (1, 1)) for name, make in makers.items()}
this.text(f"""
A block mask is a matrix of Tr × Tc bits, one for each tile of S, the same for all heads. Three patterns, drawn for
{T} × {T} tiles; what is filled is computed:
""")
this.show(report.tile_map(*(report.Tiles(name, T, T, np.argwhere(mask), f"{mask.mean():.1%} of the tiles")
                            for name, mask in shapes.items())), "")  # fmt: skip
this.text(f"""
local: each tile of queries sees its own place, and one more on each side. strided: the same, and every fourth place
from its own (both after Child et al. 2019, arXiv:1904.10509). butterfly: the places whose numbers, in binary, differ in
one digit at most, as in a fast Fourier transform (Chen et al. 2021, arXiv:2112.00029). They are functions of the
lengths and the sides of a tile in `numba_flash.patterns`; any other boolean matrix will do. Below, a tile has {Br} ×
{Bc} scores, Tr = {Tr} and Tc = {Tc}. A place is as long as the longer side of a tile: {plural(max(Br, Bc), "word")}.
(In the pictures a tile is 1 × 1, and so a place.)
""")

# %% The kernel.
this.part("The kernel")
none = masks.no_mask()
this.text("""
`visited` says whether the tile of query i and key j is to be computed. `sparse` is a constant of the kernel, 1 with a
block mask. Below it, where `flash2` asks for it (comments as in lesson 05, part 7):
""")
this.source(masks.make_visited(1, Br, Bc))
kernel = flash2.make_forward(Br, Bc, d, float32, none.allowed, none.seen, none.visited, none.keep(float32))
this.source(kernel, "for j in range(0, keys", "V_j[e // d")
this.text("""
That is Algorithm 5 of the paper: Algorithm 1, and a line 8 that goes on to the next tile where the mask has a zero. All
threads of a block ask for the same element, so all of them skip the tile, or none does. (If some did, they would miss
the barrier that follows.) The price: each of the Br threads reads one byte at each step.

FlashAttention is exact: all stages so far compute the same function. This is another function, since a key in a tile
that is left out has no weight. A model that was trained with it has this layer. For a model that was trained with all
scores it is an approximation, and nothing says that it is a good one.
""")

# %% The prediction, by hand.
this.part("A prediction: the bill")
x = this.draw(Tr=range(4, 10), Br=(8, 16), d=(8, 12, 16), H=range(2, 7))
full = x.Tr * x.Br
there = nf.predict("flash2", n=full, d=x.d, heads=x.H, blocks=(x.Br, x.Br),
                   block_mask=patterns.local(full, full, (x.Br, x.Br)))  # fmt: skip
this.ask("""
Take `local`, with as many places as there are tiles of queries, Tr, each of Br keys. How many places do the tiles of
queries see together? And for one head: how many elements of K and V does flash2 load, and how many bytes of the mask?
""",
    Question("K loads", x, "tiles are Br × Br, and N = Tr·Br. How many elements of K does flash2 load with `local`?",
        there["K"].loads, "3Tr - 2 places of Br keys, d elements each: H·(3Tr - 2)·Br·d.",
        "How many places does a tile of queries in the middle see? And the first, and the last?",
        [(x.H * 3 * full * x.d, "The first and the last place have only one neighbour."),
         (x.H * (3 * x.Tr - 1) * x.Br * x.d, "Both the first and the last place lack a neighbour."),
         (x.H * x.Tr * full * x.d, "That is dense attention."),
         (x.H * full * x.d, "A tile of queries sees its neighbours, too."),
         (2 * there["K"].loads, "That is K and V together.")]),
    Question("mask", x, "the same. How many bytes of the mask are loaded?",
        there["block_mask"].read_bytes, "Each of H·Tr·Br threads asks for one byte at each of Tr tiles: H·Tr²·Br.",
        "One byte of the mask is asked for by all threads of a block. Is a tile asked for that is left out?",
        [(x.H * x.Tr**2, "So many places there are, a byte each. But each of Br threads of a block asks for itself."),
         (x.H * (3 * x.Tr - 2) * x.Br, "The mask is asked at each tile, also at those that are left out then.")]),
)  # fmt: skip
local = patterns.local(N, N, sides)
keys = int((local * np.minimum(Bc, N - np.arange(Tc) * Bc)).sum())  # the last tile may be short
masked = {"block_mask": local, "blocks": sides}
predicted = nf.predict("flash2", **size, **masked)
dense = nf.predict("flash2", **size, blocks=sides)
assert predicted.elements == H * (2 * N * d + N + 2 * keys * d + Tr * Br * Tc)
ends = "The first and the last place have one neighbour, the others two" if Tr > 1 else "One place without neighbours"
even = "" if keys == (3 * Tr - 2) * Br else f"(The tiles do not fit so evenly here: it is {plural(keys, 'key')}.) "
this.text(f"""
{ends}: 3Tr - 2 = {plural(3 * Tr - 2, "place")}. With Br keys each that is {plural((3 * Tr - 2) * Br, "key")}, instead
of Tr·N = {Tr * N:,}. {even}So flash2 loads d times that, {plural(keys * d, "element")} of K, and as many of V. The
Tr·Br threads ask for a byte of the mask at each of Tc tiles of keys: {plural(Tr * Br * Tc, "byte")}.
""")


# %% The run.
def by_naive(visited):
    """What the stage naive makes of each tile of queries with the keys that it sees -> out, dq, dk, dv; and bounds."""
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    limits = np.zeros((3, N))                                # of dq for each query, of dk and dv for each key
    for i, row in enumerate(visited):
        rows, seen = slice(i * Br, (i + 1) * Br), np.flatnonzero(np.repeat(row, Bc)[:N])
        part = q[:, rows], k[:, seen], v[:, seen]
        out[:, rows] = nf.attention(*part, stage="naive", device=where)
        dq[:, rows], dk_i, dv_i = nf.attention_backward(*part, dout[:, rows], stage="naive", device=where)
        dk[:, seen] += dk_i
        dv[:, seen] += dv_i
        for limit, at, bound in zip(limits, (rows, seen, seen), testing.gradient_bounds(*part, dout[:, rows]).values()):
            limit[at] += bound
    return (out, dq, dk, dv), limits.max(axis=1)


this.part("The run and its bill")
this.running("flash2 with the three patterns")
work, bills, outs = nf.flops("flash2", **size, blocks=sides), {}, {}
rows = [["dense", Tr * Tc, "1.000", dense.elements, "1.000", "1.000", "-"]]
for name, make in makers.items():
    mask = make(N, N, sides)
    with nf.ledger() as bill:
        outs[name] = nf.attention(q, k, v, block_mask=mask, blocks=sides, device=where)
    assert bill == nf.predict("flash2", **size, block_mask=mask, blocks=sides)
    away = this.figures[f"{name}, away from dense"] = float(np.abs(outs[name] - this.reference).max())
    done = nf.flops("flash2", **size, block_mask=mask, blocks=sides) / work
    rows.append([name, int(mask.sum()), f"{mask.mean():.3f}", bill.elements, f"{bill.elements / dense.elements:.3f}",
                 f"{done:.3f}", f"{away:.1e}"])  # fmt: skip
    bills[name] = bill
with nf.ledger() as bills["step"]:
    gradients = nf.attention_backward(q, k, v, dout, **masked, device=where)
truth = reference.attention(q, k, v, **masked)[0], *reference.attention_backward(q, k, v, dout, **masked)
naive, limits = by_naive(local)
errors = {}
for at, name in enumerate(("out", "dq", "dk", "dv")):
    error, own = (float(np.abs(got[at] - truth[at]).max()) for got in ((outs["local"], *gradients), naive))
    errors[name] = error, own, limits[at - 1] + 2 * own if at else testing.bound(truth[0], own, n_k=N)
    this.figures["errors"] |= {f"naive, {name}": own, f"flash2, {name}": error}
this.bill("local", bills["local"], predicted=predicted, previous=("dense", dense), algorithm0=algorithm0(**size),
          below=report.gradient_error_lines(errors))  # fmt: skip
predicted_step = nf.predict("flash2", **size, **masked, direction="both")
this.keep_bill("local, step", bills["step"], predicted_step)
assert bills["step"] == predicted_step
step = predicted_step.elements / (dense + nf.predict("flash2", **size, blocks=sides, direction="backward")).elements
causal = nf.predict("flash2", **size, **masked, causal=True)
this.text(f"""
The reference in float64 has the same mask, and naive takes each tile of queries with the keys that the tile sees. So
the kernels compute their function exactly, forward and backward. A training step moves {bills["step"].elements:,}
elements, predicted and counted, which is {step:.3f} of a dense one. (The kernels of the backward pass have shorter
steps, of up to 8 rows, and ask for the mask at each: {plural(predicted_step["block_mask"].loads, "byte")} in all. An
element of the mask is a byte, one of K four: in bytes local is {bills["local"].total_bytes / dense.total_bytes:.3f} of
dense, forward.)

With causal order as well, the forward pass loads {plural(causal["K"].loads, "element")} of K, instead of
{predicted["K"].loads:,}.

The patterns; s is the part of the tiles that is computed, and the last column how far the output is at most from that
of dense attention:
""")
this.show(report.table(["pattern", "tiles", "s", "elements", "/ dense", "FLOPs / dense", "away from dense"], rows), "")
this.text(f"""
Where tiles are left out, that distance is no rounding error. (Random input has no reason to prefer near keys.) s
depends on the number of places: {plural(tiles(N, max(Br, Bc)), "place")} here, {T} in the pictures.
""")

# %% Proposition 4.
this.part("Linear in s")
this.text("""
Proposition 4 of the paper: block-sparse FlashAttention moves Θ(Nd + N²d²s/M) elements, where M of them fit on chip. A
test with N = 320, d = 64 and 20 × 20 tiles of 16 × 16: for each s that part of the tiles is drawn at random, the
kernels run, and a line a + b·s is fitted to what is counted (least squares). Forward pass, and training step:
""")
rng, n, parts = np.random.default_rng(this.seed), 320, np.arange(1, 11) / 10
(Q, K, V), order, counted = testing.inputs((1, n, 64), (1, n, 64), seed=this.seed), rng.permutation(400), []
for s in parts:
    masked = {"block_mask": (order < round(400 * s)).reshape(20, 20), "blocks": (16, 16), "device": where}
    with nf.ledger() as forward:
        nf.attention(Q, K, V, **masked)
    with nf.ledger() as both:
        nf.attention_backward(Q, K, V, Q, **masked)
    counted.append([forward.elements, both.elements])
slopes, starts = np.polyfit(parts, counted, 1)
lines = np.rint(np.outer(parts, slopes) + starts).astype(int)
this.show(report.table(["s", "forward", "line", "residual", "step", "line", "residual"], [
    [f"{s:.1f}", *(int(x) for c, l in zip(count, line) for x in (c, l, c - l))]
    for s, count, line in zip(parts, counted, lines)
]), "")
this.text("A training step, in elements:")
this.show(report.bars({f"s = {s:.1f}": step for s, (_, step) in zip(parts, counted)}), "")
this.figures["lines"] = [list(map(float, line)) for line in zip(starts, slopes)]
this.text(f"""
Every tile costs the same, so the counts lie on the line. The forward line is {starts[0]:,.0f} + {slopes[0]:,.0f}·s.
From the kernel: b = 2N²d/Br = {2 * n * n * 64 // 16:,}, since each tile of queries loads K and V. A block holds Br rows
of d elements on chip, so Br·d grows like M, and b like N²d²/M. And a = 2Nd + N + N²/Bc =
{2 * n * 64 + n + n * n // 16:,}: Q, O and L, and the bytes of the mask, which the proposition leaves out. (A kernel can
read less of the mask: by one thread per block, or as a list of the tiles to visit.)
""")

# %% The paper's measurement.
this.part("The paper's measurement")
DENSE, TIMES = 188.4, (27.2, 43.4, 60.3, 81.2, 99.4, 117.0, 135.6, 155.6, 175.6)
big, order = {"n": 4096, "d": 64, "direction": "both", "blocks": (128, 32)}, rng.permutation(32 * 128)
ours = [nf.predict("flash2", **big, block_mask=(order < round(s * order.size)).reshape(32, 128)) for s in parts[:9]]
ours, all_of_it = [bill.total_bytes / 1e6 for bill in ours], nf.predict("flash2", **big).total_bytes / 1e6
slope, start = np.polyfit(parts[:9], TIMES, 1)
off = max(abs(start + slope * s - t) for s, t in zip(parts, TIMES))
this.text(f"""
Figure 2 (right) of the paper: N = 4,096, 10 to 90 % of the blocks not zero, on an A100; without a mask it takes {DENSE}
ms. Theirs are times. Ours are megabytes, predicted for a training step of flash2, one head with d = 64, random masks
of tiles of 128 × 32; without a mask {all_of_it:.1f} MB. (Where there is a GPU, `python -m numba_flash figures right`
times them. On one H200 they took {SPARSE[0.1]:.3f} of the time of dense attention at 10 %, {SPARSE[0.5]:.3f} at 50 %
and {SPARSE[0.9]:.3f} at 90 %.)
""")
this.show(report.table(["s", "paper, ms", "/ dense", "ours, MB", "/ dense"], [
    [f"{s:.1f}", f"{t:.1f}", f"{t / DENSE:.3f}", f"{moved:.1f}", f"{moved / all_of_it:.3f}"]
    for s, t, moved in zip(parts, TIMES, ours)
]), "")
this.text(f"""
The paper's times lie on a line, too: {start:.1f} + {slope:.1f}·s ms misses none of these nine by more than {off:.1f}
ms.
""")

this.part("Your turn")
longer = 2 * N if N <= 2048 else N // 2
local_there = patterns.local(longer, longer, sides_for(longer))
there, dense_there = (nf.predict("flash2", n=longer, d=d, heads=H, blocks=sides_for(longer), block_mask=mask).elements
                      for mask in (local_there, None))  # fmt: skip
rows = Br // 2 or 2
finer = patterns.local(N, N, (rows, Bc)).mean()
another = "Places of another length, so another window: " if tiles(N, rows) != Tr else ""
this.tries({
    f"--n {longer}": f"""local moves {there / predicted.elements:.2f} times what it moves here, and dense attention
    {dense_there / dense.elements:.2f} times.""",
    f"--blocks={rows},{Bc}": f"{another}s = {finer:.3f} instead of {local.mean():.3f}.",
})
this.text("""
Check yourself: let N grow, with tiles of the same size. How does s of local, of strided and of butterfly change? For
which of them does the traffic of K and V grow like N², for which like N, and for which in between? Check it with
`nf.predict(..., block_mask=...)["K"].loads`. And how do the bytes of the mask grow?
""")
this.end()
