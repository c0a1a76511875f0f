# %% [markdown]
"""Lesson 12, several results per thread. Run `python lessons/12_register_tiled.py`, or open it as a notebook."""

# %%
import numpy as np
from numba import cuda, float32

import numba_flash as nf
from numba_flash import lesson, masks, reference, report, testing
from numba_flash.blocks import KEY_THREADS, ROWS, check_blocks, filled_up, pitch, tiles
from numba_flash.figures.measured import BENCH, COPY, INSIDE, MATMUL, WARPS
from numba_flash.hbm.predict import algorithm0
from numba_flash.hbm.warps import SECTOR, warp_accesses
from numba_flash.questions import Question
from numba_flash.stages import register_tiled

LANES, BANKS = 128, 32                                       # of a multiprocessor of an H200, per cycle
this = lesson.start("12 · register_tiled", stage="register_tiled", blocks=None)
N, d, H, where = this.n, this.d, this.heads, this.device
chosen = check_blocks("register_tiled", this.blocks, d=d)
few = {"n": min(N, 64), "d": min(d, 32)}                     # what is recorded, access by access


def recorded(stage):
    """The accesses of a run with few rows and columns, by kernel."""
    q, k, v = testing.inputs((few["n"], few["d"]), (few["n"], few["d"]), seed=this.seed)
    with nf.recording() as record:
        nf.attention(q, k, v, stage=stage, device="cpu")
    return {launch.kernel: warp_accesses(launch) for launch in record.launches}


this.part("The question")
ms = {name: forward for name, (forward, _) in BENCH.items()}
rate = {name: 4 * 64 * 4096**2 * 64 / (t / 1000) / MATMUL for name, t in ms.items()}  # of a product of matrices
intensity = nf.flops("flash2", n=N, d=d, heads=H) / nf.predict("flash2", n=N, d=d, heads=H).total_bytes
this.text(f"""
The bill counts what threads ask for. flash2 has the smallest bill so far, and it is not the fastest kernel that there
is: on an H200 it reaches {rate["flash2"]:.0%} of the rate at which that GPU multiplies matrices in float32. What does
it wait for? Here it computes {intensity:.1f} FLOPs per byte of HBM. The H200 that we measured multiplies matrices at
{MATMUL / 1e12:.1f} TFLOP/s and copies {COPY / 1e12:.2f} TB/s (`bench`), so a kernel waits for HBM only below
{MATMUL / COPY:.0f} FLOPs per byte (lesson 01). flash2 does not.

This lesson counts two things that the bill does not see, how the threads of a warp ask HBM and how they ask shared
memory, and then builds a kernel with the algorithm of flash2 that asks shared memory less.
""")

