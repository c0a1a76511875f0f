"""Kernels with one fault each. The faulty line ends in the comment that the test looks for."""

import math

import numpy as np
from numba import cuda, float32, int32


@cuda.jit(device=True)
def fetch(X, i):
    return X[i]  # device load


@cuda.jit
def too_far(A, B):
    i = cuda.grid(1)
    B[i] = A[i]  # FAULT


@cuda.jit
def negative(A, B):
    i = cuda.grid(1)
    B[i] = A[i - 1]  # FAULT


@cuda.jit
def second_axis(A, B):
    i = cuda.grid(1)
    B[0, i + 1] = A[i]  # FAULT


@cuda.jit
def in_device_function(A, B):
    i = cuda.grid(1)
    B[i] = fetch(A, i + 2)


@cuda.jit
def augmented(A, B):
    i = cuda.grid(1)
    B[i + 4] += A[0]  # FAULT


@cuda.jit
def row_view(A, B):
    i = cuda.grid(1)
    row = A[i]  # FAULT
    B[i] = row[0]


@cuda.jit
def atomic_out(A, B):
    cuda.atomic.add(B, A.shape[0] + cuda.threadIdx.x, 1)  # FAULT


def make_shared_out(T):
    @cuda.jit
    def shared_out(A):
        tile = cuda.shared.array(T, float32)
        tile[cuda.threadIdx.x] = A[0]  # FAULT
        cuda.syncthreads()

    return shared_out


def make_local_out(T):
    @cuda.jit
    def local_out(A):
        row = cuda.local.array(T, float32)
        for t in range(A.shape[0]):
            row[t] = A[t]  # FAULT

    return local_out


@cuda.jit
def barrier_in_branch(A):
    if cuda.threadIdx.x < 3:
        cuda.syncthreads()  # FAULT
    A[cuda.threadIdx.x] = 1


@cuda.jit
def two_barriers(A):
    if cuda.threadIdx.x < 3:
        cuda.syncthreads()  # FAULT
    else:
        cuda.syncthreads()
    A[cuda.threadIdx.x] = 1


@cuda.jit
def early_return(A):
    i = cuda.threadIdx.x
    if i >= A.shape[0]:
        return
    A[i] = 0
    cuda.syncthreads()  # FAULT
    A[i] += 1


