# %% [markdown]
"""Lesson 00, CUDA in ten minutes. Run it with `python lessons/00_cuda.py`, or open it as a notebook."""

# %%
import numpy as np
from numba import cuda, float32

import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.engine.model import REGISTERS, STATIC_SHARED, THREADS
from numba_flash.hbm.ledger import Bill, Count
from numba_flash.lesson import plural
from numba_flash.questions import Question

this = lesson.start(
    "00 · CUDA in ten minutes", n=1000, blocks=128, sizes="N = {n}, d = {d}, {threads} per block",
    meanings={
        "n": "N, the number of elements of the vector X, and of rows in part 5",
        "d": "d, the number of columns in part 5",
        "heads": "the number of matrices in part 5",
        "blocks": "B, the number of threads per block",
    },
)  # fmt: skip
N, d, H, where = this.n, this.d, this.heads, this.device
B = this.blocks                                              # threads per block
grid = -(-N // B)                                            # blocks: ⌈N / B⌉
rows = np.random.default_rng(this.seed).standard_normal((H, N, d), np.float32)
x = rows[0, :, 0].copy()                                     # a vector of N numbers
X = nf.to_device(x, where)

this.part("The question")
this.text("""
A GPU runs one function in many thousands of threads at once. How does a thread know which numbers are its own?
Where do those numbers live, and what does it cost to fetch them? Four small kernels answer that. You need to
know some NumPy, but nothing about CUDA.
""")


# %% A kernel: every thread runs it once.
@cuda.jit
def scale(X, Y, factor):
    i = cuda.grid(1)                                         # the number of this thread
    if i < X.shape[0]:                                       # the guard
        Y[i] = factor * X[i]


guard, idle = lesson.line_of(scale, "if i < X"), grid * B - N
ragged = f"--n {N + 1}" if B > 1 else f"--blocks {next(b for b in range(32, THREADS) if N % b)}"
more = f", {idle:,} more than there are elements. The guard in line {guard} lets those do nothing"
this.part("Thread, block, grid")
this.source(scale)
this.text(f"""
`@cuda.jit` turns a function into a kernel. A kernel has no loop over the elements: a launch starts many
threads, each of them runs the whole function, and each takes the element whose number it has.

Threads come in blocks, of up to {THREADS:,} threads each, and the blocks of one launch form its grid. Blocks are
numbered from 0, and so are the threads of a block. A thread finds its number from three values that CUDA sets
for it. `cuda.grid(1)` is short for

    cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x

the number of its block, times the number of threads per block, plus its own number within the block.

Here N = {N:,}, and a block has B = {plural(B, "thread")} (the flag --blocks sets the threads per block). So the grid
needs ⌈N/B⌉ = {plural(grid, "block")}; ⌈ ⌉ means rounded up. That makes {plural(grid * B, "thread")}{more if idle else
", as many as there are elements"}. Some of the threads:
""")
some = sorted({(0, 0), (0, B - 1), (grid // 2, B // 2), (grid - 1, (N - 1) % B), (grid - 1, B - 1)})
does = [[b, t, b * B + t, f"Y[{b * B + t}] = factor * X[{b * B + t}]" if b * B + t < N else "nothing"] for b, t in some]
this.show(report.table(["block", "thread", "i", "what it does"], does), "")
this.text(f"""
32 threads of a block form a warp and run together. Memory comes by sectors of 32 bytes, 8 elements in float32. When 32
neighbours in a warp read 32 neighbouring elements, that is one request of 4 sectors; when each reads an element far
from the others, it is 32 sectors. Lesson 12 counts sectors; the bill here counts the elements that threads ask for.

The arrays X and Y are in the memory of the GPU. To read an element from there is a load, to write one is a
store. This course counts them. A launch names the kernel, the number of blocks, the number of threads per block
and the arguments:

    nf.launch(scale, {grid}, {B}, X, Y, np.float32(2))
""")
at = this.draw(N=range(300, 960, 20), B=(32, 64, 128))
threads = -(-at.N // at.B) * at.B
this.ask("How many elements of X does this launch load, and how many of Y does it store? And with other sizes?",
    Question("threads", at, "how many threads does a launch of `scale` start, idle ones included?",
        threads, "B threads in each of ⌈N/B⌉ blocks.", "A block is started whole, and so is the last one.",
        [(at.N, "That is how many have an element. The last block is started whole, too."),
         (threads // at.B, "Those are the blocks. Each has B threads."),
         (threads - at.B, "With so few blocks the last elements have no thread: round N/B up.")]),
    Question("scale", at, "how many elements does it load and store together?",
        2 * at.N, "N loads of X and N stores of Y.", "Which threads get past the guard, and what does each of them do?",
        [(2 * threads, "Idle threads load and store nothing: the guard stops them."),
         (at.N, "Those are the loads alone. Each is followed by a store.")]),
)  # fmt: skip
this.text(f"""
Of all threads, N get past the guard. Each of those loads one element of X and stores one of Y: N loads and N
stores, and N is {N:,}. The launch, and what was counted:
""")
Y = nf.empty(N, "float32", where)
with nf.ledger() as bill:                                    # counts every load and store of the launches inside
    nf.launch(scale, grid, B, X, Y, np.float32(2), device=where)
this.counts("scale", bill, predicted=Bill({"scale": {"X": Count(loads=N), "Y": Count(stores=N)}}))
this.text(f"Largest difference from NumPy's 2 * X: {np.abs(nf.to_host(Y) - 2 * x).max():g}.")

# %% The guard is needed.
this.part("Without the guard")
this.text(f"""
Now the same launch of the same kernel with line {guard}, the guard, removed.
""")
try:
    nf.launch(lesson.without(scale, "if i < X"), grid, B, x, np.empty_like(x), np.float32(2), device="cpu")
    this.text(f"N = {N:,} is a multiple of {B:,}: no thread is past the end, nothing happens. Run with {ragged}.")
except nf.errors.OutOfBounds as error:
    b, t = error.block[0], error.thread[0]
    this.fault(error)
    this.text(f"""
    Blocks and threads may be numbered along three axes, x, y and z (part 5), so a position is three numbers. So
    far only the first is used: this is thread {t} of block {b}, number {b} × {B} + {t} = {b * B + t:,}, and the last
    element of X is number {N - 1:,}.

    Here every index is checked, and the launch stops at the first that is wrong: the load of X[{b * B + t}]. A GPU
    does not check the index. It would load whatever lies behind X in memory, then store the product over whatever
    lies behind Y. Where that memory is not mapped, the launch fails with an error. Where it is yours, your data are
    changed, and nothing tells you.
    """)

# %% Where numbers live.
this.part("Where numbers live")
this.show(report.table(["memory", "who sees it", "size on an A100 GPU", "speed"], [
    ["registers", "one thread", f"255 per thread, {REGISTERS:,} per block", "fastest"],
    ["shared memory", "one block", f"{STATIC_SHARED:,} bytes, more on request", "19 TB/s"],
    ["global memory", "all threads", "40 or 80 GB", "1.5–2.0 TB/s"],
]), "")
this.text("""
The A100 is NVIDIA's GPU for data centres of 2020, on which the FlashAttention paper measures (Dao et al. 2022,
arXiv:2205.14135; the speeds are from its section 2.1).

Registers, of 32 bits each, hold the variables of a thread, such as `i`. Arrays that a kernel gets as arguments
are in global memory. That is built of HBM (high-bandwidth memory), chips beside the processor. Registers and
shared memory are on the processor itself: they are SRAM, small, and about ten times as fast.

What a kernel costs is, above all, what crosses the border between HBM and the processor. A list of that is
called an HBM bill.
""")


# %% A grid with two axes, and a loop within a thread.
@cuda.jit
def row_sum(X, Y):
    i = cuda.grid(1)                                         # row
    h = cuda.blockIdx.y                                      # head
    if i < X.shape[1]:
        total = float32(0)                                   # a register
        for t in range(X.shape[2]):
            total += X[h, i, t]
        Y[h, i] = total


this.part("One row per thread")
this.text("""
`float32(0)` is the number 0 in that type, of 32 bits.
""")
this.source(row_sum)
this.text(f"""
A grid may have up to three axes, x, y and z, and so may a block. X is an array of {H} × {N:,} × {d} numbers now.
Its first axis is called heads (lesson 01 says why, and --heads sets how many); a head has N rows of d columns.
The x axis of the grid runs over the rows, {plural(grid, "block")} of {plural(B, "thread")}, and its y axis over the
heads. `cuda.grid(1)` is the number along x. Each thread walks along one row:

    nf.launch(row_sum, ({grid}, {H}), {B}, X, Y)
""")
at = this.draw(H=range(2, 7), N=range(120, 400, 20), d=(12, 20, 24, 40))
this.ask("How many elements of X does this launch load, and how many of Y does it store?",
    Question("row_sum", at, "how many elements does `row_sum` load and store together?",
        at.H * at.N * (at.d + 1), "Each of H·N threads loads d elements and stores one.",
        "What does one thread load and store? How many threads get past the guard?",
        [(at.H * at.N * at.d, "Those are the loads alone. Each thread stores its sum, too."),
         (at.H * at.N * at.d * 2, "A thread stores one sum for d loads.")]),
)  # fmt: skip
this.text(f"""
A thread loads the d numbers of its row and stores one. For all rows of all heads that is {H} × {N:,} × {d} =
{plural(H * N * d, "load")} of X, and {H} × {N:,} = {plural(H * N, "store")} of Y. The sum grows in a register, which
is free.
""")
Y = nf.empty((H, N), "float32", where)
with nf.ledger() as bill:
    nf.launch(row_sum, (grid, H), B, nf.to_device(rows, where), Y, device=where)
this.counts("row_sum", bill, predicted=Bill({"row_sum": {"X": Count(loads=H * N * d), "Y": Count(stores=H * N)}}))


# %% A kernel whose bill is too high.
@cuda.jit(device=True)
def load_or_zero(X, i):
    if 0 <= i and i < X.shape[0]:
        return X[i]
    return float32(0)


@cuda.jit
def smooth(X, Y):
    i = cuda.grid(1)
    if i < X.shape[0]:
        left, right = load_or_zero(X, i - 1), load_or_zero(X, i + 1)
        Y[i] = (left + X[i] + right) / float32(3)


this.part("Three loads where one would do")
this.source(load_or_zero)
this.source(smooth)
this.text("""
X is the vector of N numbers again. `smooth` replaces each element by the mean of itself and its two neighbours.
`load_or_zero` is a device function: kernels call it. Beyond the ends of X it gives 0 and loads nothing.
""")
at = this.draw(N=range(300, 960, 20))
this.ask("",
    Question("smooth", at, "how many elements of X does `smooth` load?",
        3 * at.N - 2, "3N - 2.", "What does a thread in the middle load? And the first thread, and the last?",
        [(3 * at.N, "At each end a neighbour is missing, and `load_or_zero` loads nothing for it."),
         (3 * at.N - 1, "There are two ends."),
         (at.N, "So many there are, but each is loaded by more than one thread.")]),
)  # fmt: skip
this.text(f"""
Three loads for each of N threads, less one at each end: 3N - 2 = {3 * N - 2:,}. An element away from the ends is
loaded three times, by three threads that know nothing of each other.
""")
Y = nf.empty(N, "float32", where)
with nf.ledger() as smooth_bill:
    nf.launch(smooth, grid, B, X, Y, device=where)
this.counts("smooth", smooth_bill, predicted=Bill({"smooth": {"X": Count(loads=3 * N - 2), "Y": Count(stores=N)}}))


# %% The same through shared memory.
def make_smooth_shared(B):
    B2 = B + 2                                               # a shared array has a size fixed in advance

    @cuda.jit
    def smooth_shared(X, Y):
        tile = cuda.shared.array(B2, float32)                # one for the whole block
        i = cuda.grid(1)
        tx = cuda.threadIdx.x
        tile[tx + 1] = load_or_zero(X, i)
        if tx == 0:
            tile[0] = load_or_zero(X, i - 1)                 # left neighbour
        if tx == B - 1:
            tile[B + 1] = load_or_zero(X, i + 1)             # right neighbour
        cuda.syncthreads()                                   # the barrier
        if i < X.shape[0]:
            Y[i] = (tile[tx] + tile[tx + 1] + tile[tx + 2]) / float32(3)

    return smooth_shared


this.part("Fetch once, share it")
smooth_shared = make_smooth_shared(B)
this.source(smooth_shared)
loads = N + 2 * (grid - 1)
borders = f"{grid:,} blocks have {plural(grid - 1, 'border')} between them" if grid > 1 else "1 block has no border"
this.text(f"""
A tile is a small part of an array, copied into shared memory. Here a block first fills a tile with its part of
X, B = {plural(B, "element")}, and with the neighbour at each end; B2 is B + 2. `tx` is the number of a thread
within its block. Then every thread reads three elements of the tile, which is free.

In between is a barrier: at `cuda.syncthreads()` a thread waits until all threads of its block have come that
far. Only then is the tile complete. So the barrier stands outside the guard: idle threads must come to it, too.
""")
at = this.draw(N=range(300, 960, 20), B=(32, 64, 128))
across = -(-at.N // at.B)
this.ask("",
    Question("smooth_shared", at, "how many elements of X does `smooth_shared` load?",
        at.N + 2 * (across - 1), "N + 2·(⌈N/B⌉ - 1).",
        "Think of one block first: its own part of X, and the neighbour at each end. Then of the ends of X.",
        [(at.N, "A block also needs the neighbour at each of its ends, which belongs to another block."),
         (at.N + 2 * across, "The first block has no neighbour on the left, the last none on the right."),
         (at.N + across - 1, "At a border each of the two blocks loads an element of the other: that is two loads."),
         (across * (at.B + 2), "Past the end of X nothing is loaded, neither for idle threads nor for a neighbour."),
         (3 * at.N - 2, "That is `smooth`. Here a block reads its neighbours from the tile.")]),
)  # fmt: skip
this.text(f"""
Each of N elements once, for the block it belongs to. At a border between two blocks each of the two loads one
element of the other. {borders}: N + 2 × {grid - 1:,} = {plural(loads, "load")}.
""")
Y_shared = nf.empty(N, "float32", where)
with nf.ledger() as bill:
    nf.launch(smooth_shared, grid, B, X, Y_shared, device=where)
predicted = Bill({"smooth_shared": {"X": Count(loads=loads), "Y": Count(stores=N)}})
this.bill("smooth_shared", bill, predicted=predicted, previous=("smooth", smooth_bill))
this.text("""
This is how every lesson prints a bill. The column `/ smooth` is the count divided by that of the kernel before.
The lines below the bill say what is counted:

An argument is an array that the launch hands to the kernel, here X and Y; it is in global memory. If two
threads load the same element, that is two loads. The tile and the variables are in shared memory and in
registers, and are free.

A GPU has caches, too: small memories that keep what was loaded a moment ago and answer some of the requests, so
that fewer of them reach the HBM chips. Which ones, nobody can predict. So this course counts what the threads
request, and lesson 02 comes back to the caches.

The loads of X as a picture:
""")
this.show(report.bars({"smooth": smooth_bill["X"].loads, "smooth_shared": bill["X"].loads}), "")
padded = np.pad(x.astype(np.float64), 1)
truth = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
errors = {name: float(np.abs(nf.to_host(y) - truth).max()) for name, y in (("smooth", Y), ("smooth_shared", Y_shared))}
this.figures["errors"] |= errors
this.text("""
Error against float64: {smooth:.1e} for smooth, {smooth_shared:.1e} for smooth_shared.

That is not a fault. A float32 number has 24 binary digits, about 7 decimal ones, so that each operation rounds
its result, by up to 6 parts in 10⁸. Later bills end with such an error, beside what rounding explains.
""".format(**errors))

# %% The barrier is needed.
barrier = lesson.line_of(smooth_shared, "cuda.syncthreads()")
this.part("Without the barrier")
this.text(f"""
Now the same kernel with line {barrier}, the barrier, removed. `strict=True` has the engine look for races: two
threads touch one element, at least one of them writes, and no barrier says who comes first.
""")
try:
    no_barrier = lesson.without(smooth_shared, "cuda.syncthreads()")
    nf.launch(no_barrier, grid, B, x, np.empty_like(x), device="cpu", strict=True)
    this.text("A block of one thread has nobody to wait for, and nothing happens. Run with --blocks 2.")
except nf.errors.RaceDetected as error:
    this.fault(error)
    this.text("""
    On a GPU the result of a race may be right today and wrong tomorrow, and there is no message.
    """)


# %% The barrier outside the guard.
def make_barrier_inside(B):
    @cuda.jit
    def barrier_inside(X, Y):
        tile = cuda.shared.array(B, float32)
        i = cuda.grid(1)
        tx = cuda.threadIdx.x
        if i < X.shape[0]:                                   # the guard
            tile[tx] = X[i]
            cuda.syncthreads()
            Y[i] = tile[tx] - tile[0]                        # less the first element of the block

    return barrier_inside


this.part("A barrier inside the guard")
barrier_inside = make_barrier_inside(B)
this.source(barrier_inside)
inside = lesson.line_of(barrier_inside, "cuda.syncthreads()")
this.text(f"""
A common slip, here on purpose: line {inside} has the barrier inside the guard, where idle threads never come.
""")
try:
    nf.launch(barrier_inside, grid, B, x, np.empty_like(x), device="cpu")
    this.text(f"N = {N:,} is a multiple of {B:,}: no thread is idle, all come to the barrier. Run with {ragged}.")
except nf.errors.BarrierDivergence as error:
    this.fault(error)
    this.text("""
    Either all threads of a block come to a barrier, or none does. On a GPU a kernel that breaks this rule may hang,
    give wrong results, or seem to work. The way out is that of `smooth_shared`: guard the loads and stores, and
    leave the barrier outside.
    """)

# %% What ran here.
this.part("What ran these kernels")
device = nf.device(where)
names = {"cpu": "the CPU engine", "gpu": "the GPU", "sim": "Numba's simulator"}
this.text(f"""
They ran on {names[device.name]} ({device.why}).

On a GPU, `nf.launch(kernel, grid, block, ...)` is Numba's own `kernel[grid, block](...)`, and counted. Without a
GPU the engine compiles the same source for the CPU, and takes the threads of a block from barrier to barrier,
one after the other. Which element a thread loads depends on its number, and on nothing that differs between the
two. So the bill is the same to the last element. Time is another matter: this course says nothing about time
that was not measured on a GPU.
""")

this.part("Your turn")
other = 32 if B != 32 else 256
others = -(-N // other)
this.tries({
    f"--n {grid * B}": f"N is a multiple of {B:,}: no thread is idle, and without the guard nothing happens.",
} if idle else {
    f"--n {N + 1}": "One element more takes one more block. How many of its threads are idle?",
})  # fmt: skip
this.tries({
    f"--blocks {other}": f"""With {other} threads per block the grid has {plural(others, 'block')}, and smooth_shared
    loads {plural(N + 2 * (others - 1), 'element')} of X.""",
})
this.text("""
Check yourself: at which number of threads per block does `smooth_shared` load as much as `smooth`? Write down
your answer and the number of loads, then run it with --blocks, and compare part 7 with part 6.
""")
this.end()
