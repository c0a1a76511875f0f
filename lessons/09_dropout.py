# %% [markdown]
"""Lesson 09, dropout. Run `python lessons/09_dropout.py`, or open it as a notebook."""

# %%
from fractions import Fraction

import numpy as np
from numba import float32

import numba_flash as nf
from numba_flash import dropout, lesson, reference, report, testing
from numba_flash.hbm.ledger import Bill
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.masks import no_mask
from numba_flash.questions import Question
from numba_flash.stages import LADDER, flash2, naive, naive_backward

this = lesson.start("09 · dropout", n=512, stage="flash2", direction="backward", blocks=None,
                    extra={"drop": (10, lesson.whole_number(5, 95), "PERCENT", "weights that are dropped, of 100")},
                    meanings={"seed": "seed of the random input, of dropout and of the questions"})  # fmt: skip
N, d, H, p, where = this.n, this.d, this.heads, this.drop / 100, this.device
how = {"dropout_p": p, "seed": this.seed, "device": where}
n, none, keep = 16, no_mask(), dropout.make_keep(float32, 1)
Z = dropout.to_dense(this.seed, p, 2, n, n)                  # of a small input, 2 heads

this.part("The question")
this.text("""
A network may come to rely on a few weights that happen to fit the texts it is trained with. Dropout prevents
that: in each training step every weight of P is set to 0 with probability p, at random, and the network has to make do
with the rest. When the trained network is used, nothing is dropped.

The backward pass has to know which weights were dropped. That is one more N × N matrix, and FlashAttention has no
N × N matrix in HBM. Where does it keep this one?
""")

# %% What dropout is.
this.part("What dropout is")
q, k, v = (x[:, :n] for x in this.inputs)
runs = [nf.attention(q, k, np.ones_like(v), return_lse=True, **settings) for settings in ({"device": where}, how)]
(sums, L), (sums_dropped, L_dropped) = runs
this.text("""
Each weight P_ij is multiplied by a random number Z_ij, and Z∘P is multiplied by V (∘ is the product element by
element):

    Z_ij = 0            with probability p
    Z_ij = 1/(1 - p)    otherwise
    O = (Z∘P) V

The weights that stay become larger, so that the mean of Z_ij is p·0 + (1 - p)/(1 - p) = 1. Dropout comes after the
softmax: l is the sum of all weights, dropped or not, and L = m + log l is that without dropout. The sum of a row of
Z∘P is 1 only on average.
""")
x = this.draw(p=(0.1, 0.2, 0.25), n=(8, 10, 16, 20), k=(1, 2, 3))
left, grown = Fraction(x.n - x.k, x.n), 1 / (1 - Fraction(str(x.p)))
this.ask("",
    Question("sum", x, "a row has n equal weights, 1/n each, and k of them are dropped. What is the sum of Z∘P, about?",
        left * grown, "n - k weights of 1/n, each multiplied by 1/(1 - p).", "What does a weight that stays become?",
        [(left, "The weights that stay become larger, by 1/(1 - p)."),
         (1, "On average, yes. Here it depends on how many were dropped."),
         (left * (1 - Fraction(str(x.p))), "They are divided by 1 - p, and so become larger.")], about=True),
)  # fmt: skip
this.text("""
(With V = 1 everywhere O is that sum. By flash2, from the first rows of the input:)
""")
this.show(report.table(["row", "L", "L, dropout", "sum of P", f"sum of Z∘P, p = {p:g}"], [
    [i, *(f"{x[0, i]:.6f}" for x in (L, L_dropped)), *(f"{x[0, i, 0]:.4f}" for x in (sums, sums_dropped))]
    for i in range(min(N, 4))
]), "")
this.text(f"L is the same {'bit for bit' if np.array_equal(L, L_dropped) else 'but for rounding'}.")

