# %% [markdown]
"""Lesson 04, the stage `online_softmax`. Run `python lessons/04_online_softmax.py`, or open it as a notebook."""

# %%
import argparse
from functools import reduce
from itertools import pairwise

import numpy as np
from numba import float32, float64

import numba_flash as nf
from numba_flash import lesson, reference, report
from numba_flash.blocks import tiles
from numba_flash.dropout import make_keep
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.masks import make_weight
from numba_flash.questions import Question
from numba_flash.stages import online_softmax


def scores_of_a_row(text):
    """The argparse type of --row."""
    try:
        row = tuple(map(float, text.split(",")))
    except ValueError:
        row = ()
    if not 1 <= len(row) <= 16 or not all(abs(s) <= 1e6 for s in row):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: give 1 to 16 numbers from -1e6 to 1e6, as in --row=-1,3,2.5"
        )
    return row


this = lesson.start("04 · online_softmax", stage="online_softmax",
                    sizes="N = {n}, d = {d}, float32, {heads}, T = {blocks}",
                    extra={"row": ((1., 3., 2., 0., 5., 1., 0., 4.), scores_of_a_row, "S,S,...",
                                   "the scores traced by hand, --row=-1,2 if the first is negative")})  # fmt: skip
N, d, H, T, where = this.n, this.d, this.heads, this.blocks, this.device
Tr, Td = tiles(N, T), tiles(d, T)

this.part("The question")
this.text("""
Softmax needs a whole row of S: its largest score m and its sum l = ∑exp(S_ij - m) come first, and only then is
the first weight known, exp(S_ij - m) / l. So lesson 03 stored S, read it three times, and stored P.

Can a row be used while it streams by, tile after tile, and be forgotten?
""")


# %% The trick.
def add_tile(m, l, lO, S, V):
    m_new = max(m, S.max())
    old = np.exp(m - m_new)                                  # what earlier tiles weigh in the new scale
    p = np.exp(S - m_new)
    return m_new, l * old + p.sum(), lO * old + p @ V


this.part("The trick")
this.text("""
Suppose that m is the largest score so far, and that three things were kept for the keys so far: m, the sum l,
and the sum of exp(S_ij - m)·V_j. The last is l·O, where O is the output if no more keys come.

Now a tile comes whose largest score is larger. Every term so far was computed with the old m, and should have
been with the new one. But

    exp(S_ij - m_new) = exp(S_ij - m) × exp(m - m_new)

and the last factor is the same for all of them, so it can be taken out of the sum. The old scores are not
needed: l and l·O times that factor are what they would have been. This is the online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867). In NumPy, for one row, with `lO` for l·O:
""")
this.source(add_tile)
this.text("""
It begins with m = -∞, l = 0 and l·O = 0. At the end, O = (l·O)/l.
""")
x = this.draw(m=(1, 2, 3), l=(2, 3, 4, 5), s=(1, 2, 3), t=(1, 2))
top, known = x.m + x.t, x.m + x.t - x.s
m, l, _ = add_tile(x.m, x.l, 0.0, np.array([top, known]), np.zeros(2))
this.ask("",
    Question("l", x, f"""m and l are of the keys so far. A tile of two scores comes: {top} (m + t) and {known}
        (m + t - s). What is l then, about? (exp may be typed.)""",
        l, f"l·exp(-t) + 1 + exp(-s): m rises to {top}, and all terms are counted from there.",
        "What is the new m? By which factor does the old l change, and which two terms are added?",
        [(x.l + 1 + np.exp(-x.s), "The old l was summed with the old m. It has to be rescaled."),
         (x.l * np.exp(x.t) + 1 + np.exp(-x.s), "The factor is exp(m - m_new), which is below 1 where m rises."),
         (x.l + np.exp(x.t) + np.exp(x.t - x.s), "That is l with the old m: right, but m has risen."),
         (x.l * np.exp(-x.t), "That is the old l in the new scale. The tile's own terms come on top."),
         (1 + np.exp(-x.s), "Those are the tile's own terms. The keys so far count, too.")], about=True),
)  # fmt: skip

