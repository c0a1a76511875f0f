# %% [markdown]
"""Lesson 05, the stages `flash` and `flash2`. Run `python lessons/05_flash.py`, or open it as a notebook."""

# %%
from numba import float32

import numba_flash as nf
from numba_flash import lesson, report, testing
from numba_flash.blocks import check_blocks, tiles
from numba_flash.engine.model import REGISTERS
from numba_flash.hbm.predict import algorithm0
from numba_flash.lesson import plural
from numba_flash.masks import no_mask
from numba_flash.questions import Question
from numba_flash.stages import flash, flash2

this = lesson.start("05 · flash, flash2", stage="flash", blocks=None)
N, d, H, where = this.n, this.d, this.heads, this.device
LADDER = "naive", "tiled", "online_softmax", "flash", "flash2"
chosen, chosen2 = (check_blocks(stage, this.blocks, d=d) for stage in ("flash", "flash2"))
(Br, Bc), Br2 = chosen, chosen2.Br
none = no_mask()                                             # masks are for lesson 08
Tr, Tc, Tr2 = tiles(N, Br), tiles(N, Bc), tiles(N, Br2)

this.part("The question")
this.text("""
The online softmax (lesson 04) lets m, l and O be carried along while tiles of a row come. So a tile of S can be
computed, used and forgotten, and all of attention fits into one kernel. S is the last N × N matrix in HBM.

Which tiles does such a kernel visit, in which order, and what does it then read again and again instead of S?
""")

# %% Algorithm 1 and its kernel.
this.part("Algorithm 1")
this.text("""
FlashAttention's Algorithm 1 (Dao et al. 2022, arXiv:2205.14135), with its line numbers:
""")
this.show(report.table(["line", "what it says"], [
    ["1, 3, 4", "cut Q and O into Tr tiles of Br rows, K and V into Tc tiles of Bc rows"],
    ["2", "in HBM: O = 0, l = 0, m = −∞"],
    ["5, 6", "for each tile j of keys: load K_j, V_j"],
    ["7, 8", "for each tile i of queries: load Q_i, O_i, l_i, m_i"],
    ["9", "S_ij = scale·Q_i K_jᵀ, on chip"],
    ["10", "m_tile = row maximum of S_ij, P_ij = exp(S_ij − m_tile), l_tile = its row sum"],
    ["11", "m_new = max(m_i, m_tile), l_new = exp(m_i − m_new)·l_i + exp(m_tile − m_new)·l_tile"],
    ["12", "store O_i = (l_i·exp(m_i − m_new)·O_i + exp(m_tile − m_new)·P_ij V_j) / l_new"],
    ["13", "store l_i = l_new, m_i = m_new"],
]), "")
this.text("""
("m_tile" and "l_tile" have a tilde in the paper.) Lines 10 to 12 are the trick of lesson 04. The tile gets a
maximum of its own first, and O is divided by l at every tile.

In the kernel `weight` is the guarded exp of lesson 04. `allowed` and `first` are for masks (lesson 08), `keep` is for
dropout (lesson 09): without them, every pair is allowed, the first query that sees a tile of keys is query 0, and
`keep` is 1. `N_k` is the number of keys and `g` the head of K and V, here N and h. "Alg. 1" in a comment is the table
above. "Alg. 2, l. 14" is a line of the paper's Algorithm 2, which adds masks and dropout to Algorithm 1: the dropout.
""")
kernel = flash.make_forward(Br, Bc, d, float32, none.allowed, none.first(), none.keep(float32))
this.source(kernel, "K_j = cuda", "nobody still reads")
this.text(f"""
One block of Br = {plural(Br, "thread")} works on a head. In the table i and j number the tiles; in the kernel j is the
first key of a tile, and i a query: thread r takes row r of each tile of queries, so its i goes in steps of Br. The
threads fill K_j and V_j together. Of S_ij a thread uses its own column alone, so that no barrier is needed between
storing it and loading it; neighbouring threads have neighbouring columns, and so neighbouring addresses. Line 2 is a
small kernel of its own, `initialise`.
""")

