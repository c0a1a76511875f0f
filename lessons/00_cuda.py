"""Lesson 00, CUDA in ten minutes. Run it with `python lessons/00_cuda.py`, or open it as a notebook."""

# %%
import numpy as np
from numba import cuda, float32

import numba_flash as nf
from numba_flash import lesson, report
from numba_flash.engine.model import REGISTERS, STATIC_SHARED, THREADS
from numba_flash.hbm.ledger import Bill, Count

this = lesson.start("00 · CUDA in ten minutes", n=1000, blocks=128, sizes="N = {n}, d = {d}, {blocks} threads a block")
N, d, H, B, where = this.n, this.d, this.heads, this.blocks, this.device
blocks = -(-N // B)                                          # ⌈N / B⌉
rows = np.random.default_rng(this.seed).standard_normal((H, N, d), np.float32)
x = rows[0, :, 0].copy()                                     # a vector of N numbers
X = nf.to_device(x, where)

this.part("The question")
this.text("""
A GPU runs one function in many thousands of threads at once. How does a thread know which numbers are its own?
Where do those numbers live, and what does it cost to fetch them? Four small kernels answer that. You need
NumPy, and no CUDA.
""")


# %% A kernel: every thread runs it once.
@cuda.jit
def scale(X, Y, factor):
    i = cuda.grid(1)                                         # the number of this thread
    if i < X.shape[0]:                                       # the guard
        Y[i] = factor * X[i]


this.part("Thread, block, grid")
this.source(scale)
this.text(f"""
`@cuda.jit` turns a function into a kernel. A kernel has no loop over the elements: a launch starts many
threads, each of them runs the whole function, and each takes the element whose number it has.

Threads come in blocks of up to {THREADS:,}, and the blocks of one launch form its grid. A thread finds its
number from three values that CUDA sets for it. `cuda.grid(1)` is short for

    cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x

the number of its block, times the threads in a block, plus its number within the block.

Here N = {N:,} and a block has {B:,} threads, so that the grid needs ⌈{N:,}/{B:,}⌉ blocks, {blocks:,}. Together
they have {blocks * B:,} threads, {blocks * B - N:,} more than there are elements. The guard lets those do
nothing. Some of the threads:
""")
some = sorted({(0, 0), (0, B - 1), (blocks // 2, B // 2), (blocks - 1, (N - 1) % B), (blocks - 1, B - 1)})
does = [[b, t, b * B + t, f"Y[{b * B + t}] = factor * X[{b * B + t}]" if b * B + t < N else "nothing"] for b, t in some]
this.show(report.table(["block", "thread", "i", "what it does"], does), "")
this.text(f"""
The arrays X and Y are in the memory of the GPU. To read an element from there is a load, to write one a store.
This course counts them.

Prediction: each of N threads loads one element of X and stores one of Y, N of each. Now the launch, with the
number of blocks, the threads of a block and the arguments, and the count:

    nf.launch(scale, {blocks}, {B}, X, Y, np.float32(2))
""")
Y = nf.empty(N, "float32", where)
with nf.ledger() as bill:                                    # counts every load and store of the launches inside
    nf.launch(scale, blocks, B, X, Y, np.float32(2), device=where)
this.counts("scale", bill, predicted=Bill({"scale": {"X": Count(loads=N), "Y": Count(stores=N)}}))
this.text(f"Largest difference between Y and 2 * X of NumPy: {np.abs(nf.to_host(Y) - 2 * x).max():g}.")

# %% The guard is needed.
this.part("Without the guard")
try:
    nf.launch(lesson.without(scale, "if i < X"), blocks, B, x, np.empty_like(x), np.float32(2), device="cpu")
    this.text(f"N = {N:,} is a multiple of {B:,}: no thread is past the end, nothing happens. Run with --n {N + 1}.")
except nf.errors.OutOfBounds as error:
    this.fault(error)
    this.text("""
    This is the same kernel with the line of the guard taken out. Here every index is checked, and the message
    names the line, the block and the thread. A GPU checks nothing: it would write to whatever memory comes
    next, and go on.
    """)

# %% Where numbers live.
this.part("Where numbers live")
this.show(report.table(["memory", "who sees it", "size on an A100 GPU", "speed"], [
    ["registers", "one thread", f"{REGISTERS:,} × 32 bits for a block", "fastest"],
    ["shared memory", "one block", f"{STATIC_SHARED:,} bytes, more on request", "19 TB/s"],
    ["global memory", "all threads", "40 or 80 GB", "1.5–2.0 TB/s"],
]), "")
this.text("""
Registers hold the variables of a thread, such as `i`. Arrays that a kernel gets as arguments are in global
memory. That is built of HBM (high-bandwidth memory), chips beside the processor. Registers and shared memory
are on the processor itself: SRAM, tiny, and about ten times as fast. (Speeds: Dao et al. 2022,
arXiv:2205.14135, section 2.1.)

What crosses the border between HBM and the processor is the price of a kernel. A list of it is called an HBM
bill.
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


this.part("A row for each thread")
this.source(row_sum)
this.text(f"""
A grid may have three axes, x, y and z, and a block too. X is an array of {H} × {N:,} × {d} numbers here. Its
first axis is called heads (lesson 01 says why, and --heads how many); a head has N rows of d columns. The x
axis of the grid runs over the rows, its y axis over the heads, and each thread walks along one row.

Prediction: a thread loads the d numbers of its row and stores one. That is {H} × {N:,} × {d} = {H * N * d:,}
loads of X, and {H * N:,} stores of Y. The sum grows in a register, which is free.
""")
Y = nf.empty((H, N), "float32", where)
with nf.ledger() as bill:
    nf.launch(row_sum, (blocks, H), B, nf.to_device(rows, where), Y, device=where)
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
this.text(f"""
`smooth` replaces each element by the mean of itself and its two neighbours. `load_or_zero` is a device
function, one that kernels call. Beyond the ends of X it gives 0, and touches no memory.

Prediction: three loads for each of N threads, less one at each end, 3N - 2 = {3 * N - 2:,}. Nearly every
element of X is fetched three times, by three threads that know nothing of each other.
""")
Y = nf.empty(N, "float32", where)
with nf.ledger() as smooth_bill:
    nf.launch(smooth, blocks, B, X, Y, device=where)
this.counts("smooth", smooth_bill, predicted=Bill({"smooth": {"X": Count(loads=3 * N - 2), "Y": Count(stores=N)}}))


# %% The same through shared memory.
def make_smooth_shared(B):
    B2 = B + 2                                               # a shared array has a size fixed in advance

    @cuda.jit
    def smooth_shared(X, Y):
        tile = cuda.shared.array(B2, float32)                # one for the whole block
        i = cuda.grid(1)
        t = cuda.threadIdx.x
        tile[t + 1] = load_or_zero(X, i)
        if t == 0:
            tile[0] = load_or_zero(X, i - 1)                 # left neighbour of the block
        if t == B - 1:
            tile[B + 1] = load_or_zero(X, i + 1)             # right neighbour
        cuda.syncthreads()                                   # the barrier
        if i < X.shape[0]:
            Y[i] = (tile[t] + tile[t + 1] + tile[t + 2]) / float32(3)

    return smooth_shared


this.part("Fetch once, share it")
smooth_shared = make_smooth_shared(B)
this.source(smooth_shared)
loads = N + 2 * (blocks - 1)
this.text(f"""
A tile is a small part of an array, copied into shared memory. Here the block first fills a tile with its part of
X, B = {B:,} elements and a neighbour at each end (B2 is B + 2). Then every thread reads three elements of the
tile, which is free.

In between is a barrier: at `cuda.syncthreads()` a thread waits until all threads of its block have come that
far. Only then is the tile complete.

Prediction: each of N elements once, and two neighbours more at each border between two blocks, N + 2 ×
({blocks:,} - 1) = {loads:,} loads.
""")
Y_shared = nf.empty(N, "float32", where)
with nf.ledger() as bill:
    nf.launch(smooth_shared, blocks, B, X, Y_shared, device=where)
predicted = Bill({"smooth_shared": {"X": Count(loads=loads), "Y": Count(stores=N)}})
this.bill("smooth_shared", bill, predicted=predicted, previous=("smooth", smooth_bill))
this.text("""
This is how every lesson prints a bill. `x smooth` is the count divided by that of the kernel before, and the
lines below it say what is counted (`naive` is the subject of lesson 02). The loads of X as a picture:
""")
this.show(report.bars({"smooth": smooth_bill["X"].loads, "smooth_shared": bill["X"].loads}), "")
padded = np.pad(x.astype(np.float64), 1)
truth = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
errors = {name: float(np.abs(nf.to_host(y) - truth).max()) for name, y in (("smooth", Y), ("smooth_shared", Y_shared))}
this.figures["errors"] |= errors
this.text("Error against float64: {smooth:.1e} for smooth, {smooth_shared:.1e} for smooth_shared.".format(**errors))

# %% The barrier is needed.
this.part("Without the barrier")
try:
    no_barrier = lesson.without(smooth_shared, "cuda.syncthreads()")
    nf.launch(no_barrier, blocks, B, x, np.empty_like(x), device="cpu", strict=True)
    this.text("A block of one thread has nobody to wait for, and nothing happens. Run with --blocks 2.")
except nf.errors.RaceDetected as error:
    this.fault(error)
    this.text("""
    Two threads touch one element, one of them writes, and nothing says who comes first: a race. On a GPU the
    result may be right today and wrong tomorrow, and no message tells. `strict=True` has the engine look for
    races.
    """)

# %% What ran here.
this.part("What ran these kernels")
device = nf.device(where)
names = {"cpu": "the CPU engine", "gpu": "the GPU", "sim": "Numba's simulator"}
this.text(f"""
They ran on {names[device.name]} ({device.why}).

On a GPU, `nf.launch(kernel, blocks, threads, ...)` is Numba's own `kernel[blocks, threads](...)`, and counted.
Without a GPU the engine compiles the same source for the CPU, and takes the threads of a block from barrier to
barrier, one after the other. Which element a thread loads depends on its number, and on nothing else that
differs between the two. So the bill is the same to the last element. Time is another matter, and this course
makes no claim about time that a GPU has not measured.
""")

this.part("Your turn")
other = 32 if B != 32 else 256
borders = -(-N // other) - 1
this.tries({
    f"--n {blocks * B}": f"N is a multiple of {B:,}: no thread is idle, and without the guard nothing happens.",
    f"--blocks {other}": f"""Blocks of {other} threads have {borders:,} borders between them, so smooth_shared loads
    {N + 2 * borders:,} elements of X.""",
})
this.text("""
Check yourself: at which number of threads a block does `smooth_shared` load as much as `smooth`? Write down
your answer and the number of loads, then run it with --blocks, and compare part 7 with part 6.
""")
this.end()