# %% By hand.
this.part("One row by hand")
row, values = np.array(this.row), np.arange(1., len(this.row) + 1)
state = -np.inf, 0., 0.
trace, states = [["start", "", "", "-∞", "", "0", "0", ""]], []
for j in range(0, len(row), 2):
    S, V = row[j : j + 2], values[j : j + 2]
    old, state = np.exp(state[0] - max(state[0], S.max())), add_tile(*state, S, V)
    m, l, lO = state
    states.append((m, l, lO / l))
    given = [" ".join(f"{x:g}" for x in numbers) for numbers in (S, V)]
    trace.append([f"tile {j // 2 + 1}", *given, *(f"{x:.5g}" for x in (m, old, l, lO, lO / l))])
this.text(f"""
{plural(len(row), "key")}, tiles of two keys, and d = 1, so that each row of V is one number. `old` is the factor:
""")
this.show(report.table(["", "S", "V", "m", "old", "l", "l·O", "O"], trace), "")
rises = [at for at, line in enumerate(trace) if at > 1 and line[4] != "1"]
if rises:
    at = rises[-1]
    (m, l, _), S = states[at - 2], row[2 * at - 2 : 2 * at]
    m_new, l_new, _ = states[at - 1]
    terms = " + ".join(f"exp({s:g} - {m_new:g})" for s in S)
    this.text(f"""
    Take tile {at}. It raises m from {m:g} to {m_new:g}, so l is multiplied by exp({m:g} - {m_new:g}) =
    {trace[at][4]}. Then it adds its own terms: {l:.5g} × {trace[at][4]} + {terms} = {l_new:.5g}.
    Where m stays, `old` is 1. In tile 1 it is 0: there is nothing yet to keep.
    """)
else:
    this.text("In tile 1 `old` is 0: there is nothing yet to keep. After that m never rises and nothing is rescaled.")
this.text("""
Each line is the complete softmax of the keys so far. The last line is that of the whole row.
""")

# %% By kernel.
this.part("The same row by kernels")
this.running("statistics and online_softmax on the row")
statistics = online_softmax.make_statistics(float64)
one = np.ones((1, 1))


def attend(first, last):
    return nf.attention(one, row[first:last, None], values[first:last, None], stage="online_softmax", blocks=T,
                        scale=1, return_lse=True, device=where)  # fmt: skip


def by_kernel(keys):
    m, l = nf.empty((1, 1), "float64", where), nf.empty((1, 1), "float64", where)
    nf.launch(statistics, (1, 1), 1, nf.to_device(row[None, None, :keys].copy(), where), m, l, device=where)
    return nf.to_host(m)[0, 0], nf.to_host(l)[0, 0], attend(0, keys)[0][0, 0]


ends = [min(j + 2, len(row)) for j in range(0, len(row), 2)]
kernel = [by_kernel(keys) for keys in ends]
pieces = [attend(2 * at, end) for at, end in enumerate(ends)]
merged = [reduce(lambda a, b: nf.merge(*a, *b), pieces[: at + 1])[0][0, 0] for at in range(len(ends))]
off = max(np.abs(np.array(states) - kernel).max(), np.abs(np.array(states)[:, 2] - merged).max())
this.figures["trace"] = [list(map(float, line)) for line in states]
this.text("""
The query 1 and the keys S, with scale 1, have the scores S. For the keys so far, the kernel `statistics` gives m
and l, and the stage gives O:
""")
this.show(report.table(["keys", "m", "l", "O", "O, merged"], [
    [f"1 to {end}", *(f"{x:.5g}" for x in (*line, last))] for end, line, last in zip(ends, kernel, merged)
]), "")
this.text(f"""
The last column is made in another way: the stage ran on each tile alone, which gave O and L = m + log l of that
tile, and `nf.merge` joined these results one by one. The largest difference between the hand and the kernels,
in float64: {off:.1e}.
""")

