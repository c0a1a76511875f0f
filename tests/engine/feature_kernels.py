"""Kernels for what the engine must run."""

import math

import numpy as np
from numba import cuda, float32, float64, int32

from . import helper_kernels
from .helper_kernels import OFFSETS, block_sum, scaled_twice

BIAS = 0.5


@cuda.jit
def numbering(A):
    """A[z, y, x] = 1 + the thread's number in a grid of any dimensions."""
    x, y, z = cuda.grid(3)
    X, Y, _ = cuda.gridsize(3)
    A[z, y, x] = 1 + x + X * (y + Y * z)


@cuda.jit
def alias(A):
    t = cuda.threadIdx
    b = cuda.blockIdx
    dims = cuda.blockDim
    A[b.x * dims.x + t.x] = t.x + 10 * b.x


def make_reverse(T):
    @cuda.jit
    def reverse(A):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        tile[i] = A[cuda.blockIdx.x, i]
        cuda.syncthreads()
        A[cuda.blockIdx.x, i] = tile[T - 1 - i]

    return reverse


@cuda.jit
def dynamic(A, B):
    values = cuda.shared.array(0, float32)
    again = cuda.shared.array(shape=0, dtype=float32)
    i = cuda.threadIdx.x
    values[i] = A[i]
    cuda.syncthreads()
    B[i] = again[cuda.blockDim.x - 1 - i] + values.shape[0]


def make_local(d, real):
    @cuda.jit
    def local(A, B):
        row = cuda.local.array(d, real)
        square = cuda.local.array((2, d), real)
        i = cuda.grid(1)
        if i < A.shape[0]:
            for t in range(d):
                row[t] = A[i, t]
                square[1, t] = row[t] * row[t]
            total = real(0)
            for t in range(d):
                total += square[1, d - 1 - t] + row[t]
            B[i] = total

    return local


def make_block_sums(T):
    """Shared memory summed by a device function that holds barriers, called in a loop."""

    @cuda.jit
    def block_sums(A, B):
        values = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        for row in range(A.shape[0]):
            values[i] = A[row, i]
            total = block_sum(values, i, T)
            cuda.syncthreads()
            if i == 0:
                B[row] = total

    return block_sums


@cuda.jit
def from_elsewhere(A):
    i = cuda.grid(1)
    A[i] = helper_kernels.scaled(A[i]) + scaled_twice(float32(i)) + scaled_twice(A[i], factor=3)


def make_closures(factor, flag, offsets, real):
    @cuda.jit(device=True)
    def shifted(x):
        return x + real(offsets[1]) * factor

    @cuda.jit
    def closures(A):
        i = cuda.grid(1)
        if flag:
            A[i] = shifted(A[i]) + OFFSETS[0] + BIAS
        else:
            A[i] = offsets[0]

    return closures


@cuda.jit
def mathematics(A, B):
    i = cuda.grid(1)
    x = A[i]
    B[i, 0] = math.exp(x)
    B[i, 1] = math.log(x)
    B[i, 2] = math.sqrt(x)
    B[i, 3] = max(x, float32(1)) - min(x, float32(1))
    B[i, 4] = abs(-x) + math.fabs(-x)
    B[i, 5] = x**2 + math.pi
    B[i, 6] = math.tanh(x) + math.floor(x) + math.ceil(x)
    B[i, 7] = float32(-math.inf) if math.isinf(x) else x / float32(0)


@cuda.jit
def number_types(A):
    """What float32 arithmetic gives must not pass through float64."""
    acc = float32(0)
    for _ in range(100):
        acc += A[0] * A[1]
    A[2] = acc


@cuda.jit
def control(A, n):
    """while, break, continue, elif, chained comparison, conditional expression, tuple packing."""
    i = cuda.grid(1)
    total = 0
    j = 0
    while True:
        j += 1
        if j > n:
            break
        if j % 2 == 0:
            continue
        elif j % 3 == 0 and not j == 9:
            total -= j
        else:
            total += j if 0 < j < 50 else 0
    pair = (total, i)
    first, (second, third) = pair[0], (pair[1], int32(2))
    if first > 0:
        first *= 2
    for k, weight in enumerate((1, 10, 100)):
        first += k * weight
    A[i] = first + second + third


