# %% [markdown]
"""Lesson 08, masks. Run `python lessons/08_masks.py`, or open it as a notebook."""

# %%
from fractions import Fraction

import numpy as np

import numba_flash as nf
from numba_flash import lesson, masks, reference, report, testing
from numba_flash.blocks import check_blocks, tiles
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.questions import Question
from numba_flash.stages import LADDER

this = lesson.start("08 · masks", stage="flash2", blocks=None)
N, d, H, where = this.n, this.d, this.heads, this.device
Br, Bc = check_blocks("flash2", this.blocks, d=d)
Tr = tiles(N, Br)

this.part("The question")
this.text("""
A language model writes one word after the other. When it learns, word i must not see the words that come after it:
that is causal attention. And in a batch of texts, short ones are filled up with words that nobody should see at all.
A mask says which keys a query may see.

Where does a mask enter a kernel, and what does it save?
""")

# %% What a mask is.
this.part("What a mask is")
this.text("""
A hidden key must get no weight: P_ij = 0. Softmax gives that if S_ij = -∞, since exp(-∞) = 0, and the other weights
come out as if the key were not there. So each stage asks, for each score, a function `allowed`.

`causal` and `masked` are constants of the kernel: without a mask nothing is asked, and nothing is read. `mask` is an
array of one byte per key, a row for each batch b.
""")
this.source(masks.make_allowed(1, 1))
this.text("""
With as many keys as queries, causal order lets query i see key j where j ≤ i. With N queries and N_k keys the last
query is aligned with the last key, j ≤ i + N_k - N, as in the flash-attn package. (PyTorch's `is_causal` aligns the
first query with the first key.) So `allowed` gets i + N_k - N for i.
""")
x = this.draw(N=range(5, 9), N_k=range(10, 17), i=range(1, 5))
sees = int(masks.to_dense(x.N, x.N_k, causal=True)[x.i].sum())
this.ask("",
    Question("causal", x, "how many of the N_k keys does query i see in causal order? (Both are numbered from 0.)",
        sees, "j from 0 to i + N_k - N: that is i + N_k - N + 1 keys.", "Which is the last key it sees? Key 0 counts.",
        [(x.i + 1, "That is with the first query at the first key. Here the last query is at the last key."),
         (sees - 1, "That is the number of the last key it sees. Keys are numbered from 0."),
         (x.N_k - sees, "So many are hidden.")]),
)  # fmt: skip
this.text("""
Rows are queries, columns keys, 1 is seen:
""")
rows = {(n, n_k): masks.to_dense(n, n_k, causal=True).astype(int) for n, n_k in ((5, 5), (2, 5), (5, 2))}
shown = [["  ".join(map(str, line)) for line in rows[size]] + [""] * (5 - size[0]) for size in rows]
this.show(report.table([f"N = {n}, N_k = {n_k}" for n, n_k in rows], list(zip(*shown))), "")

# %% Rows that see nothing.
this.part("A row that sees nothing")
q, k, v = (x.astype(np.float32) for x in testing.inputs((5, 4), (2, 4), seed=this.seed))
out, lse = nf.attention(q, k, v, causal=True, return_lse=True, device=where)
gradients = nf.attention_backward(q, k, v, np.ones_like(q), out=out, lse=lse, causal=True, device=where)
finite = all(np.isfinite(x).all() for x in (out, *gradients))
assert finite and not out[:3].any() and np.isneginf(lse[:3]).all() and not gradients[0][:3].any()
this.text("""
With N = 5 and N_k = 2 the first three queries see no key at all. Their softmax is 0/0. The convention is that of a
sum without terms: O = 0, and L = log 0 = -∞. Their gradients are 0, and there is no nan anywhere. By flash2:
""")
this.show(report.table(["query", "L", "O", "dQ"], [
    [i, f"{lse[i]:.4g}", *(" ".join(f"{x:.3g}" for x in row[i]) for row in (out, gradients[0]))] for i in range(5)
]), "")
this.text("""
(Query 3 sees one key, whose weight is 1 whatever its score: its dQ is 0, too.)

It takes care: exp(-∞ - (-∞)) would be nan. The guard of lesson 04, `weight`, is 0 where the score is -∞, whatever m
is, and a row with l = 0 is not divided. Some implementations put a large negative number instead of -∞, -10⁹ say. Then
a row that sees nothing gets the mean of all V, and if all true scores are below that number, the hidden key gets all
the weight.
""")