# %% The law.
this.part("Why any order will do")
this.text("""
What is summed is a pair, ∑exp(S_ij) and ∑exp(S_ij)·V_j, and a sum may be taken in any order and in any groups: it
is commutative and associative. m only keeps the numbers small: l·exp(m) is the first sum, l·O·exp(m) the second.
L = log ∑exp(S_ij) is its logarithm, the log-sum-exp, so (O, L) says all about a part of the keys that the
others need. The law of `nf.merge`:

    L = log(exp(L₁) + exp(L₂))
    O = exp(L₁ - L)·O₁ + exp(L₂ - L)·O₂
""")
this.text(f"""
Now random cuts of the N keys, merged in random pairs until one is left, against all keys at once (head 0,
{"the first 8" if N > 8 else "all"} queries, float64):
""")
this.running("online_softmax on parts of the keys")
q, k, v = (x[0].astype(np.float64) for x in this.inputs)
rng = np.random.default_rng(this.seed)


def attend_to(first, last):
    return nf.attention(q[:8], k[first:last], v[first:last], stage="online_softmax", blocks=T, return_lse=True,
                        device=where)  # fmt: skip


whole, rows = attend_to(0, N), []
for count in (2, 3, 5, 8):
    cuts = [0, *sorted(rng.integers(0, N + 1, count - 1).tolist()), N]
    parts = [attend_to(*ends) for ends in pairwise(cuts)]
    while len(parts) > 1:
        a, b = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        parts.append(nf.merge(*a, *b))
    differences = [f"{np.abs(x - y).max():.1e}" for x, y in zip(parts[0], whole)]
    rows.append([f"{count}", *differences, " + ".join(str(b - a) for a, b in pairwise(cuts))])
this.show(report.table(["parts", "O differs by", "L differs by", "keys in each part"], rows), "")
this.text("""
The differences are those of rounding in float64. So tiles, blocks of threads and GPUs can each do a part. A
part may be empty: then its O is 0 and its L is -∞.
""")

# %% Numerical safety.
this.part("Why m, and why it starts at -∞")
rows = []
for name, numbers in (
    ("-300, -300, -300, -300", [-300] * 4), ("0, 0, 500, 0", [0, 0, 500, 0]), ("all -2·10⁹", [-2e9] * 4)
):
    S, V = np.array(numbers, np.float32), np.arange(1, 5, dtype=np.float32)
    with np.errstate(all="ignore"):
        outs = [np.exp(S) @ V / np.exp(S).sum()]
        for begin in (0, -1e9, -np.inf):
            _, l, lO = add_tile(np.float32(begin), np.float32(0), np.float32(0), S, V)
            outs.append(lO / l)
    out = nf.attention(np.ones((1, 1), np.float32), S[:, None], V[:, None], stage="online_softmax", blocks=T, scale=1,
                       device=where)  # fmt: skip
    right = reference.attention(np.ones((1, 1)), S[:, None], V[:, None], 1)[0]
    rows.append([name, *(f"{x:.4g}" for x in (*outs, out[0, 0], right[0, 0]))])
this.text("""
O of a row of 4 scores in float32, V = 1 2 3 4. Without m, and with m starting at three values:
""")
this.show(report.table(["scores", "no m", "from 0", "from -10⁹", "from -∞", "kernel", "right"], rows), "")
this.text("""
"nan" is not-a-number. exp(-300) is below the smallest float32 and becomes 0, exp(500) is above the largest and
becomes ∞, and 0/0 and ∞/∞ are nan. A start at 0 or at -10⁹ is a score of a key that is not there: when all true
scores are far below it, all their exponentials are 0. Below -∞ there is nothing.

-∞ has a price: exp(-∞ - (-∞)) is nan again. It happens when every score so far is -∞, as it is where a product
overflows, or where a mask hides a key (in a later lesson). So the kernels do not call exp themselves, but a
function with a guard, `weight(s, m)`. (That of lesson 02 is the same.)
""")
this.source(make_weight(float32), "if s ==", "return math")
hidden = np.array([-np.inf, -np.inf, 1, 2])
state = -np.inf, 0., 0.
with np.errstate(all="ignore"):
    for j in (0, 2):
        state = add_tile(*state, hidden[j : j + 2], np.ones(2))