# %% What lives where.
this.part("What lives where")
sizes = {"K_j": Bc * d * 4, "V_j": Bc * d * 4, "S_ij": Bc * Br * 4}
paper = check_blocks("flash", "paper", d=d)
whole = paper.shared_bytes + 2 * paper.Br * d * 4            # with Q_i and O_i in shared memory too
than = "more" if whole > chosen.sram else "not more"
this.text("""
`cuda.shared.array` is shared memory, seen by all threads of the block. `cuda.local.array` belongs to one thread.
Registers have no addresses, so the compiler can keep such an array in them only if every index is a constant once
it has unrolled the loops, and if there are enough: 255 at most for a thread. Otherwise the array lies in local
memory, which is in HBM behind the caches. `d` is a constant of the kernel, for this reason too. The shared memory of
a block, in bytes:
""")
this.show(report.bars(sizes | {"free": chosen.sram - sum(sizes.values())}, f"of {chosen.sram:,}"), "")
this.text(f"""
{chosen}

A larger Bc means fewer passes over Q and O, so `numba_flash.blocks` takes as many keys as fit beside 64 queries.
Line 1 of the paper sets Bc = ⌈M/4d⌉ and Br = min(Bc, d), with M the elements that fit on chip: four tiles, of K, V,
Q and O. Here that is Bc = {paper.Bc} and Br = {paper.Br}. Together with S_ij they take {whole:,} bytes, {than} than the
{chosen.sram:,} there are. With Q_i and O_i in registers shared memory has {paper.shared_bytes:,} bytes to hold.
""")

# %% The prediction, by hand.
this.part("A prediction: the bill")
x = this.draw(N=range(70, 200, 10), d=(8, 12, 16), Br=(8, 16), Bc=(12, 20, 24), H=range(2, 7))
there, there2 = (nf.predict(stage, n=x.N, d=x.d, heads=x.H, blocks=(x.Br, x.Bc)) for stage in ("flash", "flash2"))
passes, passes2, all_of_O = tiles(x.N, x.Bc), tiles(x.N, x.Br), x.H * x.N * x.d
this.ask("""
For one head: how often does the kernel `flash` load each element of K and V, of Q, and of O, l and m? How often does it
store each element of O, l and m? And what does `initialise` store? The table of Algorithm 1 has all that is needed.
Write a formula in N, d and Tc for each tensor.
""",
    Question("O loads", x, "how many elements of O does the kernel `flash` load?",
        there["O"].loads, "All of O at each of Tc = ⌈N/Bc⌉ tiles of keys: H·Tc·N·d.",
        "Line 8 is in the inner loop. How often does a given tile i of queries come by?",
        [(all_of_O, "That is once. But O_i comes back for every tile of keys."),
         (all_of_O * passes2, "⌈N/Br⌉ is the number of tiles of queries. How often does each of them come by?"),
         (all_of_O * (passes - 1), "At the first tile of keys, too, O is loaded: the zeros of line 2."),
         (all_of_O * (2 * passes + 1), "Those are loads and stores. The question is for loads.")]),
    Question("l, m", x, "how many elements of l and m move, in `initialise` and `flash`?",
        there["l"].elements + there["m"].elements, "2N stored by line 2; 2N loaded and stored Tc times: H·(2 + 4Tc)·N.",
        "Two numbers per query: stored by line 2, then loaded and stored at each tile of keys.",
        [(x.H * 4 * passes * x.N, "Line 2 stores them, too."),
         (x.H * (1 + 2 * passes) * x.N, "That is one of the two."),
         (x.H * 2 * passes * x.N, "They are loaded and stored at each tile of keys, and stored by line 2."),
         (x.H * (2 + 4 * passes2) * x.N, "⌈N/Br⌉ is the number of tiles of queries. How often does each come by?")]),
)  # fmt: skip
by_hand = [
    ("initialise", "O, l, m stores", "line 2", "Nd + 2N", N * d + 2 * N),
    ("flash", "K, V loads", "line 6, each once", "2Nd", 2 * N * d),
    ("", "Q loads", "line 8, Tc times", "Tc·Nd", Tc * N * d),
    ("", "O, l, m loads", "line 8, Tc times", "Tc·(Nd + 2N)", Tc * (N * d + 2 * N)),
    ("", "O, l, m stores", "lines 12, 13, Tc times", "Tc·(Nd + 2N)", Tc * (N * d + 2 * N)),
]
predicted = nf.predict("flash", n=N, d=d, heads=H, blocks=this.blocks)
assert predicted.elements == H * sum(elements for *_, elements in by_hand)
this.text(f"""
No N² is left. All that belongs to a query comes and goes once per tile of keys, Tc = ⌈N/Bc⌉ = {plural(Tc, "time")}.
For one head:
""")
this.show(report.table(["kernel", "tensor", "why", "formula", "elements"], by_hand), "")
this.text("""
The kernel `flash` alone: (2 + 3Tc)·Nd + 4Tc·N. N² hides in Tc·N = N²/Bc.
""")

# %% The run.
this.part("The run and its bill")
this.running("the five stages, naive to flash2")
ideal, bills, outs, errors = algorithm0(n=N, d=d, heads=H), {}, {}, {}
for stage in LADDER:
    with nf.ledger() as bills[stage]:
        blocks = this.blocks if stage.startswith("flash") else None
        outs[stage] = nf.attention(*this.inputs, stage=stage, blocks=blocks, device=where)
    errors[stage] = this.exact(stage, outs[stage], outs["naive"] if stage != "naive" else None)