# %% The tiles that need not be visited.
part = "" if Tr <= 8 and tiles(N, Bc) <= 16 else ", the first of them"
this.part("What can be skipped")
grid = (min(Tr, 8), min(tiles(N, Bc), 16))
picture = [" ".join("#" if (j + 1) * Bc - 1 <= i * Br else "." if j * Bc > min((i + 1) * Br, N) - 1 else "/"
                    for j in range(grid[1])) for i in range(grid[0])]  # fmt: skip
this.text(f"""
For causal order, whole tiles of S are hidden. `flash2` stops at the last key that the last query of its tile sees.
Its tiles of {f"{Br} queries" if Br > 1 else "1 query"} by {plural(Bc, "key")}{part}: # all seen, / some seen, . not
visited.
""")
this.show(*(f"     {line}" for line in picture), "")
this.source(masks.make_seen(1))
this.text("""
`seen` is the number of keys that a tile of queries goes through, and the loop over j ends there. `flash`, whose outer
loop is over the keys, begins its loop over queries at the first that sees the tile (`first`). The standard stages
compute all of S, and store -∞ for what is hidden.
""")

# %% The prediction, by hand.
this.part("A prediction: the bill")
x = this.draw(Tr=range(3, 10), Br=(8, 16), d=(8, 12, 16), H=range(2, 7))
there = nf.predict("flash2", n=x.Tr * x.Br, d=x.d, heads=x.H, causal=True, blocks=(x.Br, x.Br))["K"].loads
all_, full = x.H * x.d * x.Tr * x.Tr * x.Br, x.Tr * x.Br     # without a mask; N
this.ask("""
For one head and causal order, with N a multiple of Br: how many keys do the Tr tiles of queries load together? (The
first tile of queries sees Br keys.) What part is that of the Tr·N keys that flash2 loads without a mask?
""",
    Question("K loads", x, "N is Tr·Br. How many elements of K does flash2 load?",
        there, "Br·(1 + 2 + ... + Tr) keys of d elements: H·d·Br·Tr·(Tr + 1)/2.",
        "Tile 0 of the queries sees Br keys, tile 1 sees 2·Br. And the last one? Add them up.",
        [(all_, "That is without a mask."),
         (Fraction(all_, 2), "A little more than one half: on the diagonal a tile is loaded whole."),
         (x.H * x.d * full * (full + 1) // 2, "That is one query at a time. A tile loads what its last query sees."),
         (x.H * x.d * x.Br * x.Tr * (x.Tr - 1) // 2, "The tiles on the diagonal are loaded, too."),
         (there // x.d, "Those are keys. Each has d elements.")]),
)  # fmt: skip
keys = sum(min((i + 1) * Br, N) for i in range(Tr))
by_hand = 2 * N * d + N + 2 * keys * d
predicted = nf.predict("flash2", n=N, d=d, heads=H, causal=True, blocks=this.blocks)
dense = nf.predict("flash2", n=N, d=d, heads=H, blocks=this.blocks)
assert predicted.elements == H * by_hand
share = keys / (Tr * N)
this.text(f"""
Tile i of the queries sees (i+1)·Br keys: together Br·(1 + 2 + ... + Tr) = Br·Tr·(Tr+1)/2, that is (Tr+1)/(2Tr) of the
Tr·N without a mask. Here Tr = {Tr}, and {"the last tile is not whole: " if N % Br else ""}{keys:,} keys are {share:.3f}
of {Tr * N:,}. The more tiles, the nearer to one half.
""")

# %% The run.
this.part("The run and its bill")
this.running("naive, flash and flash2, causal")
ideal, bills, outs = algorithm0(n=N, d=d, heads=H), {}, {}
truth = np.stack([reference.attention(*(x[h] for x in this.inputs), causal=True)[0] for h in range(H)])
for stage in ("naive", "flash", "flash2"):
    blocks = this.blocks if stage == "flash2" else None
    with nf.ledger() as bills[stage]:
        outs[stage] = nf.attention(*this.inputs, stage=stage, causal=True, blocks=blocks, device=where)
error = {stage: float(np.abs(out - truth).max()) for stage, out in outs.items()}
this.figures["errors"] |= error
limit = testing.bound(truth, error["naive"], n_k=N)
this.bill("flash2, causal", bills["flash2"], predicted=predicted, previous=("flash2, no mask", dense), algorithm0=ideal,
          below=report.error_line(error["flash2"], naive=error["naive"], bound=limit))  # fmt: skip
table = []
for stage in LADDER:
    settings = {"n": N, "d": d, "heads": H, "blocks": this.blocks if stage == "flash2" else None}
    moved = [nf.predict(stage, **settings, causal=causal).elements for causal in (False, True)]
    work = [nf.flops(stage, **settings, causal=causal) for causal in (False, True)]
    table.append([stage, *moved, f"{moved[1] / moved[0]:.3f}", f"{work[1] / work[0]:.3f}"])
this.text("Every stage, predicted, without a mask and causal:")
this.show(report.table(["stage", "elements", "causal", "quotient", "of the FLOPs"], table), "")
this.show(report.bars({f"{row[0]}{how}": row[at] for row in table[3:] for at, how in ((1, ""), (2, ", causal"))}), "")
this.text("""
For the standard stages a mask saves no traffic: it is a value in S. (Of their FLOPs exp(-∞) alone is not computed.) For
the flash stages a hidden tile is neither loaded nor computed: the FLOPs fall with the traffic, since both belong to
tiles. (Q and O are loaded and stored all the same.)
""")

# %% Key masks.
this.part("A key mask")
length = max(3 * N // 4, 1)
key_mask = np.arange(N) < length
with nf.ledger() as bill:
    masked = nf.attention(*this.inputs, key_mask=key_mask, device=where)
short = nf.attention(this.inputs[0], *(x[:, :length] for x in this.inputs[1:]), device=where)
same = np.array_equal(masked, short)
predicted_mask = nf.predict("flash2", n=N, d=d, heads=H, key_mask=True)
assert bill == predicted_mask
this.text(f"""
A key mask hides keys from all queries. Here the first {length:,} of {plural(N, "key")} are seen, as in a text of that
many words, and the others hidden. The result is that of these keys alone,
{"bit for bit" if same else "but for rounding"}: a tile whose keys are all hidden leaves m, l and O as they are. The
bill of flash2 has a new line, the mask:
""")
this.counts("flash2, key mask", bill, predicted=predicted_mask)
this.text(f"""
It is read once for each pair of a query and a key, 1 byte each time: {report.in_bytes(bill["mask"].read_bytes)} of
{report.in_bytes(bill.total_bytes)}.

Which keys are hidden is data, and the kernel cannot know it before it has read it: no tile is skipped. (A block mask
tells in advance which tiles count: lesson 10.) The value of a hidden key is multiplied by 0, and in the backward pass
the key, too. So both must be numbers: 0 times nan is nan.
""")

this.part("Your turn")
longer = 4 * N if N <= 1024 else N // 4
there = [nf.predict("flash2", n=longer, d=d, causal=causal, blocks=this.blocks) for causal in (False, True)]
half = max(Br // 2, 1)
other = half, Bc
ratio = [nf.predict("flash2", n=N, d=d, causal=causal, blocks=other)["K"].loads for causal in (False, True)]
this.tries({
    f"--n {longer}": f"""flash2 loads {there[1]["K"].loads / there[0]["K"].loads:.3f} of the K that it loads without a
    mask.""",
    f"--blocks={other[0]},{other[1]}": f"""Smaller tiles of queries: {ratio[1] / ratio[0]:.3f} of K, but
    of {plural(ratio[0], "load")} instead of {dense["K"].loads // H:,}.""",
})
this.text(f"""
Check yourself: a window lets a query see the w keys up to itself, and hides the rest. Which keys does a tile of Br
queries see? About how many elements does flash2 move then, for w much smaller than N, and how does that grow with N?
Work it out, then ask, for other n, too. (A block mask, lesson 10, leaves out whole tiles.)

    import numpy as np
    import numba_flash as nf
    n, w, T = 1024, 64, 8                # tiles of T × T
    i, j = np.ogrid[: n // T, : n // T]  # tile i of the queries, j of the keys
    window = (j <= i) & ((i - j) * T < w + T - 1)
    nf.predict("flash2", n=n, d={d}, blocks=(T, T), block_mask=window).elements
""")
this.end()
