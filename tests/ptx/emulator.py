"""Kernels of warps run in Python, without a GPU: each thread is a Python thread, and waits for its warp.

Slow (a second per tile), and strict: shared memory is NaN before it is written to, and what `cp.async` copies arrives
when its group is waited for, not before.
"""

import math
import threading
from types import CellType, FunctionType, SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba.core.types import Number

here = threading.local()  # of each thread: lane, warp, block, groups, pending, threadIdx, blockIdx


def to_float(bits, kind):
    bits = np.asarray(bits, np.uint16)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(x, kind):
    x = np.asarray(x, np.float32)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Block:
    def __init__(self, threads, shared_bytes):
        self.memory = np.full(shared_bytes, 0xFF, np.uint8)
        self.barrier = threading.Barrier(threads)
        self.warps = [Warp(self) for _ in range(threads // 32)]


class Warp:
    """together(action, x): action([x of lane 0, …]) -> a list, of which each lane gets its own."""

    def __init__(self, block):
        self.block, self.given, self.results = block, [None] * 32, None
        self.barrier = threading.Barrier(32, action=lambda: setattr(self, "results", self.action(self.given)))

    def together(self, action, x):
        self.given[here.lane], self.action = x, action
        self.barrier.wait()
        return self.results[here.lane]


def load_matrices(transposed):
    def ldmatrix(to, start, along, down):
        def action(addresses):
            memory = here.warp.block.memory
            rows = [memory[a : a + 16].view(np.uint16) for a in addresses]
            matrices = np.array(rows).reshape(4, 8, 8)
            matrices = matrices.transpose(0, 2, 1) if transposed else matrices
            pairs = np.ascontiguousarray(matrices).view(np.uint32)  # (4, 8, 4)
            return [pairs[:, lane // 4, lane % 4] for lane in range(32)]

        to.reshape(-1)[:4] = here.warp.together(action, (int(start) ^ int(along)) + int(down))

    return ldmatrix


def make_mma(kind):
    def mma(C, A, B):
        def action(given):
            a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
            for lane, (C, A, B) in enumerate(given):
                g, t = lane // 4, 2 * (lane % 4)
                halves = [to_float([r & 0xFFFF, r >> 16], kind) for r in (*map(int, A), *map(int, B))]
                for r in range(4):
                    a[g + r % 2 * 8, t + r // 2 * 8 : t + r // 2 * 8 + 2] = halves[r]
                for r in range(2):
                    b[t + r * 8 : t + r * 8 + 2, g] = halves[4 + r]
                c[g, t : t + 2], c[g + 8, t : t + 2] = C[:2], C[2:]
            with np.errstate(all="ignore"):
                c = c + a @ b
            return [np.array([*c[n // 4, n % 4 * 2 :][:2], *c[n // 4 + 8, n % 4 * 2 :][:2]]) for n in range(32)]

        C[:] = here.warp.together(action, (C.copy(), A.copy(), B.reshape(-1).copy()))

    return mma


def shuffle(_, x, mask):
    return here.warp.together(lambda given: [given[lane ^ mask] for lane in range(32)], x)


def cp_async_16(shared, address, offset, row, end):
    here.pending.append((int(shared) + offset, address, offset, row < end, 16))


def cp_async_4(shared, address, bytes):
    here.pending.append((int(shared), address, 0, bytes > 0, 4))


def commit():
    here.groups.append(here.pending)
    here.pending = []


def wait(pending):
    while len(here.groups) > pending:
        for shared, (M, at), offset, is_there, size in here.groups.pop(0):
            data = M.reshape(-1).view(np.uint8)[at + offset :][:size] if is_there else 0
            here.warp.block.memory[shared : shared + size] = data


class Address(NamedTuple):
    """A byte of an array, which need not be there."""

    M: np.ndarray
    at: int

    def __add__(self, offset):
        return Address(self.M, self.at + int(offset))


def address_of(M, indices):
    return Address(M, sum(int(i) * stride for i, stride in zip(indices, M.strides)))


def store(address, pair):
    M, at = address
    assert 0 <= at <= M.nbytes - 4
    M.reshape(-1).view(np.uint8)[at : at + 4] = np.array([pair], np.uint32).view(np.uint8)


def load_16(address):
    M, at = address
    return M.reshape(-1).view(np.uint8)[at : at + 16].view(np.uint32).copy()


def load_shared_floats(address, offset):
    return here.warp.block.memory[int(address) + offset :][:8].view(np.float32).copy()


def emulated(name, kind):
    def pack(low, high):
        low, high = (int(x) for x in to_bits([low, high], kind))
        return low | high << 16

    return {
        "mma": make_mma(kind), "ldmatrix": load_matrices(False), "ldmatrix_transposed": load_matrices(True),
        "pack": pack, "unpack": lambda pair: tuple(to_float([int(pair) & 0xFFFF, int(pair) >> 16], kind)),
        "ex2": lambda x: np.exp2(np.float32(x)), "larger": lambda x, y: np.fmax(np.float32(x), np.float32(y)),
        "cp_async_16": cp_async_16, "cp_async_commit": commit, "cp_async_wait": wait, "count": lambda *_: None,
        "address_of": address_of, "_store_4": store, "_load_16": load_16,
        "cp_async_4": cp_async_4, "load_shared_floats": load_shared_floats, "shared_address": lambda _: 0,
    }[name]  # fmt: skip


class Cuda:
    """What kernels use of numba.cuda."""

    threadIdx = property(lambda self: here.threadIdx)
    blockIdx = property(lambda self: here.blockIdx)
    gridDim = property(lambda self: here.gridDim)
    laneid = property(lambda self: here.lane)
    shared = SimpleNamespace(array=lambda shape, dtype: None)
    shfl_xor_sync = staticmethod(shuffle)

    class local:
        @staticmethod
        def array(shape, dtype):
            return np.full(shape, 2**31 if dtype == np.uint32 else math.nan, dtype)

    @staticmethod
    def syncthreads():
        here.warp.block.barrier.wait()


def in_python(value, kind, seen):
    """The same function with everything that it calls in Python too."""
    if id(value) in seen:
        return seen[id(value)]
    if type(value).__name__ == "_Intrinsic":
        return emulated(value._name, kind)
    if isinstance(value, Number):
        return getattr(np, str(value))
    if getattr(value, "__name__", None) == "numba.cuda":
        return Cuda()
    if not hasattr(value, "py_func"):
        return value
    function = value.py_func
    cells = tuple(CellType() for _ in function.__closure__ or ())
    names = {n: v for n, v in function.__globals__.items() if n in function.__code__.co_names}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    seen[id(value)] = made
    for cell, old in zip(cells, function.__closure__ or ()):
        cell.cell_contents = in_python(old.cell_contents, kind, seen)
    names |= {n: in_python(v, kind, seen) for n, v in names.items()} | {"__builtins__": __builtins__}
    return made


def run(kernel, grid, threads, shared_bytes, kind, *arguments):
    """kernel[grid, threads, 0, shared_bytes](*arguments), with NumPy arrays. kind: "f16" or "bf16"."""
    function = in_python(kernel, kind, {})
    failed = []

    def thread(block, x, y, n):
        here.lane, here.warp, here.groups, here.pending = n % 32, block.warps[n // 32], [], []
        here.threadIdx, here.blockIdx = SimpleNamespace(x=n), SimpleNamespace(x=x, y=y)
        here.gridDim = SimpleNamespace(x=grid[0], y=grid[1])
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
        except BaseException as error:
            failed.append(error)
            block.barrier.abort()
            [warp.barrier.abort() for warp in block.warps]

    for y in range(grid[1]):
        for x in range(grid[0]):
            block = Block(threads, shared_bytes)
            started = [threading.Thread(target=thread, args=(block, x, y, n)) for n in range(threads)]
            [t.start() for t in started]
            [t.join() for t in started]
            if failed:
                raise min(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError))