counted, counted2 = bills["flash"], bills["flash2"]
this.bill("flash", counted, predicted=predicted, previous=("online_softmax", bills["online_softmax"]),
          algorithm0=ideal, below=errors["flash"])  # fmt: skip
verdict = "less" if counted.elements < ideal.elements else "not less"
this.text(f"""
S is gone. Q, O, l and m are what is read again and again now. The bill is {verdict} than that of Algorithm 0, which
puts the result of each step into HBM. (Lesson 06 says for which sizes it is less.)
""")

# %% The order of the loops.
this.part("Which loop goes outside")
side = 4
orders = {"flash": [(i, j) for j in range(side) for i in range(side)],
          "flash2": [(i, j) for i in range(side) for j in range(side)]}  # fmt: skip
strips = {}
for stage, order in orders.items():
    Q_i, K_j = ([f"{step[axis] + 1}" if at == 0 or order[at - 1][axis] != step[axis] else "·"
                 for at, step in enumerate(order)] for axis in (0, 1))  # fmt: skip
    last = [f"{i + 1}" if j == side - 1 else "·" for i, j in order]
    strips[stage] = {"Q_i loads": Q_i, "K_j, V_j loads": K_j}
    strips[stage] |= {"O_i loads": Q_i, "O_i stores": Q_i} if stage == "flash" else {"O_i stores": last}
