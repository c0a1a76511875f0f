"""A model of Hopper in Python: the source of the `hopper` kernel, run thread by thread without a GPU.

Each CUDA thread is a thread of Python. Shared memory is bytes with the 128-byte swizzle in their addresses. Copies and
products happen at the moment that is hardest for the kernel: a load writes when it is issued, a product reads its tiles
when it is waited for, and a store when its memory is wanted again. A slot released too early, a barrier that waits for
the wrong number of arrivals or a wrong offset gives wrong numbers, or `Stuck`.
"""

import math
import pathlib
import threading
from types import SimpleNamespace

import numpy as np

import numba_flash

PATIENCE = 30  # seconds after which a wait is taken to be for ever
SOURCES = pathlib.Path(numba_flash.__file__).parent


class Stuck(Exception):
    """A thread waits for what does not come."""


class Barrier:
    """An mbarrier: arrivals and bytes that are to come in this phase."""

    def __init__(self, arrivals):
        self.arrivals = self.left = arrivals
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def count(self, arrivals=0, expected=0):
        with self.changed:
            self.left -= arrivals
            self.bytes += expected
            assert self.left >= 0, "more arrivals than the barrier was made for"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.arrivals, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE):
                raise Stuck(f"phase {self.phase}, {self.left} arrivals and {self.bytes} bytes are missing")


