# %% [markdown]
"""Lesson 13, the paper's figures, and the hardware. Run `python lessons/13_figures.py`, or open it as a notebook."""

# %%
import math
from itertools import pairwise

import numba_flash as nf
from numba_flash import lesson, report, testing
from numba_flash.blocks import choose_blocks, tiles
from numba_flash.engine.model import REGISTERS
from numba_flash.figures import left, measured, memory, middle, right, runs, slopes, theorem5
from numba_flash.figures.common import aligned
from numba_flash.figures.measured import BENCH, COPY, HALF, INSIDE, KERNELS, L2, MATMUL, PROCESSORS, TIMES, WARPS
from numba_flash.figures.memory import elements
from numba_flash.hbm.predict import algorithm0
from numba_flash.hbm.warps import SECTOR, warp_accesses
from numba_flash.questions import Question
from numba_flash.report import in_bytes

this = lesson.start("13 · the paper's figures", stage="flash", blocks=None,
                    extra={"measure": (False, None, None, "on a GPU with ncu, measure DRAM and time anew")})
N, d, H, where = this.n, this.d, this.heads, this.device
settings = {stage: {"blocks": this.blocks if stage in ("flash", "flash2") else None} for stage in KERNELS}
ladder = left.compute(**left.PAPER, run=False)               # Figure 2 (left), predicted
n, width, heads = left.PAPER["n"], left.PAPER["d"], left.PAPER["heads"] * left.PAPER["batch"]
requested = ladder["float32_bytes"]                          # of the forward pass, as threads request them
read, written = ({stage: sum(getattr(one, kind) for one in kernels.values()) for stage, kernels in KERNELS.items()}
                 for kind in ("read", "written"))  # fmt: skip
moved = {stage: read[stage] + written[stage] for stage in KERNELS}
ms = {stage: forward for stage, (forward, _) in TIMES.items()}


def fell(values):
    """By which factor a figure falls at each step of the ladder, written."""
    return ["-", *(f"/ {before / after:.2f}" for before, after in pairwise(values.values()))]


this.part("The question")
this.text("""
The FlashAttention paper counts bytes of HBM, and says that time follows them. What of that can one check? Each of its
figures is a claim that can be predicted from the algorithm, counted in a run and, in part, measured on a GPU. This
lesson goes through them, and then asks the hardware itself: what did DRAM, the chips that HBM is made of, move?
""")
this.show(report.table(["in the paper", "claim", "here"], [
    ["Figure 2, left", "40.3 GB to 4.4 GB, 41.7 ms to 7.3 ms", "parts 3 to 9"],
    ["Figure 2, middle", "larger tiles of keys move fewer bytes", "part 10"],
    ["Theorem 2", "Θ(N²d²/M) accesses of HBM, forward", "part 10"],
    ["Figure 2, right", "time is linear in s, the part of the tiles", "part 11"],
    ["Proposition 4", "Θ(Nd + N²d²s/M) accesses, block-sparse", "part 11"],
    ["Theorem 5", "Θ(N²d²/M) accesses of HBM, backward", "part 12"],
    ["Table 21", "memory grows like N, and not like N²", "part 13"],
]), "")
this.text("""
`python -m numba_flash figures` computes them all, at any size, as tables, pictures and CSV. Below they are the paper's
sizes, unless it is said otherwise. Predicted bytes are elements × 2, as in the paper's half precision, where they stand
beside the paper's, and elements × 4, as in our float32, where they stand beside our measurements.
""")

