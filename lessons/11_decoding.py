# %% [markdown]
"""Lesson 11, decoding. Run `python lessons/11_decoding.py`, or open it as a notebook."""

# %%
import numpy as np
from numba import float32

import numba_flash as nf
from numba_flash import lesson, masks, reference, report, testing
from numba_flash.blocks import choose_blocks, tiles
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.questions import Question
from numba_flash.stages import flash2_split

MOST, SM, BANDWIDTH, FP32 = 1024, 132, 4.8e12, 67e12         # of an H200: multiprocessors, bytes/s, FLOP/s (datasheet)
this = lesson.start("11 · decoding", n=32768, stage="flash2", direction="split", blocks=None,
                    sizes="N = 1, N_k = {n}, d = {d}, float32, {heads}",
                    extra={"splits": (128, lesson.whole_number(1, MOST), "SPLITS", "n, the splits of the keys")},
                    meanings={"n": "N_k, the number of keys; there is one query"})  # fmt: skip
N_k, d, H, n, where = this.n, this.d, this.heads, this.splits, this.device


def plan(n, N_k=N_k):  # -> Bc, Tc, tiles of the longest split, splits with a tile, bill
    Bc = this.blocks or min(choose_blocks("flash2", d=d, direction="split").Bc, tiles(N_k, 16))  # not too few tiles
    chain = tiles(Tc := tiles(N_k, Bc), n)
    return Bc, Tc, chain, tiles(Tc, chain), nf.predict("flash2", n=1, n_k=N_k, d=d, heads=H, split_kv=n, blocks=(1, Bc))


Bc, Tc, chain, _, predicted = plan(n)
size, split = {"n": 1, "n_k": N_k, "d": d, "heads": H}, {"split_kv": n, "blocks": (1, Bc)}
alone, ridge = nf.predict("flash2", **size), FP32 / BANDWIDTH

this.part("The question")
busy = f"{H} of them {'has' if H == 1 else 'have'} work, and the rest waits" if H < SM else "all of them have work"
this.text(f"""
A language model writes one word after the other. For the next word each head has one new query. The keys and values of
the words so far do not change, since no word sees a later one (lesson 08). So they are kept: that is the KV cache. Here
it has {plural(N_k, "key")} (N_k, --n) per head, {report.in_bytes(8 * N_k * d * H)} for {plural(H, "head")}, and each
new word needs all of it.

flash2 has one block of threads per tile of queries. One query is one tile, so there is one block per head:
{plural(H, "block")}. A block runs on one multiprocessor of the GPU, and an H200 has {SM}: {busy}. What is to be gained?
""")

# %% What there is to gain.
this.part("Nothing to save")
flops, work = nf.flops("flash2", **size), nf.flops("flash2", **size, **split)
this.text(f"""
FlashAttention saves traffic, and here there is none to save. Each key and each value has to be read: 2N_k·d elements
per head. flash2 reads them once. Besides, it moves Q, O and L, 2d + 1 elements, and that is all.

An element of K or V takes part in one product and one sum: 2 FLOPs per element, half a FLOP per byte. (With the softmax
it is {flops / alone.total_bytes:.2f} FLOP/byte here.) An H200 (the other lessons speak of an A100) moves
{BANDWIDTH / 1e12:.1f} TB/s and computes {FP32 / 1e12:.0f} TFLOP/s in float32, so below {ridge:.1f} FLOP/byte it waits
for memory (lesson 01). What is left to gain is parallelism: one multiprocessor can ask HBM for a small part of what it
delivers, all of them for all of it.

So the keys are cut into n splits (--splits), and each split gets a block of its own. It goes through these keys alone,
and leaves m_s, l_s and O_s, not yet divided by l_s. A second kernel puts the parts together, by the law of lesson 04:

    m = max m_s      l = ∑exp(m_s - m)·l_s      O = ∑exp(m_s - m)·O_s / l
""")