# %% Sectors.
this.part("What a warp asks of HBM")
this.text(f"""
32 threads of a block are a warp and run each instruction together (lesson 00). HBM is read in sectors of {SECTOR}
bytes: 8 neighbouring elements of float32. A load by a warp is one request, and moves each sector in which one of its 32
elements lies. If the 32 elements are neighbours, these are 4 sectors. If each lies far from the others, it is 32, of
which 7/8 are not asked for: a load that is not coalesced.
""")
x = this.draw(s=range(2, 8), B=(64, 96, 128, 160))
this.ask("""
Which distance between the elements of neighbouring threads costs how many sectors?
""",
    Question("sectors", x, "thread i of B threads in a block loads X[s·i]. How many sectors do the requests touch?",
        len({s_i * x.s // 8 for s_i in range(x.B)}), "s·B/8: they span 4·s·B bytes, and no sector lies between.",
        "A warp spans 32·s elements, or 128·s bytes. How many sectors of 32 bytes is that? How many warps?",
        [(x.B // 8, "That is for neighbours, s = 1."), (x.B, "Each thread has a sector of its own from s = 8 on."),
         (4 * x.s, "So many one warp touches. How many warps has the block?")]),
)  # fmt: skip
this.text(f"""
A stage's requests can be counted: `nf.recording()` keeps each access of each thread, and the n-th accesses of the
threads of a warp at one place of the source are a request. For one head, N = {few["n"]} and d = {few["d"]}; "least" is
what the same elements would take if they were neighbours. (The last row is of the kernel that part 6 builds.)
""")
naive, flash2 = recorded("naive"), recorded("flash2")["flash2"]
tile = recorded("register_tiled")["register_tiled"]
of_O = [one for one in tile if one.array == "O"]
of_hbm = [one for kernel in ("scores", "softmax", "output") for one in naive[kernel]]
of_hbm += [one for one in flash2 if one.space == "global" and one.array != "L"] + of_O
table = [[one.kernel, f"{one.array} {one.kind}", one.requests, f"{one.per_request:.2f}",
          f"{one.least / one.requests:.2f}"] for one in of_hbm]  # fmt: skip
this.show(report.table(["kernel", "", "requests", "sectors", "least"], table), "")
this.figures["sectors"] = [[one.kernel, one.array, one.kind, one.requests, one.units, one.least] for one in of_hbm]
far, across = next(one for one in naive["softmax"] if one.array == "S"), {one.array: one for one in naive["scores"]}
this.text(f"""
A block of `scores` has 16 × 16 threads, so a warp has 2 queries and 16 keys. The rows of Q and K are d elements apart:
{across["Q"].per_request:.0f} sectors of Q per request, and {across["K"].per_request:.0f} of K. `softmax` has a thread
per row, and the rows of S are N_k elements apart: {far.per_request:.0f} sectors per request. The bill does not tell: it
counts elements. Nor is it all lost, where a cache keeps the sectors for the next 7 steps of the loop. The tiles of
lesson 03 mend it for the products, since they are filled by neighbours: flash2 fills K_j and V_j so. It loads Q and
stores O by the row, once each.
""")

# %% Banks.
this.part("What a warp asks of shared memory")


def make_column(width):
    @cuda.jit
    def column(X, Y):
        tile = cuda.shared.array((32, width), float32)
        x = cuda.threadIdx.x
        for r in range(32):
            tile[r, x] = X[r, x]
        cuda.syncthreads()
        for t in range(32):
            Y[x, t] = tile[x, t]                             # thread x reads row x of the tile

    return column


def waves(width):
    X = np.ones((32, 32), np.float32)
    with nf.recording() as record:
        nf.launch(make_column(width), 1, 32, X, np.empty_like(X), device="cpu")
    return next(one for one in warp_accesses(record.launches[0]) if (one.array, one.kind) == ("tile", "loads"))


this.text(f"""
Shared memory has no sectors, it has {BANKS} banks. Word w, 4 bytes, lies in bank w mod {BANKS}. In one go, a
wavefront, each bank serves one word, to as many threads as ask for that word. If two threads of a warp ask one bank for
two words, the request takes two wavefronts: a bank conflict. The rows of a tile with `width` columns begin `width`
banks apart:
""")
this.source(make_column(32), "tile = ", "Y[x, t]")
x = this.draw(width=(42, 44, 50, 52, 56, 60, 72, 80))
this.ask("",
    Question("wavefronts", x, "how many wavefronts does one request for `tile[x, t]` take?",
        np.gcd(x.width, 32).item(), "The greatest common divisor of width and 32: so many rows share a bank.",
        "In which bank does row x begin? Which is the first other row that begins in the bank of row 0?",
        [(1, "Rows begin in different banks only if width is odd."),
         (32, "That is for a width of 32: all rows begin in one bank."),
         (32 // np.gcd(x.width, 32).item(), "So many banks are used. How many rows does each of them serve?")]),
)  # fmt: skip
widths = 32, 33, 34, 36, 40, 48, 68
this.show(report.table(["width", "wavefronts per request"], [[w, f"{waves(w).per_request:.0f}"] for w in widths]), "")
this.text("""
So a tile that is read by rows gets a column more, which nobody uses: `d | 1` in the backward pass of flash2. In `tiled`
16 threads read 16 rows of 16 columns: 8 rows begin in the same bank (its comment says so). Where all threads of a warp
ask for the same word, as those of flash2 do, there is no conflict.
""")

# %% One result per thread.
this.part("One result per thread")
asked = sum(one.elements for one in flash2 if one.space == "shared" and one.kind == "loads")
multiplied = 2 * few["n"] ** 2 * few["d"]
warps = 2 * 4096**2 * 64 * 64 // 32                          # multiply-adds of warps in the run that was measured
one, two = INSIDE["flash2"], INSIDE["register_tiled"]
this.text(f"""
Then why is flash2 not faster? In flash2 each thread has a query, with its rows of Q_i and O_i in registers. Each
multiply-add takes an element of K_j or V_j, the same one for all threads of the block, and still each thread has to
load it. Counted in the run above:

    loads from shared memory  {asked:>11,}
    multiply-adds             {multiplied:>11,}     {asked / multiplied:.3f} loads per multiply-add

(The few more are S_ij, which is in shared memory, too.) A multiprocessor of an H200 starts the multiply-adds of
{LANES // BANKS} warps in a cycle, and its shared memory serves one wavefront (NVIDIA, CUDA C++ Programming Guide). A
wavefront per multiply-add would leave the units idle for {LANES // BANKS - 1} cycles of {LANES // BANKS}. But a load
need not be of one word: the compiler joins four neighbours, and the inner loops of flash2 have 16 loads for 64
multiply-adds. NVIDIA's profiler Nsight Compute (`ncu`) counts {one.wavefronts / warps:.2f} wavefronts for each
multiply-add of a warp: about two for a load of four neighbours, although all threads ask for the same. (Why not one, we
do not know.) It also says what part of its peak each unit reached, the "speed of light". For 64 heads,
N = 4096, d = 64, in {ms["flash2"]:.1f} ms: shared memory {one.shared:.0f}%, slots in which an instruction can start
{one.issued:.0f}%, multiply-add units {one.multiplied:.0f}% (they form other products and sums, too). None is at its
limit. The rest is waiting:

- A thread adds up a score in one sum, `s += Q_i[t] * K_j[c, t]`: each multiply-add needs the one before. What its
warps wait for most, ncu calls it `wait`, is the instruction before: {one.wait:.2f} cycles per instruction.

- A thread takes {one.registers} registers, and a multiprocessor has 65,536: enough for 2 blocks of 128 threads. So
{one.warps:.1f} warps are at work of the {WARPS} that it can hold, {one.warps / WARPS:.0%}. This share is the occupancy.
With so few, often none is ready.
""")

# %% Several results per thread.
this.part("Several results per thread")
this.text(f"""
A thread that owns R × C scores, a thread tile, loads R elements of Q_i and C of K_j, and multiplies each with each:
R·C multiply-adds for R + C loads, and R·C sums that do not wait for one another. Its results are in registers,
{ROWS} × {tiles(chosen.Bc, KEY_THREADS)} scores here; so are the elements that it multiplies next. This is register
tiling, or register blocking.
""")
x = this.draw(R=(2, 4, 8), C=(3, 4, 5, 6), d=(16, 24, 32, 48))
this.ask("",
    Question("loads", x, "how many elements does a thread with R × C scores load from shared memory, for d columns?",
        x.d * (x.R + x.C), "(R + C)·d, for R·C·d multiply-adds.",
        "For one column: how many elements of Q_i, how many of K_j? Each is used for a whole row or column of scores.",
        [(2 * x.R * x.C * x.d, "So many loads R·C threads with one score each."),
         (x.R * x.C * x.d, "So many multiply-adds it makes. Each element that it loads is used several times."),
         (x.R + x.C, "That is for one column of Q_i and K_j.")]),
)  # fmt: skip
rows_by_rows, rows_by_columns, _ = register_tiled.make_products(*filled_up(*chosen, d), float32)
this.source(rows_by_rows)
this.text("""
`rows_by_rows` is a device function: a function that kernels call, and that the compiler writes into them. Y is the
number of threads along y. `uint32` is an integer without a sign: such an index cannot count from the end, and so
Numba does not ask whether it does.

The ranges of the inner loops are constants, so the compiler writes these loops out and keeps C, a and b in registers
(lesson 05, part 2). The loads per multiply-add:
""")
shares = []
for R, C in ((1, 1), (2, 2), (4, 4), (4, 8), (8, 8)):
    loads = R + C if R * C > 1 else 1
    shares.append([f"{R} × {C}", loads, R * C, f"{loads / (R * C):.3f}"])
this.show(report.table(["results", "loads", "multiply-adds", "loads each"], shares), "")
this.text("""
(1 × 1 is flash2, whose own element is in a register.) 8 × 8 needs 64 registers for the results of one product, and as
many for O: a thread has 255, and a multiprocessor 65,536 for all its threads. With more registers per thread, the
occupancy falls. 4 × 4 and 4 × 8 leave room for 512 threads per multiprocessor.
""")

# %% The kernel.
this.part("The kernel")
none = masks.no_mask()
kernel = register_tiled.make_forward(*chosen, d, float32, none.allowed, none.seen, none.keep(float32))
rows, keys, columns = filled_up(*chosen, d)
this.text(f"""
A block has {KEY_THREADS} × {rows // ROWS} threads for a tile of Br = {chosen.Br} and Bc = {chosen.Bc}. Thread (x, y)
owns rows y, y + Y, … of the tile. Several threads share a row now. So its maximum and its sum pass through shared
memory, `part`, and so does P_ij, which the product with V_j reads along the keys. ("Alg. 1" in a comment is that of the
FlashAttention-2 paper, lesson 05, part 7; `keep` is of dropout, lesson 09.)
""")
this.source(kernel, "for j in range(0, keys", "rows_by_columns(")
this.text(f"""
The widths of the tiles are chosen for the banks. A row of Q_i, K_j and V_j takes {pitch(columns)} elements: eight
threads that read the same columns of eight rows find them in different banks, and rows begin at multiples of 16 bytes,
so that four neighbours are one load. Thread x owns columns 4x to 4x + 3 of O_i, and so on every {4 * KEY_THREADS}:
eight threads read 4 neighbours each in one go. (In part 3 all 32 threads read rows of their own, here 8 do.) What the
warps ask shared memory for, for N = {few["n"]} and d = {few["d"]}:
""")
shared = [one for one in tile if one.space == "shared"]
this.show(report.table(["", "line", "requests", "wavefronts", "least"], [
    [f"{one.array} {one.kind}", one.line, one.requests, f"{one.per_request:.2f}", f"{one.least / one.requests:.2f}"]
    for one in shared
]), "")  # fmt: skip
this.figures["wavefronts"] = [[one.array, one.kind, one.requests, one.units, one.least] for one in shared]
now = sum(one.elements for one in shared if one.kind == "loads")
collide = ", ".join(dict.fromkeys(one.array for one in shared if one.kind == "stores" and one.units > one.least))
this.text(f"""
A request is one element per thread here. The GPU makes fewer: of the loops in the products the inner ones are written
out, those over t0 and c0 are not, and so 4 neighbours are loaded at once, or 2 of P_ij.

The products read without a conflict. {f"Stores into {collide} take two wavefronts in place of one." if collide else ""}
The columns in fours have a price: neighbours in a warp store elements of O that are 4 apart, in
{of_O[0].per_request:.0f} sectors where {of_O[0].least / of_O[0].requests:.0f} would do (part 2, last row), once per
block. All loads from shared memory together: {now:,}. Of flash2 it was {asked:,}.
""")

# %% The run.
this.part("The run and its bill")
this.running("naive, flash2 and register_tiled")
bills, outs = {}, {}
for stage in ("naive", "flash2", "register_tiled"):
    with nf.ledger() as bills[stage]:
        outs[stage] = nf.attention(*this.inputs, stage=stage, blocks=this.blocks if stage == "register_tiled" else None,
                                   device=where)  # fmt: skip
predicted = nf.predict("register_tiled", n=N, d=d, heads=H, blocks=this.blocks)
before = nf.predict("flash2", n=N, d=d, heads=H)
truth = reference.attention(*this.inputs)[0]
errors = this.figures["errors"] = {stage: float(np.abs(out - truth).max()) for stage, out in outs.items()}
limit = testing.bound(truth, errors["naive"], n_k=N)
this.bill("register_tiled", bills["register_tiled"], predicted=predicted, previous=("flash2", before),
          algorithm0=algorithm0(n=N, d=d, heads=H),
          below=report.error_line(errors["register_tiled"], naive=errors["naive"], bound=limit))  # fmt: skip
more = "K and V are loaded more often than by flash2, since its tiles have fewer queries" if (
    predicted["K"].loads > before["K"].loads) else "K and V are loaded as often as by flash2"  # fmt: skip
this.text(f"""
HBM sees the algorithm of flash2: Q and O once, K and V once for each tile of queries. {more}:
Tr = {tiles(N, chosen.Br):,} here. That is cheap: the kernel does not wait for HBM.

Measured on an H200 in float32, 64 heads, N = 4096, d = 64: what `bench` finds, beside the backend `efficient` of
PyTorch's attention, and what ncu says of the forward pass:
""")
tflop = 4 * 64 * 4096**2 * 64 / 1e9                          # over ms: TFLOP/s
names = {"flash2": "flash2", "register_tiled": "register_tiled", "efficient": "PyTorch"}
this.show(report.table(["", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s"], [
    [shown, f"{forward:.3g}", f"{tflop / forward:.1f}", f"{backward:.3g}", f"{2.5 * tflop / backward:.1f}"]
    for name, shown in names.items() for forward, backward in [BENCH[name]]
]), "")  # fmt: skip
this.show(report.table(["forward, by ncu", *INSIDE], [
    [what, *(show(inside) for inside in INSIDE.values())] for what, show in {
        "shared memory, %": lambda inside: f"{inside.shared:.0f}",
        "slots for instructions, %": lambda inside: f"{inside.issued:.0f}",
        "multiply-add units, %": lambda inside: f"{inside.multiplied:.0f}",
        "wavefronts per multiply-add": lambda inside: f"{inside.wavefronts / warps:.2f}",
        f"warps at work, of {WARPS}": lambda inside: f"{inside.warps:.1f}",
        "cycles in `wait`, per instruction": lambda inside: f"{inside.wait:.2f}",
        "cycles waiting for shared memory": lambda inside: f"{inside.short_scoreboard:.2f}",
    }.items()
]), "")  # fmt: skip
this.text(f"""
Shared memory is as busy in both, and register_tiled asks it for {1 - two.wavefronts / one.wavefronts:.1%} less. Its
sums do not wait for one another, and with {two.registers} registers per thread twice as many warps are at work. So more
instructions start per cycle, and the time falls by {1 - ms["register_tiled"] / ms["flash2"]:.0%}. These figures do not
say how much of that is due to which change. It waits most for shared memory now, which is not at its limit either.

PyTorch's kernel uses other units: on this GPU it multiplies float32 on the tensor cores. They take TF32, float32 with
10 bits of fraction in place of 23; three such products together come near to one of float32 (`OpMultiplyAddFastF32` in
the source of its mem_eff_attention). No flag turns that off.

The backward pass gains more: most of its products in flash2 take both factors from shared memory. It still computes S
and dP twice, once for dQ and once for dK and dV, so that each result has one owner (lesson 07): seven products, where
Algorithm 2 of FlashAttention-2 has five. (The table's TFLOP/s are of five.)

What HBM really moved, ncu tells, too: `python -m numba_flash bill --stage flash2 --n 4096 --heads 64 --measure`. In
the run on the H200 DRAM read {one.dram_read / 1e6:.1f} MB for flash2, {two.dram_read / 1e6:.1f} for register_tiled.
Q, K and V are {3 * 4 * 64 * 4096 * 64 / 1e6:.1f} MB: caches answer nearly all that is asked for again (lesson 13).
""")

this.part("Your turn")
wider = (32, 32) if tuple(chosen) != (32, 32) else (16, 16)
bill = nf.predict("register_tiled", n=N, d=d, heads=H, blocks=wider)
other = check_blocks("register_tiled", None, d=2 * d if d <= 128 else d // 2)
this.tries({
    f"--blocks {wider[0]},{wider[1]}": f"""K and V are loaded {bill["K"].loads / predicted["K"].loads:.2f} times as
    often, and the output is the same but for rounding.""",
    f"--d {2 * d if d <= 128 else d // 2}": f"""The default tiles are then Br = {other.Br} and Bc = {other.Bc}.
    The more columns, the fewer rows fit, from some d on.""",
})  # fmt: skip
this.text("""
Check yourself: if thread x reads row 2x of a tile of 64 rows, and not row x, which widths are without conflicts? And
how many sectors and wavefronts do the requests of `tiled` take, line by line? Work one of them out by hand, then count:

    import numpy as np, numba_flash as nf
    from numba_flash.hbm.warps import warp_accesses
    q = np.ones((32, 16), np.float32)
    with nf.recording() as record:
        nf.attention(q, q, q, stage="tiled", device="cpu")
    found = warp_accesses(record.launches[0])
    [(one.line, one.array, one.kind, one.per_request) for one in found]
""")
this.end()