step = ["step", *range(1, side * side + 1)]
this.text(f"""
A step takes one tile of Q and one of K and V. With {side} × {side} tiles there are {side * side} steps, and any
order of them will do. In the picture a number is a tile that moves between HBM and the chip in that step; where
there is none, nothing moves. Algorithm 1 (l and m move with O):
""")
this.show(report.table(step, [[name, *cells] for name, cells in strips["flash"].items()]), "")
this.text("""
With the loops exchanged, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691):
""")
this.show(report.table(step, [[name, *cells] for name, cells in strips["flash2"].items()]), "")
this.running("both on a small input")
small, rows = testing.inputs((1, 8 * side, d), (1, 8 * side, d), seed=this.seed), []
for stage, strip in strips.items():
    with nf.ledger() as bill:
        nf.attention(*small, stage=stage, blocks=(8, 8), device=where)
    moved = {tensor: bill.kernels[stage][tensor].elements // (8 * d) for tensor in "QKVO"}
    assert moved == {tensor: sum(side * side - cells.count("·") for name, cells in strip.items() if tensor in name)
                     for tensor in "QKVO"}  # fmt: skip
    rows.append([stage, *moved.values(), sum(moved.values())])
this.text("""
Both kernels ran with tiles of 8 × 8 for N = 32. The lines of Q, K, V and O in the bills of the kernels `flash` and
`flash2`, divided by the size of a tile, say the same as the two pictures:
""")
this.show(report.table(["tiles moved", "Q", "K", "V", "O", "together"], rows), "")

# %% flash2.
this.part("FlashAttention-2's kernel")
functions = none.allowed, none.seen, none.visited, none.keep(float32)
this.text("""
From here on "Alg. 1" is that of the FlashAttention-2 paper. (Its line 10 prints an inverse that does not belong there.)
Two comments name the first paper, as "the paper": "Alg. 2 of the paper, l. 14" is dropout (lesson 09), and "Alg. 5 of
the paper, l. 8" leaves out a tile (lesson 10).

`seen` and `visited` are for masks. `keys` is how many keys this tile sees, all of them without a mask, and `visited` is
true for every tile without a block mask, the array `block_mask`.
""")
this.source(flash2.make_forward(Br2, chosen2.Bc, d, float32, *functions), "K_j = cuda", "L[h, i]")
predicted2 = nf.predict("flash2", n=N, d=d, heads=H, blocks=this.blocks)
assert predicted2.elements == H * (2 * N * d + 2 * Tr2 * N * d + N)
this.text(f"""
A block of threads has one tile of queries and walks through all keys. O_i holds l·O,
as in the trace of lesson 04, and is divided once. m and l never leave their thread; what leaves is O and L = m + log l,
which the backward pass will need (lesson 07).

{chosen2}
""")
this.ask("",
    Question("K, V loads", x, "how many elements of K and V together does `flash2` load?",
        there2["K"].loads + there2["V"].loads, "All of K and V for each of Tr = ⌈N/Br⌉ tiles of queries: 2·H·Tr·N·d.",
        "A block has one tile of queries and walks through all keys. How many blocks does a head have?",
        [(2 * all_of_O, "That is once. But every tile of queries needs all keys."),
         (2 * all_of_O * passes, "⌈N/Bc⌉ is how many steps a block takes. How many blocks load the same tile of K?"),
         (all_of_O * passes2, "That is one of the two.")]),
)  # fmt: skip
this.text(f"""
Q, O and L once, K and V once per tile of queries, of which there are Tr = ⌈N/Br⌉ = {Tr2}. That is
(2 + 2Tr)·Nd + N = {2 * N * d * (1 + Tr2) + N:,} for one head.
""")
this.bill("flash2", counted2, predicted=predicted2, previous=("flash", counted), algorithm0=ideal,
          below=errors["flash2"])  # fmt: skip

# %% What the swap saves and costs.
cost = sum(counted2[tensor].elements - counted[tensor].elements for tensor in "KV")
saved = counted.elements + cost - counted2.elements
grids = [bills[stage].launches[-1].grid for stage in ("flash", "flash2")]
blocks_of = [x * y * z for x, y, z in grids]
its_own = "" if this.blocks else f": here {Br} × {Bc} in flash, and {Br2} × {chosen2.Bc} in flash2"
this.part("What changed, and what it costs")
this.text(f"""
With these tiles the exchange saves {saved:,} elements of Q, O, l and m, and costs {cost:,} of K and V.

It asks for other tiles, too{its_own}.
In flash, more keys in a tile mean fewer passes over Q and O: Bc is as large as fits. In flash2, more queries in a tile
mean fewer passes over K and V: Br should be large, and Bc does not enter the bill. The rows of queries are in
registers, and a block has {REGISTERS:,} of those, {4 * REGISTERS:,} bytes.

And it lets more threads work. In flash the tiles of keys come one after another, since each needs the O of the one
before: one block per head, {blocks_of[0]:,} here. In flash2 a tile of queries needs nothing of the others, and each
is a block: {blocks_of[1]:,} here. A block runs on one of the GPU's processors (SMs, streaming multiprocessors), and
an A100 has 108.

The authors' CUDA package keeps this order, and changes how a tile is computed: matrix units take the products, S stays
in registers, the rows of a tile are spread over the threads of a warp, and FlashAttention-2 spends fewer operations
outside of the products. Its paper argues with those and with the number of blocks, more than with HBM: the blocks of
a head run at about the same time, and what one of them loads of K and V the next often finds in the L2 cache (lesson
02). A GPU whose registers and shared memory hold several blocks at a time hides the waiting of one behind the work of
another; one block of flash per SM, as large as fits, cannot do that.
""")

# %% The ladder.
this.part("The ladder so far")
rows = []
for stage, before in zip(LADDER, (None, *LADDER)):
    bill = bills[stage]
    times = f"{bill.elements / bills[before].elements:.3f}" if before else "-"
    rows.append([stage, bill.elements, bill.total_bytes / 1e6, bill.elements / ideal.elements, times,
                 nf.STAGES[stage].deletes])  # fmt: skip
this.show(report.table(["stage", "elements", "MB", "/ ideal", "/ before", "deletes"], rows), "")
this.show(report.bars({stage: bills[stage].elements for stage in LADDER[1:]} | {"Algorithm 0": ideal.elements}), "")
longest = bills["naive"].elements / max(bills["tiled"].elements, 1)
this.text(f"""
The bar of naive would be {longest:.3g} times as long as that of tiled. All five stages compute the same. The largest
error against float64, and divided by that of naive:
""")
found = this.figures["errors"]
own = found["naive"]
this.show(report.table(["stage", "error", "/ naive"], [
    [stage, f"{found[stage]:.1e}", f"{found[stage] / own:.2f}" if own else "-"] for stage in LADDER
]), "")

this.part("Your turn")
half = next(
    (Br, keys) for keys in (Bc // 2, Bc // 4, 4, 2, 1, 3, 5) if (keys and tiles(N, keys) != Tc) or keys == 5
)
then, then2 = (nf.predict(stage, n=N, d=d, heads=H, blocks=half).elements for stage in ("flash", "flash2"))
other = 2 * d if d == 1 or (d <= 128 and not this.blocks) else d // 2
there = nf.predict("flash", n=N, d=other, blocks=this.blocks).elements / algorithm0(n=N, d=other).elements
this.tries({
    f"--blocks={half[0]},{half[1]}": f"""Br = {half[0]} and Bc = {half[1]} in both stages. flash: {then:,}
    elements instead of {counted.elements:,}; flash2: {then2:,}{"" if then2 == counted2.elements else
    f" instead of {counted2.elements:,}"}.""",
    f"--d {other}": f"flash moves {there:.3g} times as much as Algorithm 0 then.",
})
this.text(f"""
Check yourself: a kernel has to move Q, K, V, O and L at least once, 4Nd + N. With which Br does flash2 come down to
twice that? Work it out, and check it with `nf.predict("flash2", n={N}, d={d}, blocks=(Br, 8))`. Then run the lesson
with --blocks Br,8. Does anything stand in the way?
""")
this.end()