# %% Two splits by hand.
this.part("Two splits by hand")
E, V, one = (np.array(x, np.float32)[:, None] for x in ((1, 1, 4, 2), (4, 8, 12, 6), (1,)))
S, small = np.log(E), {"scale": 1, "device": where}
parts = [nf.attention(one, S[at], V[at], return_lse=True, **small) for at in (slice(2), slice(2, 4), slice(4, 4))]
whole, L = nf.merge(*parts[0], *parts[1])
turned, three = (nf.merge(*a, *b)[0] for a, b in ((parts[1], parts[0]), ((whole, L), parts[2])))
by_kernel = nf.attention(one, S, V, split_kv=3, blocks=(1, 2), **small)
this.text("""
Four keys and d = 1. exp(S) is 1, 1, 4 and 2, and V is 4, 8, 12 and 6. Two keys for each split:

    m_0 = log 1    l_0 = 1 + 1 = 2         O_0 = 1·4 + 1·8 = 12
    m_1 = log 4    l_1 = 1 + 1/2 = 3/2     O_1 = 1·12 + 1/2·6 = 15

So m = log 4. The factors exp(m_s - m) are 1/4 and 1, l = 2/4 + 3/2 = 2, and O = (12/4 + 15)/2 = 9. All keys at once
give (4 + 8 + 48 + 12)/8 = 9, too. The same by flash2, called for the keys of each split; it returns O_s / l_s and L_s =
m_s + log l_s. Split 2 has no keys at all:
""")
this.show(report.table(["split", "L_s", "O_s / l_s", "exp(L_s - L)"], [
    [s, *(f"{x:.4f}" for x in (L_s[0], O_s[0, 0], np.exp(L_s[0] - L[0])))] for s, (O_s, L_s) in enumerate(parts)
]), "")
this.text(f"""
`nf.merge` of splits 0 and 1 gives O = {whole[0, 0]:.5g}; in the other order {turned[0, 0]:.5g}; with split 2 as well
{three[0, 0]:.5g}. The kernels below, with 3 splits, give {by_kernel[0, 0]:.5g}. The order does not matter, but for
rounding. An empty split has m_s = L_s = -∞, and so the weight 0.

(Why not let a split leave L_s and O_s / l_s, as `nf.merge` takes them? L_s = m_s + log l_s is rounded, to seven digits
in float32. If m_s is a million, no digit of log l_s after the point is left, and the factors exp(L_s - L) are off.
Apart, m_s and l_s lose nothing.)
""")

# %% The kernels.
this.part("The kernels")
none, intensity = masks.no_mask(), work / predicted.total_bytes
kernel = flash2_split.make_split(Bc, d, float32, none.allowed, none.seen)
this.text(f"""
In flash2 each of {choose_blocks("flash2", d=d).Br} threads has a query. With one query one thread computes, and the
others help it to load. So the new kernel shares out the keys: its tile has Bc of them, and its block Bc threads. First,
thread r has key r, and computes its score. Then it has columns r, r + Bc, ... of V and of O. (`j` is the first key of
a tile, and `end` the first behind those of the split. Splits that are merged are the idea of Flash-Decoding: Dao,
Haziza, Massa and Sizov 2023.)
""")
this.source(kernel, "S_j[r] = real", "O_i[t] = acc")
this.text(f"""
S_j and P_j are in shared memory. For the maximum and the sum each thread goes through all of them. That is no traffic,
but Bc threads do the same work: {intensity:.2f} FLOP/byte with all of it, {"not" if intensity >= ridge else "still"}
below {ridge:.1f}. The second kernel has a thread for each element of O:
""")
this.source(flash2_split.make_merge(float32), "m = real", "O[h, i, t]")