class Block:
    """What the threads of one block share."""

    def __init__(self, plan, index, grid):
        self.plan, self.index, self.grid = plan, index, grid
        self.memory = np.full(plan.shared_bytes // 2, 0x7E00, np.uint16)  # NaN
        self.barriers, self.named, self.lock = {}, {}, threading.Lock()
        self.taken = np.full((plan.Q.slots, 2), -1)
        self.all = threading.Barrier(1 + 128 * plan.consumers, timeout=PATIENCE)
        self.groups = [Together(128) for _ in range(plan.consumers)]
        self.warps = [Together(32) for _ in range(4 * plan.consumers)]


class Together:
    """Threads that do something together: each brings a value, one computes, each takes its result."""

    def __init__(self, count):
        self.values, self.results = [None] * count, None
        self.compute = None
        self.barrier = threading.Barrier(count, action=self.act, timeout=PATIENCE)

    def act(self):
        self.results = self.compute(list(self.values))

    def __call__(self, place, value, compute):
        self.values[place], self.compute = value, compute
        self.barrier.wait()
        return self.results[place]


def swizzled(address):
    """Bytes in shared memory -> elements, with the pieces of 16 bytes permuted in each 8 rows of 128 bytes."""
    return (address ^ (address >> 7 & 7) << 4) // 2


here = threading.local()


def run(plan, arrays, *, causal, masked, hide_all, scaled, factor, blocks, together=1):
    """The kernel on float arrays Q, K, V (heads, N, d) and the key mask; returns O and L, which begin as NaN."""
    Q, K, V, mask = arrays
    O, L = np.full(Q.shape, np.nan), np.full(Q.shape[:2], np.nan)
    kernel = source(plan, causal, masked, hide_all, scaled)
    queue, failures = np.zeros(2, int), []
    lock = threading.Lock()

    def thread(block, tid):
        here.block, here.tid, here.pending, here.stores, here.lock = block, tid, [], [], lock
        try:
            kernel(Q, K, V, mask, [0, 1, 2, 3], O, L, queue, 1, together, factor)
        except BaseException as error:
            failures.append(error)
            block.all.abort()
            for group in block.groups + block.warps:
                group.barrier.abort()

    everybody = [0, *range(128, plan.threads)]
    grid = [Block(plan, index, blocks) for index in range(blocks)]
    threads = [threading.Thread(target=thread, args=(b, tid), daemon=True) for b in grid for tid in everybody]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    broken = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (broken or failures)[0]
    assert not queue.any(), "the counter is not as it was"
    for finished in (b for block in grid for b in block.barriers.values()):
        assert finished.left == finished.arrivals and finished.bytes == 0, "a phase is left unfinished"
    return O, L


# ------------------------------------------------------------------------------------------------- numba.cuda's part
def warp(value, compute):
    place = (here.tid - 128) // 32
    return here.block.warps[place](here.tid % 32, value, compute)


def array(shape, dtype=None):
    return here.block.taken if isinstance(shape, tuple) else [0] * shape


def add(queue, index, value):
    with here.lock:
        queue[index] += value
        return int(queue[index]) - value


def shuffle(mask, value, lane):
    return warp(value, lambda values: [values[lane]] * 32) if here.tid >= 128 else value


class Threads:
    threadIdx = property(lambda self: SimpleNamespace(x=here.tid))
    blockIdx = property(lambda self: SimpleNamespace(x=here.block.index))
    gridDim = property(lambda self: SimpleNamespace(x=here.block.grid))
    shared = local = SimpleNamespace(array=array)
    atomic = SimpleNamespace(add=add)
    shfl_sync = staticmethod(shuffle)

    def jit(self, **_):
        return lambda function: function

    def syncthreads(self):
        here.block.all.wait()

    def syncwarp(self):
        warp(None, lambda values: values)

    def shfl_xor_sync(self, mask, value, distance):
        return warp(value, lambda values: [values[lane ^ distance] for lane in range(32)])

    def any_sync(self, mask, value):
        return warp(bool(value), lambda values: [any(values)] * 32)

    def ballot_sync(self, mask, value):
        return warp(bool(value), lambda values: [sum(v << lane for lane, v in enumerate(values))] * 32)


# ---------------------------------------------------------------------------------------------- the instructions' part
def barrier(address):
    return here.block.barriers[address]


def new_barrier(address, arrivals):
    here.block.barriers[address] = Barrier(arrivals)


def named(number, threads, arriving):
    """bar.sync and bar.arrive: `threads` come in each round, those that only arrive among them."""
    with here.block.lock:
        b = here.block.named.setdefault(number, Barrier(threads))
        phase = b.phase
    b.count(1)
    if not arriving:
        b.wait(phase & 1)


mbarrier = SimpleNamespace(
    init=new_barrier,
    fence_init=lambda: None,
    expect=lambda address, size: barrier(address).count(1, size),
    arrive=lambda address: barrier(address).count(1),
    wait=lambda address, parity: barrier(address).wait(parity),
    sync_named=lambda number, threads: named(number, threads, False),
    arrive_named=lambda number, threads: named(number, threads, True),
)
registers = SimpleNamespace(
    make_raise=lambda n: lambda: None, make_lower=lambda n: lambda: None, lane_now=lambda: here.tid % 32
)


def box(address, rows):
    """Elements of shared memory that hold `rows` rows of 64 columns."""
    row, column = np.indices((rows, 64))
    return swizzled(address + 128 * row + 2 * column)


def make_load(rows):
    def load(tensor, tensor_map, column, row, head, address, full):
        assert address % 1024 == 0
        inside = tensor[head, row : row + rows, column : column + 64].astype(np.float16)
        filled = np.zeros((rows, 64), np.float16)
        filled[: len(inside)] = inside
        here.block.memory[box(address, rows)] = filled.view(np.uint16)
        barrier(full).count(0, -128 * rows)

    return load


def make_store(rows):
    def store(tensor, tensor_map, column, row, head, address):
        def now():
            values = here.block.memory[box(address, rows)].view(np.float16)
            target = tensor[head, max(row, 0) : row + rows, column : column + 64]
            target[...] = values[: len(target)]

        here.stores.append(now)

    return store


def stores_happen():
    while here.stores:
        here.stores.pop(0)()


tma = SimpleNamespace(
    make_load=make_load,
    make_store=make_store,
    fence_map=lambda tensor_map: None,
    fence_async=lambda: None,
    commit=lambda: None,
    wait_read=stores_happen,
    wait_done=stores_happen,
)


def make_pack(dtype):
    def pack(low, high):
        return np.array([low, high], np.float16).view(np.uint32)[0]

    return pack


def stmatrix_x4(address, *words):
    def store(given):
        for q in range(4):
            for lane in range(32):
                at = given[8 * q + lane // 4][0] // 2 + 2 * (lane % 4)
                memory[at : at + 2] = np.array([given[lane][1][q]], np.uint32).view(np.uint16)
        return given

    memory = here.block.memory
    warp((address, words), store)


def fragment(sums, tid):
    """Rows and columns of the sums of thread `tid` of a warp group, in the order of its registers."""
    x = np.arange(len(sums))
    return 16 * (tid // 32) + tid % 32 // 4 + 8 * (x // 2 % 2), x // 4 * 8 + tid % 4 * 2 + x % 2


def operand(memory, descriptor, steps, rows, transposed):
    """(rows, 16 · steps) of a tile: rows of the sum, or columns of it."""
    assert descriptor >> 62 == 1 and descriptor >> 32 & 0x3FFF == 64
    start, panel = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    row, k = np.indices((rows, 16))
    inner = 128 * k + 2 * (row % 64) + row // 64 * panel if transposed else 128 * row + 2 * k
    return np.concatenate([memory[swizzled(start + step + inner)].view(np.float16) for step in steps], axis=1)


def make_product(n, dtype, steps_a, steps_b, transposed=False, clear=False):
    def product(sums, A, B):
        here.pending.append((sums, A, B, work))

    def work(given):
        memory = here.block.memory
        right = operand(memory, given[0][2], steps_b, n, transposed).astype(np.float32)
        if steps_a:
            left = operand(memory, given[0][1], steps_a, 64, False).astype(np.float32)
        else:
            left = np.zeros((64, 16 * len(steps_b)), np.float32)
            for tid, (_, words, _) in enumerate(given):
                pairs = np.array(words, np.uint32).view(np.float16)
                left[fragment(pairs, tid)] = pairs
        result = left @ right.T
        for tid, (sums, _, _) in enumerate(given):
            old = 0 if clear else np.array(sums)
            sums[:] = (old + result[fragment(sums, tid)]).tolist()
        return given

    return product


def make_wait(count, pending):
    def wait(sums, *_):
        while len(here.pending) > pending:
            *given, work = here.pending.pop(0)
            here.block.groups[here.tid // 128 - 1](here.tid % 128, given, work)

    return wait


def source(plan, causal, masked, hide_all, scaled):
    """The kernel, of the package's source, with all this in the place of numba.cuda and of the instructions."""
    cuda, device = Threads(), lambda function: function
    types = {"float32": float, "int32": int, "int64": int, "uint32": lambda x: int(x) & 0xFFFFFFFF}
    ring = execute("ptx/ring.py", device=device, mbarrier=mbarrier)
    kernels = execute(
        "stages/hopper_kernels.py",
        **types,
        cuda=cuda,
        device=device,
        mbarrier=mbarrier,
        registers=registers,
        ring=SimpleNamespace(**ring),
        tma=tma,
        wgmma=SimpleNamespace(
            make_product=make_product,
            make_wait=make_wait,
            make_wait_after=make_wait,
            descriptor=execute("ptx/wgmma.py")["descriptor"],
        ),
        shared_address=lambda array: 0,
        ex2=lambda x: math.exp2(max(x, -1100.0)),
        lg2=lambda x: math.log2(x) if x else -math.inf,
        make_pack=make_pack,
        stmatrix_x4=stmatrix_x4,
    )
    return kernels["make_forward"](plan, "f16", causal, masked, hide_all, scaled)


def execute(path, **names):
    lines = (SOURCES / path).read_text().splitlines()
    kept = ["" if line.startswith(("from .", "from numba ")) else line for line in lines]
    exec(compile("\n".join(kept), path, "exec"), names)
    return names
