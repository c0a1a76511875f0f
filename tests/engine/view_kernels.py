"""Small kernels that reach a tensor in every way a kernel may, each with the accesses it makes, counted by hand.

Every engine must count them alike. A view (a row, a slice) touches no memory; one access of one element of a kernel
argument by one thread is one load, one store or one atomic.
"""

from dataclasses import dataclass
from typing import Callable

import numpy as np
from numba import cuda, float32


@dataclass(frozen=True)
class Case:
    """One launch: `kernel[grid, block](*arguments())` makes `counts` {tensor: (loads, stores, atomics)}, and leaves
    `results` {tensor: array} in the tensors it stores to. `arguments()` returns fresh NumPy arrays and scalars.
    """

    name: str
    kernel: object
    grid: tuple
    block: tuple
    arguments: Callable
    counts: dict
    results: dict


N, d = 5, 3
S = np.arange(N * d, dtype=np.float32).reshape(N, d)


@cuda.jit
def row_view(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        row = S[i]
        acc = float32(0)
        for t in range(S.shape[1]):
            acc += row[t]
        O[i] = acc


@cuda.jit
def row_of_row(S, O):
    i = cuda.grid(1)
    if i < S.shape[1]:
        O[i] = S[0][i][2] * S[1, i][0]


@cuda.jit
def slices(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        tail = S[i, 1:]
        column = S[:, 0]
        middle = S[1:4][:, 1:]
        O[i] = tail[0] + tail[1] + column[i] + middle[2, 1]


@cuda.jit
def store_through_view(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        row = O[i, :]
        for t in range(row.shape[0]):
            row[t] = S[i, t] + float32(1)


@cuda.jit
def tuple_targets(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        O[i, 0], O[i, 1] = S[i, 1], S[i, 0]


@cuda.jit
def augmented(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        O[i] += S[i, 0]
        O[i] *= S[i, 1]


@cuda.jit
def augmented_through_an_index(order, O):
    i = cuda.grid(1)
    if i < order.shape[0]:
        O[order[i]][0] += 1
        O[order[i], order[0]] *= 2


@cuda.jit
def stepped_slices(S, O):
    i = cuda.grid(1)
    if i < 2:
        every_second = S[::2]
        backwards = S[i, ::-1]
        O[i] = every_second[i + 1, 0] + backwards[0] + S[1::2, 1:][i, 1]


@cuda.jit
def augmented_view(O):
    i = cuda.grid(1)
    if i < O.shape[0]:
        row = O[i]
        row[1] -= row[0]


@cuda.jit
def shape_in_a_name(S, O):
    s = S.shape
    n, m = S.shape
    i = cuda.grid(1)
    if i < s[0]:
        O[i] = S[i, s[1] - 1] + S[n - 1, m - 1]


@cuda.jit
def position_in_a_name(S, O):
    p = cuda.grid(2)
    if p[0] < S.shape[0] and p[1] < S.shape[1]:
        O[p[0], p[1]] = S[p[0], p[1]]


@cuda.jit
def tuple_index(S, O):
    p = cuda.grid(2)
    if p[0] < S.shape[0] and p[1] < S.shape[1]:
        O[p] = S[p]


@cuda.jit
def lengths(S, O):
    i = cuda.grid(1)
    if i < len(S):
        row = S[i]
        O[i] = row[len(row) - 1] + float32(S.size + S.ndim + S.itemsize + S.nbytes + S.strides[0])


@cuda.jit
def atomics(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        cuda.atomic.add(O, 0, S[i, 0])
        cuda.atomic.max(O, 1, S[i, 1])
        cuda.atomic.min(O, 2, S[i, 2])


@cuda.jit
def atomics_on_views(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        row = O[1]
        cuda.atomic.add(row, 0, S[i, 0])
        cuda.atomic.add(O[:, 2], 0, S[i, 1])
        cuda.atomic.add(O, (0, 1), S[i, 2])


@cuda.jit
def integer_atomics(A, B):
    i = cuda.grid(1)
    if i < 4:
        cuda.atomic.sub(A, 0, 1)
        cuda.atomic.or_(A, 1, 1 << i)
        cuda.atomic.compare_and_swap(B, 0, i + 1)
        cuda.atomic.cas(A, 2, i, i + 1)


@cuda.jit(device=True)
def load_or_zero(A, i, t):
    return A[i, t] if i < A.shape[0] and t < A.shape[1] else float32(0)


@cuda.jit(device=True)
def add_row(row, O, i):
    for t in range(len(row)):
        O[i] += row[t]


@cuda.jit
def device_function(S, O):
    i, t = cuda.grid(2)
    if i < O.shape[0] and t < O.shape[1]:
        O[i, t] = load_or_zero(S, i, t) + load_or_zero(S, i, t + 1)


@cuda.jit
def device_function_with_view(S, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        add_row(S[i], O, i)


@cuda.jit
def one_of_two(S, T, O):
    i = cuda.grid(1)
    if i < S.shape[0]:
        row = S[i] if i % 2 == 0 else T[i]
        O[i] = row[0]


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


GRID, BLOCK = (2, 1, 1), (4, 1, 1)  # eight threads for five rows
CASES = [
    Case(
        "a row of a tensor", row_view, GRID, BLOCK, lambda: (S.copy(), zeros(N)),
        {"S": (N * d, 0, 0), "O": (0, N, 0)}, {"O": S.sum(1)},
    ),
    Case(
        "a row of a row", row_of_row, GRID, BLOCK, lambda: (ramp(2, 4, 3), zeros(4)),
        {"S": (2 * 4, 0, 0), "O": (0, 4, 0)}, {"O": ramp(2, 4, 3)[0, :, 2] * ramp(2, 4, 3)[1, :, 0]},
    ),
    Case(
        "slices", slices, GRID, BLOCK, lambda: (S.copy(), zeros(N)),
        {"S": (4 * N, 0, 0), "O": (0, N, 0)}, {"O": S.sum(1) + S[3, 2]},
    ),
    Case(
        "stores through a row", store_through_view, GRID, BLOCK, lambda: (S.copy(), zeros(N, d)),
        {"S": (N * d, 0, 0), "O": (0, N * d, 0)}, {"O": S + 1},
    ),
    Case(
        "a[0], a[1] = x, y", tuple_targets, GRID, BLOCK, lambda: (S.copy(), zeros(N, 2)),
        {"S": (2 * N, 0, 0), "O": (0, 2 * N, 0)}, {"O": S[:, 1::-1]},
    ),
    Case(
        "A[i] += v", augmented, GRID, BLOCK, lambda: (S.copy(), ramp(N)),
        {"S": (2 * N, 0, 0), "O": (2 * N, 2 * N, 0)}, {"O": (ramp(N) + S[:, 0]) * S[:, 1]},
    ),
    Case(
        "row[j] -= v", augmented_view, GRID, BLOCK, lambda: (S.copy(),),
        {"O": (2 * N, N, 0)}, {"O": np.stack([S[:, 0], S[:, 1] - S[:, 0], S[:, 2]], 1)},
    ),
    Case(
        "A[order[i]][0] += v", augmented_through_an_index, GRID, BLOCK, lambda: (np.array([2, 0, 1, 4, 3]), S.copy()),
        {"order": (3 * N, 0, 0), "O": (2 * N, 2 * N, 0)},
        {"O": np.stack([S[:, 0] + 1, S[:, 1], 2 * S[:, 2]], 1)},
    ),
    Case(
        "X[::2], X[i, ::-1]", stepped_slices, GRID, BLOCK, lambda: (S.copy(), zeros(2)),
        {"S": (3 * 2, 0, 0), "O": (0, 2, 0)},
        {"O": np.array([S[2, 0] + S[0, 2] + S[1, 2], S[4, 0] + S[1, 2] + S[3, 2]])},
    ),
    Case(
        "s = A.shape; s[1]", shape_in_a_name, GRID, BLOCK, lambda: (S.copy(), zeros(N)),
        {"S": (2 * N, 0, 0), "O": (0, N, 0)}, {"O": S[:, 2] + S[4, 2]},
    ),
    Case(
        "p = cuda.grid(2); p[0]", position_in_a_name, (2, 1, 1), (4, 4, 1), lambda: (S.copy(), zeros(N, d)),
        {"S": (N * d, 0, 0), "O": (0, N * d, 0)}, {"O": S},
    ),
    Case(
        "p = cuda.grid(2); A[p]", tuple_index, (2, 1, 1), (4, 4, 1), lambda: (S.copy(), zeros(N, d)),
        {"S": (N * d, 0, 0), "O": (0, N * d, 0)}, {"O": S},
    ),
    Case(
        "len(A)", lengths, GRID, BLOCK, lambda: (S.copy(), zeros(N)),
        {"S": (N, 0, 0), "O": (0, N, 0)}, {"O": S[:, 2] + (15 + 2 + 4 + 60 + 12)},
    ),
    Case(
        "atomics on a tensor", atomics, GRID, BLOCK, lambda: (S.copy(), np.array([0, -1, 99], np.float32)),
        {"S": (3 * N, 0, 0), "O": (0, 0, 3 * N)}, {"O": np.array([S[:, 0].sum(), S[:, 1].max(), S[:, 2].min()])},
    ),
    Case(
        "atomics on a view", atomics_on_views, GRID, BLOCK, lambda: (S.copy(), zeros(2, 3)),
        {"S": (3 * N, 0, 0), "O": (0, 0, 3 * N)},
        {"O": np.array([[0, S[:, 2].sum(), S[:, 1].sum()], [S[:, 0].sum(), 0, 0]])},
    ),
    Case(
        "atomics on integers", integer_atomics, GRID, BLOCK,
        lambda: (np.array([9, 0, 0], np.int32), np.array([0], np.int32)),
        {"A": (0, 0, 3 * 4), "B": (0, 0, 4)}, {},
    ),
    Case(
        "a device function indexes", device_function, (2, 1, 1), (4, 4, 1), lambda: (S.copy(), zeros(N, d)),
        {"S": (N * (2 * d - 1), 0, 0), "O": (0, N * d, 0)},
        {"O": S + np.pad(S[:, 1:], ((0, 0), (0, 1)))},
    ),
    Case(
        "a device function takes a row", device_function_with_view, GRID, BLOCK, lambda: (S.copy(), zeros(N)),
        {"S": (N * d, 0, 0), "O": (N * d, N * d, 0)}, {"O": S.sum(1)},
    ),
    Case(
        "one of two tensors", one_of_two, GRID, BLOCK, lambda: (S.copy(), -S, zeros(N)),
        {"S": (3, 0, 0), "T": (2, 0, 0), "O": (0, N, 0)}, {"O": S[:, 0] * [1, -1, 1, -1, 1]},
    ),
]  # fmt: skip