# %% The prediction, by hand.
this.part("A prediction: what the splits cost")
x = this.draw(N_k=range(200, 800, 40), d=(8, 12, 16, 24), n=range(3, 10), H=range(2, 7))
there = [nf.predict("flash2", n=1, n_k=x.N_k, d=x.d, heads=x.H, **s) for s in ({}, {"split_kv": x.n, "blocks": (1, 8)})]
there = there[1].elements - there[0].elements
this.ask("""
How many elements do the two kernels move for one head, as a formula in N_k, d and n? How many are that more than flash2
moves? For which n is that one percent?
""",
    Question("more", x, "how many elements more than flash2 do n splits move?",
        there, "6nd + 2n - d for each head.",
        "Go through both listings: Q, O_s, m_s and l_s. How many threads of the merge load each m_s, and how often?",
        [(x.H * (6 * x.n * x.d + 2 * x.n), "flash2 loads the query once, too: d elements are not more."),
         (x.H * (5 * x.n * x.d + 2 * x.n - x.d), "A thread of the merge loads m_s twice: for m, and for the factor."),
         (x.H * (3 * x.n * x.d + 4 * x.n - x.d), "Each of d threads of the merge loads m_s and l_s for itself."),
         (x.H * (3 * x.n * x.d + 5 * x.n - x.d), "Each of d threads of the merge loads m_s and l_s for itself.")]),
)  # fmt: skip
more = 6 * n * d + 2 * n - d
assert predicted.elements == alone.elements + H * more
most = (alone.elements // H + 100 * d) // (100 * (6 * d + 2))
limit = f"up to n = {most:,}" if most else "for no n: the text is too short"
this.show(report.table(["", "flash2", "flash2_split", "merge_splits"], [
    ["Q", "d", "nd", "-"], ["K, V", "2N_k·d", "2N_k·d", "-"], ["O_s", "-", "nd", "nd"], ["m_s", "-", "n", "2nd"],
    ["l_s", "-", "n", "nd"], ["O, L", "d + 1", "-", "d + 1"],
]), "")  # fmt: skip
this.text(f"""
All d threads of the merge ask for all m_s twice, for m and for the factors, and for all l_s. (Caches answer most of
that.) Together that is 6nd + 2n - d more than flash2: here {more:,} more than {alone.elements // H:,}. 6nd is one
percent of 2N_k·d where n = N_k/300. Exactly, the splits cost one percent of the bill of flash2 or less {limit}.
""")

# %% The run.
this.part("The run and its bill")
this.running(f"naive, flash2, and flash2 with {plural(n, 'split')}")
q, k, v = testing.inputs((H, 1, d), (H, N_k, d), seed=this.seed)
truth, bills, errors = reference.attention(q, k, v)[0], {}, this.figures["errors"]
for name, how in {"naive": {"stage": "naive"}, "flash2": {}, "split": split}.items():
    with nf.ledger() as bills[name]:
        out = nf.attention(q, k, v, **how, device=where)
    errors[name] = float(np.abs(out - truth).max())
assert bills["flash2"] == alone
limit = testing.bound(truth, errors["naive"], n_k=N_k)
this.bill("split", bills["split"], predicted=predicted, previous=("flash2", alone), algorithm0=algorithm0(**size),
          below=report.error_line(errors["split"], naive=errors["naive"], bound=limit))  # fmt: skip
this.text(f"""
K and V are loaded once, as before. What is new: the query for each split, O_s, m_s and l_s, and a second launch. The
function is the same. (The error of flash2 without splits is {errors["flash2"]:.1e}.)
""")

# %% How many splits.
this.part("How many splits?")
table, runs = [], {}
for splits in sorted({n, *(2**power for power in range(11) if 2**power <= 2 * Tc)}):
    *_, longest, filled, expected = plan(splits)
    with nf.ledger() as bill:
        out = nf.attention(q, k, v, split_kv=splits, blocks=(1, Bc), device=where)
    assert bill == expected and np.array_equal(out, runs.setdefault(longest, out))
    table.append([splits, filled, min(H * filled, SM), longest, bill.elements,
                  f"{bill.elements / alone.elements:.4f}", f"{np.abs(out - truth).max():.1e}"])  # fmt: skip
apart = max(float(np.abs(out - runs[Tc]).max()) for out in runs.values())
this.figures["table"] = [row[:5] for row in table]
this.text(f"""
Tiles of {plural(Bc, "key")} (--blocks) make Tc = {plural(Tc, "tile")} per head. Each split takes ⌈Tc/n⌉ of them, until
none is left.
""")
x = this.draw(Tc=(9, 10, 11, 12, 17, 18), n=(7, 8))
filled = tiles(x.Tc, tiles(x.Tc, x.n))
this.ask("",
    Question("filled", x, "how many of the n splits have a tile?",
        filled, "⌈Tc/⌈Tc/n⌉⌉: each takes ⌈Tc/n⌉, and later ones may find nothing left.",
        "How many tiles does the first split take, and the second? When is none left?",
        [(x.n, "Some find nothing left: the first ones take ⌈Tc/n⌉ tiles, which is rounded up."),
         (tiles(x.Tc, x.n), "So many tiles a split takes. How many splits until none is left?"),
         (x.Tc // tiles(x.Tc, x.n), "The last one with a tile may have fewer than ⌈Tc/n⌉.")]),
)  # fmt: skip
this.text(f"""
In the table, whose bills are counted: "chain" is ⌈Tc/n⌉, the tiles that a block goes through one after
the other. "filled" is the number of splits, per head, that have a tile. "busy" is how many of the {SM} multiprocessors
have such a block:
""")
this.show(report.table(["n", "filled", "busy", "chain", "elements", "/ flash2", "error"], table), "")
this.text("The longest chain, in tiles:")
this.show(report.bars({f"n = {row[0]:,}": row[3] for row in table}), "")
this.text(f"""
With more splits than Tc some are empty. (With fewer some may be, where n does not divide Tc.) Their blocks store O_s =
0, m_s = -∞ and l_s = 0 for nothing. And the merge is a chain, too: each thread goes through all n splits. So one takes
about as many as give each multiprocessor a block, ⌈{SM}/H⌉ = {tiles(SM, H)} here, but no more than Tc; and of those
with the same chain the least, here n = {tiles(Tc, tiles(Tc, min(Tc, tiles(SM, H))))}. A batch of texts needs fewer:
each text has blocks of its own.

Rows of the same chain give the same bits: their splits hold the same tiles, and an empty split adds 0. Another chain
rounds in another way, and a shorter one often less. From n = 1 the outputs differ by {apart:.1e} at most.
""")

# %% Heads that share K and V.
this.part("Heads that share K and V")
shared = nf.predict("flash2", n=1, n_k=N_k, d=d, heads=4 * H, kv_heads=H, **split)["K"].loads
assert shared == 4 * predicted["K"].loads
this.text(f"""
In many models several heads share K and V (GQA, grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245). Their
KV cache is smaller. But this kernel does not load less, since each head has blocks of its own: {plural(4 * H, "head")}
that share {plural(H, "head")} of K and V load {shared:,} elements of K, four times what there is. (Caches may help.)
""")

this.part("Your turn")
other, longer = 4 * n if 4 * n <= MOST else n // 4, 4 * N_k if N_k <= 32768 else N_k // 4
tried = {f"--splits {other}": plan(other), f"--n {longer}": plan(n, longer)}
this.tries({
    flag: f"""The longest chain is {plural(longest, "tile")} instead of {chain:,}. Filled splits per head: {filled:,}.
    All but K and V is {1 - 2 * bill["K"].loads / bill.elements:.2%} of the bill instead of
    {1 - 2 * predicted["K"].loads / predicted.elements:.2%}."""
    for flag, (_, _, longest, filled, bill) in tried.items()
})
this.text(f"""
Check yourself: let a block have the queries of all g heads that share K and V, instead of one. How many elements of K
are loaded then per head of K? In how many FLOPs of the two products does an element of K and V take part? From which g
on does an H200, by these, no longer wait for memory ({ridge:.1f} FLOP/byte)? Work it out, then ask with your g: to
flash2, g queries in one tile are the same.

    import numba_flash as nf
    g = 4
    bill = nf.predict("flash2", n=g, n_k={N_k}, d={d}, blocks=(g, 8))
    bill["K"].loads, 4 * g * {N_k} * {d} / bill.total_bytes
""")
this.end()
