"""Kernels whose log is written out by hand in test_recorder.py. Line numbers are taken from the comments."""

from numba import cuda, float32


@cuda.jit(device=True)
def first_of(X, i):
    return X[i]  # device


@cuda.jit(device=True)
def swapped(T, r):
    value = T[1 - r]  # inlined
    cuda.syncthreads()
    return value


@cuda.jit
def small(A, B, n, C):
    T = cuda.shared.array(2, float32)
    own = cuda.local.array(1, float32)
    r = cuda.threadIdx.x  # r
    T[r] = first_of(A, cuda.blockIdx.x * 2 + r)  # fill
    cuda.syncthreads()
    x = swapped(T, r)  # swap
    for k in range(n):  # loop
        x += k  # add
    own[0] = x  # keep
    if x > 100:
        x = float32(0)  # never
    row = B[cuda.blockIdx.x]
    row[r] = own[0]  # out
    cuda.atomic.add(C, 0, r)  # count


@cuda.jit
def numbers(A, B):
    i = cuda.grid(1)
    whole = A[i] * 2 + 1  # whole
    truth = whole > 3  # truth
    half = whole / 2  # half
    n = 0
    while n < 2:  # while
        n += 1  # n
    B[i] = half
    B[i] += 1  # again


@cuda.jit
def beyond(A):
    A[cuda.grid(1) + 1] = 1