def make_missing_barrier(T):
    @cuda.jit
    def missing_barrier(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        tile[i] = A[i]  # FAULT
        B[i] = tile[T - 1 - i]  # too early

    return missing_barrier


def make_late_barrier(T):
    """Without a barrier at the end of the loop, a fast thread overwrites what a slow one still reads."""

    @cuda.jit
    def late_barrier(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        for row in range(A.shape[0]):
            tile[i] = A[row, i]  # too early
            cuda.syncthreads()
            B[row, i] = tile[T - 1 - i]  # FAULT

    return late_barrier


def make_early_reader(T):
    """Read first and written last: without a barrier at the loop's end, thread 1 still writes what thread 0 reads."""

    @cuda.jit
    def early_reader(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        tile[i] = A[0, i]
        cuda.syncthreads()
        for row in range(A.shape[0]):  # the loop
            B[row, i] = tile[T - 1 - i]  # in the next turn
            cuda.syncthreads()
            tile[i] = A[row, i]  # FAULT

    return early_reader


def make_late_writer(T):
    """What thread 1 writes in its next turn, thread 0 still reads: every thread but 0 reads its own element alone."""

    @cuda.jit
    def late_writer(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        for row in range(A.shape[0]):  # the loop
            if i > 0 or row == 0:
                tile[i] = A[row, i]  # FAULT
            cuda.syncthreads()
            B[row, i] = tile[i] if i > 0 else tile[1]  # too early

    return late_writer


@cuda.jit(device=True)
def fill(tile, A, row, i):
    tile[i] = A[row, i]  # of a device function
    cuda.syncthreads()


def make_late_barriers_outside(T):
    """The outer loop's barrier is missing; the inner loop has its own, which no turn may come to."""

    @cuda.jit
    def late_barriers_outside(A, B):
        tile = cuda.shared.array(T, float32)
        other = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        for row in range(A.shape[0]):  # the loop
            fill(tile, A, row, i)  # in the next turn
            for _ in range(2):
                other[i] = A[row, i]
                cuda.syncthreads()
                B[row, i] = other[T - 1 - i]
                cuda.syncthreads()
            B[row, i] = tile[T - 1 - i]  # FAULT

    return late_barriers_outside


def make_late_while(T):
    """A condition is asked again at the end of each turn."""

    @cuda.jit
    def late_while(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        if i == 0:
            tile[0] = 2
        cuda.syncthreads()
        while tile[0] > 0:  # the loop, FAULT
            cuda.syncthreads()
            if i == 0:
                tile[0] -= 1  # too early

    return late_while


def make_skipped_barrier(T):
    """The barrier between the two is one that nobody comes to: it is between them that one is missing."""

    @cuda.jit
    def skipped_barrier(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        for row in range(A.shape[0]):  # the loop
            tile[i] = A[row, i]  # FAULT
            if row > 5:
                cuda.syncthreads()
            B[row, i] = tile[T - 1 - i]  # too early
            cuda.syncthreads()

    return skipped_barrier


def make_branches(T):
    """One branch or the other, in one turn: a barrier in the first is between them in the text alone."""

    @cuda.jit
    def branches(A, B):
        tile = cuda.shared.array(T, float32)
        i = cuda.threadIdx.x
        for _ in range(A.shape[0]):  # the loop
            if i == 0:
                tile[1] = A[0, 0]  # too early
                cuda.syncthreads()
            else:
                B[0, i] = tile[1]  # FAULT
                cuda.syncthreads()

    return branches


@cuda.jit
def write_write(A):
    A[cuda.threadIdx.x // 2] = cuda.threadIdx.x  # FAULT


@cuda.jit
def blocks_race(A):
    A[cuda.threadIdx.x] = cuda.blockIdx.x  # FAULT


@cuda.jit
def block_reads_another(A, B):
    B[cuda.blockIdx.x] = A[cuda.blockIdx.x]
    A[cuda.blockIdx.x + 1] = 1  # written here, read by the next block


@cuda.jit
def mixed_atomic(A):
    if cuda.threadIdx.x == 0:
        A[0] = 1
    cuda.atomic.add(A, 0, 1)  # FAULT


def make_unwritten_shared(T):
    @cuda.jit
    def unwritten_shared(A):
        tile = cuda.shared.array((T, 2), int32)
        tile[cuda.threadIdx.x, 0] = 1
        cuda.syncthreads()
        A[cuda.threadIdx.x] = tile[cuda.threadIdx.x, 1]  # FAULT

    return unwritten_shared


def make_unwritten_local(T):
    @cuda.jit
    def unwritten_local(A):
        row = cuda.local.array(T, int32)
        for t in range(T - 1):
            row[t] = t
        A[cuda.threadIdx.x] = row[T - 1]  # FAULT

    return unwritten_local


@cuda.jit
def shifted(A, B):
    i = cuda.grid(1)
    B[i] = A[i + 1]


@cuda.jit
def accumulate(A, B):
    B[cuda.grid(1)] += A[cuda.grid(1)]  # FAULT


# --- what cannot run


@cuda.jit
def warp_shuffle(A):
    A[0] = cuda.shfl_sync(-1, A[0], 0)  # FAULT


@cuda.jit
def warp_sync(A):
    cuda.syncwarp()  # FAULT


@cuda.jit
def warp_lane(A):
    A[0] = cuda.laneid  # FAULT


@cuda.jit
def sync_count(A):
    A[0] = cuda.syncthreads_count(1)  # FAULT


def plain_helper(x):
    return x + 1


@cuda.jit
def plain_python(A):
    A[0] = plain_helper(A[0])  # FAULT


@cuda.jit
def unknown_name(A):
    A[0] = nowhere  # noqa: F821  FAULT


TABLE = np.arange(4)


@cuda.jit
def global_array(A):
    A[0] = TABLE[0]  # FAULT


@cuda.jit
def comprehension(A):
    A[0] = sum([x for x in range(4)])  # FAULT


@cuda.jit
def asserts(A):
    assert A[0] > 0  # FAULT


@cuda.jit
def imports(A):
    import math  # FAULT

    A[0] = math.pi


@cuda.jit
def deletes(A):
    x = A[0]
    del x  # FAULT


@cuda.jit
def no_call(A):
    A[0] = 1
    cuda.syncthreads  # FAULT


@cuda.jit
def raises(A):
    if A[0] > 0:
        raise ValueError  # FAULT


@cuda.jit
def slice_store(A):
    A[1:3] = 0  # FAULT


@cuda.jit
def returns(A):
    return A[0]  # FAULT


def make_computed_shape(T):
    @cuda.jit
    def computed_shape(A):
        tile = cuda.shared.array(T * 4, float32)  # FAULT
        tile[0] = A[0]

    return computed_shape


@cuda.jit
def too_many_indices(A):
    A[0, 0, 0] = 1  # FAULT


@cuda.jit
def float_index(A):
    A[0] = A[A[1]]  # FAULT


@cuda.jit
def not_an_attribute(A):
    A[0] = A.max()  # FAULT


@cuda.jit
def math_of_array(A):
    A[0] = math.exp(A)  # FAULT


@cuda.jit(device=True)
def recursive(x):
    return recursive(x - 1) if x > 0 else x


@cuda.jit
def calls_recursive(A):
    A[0] = recursive(3)


@cuda.jit(device=True)
def barrier_twice(A):
    cuda.syncthreads()
    if A[0] > 0:
        return 1  # FAULT
    return 2


@cuda.jit
def calls_barrier_twice(A):
    x = barrier_twice(A)
    A[0] = x


@cuda.jit
def star_arguments(*A):
    A[0][0] = 1


def make_large(n):
    @cuda.jit
    def large(A):
        one = cuda.shared.array(n, float32)
        two = cuda.shared.array((2, n), float32)
        one[0] = A[0]
        two[0, 0] = A[0]

    return large


@cuda.jit
def uses_dynamic(A):
    values = cuda.shared.array(0, float32)
    values[cuda.threadIdx.x] = A[0]


@cuda.jit
def forever(A):
    while A[0] == 0:
        A[1] += 1


@cuda.jit
def long_loops(A):
    for _ in range(1 << 20):
        for j in range(1 << 20):
            A[1] += j


@cuda.jit
def one_long_loop(A):
    total = 0
    for j in range(1 << 50):
        total += j ^ (total >> 3)
    A[0] = total


@cuda.jit
def many_blocks(A):
    for j in range(1000):
        A[1] += j


def make_long_barriers(T):
    @cuda.jit
    def long_barriers(A):
        tile = cuda.shared.array(T, float32)
        tile[cuda.threadIdx.x] = 0
        for _ in range(1 << 30):
            cuda.syncthreads()
        A[0] = tile[0]

    return long_barriers


# --- races that only a full history finds


@cuda.jit
def second_reader(A, B):
    """Threads 0 and 1 read A[0]; then thread 0 writes it: it races with thread 1, not with itself."""
    i = cuda.threadIdx.x
    if i < 2:
        B[i] = A[0]
    if i == 2:
        B[2] = 0
    cuda.syncthreads()
    if i == 1:
        B[0] = A[1]
    if i == 0:
        B[1] = A[1]
    if i == 1:
        A[1] = 0  # FAULT


@cuda.jit
def third_block(A, B):
    """Blocks 0 and 1 read A[0], block 0 wrote nothing; block 2 reads it too, and block 1 writes what 0 and 2 read."""
    b = cuda.blockIdx.x
    if b == 0 or b == 1:
        B[b] = A[0]
    if b == 2:
        A[0] = 1  # FAULT


@cuda.jit
def read_and_atomic(A, B):
    i = cuda.threadIdx.x
    if i == 0:
        B[0] = A[0]
    if i == 1:
        cuda.atomic.add(A, 0, 1)  # FAULT


@cuda.jit
def atomic_on_unwritten(A):
    total = cuda.shared.array(1, float32)
    cuda.atomic.add(total, 0, A[0])  # FAULT


@cuda.jit
def next_block_without_barrier(A):
    """Thread b of block b writes A[0]: two blocks, two threads."""
    if cuda.threadIdx.x == cuda.blockIdx.x:
        A[0] = 1  # FAULT


@cuda.jit
def dynamic_twice(A):
    one = cuda.shared.array(0, float32)
    two = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    one[i] = A[i]
    A[i] = two[cuda.blockDim.x - 1 - i]  # other name, same memory


@cuda.jit
def dynamic_of_two_types(A):
    one = cuda.shared.array(0, float32)
    two = cuda.shared.array(0, int32)
    one[cuda.threadIdx.x] = A[0]
    A[0] = two[0]


def make_static_and_dynamic(n):
    @cuda.jit
    def static_and_dynamic(A):
        fixed = cuda.shared.array(n, float32)
        rest = cuda.shared.array(0, float32)
        fixed[0] = A[0]
        rest[0] = A[0]

    return static_and_dynamic


@cuda.jit
def far_corner(A):
    x, y, z = cuda.grid(3)
    if x == 3 and y == 5 and z == 3:
        A[x, y, z + 1] = 0  # FAULT
