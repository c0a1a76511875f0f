"""Kernels that once went wrong without a word. Each is small; what is right is in test_regressions.py."""

import enum
import functools

import numpy as np
from numba import cuda, float32, int32, int64

Bx, ty, thread = 4, 7, 9  # names that the engine uses inside for coordinates


@cuda.jit
def coordinates_as_globals(A):
    own = cuda.local.array(1, int64)
    i = cuda.grid(1)
    own[0] = i // Bx + ty + thread
    A[i] = own[0]


@cuda.jit
def load(A):
    A[cuda.grid(1)] = 3


def make_inner():
    @cuda.jit(device=True)
    def clamp(x):
        if x < 0:
            return 0
        return x * 100

    return clamp


inner = make_inner()


@cuda.jit(device=True)
def clamp(x):
    if x > 10:
        return inner(10)
    return x


@cuda.jit
def same_names(A):
    A[0] = clamp(20)


def make_width(T):
    @cuda.jit(device=True)
    def width():
        return T

    return width


three, five = make_width(3), make_width(5)


@cuda.jit(device=True)
def with_barrier(A):
    cuda.syncthreads()
    A[1] = three()


@cuda.jit
def same_closures(A):
    with_barrier(A)
    A[0] = five()


@cuda.jit(device=True)
def bump(A):
    cuda.syncthreads()
    return cuda.atomic.add(A, 0, 1)


@cuda.jit
def result_not_used(A):
    bump(A)


def make_mulhi(M):
    @cuda.jit
    def mulhi(A, B):
        B[0] = (A[0] * M) >> np.uint32(32)

    return mulhi


def plain(A):
    A[0] = 55


@cuda.jit
@functools.wraps(plain)
def wrapped(A):
    A[0] = 44


class Axis(enum.IntEnum):
    ROW = 1


@cuda.jit
def enumerated(A):
    A[Axis.ROW] = Axis.ROW + 5


@cuda.jit(device=True)
def large_scratch(A, i):
    scratch = cuda.shared.array(8192, float32)
    scratch[i] = A[i]
    cuda.syncthreads()
    A[i] = scratch[1 - i]
    cuda.syncthreads()


@cuda.jit
def shared_once_per_function(A):
    large_scratch(A, cuda.threadIdx.x)
    large_scratch(A, cuda.threadIdx.x)


@cuda.jit
def padded(A):
    tile = cuda.shared.array((32, 32 + 1), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile[y, x] = A[y, x]
    cuda.syncthreads()
    A[x, y] = tile[y, x]


def make_indented():
    @cuda.jit
    def indented(A):
# a comment in the first column
        A[0] = 6

    return indented


# --- what must be refused, or end


@cuda.jit
def zero_step(A, s):
    A[0] = A[::s].shape[0]


@cuda.jit
def shared_objects(A):
    tile = cuda.shared.array(4, object)
    A[0] = 1


@cuda.jit
def spins_on_unwritten(A):
    flag = cuda.shared.array(1, int32)
    while flag[0] != 0:
        pass
    A[0] = 1


@cuda.jit
def diverges_on_unwritten(A):
    flag = cuda.shared.array(4, int32)
    if cuda.threadIdx.x == 0:
        flag[0] = 1
    if flag[cuda.threadIdx.x] == 1:
        cuda.syncthreads()
    A[0] = 1


@cuda.jit
def huge_local(A):
    row = cuda.local.array(200_000_000, float32)
    row[0] = A[0]


@cuda.jit
def huge_shared(A):
    tile = cuda.shared.array((65536, 65536, 65536, 65536), float32)
    tile[0, 0, 0, 0] = A[0]


@cuda.jit
def tuple_too_short(A, i):
    sizes = (1, 2, 3)
    A[0] = sizes[i]


@cuda.jit
def endless_range(A, s):
    for j in range(0, 5, s):
        A[0] = j


@cuda.jit
def half_inside(A):
    A[0] = np.float16(2.5)


def make_late():
    @cuda.jit
    def late(A):
        A[0] = bound_later

    def bind():
        nonlocal bound_later
        bound_later = 3

    if False:
        bound_later = 0
    return late, bind


@cuda.jit(device=True)
def starred(*a):
    cuda.syncthreads()


@cuda.jit
def calls_starred(A):
    starred(A)


@cuda.jit
def identity(A, x):
    A[0] = x


@cuda.jit
def copy(A, B):
    i = cuda.grid(1)
    B[i] = A[i]