# %% The predictions, by hand.
this.part("Predictions: three numbers")
a = this.draw(B=(16, 64, 128, 256))
b = this.draw(N=range(100, 400, 20), d=(16, 32, 64), H=(2, 3, 5, 6))
c = this.draw(N=range(100, 260, 20), d=(8, 16), Bc=(16, 24, 32, 48))
bar = nf.predict("flash", n=c.N, d=c.d, blocks=(8, c.Bc)).kernels["flash"]
Tc = tiles(c.N, c.Bc)
this.ask(f"""
L2 is the cache before DRAM. That of the H200 we measured holds {L2:,} bytes, says its driver. Figure 2 (middle) counts
what Algorithm 1 moves, but neither the first read of O, which is 0 then, nor l and m, nor the set-up.
""",
    Question("L2", a, "from about which N on is S of B heads, in float32, larger than L2?",
        math.isqrt(L2 // (4 * a.B)) + 1, "4·B·N² bytes: N = √(L2/4B).",
        "How many bytes is S of one head? Of B heads? Set that equal to the bytes of L2.",
        [(math.isqrt(L2 // a.B) + 1, "That is for elements of 1 byte."),
         (math.isqrt(L2 // 4) + 1, "That is for one head."),
         (L2 // (4 * a.B), "That is N². Take the square root.")], about=True),
    Question("least", b, """how many bytes must DRAM move at least for flash2, which stores L too, if caches are empty
        before and after?""", 4 * b.H * (4 * b.N * b.d + b.N), "Q, K and V are read once, O and L written: 4Nd + N.",
        "A cache can answer what is read again. Which tensors have to come, and which have to go, once?",
        [(16 * b.H * b.N * b.d, "L is written, too: N elements per head."),
         (12 * b.H * b.N * b.d, "What is read. O and L are written."),
         (b.H * (4 * b.N * b.d + b.N), "Those are elements, of 4 bytes each.")]),
    Question("bar", c, "how many elements per head has the bar of Figure 2 (middle) for tiles of Bc keys?",
        sum(bar[tensor].loads for tensor in "QKV") + bar["O"].elements - c.N * c.d,
        "(1 + 3Tc)·Nd: K and V once, 2; Q and O read, O written, 3Tc; less the first read of O.",
        "At each of Tc steps Q and O are read and O is written. K and V pass once.",
        [((2 + 3 * Tc) * c.N * c.d, "The first read of O is left out."),
         (3 * Tc * c.N * c.d, "K and V are read once: 2Nd. The first read of O is left out: Nd less."),
         ((1 + 2 * Tc) * c.N * c.d, "Q, O read and O written: that is three at each step.")]),
)  # fmt: skip
this.text("""
All three come back below. And guess, before you look: the ladder has five steps from naive to register_tiled. At which
of them does the traffic of DRAM fall most? At which does it not fall at all?
""")

# %% The run.
this.part("The ladder, counted")
this.running("six stages")
bills, outs = {}, {}
with report.progress("counting the ladder", len(KERNELS)) as advance:
    for stage, how in settings.items():
        with nf.ledger() as bills[stage]:
            outs[stage] = nf.attention(*this.inputs, stage=stage, **how, device=where)
        advance()
predicted = {stage: nf.predict(stage, n=N, d=d, heads=H, **how) for stage, how in settings.items()}
assert bills == predicted
for stage, out in outs.items():
    verdict = this.exact(stage, out, outs["naive"])
    if stage == "flash2":
        this.bill("flash2", bills[stage], predicted=predicted[stage], previous=("flash", predicted["flash"]),
                  algorithm0=algorithm0(n=N, d=d, heads=H), below=verdict)  # fmt: skip
errors = this.figures["errors"]
limit = testing.bound(this.reference, errors["naive"], n_k=N)
this.show(report.table(["stage", "predicted", "counted", "difference", "error"], [
    [stage, predicted[stage].elements, bill.elements, bill.elements - predicted[stage].elements,
     f"{errors[stage]:.1e} {'exact' if errors[stage] <= limit else 'WRONG'}"] for stage, bill in bills.items()
]), "")  # fmt: skip
this.show(report.bars({stage: 4 * bill.elements for stage, bill in bills.items()}, "bytes"), "")
same = (N, d, H, this.blocks) == (n, width, 1, None)
this.text(f"""
Predicted and counted are equal at every step, tensor by tensor.
{f"This is a head of the paper's configuration: {heads:,} times these are the bytes requested in the next part." if same
else f"The next part has N = {n:,} and d = {width}, predicted: what you get without --n, --d, --heads and --blocks."}
""")

# %% What DRAM and the clock say.
this.part("Requested, moved, and the clock")
this.text(f"""
The paper's configuration, forward: N = {n:,}, d = {width}, 16 heads, batch 64, in float32. Bytes that the threads
request are predicted. Bytes that DRAM moved, and ms, are measured on one H200 (Nsight Compute, `ncu`, and `figures
left`). `/ 2` says that a figure is half of the one above it.
""")
this.show(aligned(["stage", "requested", "", "DRAM", "", "ms", ""], [
    [stage, in_bytes(requested[stage]), a, in_bytes(moved[stage]), b, f"{ms[stage]:.1f}", c]
    for stage, a, b, c in zip(requested, fell(requested), fell(moved), fell(ms))
]), "")  # fmt: skip
this.show(report.bars({f"{stage:<14} DRAM": float(f"{moved[stage] / 1e9:.3g}") for stage in moved}, "GB"), "")
this.show(report.bars({f"{stage:<14} time": ms[stage] for stage in ms}, "ms"), "")
this.figures["ladder"] = {stage: [requested[stage], moved[stage], ms[stage]] for stage in requested}
falls = {stage: (moved[before] - moved[stage]) / 1e9 for before, stage in zip(moved, list(moved)[1:])}
largest = max(falls, key=falls.get)
this.text(f"""
Three columns, three answers. Requests fall at every step but the last. DRAM falls most at `{largest}`, by
{falls[largest]:.1f} GB; at `tiled` by {falls['tiled']:.2f} GB of {moved['naive'] / 1e9:.1f}, less than two measurements
differ by, and at the last step not at all. Time falls at every step. None of the columns can be had from another.
""")
if this.measure:
    this.running("ncu for each stage, then the stages against the clock: about a minute")
    own = runs.dram(left.PAPER, requested)
    clock = runs.times(left.PAPER, {stage: {"stage": stage, "direction": "forward"} for stage in requested})
    this.figures["measured"], this.figures["times"] = own, clock
    found = {stage: row["read"] + row["written"] for stage, row in own["bytes"].items()}
    taken = {stage: 1000 * row["median"] for stage, row in clock["seconds"].items()}
    this.text(f"And yours, on {clock['gpu']}:")
    this.show(aligned(["stage", "DRAM", "yours", "ms", "yours"], [
        [stage, in_bytes(moved[stage]), in_bytes(found[stage]) if stage in found else "-", f"{ms[stage]:.1f}",
         f"{taken[stage]:.1f}" if stage in taken else "-"] for stage in requested
    ]), "")  # fmt: skip
    for why in dict.fromkeys([*own["why"].values(), *clock["why"].values()]):
        this.text(f"Left out: {why}.")
else:
    this.text("On a GPU with Nsight Compute (`ncu`), `--measure` sets your own figures beside these.")

# %% The gaps: kernel by kernel.
this.part("Why DRAM moves less: caches")
this.text("""
Between the threads and DRAM are two caches: L1, one on each multiprocessor, and L2, one for all. They keep what came
last, and answer who asks again. ncu empties both before each kernel. So a kernel has to move each tensor that it loads,
and each that it stores, once at least: the column `once`. What DRAM read and wrote, kernel by kernel, and both over
that:
""")
rows, once, asked = [], {}, {}
for stage, kernels in KERNELS.items():
    for kernel, dram in kernels.items():
        counts = nf.predict(stage, **left.PAPER).kernels[kernel]
        at = f"{stage} {kernel}"
        asked[at] = 4 * sum(count.elements for count in counts.values())
        passes = {tensor: bool(count.loads) + bool(count.stores) for tensor, count in counts.items()}
        once[at] = 4 * heads * sum(times * elements(tensor, n, width) for tensor, times in passes.items() if times)
        name = stage if kernel == next(iter(kernels)) else ""
        sizes = asked[at], once[at], dram.read, dram.written
        rows.append([name, kernel, *map(in_bytes, sizes), f"{(dram.read + dram.written) / once[at]:.2f}"])
this.show(aligned(["stage", "kernel", "requested", "once", "read", "written", "/ once"], rows, names=2), "")
this.figures["once"] = once
scores, softmax = KERNELS["naive"]["scores"], KERNELS["naive"]["softmax"]
answered = 1 - (scores.read + scores.written) / asked["naive scores"]
S, one = 4 * heads * n * n, 4 * heads * n * width
this.text(f"""
`scores` of naive. The threads ask for {in_bytes(asked["naive scores"])}, and DRAM moves
{in_bytes(scores.read + scores.written)}: caches answer {answered:.1%}. That is the Algorithm 0 of lesson 01, each
operand once, and the caches do it by themselves. The tiles of lesson 03 ask for {in_bytes(asked["tiled scores"])} and
DRAM moves as much as before. So `tiled` saves next to nothing in DRAM. It saves requests, which L1 and L2 have to
answer one by one, and time falls all the same, from {ms["naive"]:.0f} ms to {ms["tiled"]:.0f}.

Writing. DRAM moves less than `once` in places: flash2 has written {in_bytes(written["flash2"])}, and O and L are
{in_bytes(one + 4 * heads * n)}. What is stored goes to L2, and from there to DRAM when L2 needs the room (write-back).
When the kernel ends, {in_bytes(one + 4 * heads * n - written["flash2"])} lie in L2 still, which holds {in_bytes(L2)}.
They are written later, and are on no kernel's bill.
""")

# %% Sectors.
this.part("Why DRAM moves more: softmax")
with nf.recording() as record:
    nf.attention(*testing.inputs((64, 8), (64, 8), seed=this.seed), stage="naive", device="cpu")
recorded = warp_accesses(next(launch for launch in record.launches if launch.kernel == "softmax"))
loads = [access for access in recorded if access.array == "S"]
units, requests, loaded = (sum(getattr(access, what) for access in loads) for what in ("units", "requests", "elements"))
filled = KERNELS["flash"]["initialise"]
this.text(f"""
One kernel moves {(softmax.read + softmax.written) / moved["naive"]:.0%} of naive's bytes: softmax,
{(softmax.read + softmax.written) / once["naive softmax"]:.1f} times S and P. It has a thread per row. So the 32 threads
of a warp ask for 32 rows, which lie {4 * n:,} bytes apart. In a recording of it, one request for S touches
{units / requests:.0f} sectors of {SECTOR} bytes, for 4 bytes of each: {loaded * 4 / (units * SECTOR):.1%} is used
(lesson 12). The next 7 steps of the loop want the rest. If a cache keeps the sector that long, it comes once; if not,
it comes up to 8 times.

P is written {softmax.written / S:.1f} times: a sector of P that leaves L2 when it is partly written goes to DRAM, and
goes again. And it may be read before: `initialise` of flash loads nothing, stores O by the row as well, and DRAM reads
{in_bytes(filled.read)} for it and writes {in_bytes(filled.written)}. So not all that softmax reads is S. What it reads
of P is at most what it writes, if a sector is read no more often than written:
""")
this.show(report.bars({"S, once per pass": 3 * S, "softmax, S, at least": softmax.read - softmax.written,
                       "softmax, S and P": softmax.read, "S, each request": 24 * S}, "bytes"), "")
again = filled.read / filled.written
this.text(f"""
In three passes over S, then, a sector of S came {(softmax.read - softmax.written) / (3 * S):.1f} to
{softmax.read / (3 * S):.1f} times per pass. If DRAM reads P in the same proportion to what it writes as in
`initialise`, {again:.0%}, it is {(softmax.read - softmax.written * again) / (3 * S):.1f} times.
""")
resident, line = PROCESSORS * 2048, 128
least = {stage: sum(once[f"{stage} {kernel}"] for kernel in kernels) for stage, kernels in KERNELS.items()}
spared = least["tiled"] - least["online_softmax"]
this.text(f"""
Could a cache have kept them? An H200 runs up to {PROCESSORS} × 2,048 = {resident:,} threads at once, each in a row of
its own. Caches keep lines of {line} bytes, 4 sectors. That is {in_bytes(resident * line)} for S and as much for P:
{in_bytes(2 * resident * line)}, more than L2 has. `statistics` of online_softmax reads by the row, too, but it makes
one pass and stores no P: {in_bytes(resident * line)} fit, and DRAM reads
{KERNELS["online_softmax"]["statistics"].read / S:.2f} times S. Conjecture: that is the
reason. The figures agree with it, and do not prove it.

The largest step in the DRAM column is the one to online_softmax, {in_bytes(moved["tiled"] - moved["online_softmax"])}.
Of these, {in_bytes(spared)} are P, by the column `once`. The others are bytes that came more than once.
""")

# %% What fits into L2.
this.part("What L2 holds")
sizes = []
for count in (1, 16, heads):
    from_here = math.isqrt(L2 // (4 * count)) + 1
    sizes.append([count, from_here, in_bytes(4 * count * n * n), "in L2" if 4 * count * n * n <= L2 else "in DRAM"])
this.text(f"""
S of all heads takes 4N² bytes per head. From this N on it is larger than the {in_bytes(L2)} of L2; below, a kernel can
find in L2 what the kernel before it left there, and S need never reach DRAM. (ncu, as `--measure` runs it, cannot show
that: it empties the caches before each kernel.)
""")
this.show(report.table(["heads", "from N =", f"S at N = {n:,}", ""], sizes), "")
this.figures["outgrows"] = {str(count): from_here for count, from_here, *_ in sizes}
blocks = {stage: choose_blocks(stage, d=width) for stage in ("flash", "flash2")}
pair = 4 * 2 * n * width                                     # Q and O, or K and V, of one head
in_flash = KERNELS["flash"]["flash"]
each_has = measured.SHARED // blocks["flash"].shared_bytes            # blocks on a multiprocessor
of_block = blocks["flash2"].threads * 8 * tiles(INSIDE["flash2"].registers, 8)  # which come in eights
at_once = REGISTERS // of_block
running = PROCESSORS * at_once / tiles(n, blocks["flash2"].Br)
this.text(f"""
A small benchmark so says little about DRAM: with one head of N = {n:,}, naive has its S in L2. The paper's 1,024 heads
have {S / L2:.0f} times as much as L2 holds.

flash and flash2 have no S, and L2 decides between them, too. In flash a block has a head, and passes over its Q and O
once for each of Tc = {tiles(n, blocks["flash"].Bc)} tiles of keys. These are {in_bytes(pair)} per head. With a single
block on each of {PROCESSORS} multiprocessors they are {in_bytes(PROCESSORS * pair)}, and each has room for {each_has}
blocks: L2 cannot hold them. When a block comes back to a row, the row is gone. DRAM moves as much as the threads ask
for, {(in_flash.read + in_flash.written) / 1e9:.2f} GB of {asked["flash flash"] / 1e9:.2f}, and yet caches work: flash
has a thread per row, so a request for Q or O touches 32 sectors, and 1/8 of their bytes is used. Caches answer 7 of 8
sectors, and nothing survives from one tile of keys to the next. The paper counts so: each element once per step.

In flash2 the Tr = {tiles(n, blocks["flash2"].Br)} blocks of a head run side by side and read the same K and V. A
multiprocessor has registers for {at_once} blocks, with {INSIDE["flash2"].registers} per thread (ncu; lesson 12). So
{running:.0f} heads are at work, with {in_bytes(running * pair)} of K and V, and these fit. DRAM read
{read["flash2"]:,} bytes; Q, K and V are {3 * one:,}. The order of loops that lets O stay in registers lets L2 do the
rest.

That is all that a kernel can save, {in_bytes(once["flash2 flash2"])} of Q, K, V, O and L once. register_tiled asks for
{requested["register_tiled"] / requested["flash2"]:.1f} times as much as flash2, since its tiles have fewer queries, and
DRAM moves the same: there is nothing left.
""")

# %% The clock.
this.part("What takes the time")
flops = {stage: nf.flops(stage, **left.PAPER) for stage in requested}
ideal = 4 * algorithm0(**left.PAPER).elements
floors = {"Algorithm 0": (ideal / COPY, flops["naive"] / MATMUL)}
floors |= {stage: (moved[stage] / COPY, flops[stage] / MATMUL) for stage in requested}
floors |= {"Algorithm 0, fp16": (ideal / 2 / COPY, flops["naive"] / HALF),
           "flash2, fp16": (least["flash2"] / 2 / COPY, flops["flash2"] / HALF)}  # fmt: skip
floors = {name: (1000 * dram, 1000 * work) for name, (dram, work) in floors.items()}
this.text(f"""
How long would DRAM take for its bytes alone, and the arithmetic units for the operations alone? This H200 copies
{COPY / 1e12:.2f} TB/s, read and written. It multiplies matrices at {MATMUL / 1e12:.1f} TFLOP/s in float32, and in
float16 (fp16), on tensor cores, at {HALF / 1e12:.0f} (all by `bench`). Algorithm 0, and what is in fp16, are
predicted, each tensor once per kernel; all operations at the rate of a product. In ms:
""")
this.show(aligned(["stage", "DRAM alone", "arithmetic alone", "measured", "DRAM / measured"], [
    [name, f"{dram:.2f}", f"{work:.2f}", *([f"{ms[name]:.1f}", f"{dram / ms[name]:.0%}"] if name in ms else "--")]
    for name, (dram, work) in floors.items()
]), "")  # fmt: skip
this.figures["floors"] = floors
ratio = {name: dram / work for name, (dram, work) in floors.items()}
this.text(f"""
The paper's case is fp16. There Algorithm 0 is memory-bound: DRAM takes {ratio["Algorithm 0, fp16"]:.1f} times as long
as the arithmetic. With FlashAttention it takes {ratio["flash2, fp16"]:.2f} times as long: the bytes no longer matter.
In float32 the arithmetic is {HALF / MATMUL:.0f} times as slow, and Algorithm 0 is at {ratio["Algorithm 0"]:.2f}
already. So there is less to win, before any kernel is written.

And DRAM's bandwidth is not the limit of any of our stages: the largest share is
{max(floors[stage][0] / ms[stage] for stage in ms):.0%}. What is? For each kernel, ncu says what part of its peak each
unit reached (speed of light, lesson 12): L1, which shared memory is part of, L2, DRAM, and the slots in which an
instruction can start. In %, and which is largest. (ncu times each kernel by itself; their sums are up to 5% below the
times of part 4. And its peak of DRAM is that of the datasheet, not what a copy reaches.)
""")
units = {"L1": "l1", "L2": "l2", "DRAM": "dram", "slots": "issued"}
light = []
for stage, kernels in KERNELS.items():
    for kernel, one_kernel in kernels.items():
        shares = {unit: getattr(one_kernel, field) for unit, field in units.items()}
        name = stage if kernel == next(iter(kernels)) else ""
        light.append([name, kernel, f"{one_kernel.ms:.1f}", *(f"{x:.1f}" for x in shares.values()),
                      max(shares, key=shares.get)])  # fmt: skip
this.show(aligned(["stage", "kernel", "ms", *units, "largest"], light, names=2), "")
this.text(f"""
Three kinds of limits. A unit at its peak: L1 in `scores`, where naive's requests touch many sectors, and those of tiled
have bank conflicts, {measured.CONFLICTS:.0%} of the wavefronts in shared memory (lesson 12). Instructions: `output` of
naive starts one in {KERNELS["naive"]["output"].issued:.0f}% of the slots. And latency: softmax has no unit above
{softmax.l2:.0f}%. Its warps wait {measured.SOFTMAX_WAITS} cycles for loads per instruction, which {WARPS} warps do not
hide. `statistics`, one pass in place of three and no P, takes {KERNELS["online_softmax"]["statistics"].ms:.0f} ms in
place of {softmax.ms:.0f}. flash and flash2 have {INSIDE["flash2"].warps:.0f} warps at work of {WARPS}, and wait;
register_tiled has twice as many, and asks shared memory less: at the same DRAM traffic {ms["flash2"]:.1f} ms become
{ms["register_tiled"]:.1f} (lesson 12).
""")

# %% Figure 2, left.
this.part("Figure 2 (left): 9.2 and 5.7 times")
this.text("""
A training step, both passes, in half precision. (The paper's GFLOP do not follow from its caption, so that only their
ratio can be compared: lesson 06.)
""")
this.show(*left.headline(ladder, ladder["best"]["flash2, 16 bits"]))
this.show(*left.tiles_page(ladder))
this.show(*left.difference(ladder, ladder["best"]["flash2, 16 bits"]))
both = {name: sum(row) for name, row in BENCH.items()}
products = {"math": 6, "register_tiled": left.products("register_tiled", True)}
this.text(f"""
The time. The paper's step became 41.7 / 7.3 = {41.7 / 7.3:.1f} times as fast. Ours, in float32 on an H200, takes
{TIMES["naive"][1]:.0f} ms with naive, {TIMES["flash2"][1]:.0f} with flash2 and {TIMES["register_tiled"][1]:.0f} with
register_tiled, {TIMES["naive"][1] / TIMES["register_tiled"][1]:.0f} times less. That reproduces nothing: naive is far
from the standard attention that the paper compares with. PyTorch has one, `math`, and a fused kernel, `efficient`. In
float32, N = 4,096, 64 heads, in ms; the speed is that with math = 1:
""")
this.show(aligned(["", "forward", "speed", "both", "speed"], [
    [name, f"{forward:.3g}", f"{BENCH['math'][0] / forward:.2f}", f"{both[name]:.3g}",
     f"{both['math'] / both[name]:.2f}"] for name, (forward, _) in BENCH.items()
]), "")  # fmt: skip
this.text(f"""
So we do not reproduce 5.7. Forward, register_tiled is {BENCH["math"][0] / BENCH["register_tiled"][0]:.1f} times as
fast as standard attention. In a training step it is slower: it forms {products["register_tiled"]} products where math
forms {products["math"]}, in {both["register_tiled"] / products["register_tiled"]:.1f} ms each, where math takes
{both["math"] / products["math"]:.1f}. PyTorch's own fused kernel gains {both["math"] / both["efficient"]:.1f} times, on
other units: it multiplies float32 on the tensor cores, as three products of TF32 (lesson 12). Part 8 says why there is
less to win in float32. In the paper 40.3 GB in 41.7 ms are {40.3 / 41.7:.2f} TB/s, of the 1.5 to 2.0 of an A100: HBM
alone needed about half of the time, or more.
""")

# %% Figure 2, middle, and Theorem 2.
this.part("Figure 2 (middle), and Theorem 2")
bars = middle.compute(**middle.PAPER, run=False)
with report.progress("counting flash", len(middle.BARS)) as advance:
    found = {}
    for Bc in middle.BARS:
        found[str(Bc)] = middle.count(N, d, Bc)
        advance()
bars |= {"counted": found, "device": runs.place()}
assert bars["equal_bars"] and all(row["equal"] for row in found.values())
this.text("HBM traffic of Algorithm 1, forward, in half precision, against the keys per tile, Bc:")
this.show(*middle.bars(bars))
this.show(*middle.counted_page(bars))
theorem = bars["theorem2"]
this.text(f"""
Theorem 2 says how this goes on: Θ(N²d²/M) accesses, where M elements fit on chip. Line 1 of Algorithm 1 sets Bc =
⌈M/4d⌉. In log-log scale that is a line of slope −1 against M, +2 against d and against N. One head, N =
{theorem['n']:,}; Bc, Tc and all terms are for d = 64, and in the columns for d are all terms over N²d²/M, which the
theorem keeps between two constants. The slopes over M are given twice, first away from M = Nd, then up to it:
""")
this.show(*slopes.points_page(theorem))
this.show(*slopes.slopes_page(theorem, slopes.FORWARD))

# %% Figure 2, right, and Proposition 4.
this.part("Figure 2 (right), and Proposition 4")
sparse = right.compute(**right.PAPER, run=False)
sparse["counted"] = right.count(min(N, right.COUNTED["n"]), min(d, right.COUNTED["d"]))
assert all(mask["equal"] for mask in sparse["counted"]["masks"])
this.text("""
Block-sparse attention (lesson 10) computes a part s of the tiles. The paper has the time of both passes for nine values
of s, N = 4,096; ours is what flash2 moves for them, predicted for one head:
""")
this.show(*right.shares_page(sparse))
this.show(*right.lines_page(sparse))
this.show(*right.proposition_page(sparse))
this.show(*right.counted_page(sparse["counted"]))
line = sparse["paper"]["line"]
(a, b, off), (low, half, high) = measured.SPARSE_LINE, measured.SPARSE.values()
this.text(f"""
The paper's times lie on a line as well, {line["off"]:.1f} ms off it at most. Its end, a + b =
{line["a"] + line["b"]:.1f} ms, is not far above dense attention, {sparse["paper"]["dense"]} ms. On one H200 `figures
right` found {a:.1f} + {b:.1f}·s ms for flash2 in float32 with 64 heads, {off:.1f} ms off it at most, and
{measured.DENSE} ms without a mask. As a part of that, 10, 50 and 90 % of the tiles took {low:.3f}, {half:.3f} and
{high:.3f}; the paper has 0.144, 0.528 and 0.932. That all of these are lines is no proof that bytes take the time:
operations fall with s in the same way.
""")

# %% Theorem 5.
this.part("Theorem 5: the backward pass")
backward = theorem5.compute(**theorem5.PAPER, run=False)
backward["counted"] = theorem5.count(min(N, theorem5.COUNTED["n"]), min(d, theorem5.COUNTED["d"]))
low, high = theorem5.bounds(theorem5.PAPER["d"])
points = [p for p in backward["theorem"]["points"] if p["d"] == theorem5.PAPER["d"]]
shown = [p for p in points if slopes.is_power_of_4(p["M"])]
constants = [p["constant"] for p in shown]
assert backward["equal"] and all(p["equal"] for p in backward["counted"])
this.text(f"""
The same Θ(N²d²/M), for Algorithm 4: (5 + 5Tc)Nd + 2TcN elements, where the forward pass has 3Tc. Over N²d²/M that is
about 20 in place of 12. It lies between {low:.1f} and {high:.1f} for any N and M from d to Nd, at d = 64. Predicted, at
N = {theorem5.PAPER["n"]:,}, from {min(constants):.1f} to {max(constants):.1f}:
""")
this.show(report.bars({f"M = {slopes.power(p['M'])}": p["constant"] for p in shown}), "")
this.show(*theorem5.counted_page(backward))

# %% Table 21.
this.part("Table 21: memory")
table = memory.compute(**memory.PAPER, run=False)
with report.progress("recording allocations", len(table["stages"])) as advance:
    table["runs"] = {}
    for stage in table["stages"]:
        table["runs"][stage] = memory.step(stage, min(N, 256), min(d, 32))
        advance()
table["equal"] = all(run["predicted"] == run["allocated"] for run in table["runs"].values())
assert table["equal"]
this.text("""
What a training step holds in HBM at its peak. Matrices per head, and the peak of 16 × 8 heads in half precision:
""")
this.show(report.table(["stage", "N × N", "N × d", "N", "beside Q to dV"], list(memory.formulas(table))), "")
this.show(*memory.sizes_page(table))
this.show(*memory.runs_page(table))
this.text("""
Time may be argued about; this may not. The largest N that a GPU can train at is set by the N × N matrices, and flash
and flash2 have none. The paper has out of memory from N = 8,192 on for PyTorch, and 13,376 MB at 65,536 for its own.
""")

# %% What it is.
this.part("What FlashAttention is, and is not")
peak = {stage: table["stages"][stage]["bytes"]["65536"] for stage in ("naive", "flash2")}
more, most = (ladder["stages"][stage]["flops"] / ladder["stages"]["naive"]["flops"] for stage in ("flash", "flash2"))
this.show(report.table(["it is", "the figure that proves it"], [
    ["exact", f"error of flash2 {errors['flash2']:.1e}, of naive {errors['naive']:.1e} (part 3; lesson 06)"],
    ["less HBM traffic", f"DRAM {in_bytes(moved['naive'])} to {in_bytes(moved['flash2'])}, measured (part 4)"],
    ["at the least there is", f"DRAM reads Q, K and V {read['flash2'] / (3 * one):.4f} times (part 7)"],
    ["Θ(N²d²/M)", "slopes of −1 and +2, predicted; runs are as predicted (parts 10, 12)"],
    ["linear memory", f"{in_bytes(peak['naive'])} to {in_bytes(peak['flash2'])} at N = 65,536 (part 13)"],
]), "")
this.show(report.table(["it is not", "the figure that proves it"], [
    ["fewer operations", f"flash {more:.2f}, flash2 {most:.2f} times as many in a training step (lesson 06)"],
    ["a matter of bytes alone", "the last step asks for more, DRAM moves the same, and it is faster (part 4)"],
    ["always 5.7 times as fast", f"{both['math'] / both['efficient']:.1f} times in float32 (part 9)"],
    ["linear in N", "the slope of its traffic against N is +2; its memory is linear (parts 10, 13)"],
    ["block-sparse", "with s < 1 it is another function (part 11; lesson 10)"],
]), "")

this.part("Your turn")
longer = 2 * N if N <= 1024 else N // 2
wider = 2 * d if d == 1 or (d <= 64 and not this.blocks) else d // 2


def against(**sizes):
    """What naive and flash2 move with other sizes, over what they move here."""
    there = {"n": N, "d": d, "heads": H} | sizes
    return (f"{nf.predict(stage, **there, **settings[stage]).elements / bills[stage].elements:.2f}"
            for stage in ("naive", "flash2"))  # fmt: skip


this.tries({flag: "naive moves {} times what it moves here, flash2 {} times. {}".format(*against(**sizes), why)
            for flag, sizes, why in (
    (f"--n {longer}", {"n": longer}, "Where N is large both grow like N²."),
    (f"--d {wider}", {"d": wider}, "S, P and L have no d in them."),
)})  # fmt: skip
this.text(f"""
Check yourself: take the paper's configuration with 16 heads in place of 1,024. For which kernels in the table of part 5
does `/ once` change, and why? What would DRAM move for flash? Part 7 has what you need. What the threads request:

    import numba_flash as nf
    nf.predict("flash", n={n}, d={width}, heads=16).total_bytes

On a GPU, `python -m numba_flash bill --stage flash --n {n} --heads 16 --measure` says what DRAM did.
""")
this.end()
