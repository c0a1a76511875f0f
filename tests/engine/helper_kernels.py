"""Device functions that the engine's tests call from another module."""

from numba import cuda, float32

SCALE = 3
OFFSETS = (5, 7)


@cuda.jit(device=True)
def scaled(x):
    return x * float32(SCALE)


@cuda.jit(device=True)
def scaled_twice(x, factor=2):
    return scaled(scaled(x)) * factor


@cuda.jit(device=True)
def block_sum(values, thread, n):
    """The sum of values[0:n], n a power of two, in values[0]; every thread of the block calls it."""
    step = n // 2
    while step > 0:
        cuda.syncthreads()
        if thread < step:
            values[thread] += values[thread + step]
        step //= 2
    cuda.syncthreads()
    return values[0]