# %% Store Z.
this.part("Standard: store Z")
this.text("""
naive and tiled have P in HBM. One more kernel, with a thread per score, draws Z, stores it in one byte per score (0 or
1), and stores Z∘P for the product with V. In the backward pass dP = Z∘(dO Vᵀ), and another kernel loads Z for that.
(online_softmax, which forms P for its backward pass alone, has both kernels there.) What their threads do, where `keep`
draws Z_ij (the next part says how), and `p_drop` is p:
""")
this.source(naive.make_dropout(float32, keep), "z = keep", "P_dropped[h")
this.source(naive_backward.make_dropout_backward(float32), "z = real", "dP[h")

# %% A generator that needs no order.
this.part("Flash: draw Z again")
this.text("""
An ordinary generator of random numbers has a state: each number comes from what the number before has left, and the
thousandth comes after 999 others. A counter-based generator has none. It is a function from a counter to a number that
looks random, and any counter may come first. Ours is Philox 4×32-10 (Salmon et al. 2011, Random123). Its key is the
seed, and its counter the place of the score, (i, j, h, 0). (`dropped` is a constant, 1 with dropout. `WORDS` is 2³²,
`LOW` keeps the lower 32 bits of a number, `HALF` is 32; multipliers, steps and ten `ROUNDS` are Philox's.)
""")
this.source(keep)
this.source(dropout.philox, "k_0, k_1 =", "return")
this.text(f"The first of four words of 32 bits decides: it is compared with p·2³². In head 0, with seed {this.seed}:")
rows, others = [], Z[0] + 9 * (np.add.outer(np.arange(n), np.arange(n)) < 2)
for i, j in ((0, 0), (0, 1), (1, 0), map(int, np.unravel_index(others.argmin(), (n, n)))):  # and one that is dropped
    first = int(dropout.philox(*map(np.uint64, (i, j, 0, 0)), np.uint64(this.seed))[0])
    rows.append([i, j, f"{first:08x}", f"{first / 2**32:.4f}", f"{Z[0, i, j]:.4g}"])
this.show(report.table(["i", "j", "first word", "/ 2³²", f"Z_ij, p = {p:g}"], rows), "")
this.text("""
So the seed is all there is to keep. A thread forms Z_ij when it needs it, in the forward pass and in the backward pass.
In flash2 (l_i is summed before Z_ij comes in; the comments are as in lesson 05, part 7):
""")
kernel = flash2.make_forward(8, 8, d, float32, none.allowed, none.seen, none.visited, keep)
this.source(kernel, "p = weight", "O_i[t] += p")
this.text("""
(The paper saves the state of a generator at the start of Algorithm 2, and sets it again in Algorithm 4.) The second
form of D (lesson 07) holds as it is: D_i = ∑_j P_ij·Z_ij·(dO_i·V_j) = dO_i·O_i.
""")

# %% The same Z everywhere.
this.part("The same Z, whatever the order")
this.running("every stage on a small input")
eye, rows = np.stack([np.eye(n, dtype=np.float32)] * 2), []
for stage, sides in (("naive", None), ("tiled", 5), ("online_softmax", 5), ("flash", (5, 3)), ("flash2", (5, 3)),
                     ("flash2", (16, 16))):  # fmt: skip
    out = nf.attention(0 * eye, eye, eye, stage=stage, blocks=sides, **how)
    dv = nf.attention_backward(0 * eye, eye, eye, eye, stage=stage, blocks=sides, **how)[2]
    differ = [int(((got != 0) != (Z != 0)).sum()) for got in (out, dv.swapaxes(1, 2))]
    assert differ == [0, 0]
    rows.append([stage, " × ".join(map(str, np.broadcast_to(sides, 2))) if sides else "-", *differ])