m, l = nf.empty((1, 1), "float64", where), nf.empty((1, 1), "float64", where)
nf.launch(statistics, (1, 1), 1, nf.to_device(hidden[None, None], where), m, l, device=where)
m, l = (nf.to_host(x)[0, 0] for x in (m, l))
this.text(f"""
The row -∞, -∞, 1, 2 by `add_tile`, which has no guard, and by `statistics`:

    add_tile     m = {state[0]:.5g}   l = {state[1]:.5g}
    statistics   m = {m:.5g}   l = {l:.5g}
""")

# %% The stage.
this.part("The stage")
this.text("""
Three kernels (numba_flash/stages/online_softmax.py). The scores are those of lesson 03. `statistics` passes over
a row of S once, with a tile of one score:
""")
this.source(online_softmax.make_statistics(float32), "m_i = real", "l[h, i]")
this.text("""
This stage carries m and l along, and not O: it stops halfway, so that the next step is small. With m and l known,
`output` passes over S a second time. It is the tiled product of lesson 03, except that it reads S and forms a
tile of P on the way, in shared memory. P never reaches HBM. (`keep`, `seed` and `p_drop` are for dropout, lesson 09;
without it `keep` is 1. `row` is the query of a thread and `col` its column of O.)
""")
this.source(online_softmax.make_output(T, float32, make_keep(float32, 0)), "P_ij = cuda", "O[h, row")

# %% The prediction, by hand.
this.part("A prediction: the bill")
x = this.draw(N=range(70, 200, 10), d=(20, 36, 44), T=(8, 16), H=(7, 11, 13))
there, across = nf.predict("online_softmax", n=x.N, d=x.d, heads=x.H, blocks=x.T), tiles(x.d, x.T)
this.ask("""
What changes against tiled's bill (lesson 03)? For one head: how often is each element of S loaded, in `statistics`
and in `output`? And how many elements of m and of l are stored, and how many loaded? ⌈N/T⌉ is the number of tiles along
N, ⌈d/T⌉ along d; a block of `output` has T × T threads, and each of them runs the lines above.
""",
    Question("S loads", x, "how many elements of S do the kernels load?",
        there["S"].loads, "N² by `statistics` and N²·⌈d/T⌉ by `output`, for each head.",
        "`statistics` passes over S once. And `output` needs a weight where tiled's product loaded P.",
        [(x.H * x.N**2 * (3 + across), "softmax passed over S three times. `statistics` passes once."),
         (x.H * x.N**2 * across, "That is `output`. `statistics` loads S, too."),
         (x.H * x.N**2 * 2, "`output` loads S once per column of tiles of O, and there are ⌈d/T⌉ of these."),
         (x.H * x.N**2 * (1 + x.d), "`output` shares its tiles: once per column of tiles of O, not per column.")]),
    Question("m loads", x, "how many elements of m does `output` load? It has whole blocks of T × T threads.",
        there["m"].loads, "T·⌈d/T⌉ threads have the same query, and each loads its m: H·N·T·⌈d/T⌉.",
        "How many threads of `output` have the same query? Each loads m for itself.",
        [(2 * x.H * x.N, "So many m and l there are. The question is for m, and each thread loads it for itself."),
         (2 * x.H * x.N * across, "That is m and l, once per block. The question is for m, and each thread loads it."),
         (2 * x.H * x.N * x.d, "That is m and l. The question is for m; and threads past column d load it, too."),
         (x.H * x.N, "So many there are. But each thread of `output` loads the m of its query for itself."),
         (x.H * x.N * across, "That is once per block. But each of T threads of a row loads it for itself."),
         (x.H * x.N * x.d, "Threads past column d load it, too: a tile hangs over the edge."),
         (2 * there["m"].loads, "That is m and l together.")]),
)  # fmt: skip
by_hand = [
    ("scores", "Q loads", "as before", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "K loads", "as before", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "S stores", "as before", "N²", N * N),
    ("statistics", "S loads", "one pass", "N²", N * N),
    ("", "m, l stores", "two per row", "2N", 2 * N),
    ("output", "S loads", "instead of P", "N²·⌈d/T⌉", N * N * Td),
    ("", "m, l loads", "two per thread", "2N·T·⌈d/T⌉", 2 * N * T * Td),
    ("", "V loads", "as before", "N·d·⌈N/T⌉", N * d * Tr),
    ("", "O stores", "as before", "Nd", N * d),
]
predicted = nf.predict("online_softmax", n=N, d=d, heads=H, blocks=T)
assert predicted.elements == H * sum(elements for *_, elements in by_hand)
this.text(f"""
`statistics` loads a score once, where softmax loaded it three times. `output` loads it once per column of tiles of O,
⌈d/T⌉ = {Td} in all, as it did with P in tiled. In `output` a query has T·⌈d/T⌉ = {plural(T * Td, "thread")}, and
each loads m and l of its query. For one head:
""")
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")