@cuda.jit
def atomics(counter, extremes, old):
    i = cuda.grid(1)
    cuda.atomic.add(counter, 0, 1)
    cuda.atomic.sub(counter, 1, 2)
    cuda.atomic.max(extremes, (0, 0), float32(i))
    cuda.atomic.min(extremes, (0, 1), float32(-i))
    cuda.atomic.nanmax(extremes, (1, 0), float32(i))
    cuda.atomic.nanmin(extremes, (1, 1), float32(i))
    cuda.atomic.or_(counter, 2, 1 << (i % 8))
    cuda.atomic.and_(counter, 3, ~(1 << (i % 8)))
    cuda.atomic.xor(counter, 4, i)
    old[i] = cuda.atomic.add(counter, 5, 1)
    cuda.atomic.exch(counter, 6, 9)
    cuda.atomic.cas(counter, 7, 0, 4)


@cuda.jit
def shared_atomics(A, total):
    sum_ = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 0:
        sum_[0] = float32(0)
    cuda.syncthreads()
    cuda.atomic.add(sum_, 0, A[i])
    cuda.syncthreads()
    if i == 0:
        total[0] = sum_[0]


@cuda.jit
def fences(A):
    i = cuda.grid(1)
    A[i] = i
    cuda.threadfence()
    cuda.threadfence_block()
    A[i] += 1


@cuda.jit
def attributes(A, out):
    out[0] = A.ndim
    out[1] = A.size
    out[2] = A.shape[0]
    out[3] = len(A)
    rows, columns = A.shape
    out[4] = rows * 100 + columns
    out[5] = A.strides[0]
    out[6] = A[0].shape[0]
    out[7] = A[:, 1:].size


@cuda.jit
def scalars(A, i32, f32, f64, flag, pair):
    A[0] = i32 + f32 + f64 + pair[0] * pair[1]
    A[1] = 1 if flag else 0


@cuda.jit
def copy(A, B):
    """B = A, elementwise, for every layout of A and B."""
    x, y = cuda.grid(2)
    if x < A.shape[0] and y < A.shape[1]:
        B[x, y] = A[x, y]


@cuda.jit
def index_once(A, order, counter):
    """The index of an augmented assignment is evaluated once."""
    A[cuda.atomic.add(counter, 0, 1)] += 5
    A[order[cuda.threadIdx.x]] *= 2


CONSTANTS = np.float32(2.5), np.int64(3)


@cuda.jit
def numpy_constants(A):
    A[0] = CONSTANTS[0] * np.float32(2) + np.float32(CONSTANTS[1])
    A[1] = np.float64(1)
    A[2] = float64(BIAS) + np.int32(7.9)


@cuda.jit(device=True)
def swap_halves(values, thread, n):
    half = n // 2
    other = values[(thread + half) % n]
    cuda.syncthreads()
    values[thread] = other
    cuda.syncthreads()
    return half


@cuda.jit
def awkward_names(A, load, store):
    """Locals and arguments called like the engine's own functions; two barrier functions written into one kernel."""
    cell = cuda.shared.array(8, float32)
    order = cuda.shared.array(8, int32)
    thread = cuda.threadIdx.x
    slice = load
    words = 1
    cell[thread] = A[thread]
    order[thread] = thread
    cuda.syncthreads()
    n = swap_halves(cell, thread, 8)
    run = n
    block = swap_halves(order, thread, 8)
    A[thread] = cell[thread] + order[thread] * store + slice + words + run + block


def make_pruned(causal, wide):
    """The branch not taken does not type: 0 columns to unpack, or a tuple of two."""

    @cuda.jit
    def pruned(A):
        if causal:
            pair = (A[0], 2)
        else:
            pair = A[0]
        if wide and not causal:
            A[0] = pair * 3
        if causal:
            A[0] = pair[0] + pair[1]

    return pruned


@cuda.jit
def wrap_around(counter, old):
    i = cuda.threadIdx.x
    old[i] = cuda.atomic.inc(counter, 0, 2)
    cuda.atomic.dec(counter, 1, 3)