this.text(f"""
With Q = 0 all weights are equal, and with V the identity matrix O = Z∘P: the output shows Z. With dO the identity
dVᵀ = Z∘P: that is the Z of the backward pass. With N = d = 16 and 2 heads, how many of the {Z.size} bits of Z are not
those that the same generator, written in NumPy, draws:
""")
this.show(report.table(["stage", "tiles", "forward", "backward"], rows), "")
other = dropout.to_dense((this.seed + 1) % 2**64, p, 1, n, n)[0]
pictures = {"head 0": Z[0], "head 1": Z[1], f"head 0, seed {(this.seed + 1) % 2**64}": other}
this.text("The same as a picture; a gap is a weight that is dropped:")
this.show(report.tile_map(*(report.Tiles(name, n, n, np.argwhere(z)) for name, z in pictures.items())), "")
draws = np.random.default_rng(this.seed).random(n * n) >= p
by_tiles = draws.reshape(4, 4, 4, 4).transpose(0, 2, 1, 3).reshape(n, n)
differ = int((draws.reshape(n, n) != by_tiles).sum())
this.text(f"""
A generator with a state cannot do that. Its numbers go to the scores in the order in which these are visited, which
depends on the tiles: row by row, or in tiles of 4 × 4, NumPy's default generator gives two masks that differ in
{plural(differ, "place")} of {n * n}. The loops of a backward pass go another way again, and blocks run in any order.
""")

# %% The prediction, by hand.
this.part("A prediction: what dropout adds")
x = this.draw(N=range(100, 400, 20), H=(5, 7, 11))
there, without = (nf.predict("naive", n=x.N, d=16, heads=x.H, direction="both", dropout_p=q) for q in (0.1, 0))
there = there.total_bytes - without.total_bytes
this.ask("""
A training step is a forward and a backward pass. How many elements more does it move per score with dropout, in the
stage `naive`? How many bytes is that in float32, with one byte for each element of Z? And in the stage `flash2`?
""",
    Question("bytes", x, "how many bytes more does a training step of naive move?",
        there, "18 bytes per score: 4 + 1 + 4 in each of the two passes.",
        "Count the accesses of one thread in each of the two listings: which are of 4 bytes, and which is of 1?",
        [(24 * x.H * x.N**2, "Z has one byte per score, and not 4."),
         (6 * x.H * x.N**2, "Those are elements. All but Z have 4 bytes."),
         (9 * x.H * x.N**2, "That is one of the two passes."),
         (2 * x.H * x.N**2, "That is Z alone. The weights are loaded and stored once more, too.")]),
)  # fmt: skip
added, added_bytes = 3 + 3, 2 * (4 + 1 + 4)                  # per score, by hand
this.text(f"""
Each of the two kernels above has {added // 2} accesses per score, one of them to Z. Together {added} elements and
4·4 + 2·1 = {added_bytes} bytes per score. In flash2 nothing: there is no new tensor, and no new access.
""")

# %% The run.
this.part("The run and its bill")
this.running("a training step of naive and of flash2")
size, found, outs, bills, errors = {"n": N, "d": d, "heads": H}, {}, {}, {}, {}
tiles_of = dict.fromkeys(LADDER) | {"flash2": this.blocks}
predicted, without = ({stage: nf.predict(stage, **size, direction="both", blocks=blocks, dropout_p=drop)
                       for stage, blocks in tiles_of.items()} for drop in (p, 0.0))  # fmt: skip
for stage in ("naive", "flash2"):
    with nf.ledger() as bills[stage]:
        found[stage] = nf.attention_backward(*this.inputs, this.dout, stage=stage, blocks=tiles_of[stage], **how)
    outs[stage] = nf.attention(*this.inputs, stage=stage, **how)
    assert bills[stage] == predicted[stage]
new, by_form = (Bill({name: bill.kernels[name] for name in ("dropout", "dropout_backward")}, bill.launches)
                for bill in (bills["naive"], predicted["naive"]))  # fmt: skip
assert (new.elements, new.total_bytes) == (H * N * N * added, H * N * N * added_bytes)
this.text("The lines that dropout adds to the bill of naive:")
this.bill("naive, dropout", new, predicted=by_form)
truth = (reference.attention(*this.inputs, dropout_p=p, seed=this.seed)[0],
         *reference.attention_backward(*this.inputs, this.dout, dropout_p=p, seed=this.seed))  # fmt: skip