# %% The run.
this.part("The run and its bill")
this.running("naive, tiled, then online_softmax")
ideal = algorithm0(n=N, d=d, heads=H)
naive_out = nf.attention(*this.inputs, stage="naive", device=where)
with nf.ledger() as before:
    nf.attention(*this.inputs, stage="tiled", blocks=T, device=where)
with nf.ledger() as counted:
    out = nf.attention(*this.inputs, stage="online_softmax", blocks=T, device=where)
this.bill("online_softmax", counted, predicted=predicted, previous=("tiled", before), algorithm0=ideal,
          below=this.exact("online_softmax", out, naive_out))  # fmt: skip
square = {"tiled: S": before["S"], "tiled: P": before["P"], "online_softmax: S": counted["S"]}
square = {name: count.elements for name, count in square.items()}
this.text("""
"new" is what this kernel did not touch in `tiled`. `statistics` is a kernel that `tiled` does not have: its
loads of S are compared with all loads of S there. All traffic of the N × N matrices:
""")
this.show(report.bars(square, "elements"), "")

# %% What changed and why.
this.part("What changed, and what did not")
work = [nf.flops(stage, n=N, d=d, heads=H, blocks=T) for stage in ("tiled", "online_softmax")]
this.figures["flops"] = dict(zip(("tiled", "online_softmax"), work))
here, there = counted.elements, before.elements
this.text(f"""
P is gone, and so are two of the three passes of softmax. In their place are m and l, N numbers each. The bill is
{here / there:.2f} times that of tiled. The result is exact: rescaling adds a rounding or two where m rises.

The arithmetic is {work[0]:,} FLOPs in tiled and {work[1]:,} here. Softmax took 7 per score. `statistics` takes 7 too:
a maximum, two exponentials with a difference each, a product and a sum (and 2 less per row, where there is nothing to
rescale yet). `output` takes 3 more, a difference, an exponential and a quotient, per score and column of tiles of O,
of which there {f"are {Td}" if Td > 1 else "is 1"}.

S stays: each element stored once, loaded {1 + Td} times, {counted['S'].elements / here:.0%} of the bill. But nothing
has to wait for a whole row any more. In the trace m, l and l·O were all carried along while tiles came. So the three
steps fit into one kernel, and a tile of S can be used and forgotten. Lesson 05 does that.
""")

this.part("Your turn")
other = 32 if T != 32 else 16
then = nf.predict("online_softmax", n=N, d=d, heads=H, blocks=other)
falling = tuple(sorted(this.row, reverse=True))
row_to_try, shows = next((row, shows) for row, shows in (
    (falling, "The largest score comes first."), (falling[::-1], "The largest score comes last."),
    ((1., 3., 2.), "Three other scores.")
) if row != this.row)  # fmt: skip
this.tries({
    f"--blocks {other}": f"""Each element of S is loaded {1 + tiles(d, other)} times then. The total: {then.elements:,}
    elements.""",
    f"--row={','.join(f'{s:.15g}' for s in row_to_try)}": f"{shows} Look at the column `old`.",
})
this.text("""
Check yourself: Algorithm 1 of the paper keeps O and not l·O, and divides at each tile. With which factor must it
multiply the old O when a tile comes, in terms of `old`, the old l and the new l? Write it down, test it on two
lines of the trace, and compare with line 12 of the table in lesson 05.
""")
this.end()