limits = [limit / (1 - p) for limit in this.gradients[1].values()]  # no term grows by more than 1/(1 - p)
for at, (name, expected) in enumerate(zip(("out", "dq", "dk", "dv"), truth)):
    own, error = (float(np.abs((outs[stage], *found[stage])[at] - expected).max()) for stage in ("naive", "flash2"))
    errors[name] = error, own, limits[at - 1] + 2 * own if at else testing.bound(expected, own, n_k=N)
    this.figures["errors"] |= {f"naive, {name}": own, f"flash2, {name}": error}
this.bill("flash2", bills["flash2"], predicted=predicted["flash2"], previous=("no dropout", without["flash2"]),
          algorithm0=algorithm0(**size, direction="both"), ideal="Algorithms 0, 3",
          below=report.gradient_error_lines(errors))  # fmt: skip

# %% All stages, and what it costs.
this.part("What changed, and what it costs")
moved = {stage: [bill[stage].total_bytes for bill in (without, predicted)] for stage in LADDER}
this.text("What a training step moves, in bytes; every stage, predicted:")
this.show(report.table(["stage", "no dropout", "dropout", "more", "ratio"], [
    [stage, before, after, after - before, f"{after / before:.3f}"] for stage, (before, after) in moved.items()
]), "")
bars = {f"{stage}{of}": moved[stage][at] for stage in ("tiled", "flash2") for at, of in enumerate(("", ", dropout"))}
this.show(report.bars(bars, "bytes"), "")
this.text(f"""
(The bar of naive would be {moved["naive"][1] / moved["tiled"][1]:.3g} times as long as that of tiled.) naive and tiled
keep P, Z∘P and Z between the passes, 9 bytes per score instead of 4; Z alone is {report.in_bytes(65_536**2 * 16 * 8)}
for batch 16 and 8 heads of N = 65,536. The flash stages keep a seed.

The price is integer work: ten rounds of two products and four exclusive ors, for each score and each time that Z_ij is
needed. In a training step that is once in naive and tiled, twice in flash, and three times in flash2, whose backward
pass has two kernels. (online_softmax draws it for each tile of columns of V, and once more backward.) It appears
neither in the bill nor in the FLOPs. (Philox gives four words at a time; ours uses one.)
""")
drawn = dropout.to_dense(this.seed, p, H, N, N)
mean, typical = float(drawn.mean()), (p / ((1 - p) * drawn.size)) ** 0.5
this.figures["mean of Z"] = mean
this.text(f"""
Is Z what it should be? Z_ij has mean 1 and variance p/(1 - p), so the mean of {plural(drawn.size, "element")} should
miss 1 by about √(p/((1 - p)·{drawn.size:,})) = {typical:.2g}. In this run {(drawn == 0).mean():.5f} of all weights are
dropped, and the mean of Z is {mean:.5f}: it misses 1 by {abs(mean - 1):.2g}.
""")

this.part("Your turn")
percent, longer = 50 if this.drop != 50 else 10, 2 * N if N <= 1024 else N // 2
this.tries({
    f"--drop {percent}": "Other gradients, the same bills: what is dropped is computed and moved like all else.",
    f"--n {longer}": f"""Dropout adds {report.in_bytes(H * longer**2 * added_bytes)} to a training step of naive then,
    instead of {report.in_bytes(new.total_bytes)}, and nothing to flash2.""",
})
this.text(f"""
Check yourself: a variant of flash2 stores Z in the forward pass, one byte per score, and loads it in both kernels of
the backward pass. How many bytes more does a training step move? Compare with the whole bill of flash2 here,
{report.in_bytes(bills["flash2"].total_bytes)}. How does that change with N? And with one bit per score? Then ask, for
other n, too. (naive stores Z once and loads it once.)

    import numba_flash as nf
    size = dict(n={N}, d={d}, direction="both", dropout_p={p:g})
    Z, bill = nf.predict("naive", **size)["Z"], nf.predict("flash2", **size)
    (Z.write_bytes + 2 * Z.read_bytes) / bill.total_bytes
""")
this.end()
