"""Exercise 00_guard: one element per thread. After "Without the guard" in lesson 00, 3 lines.

The kernel `add` forms Z = factor·X + Y. Fill the hole: find the number of this thread in the whole grid, keep the
threads that have no element from doing anything, and store one element of Z.

X, Y and Z have N elements, and N need not be a multiple of B. The bill it must meet:

    X  loads   N
    Y  loads   N
    Z  stores  N

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 00_guard
    python -m numba_flash check 00_guard --hint 1
"""

import numpy as np
from numba import cuda

import numba_flash as nf

B = 64                                                       # threads per block


def specification(X, Y, factor):
    return factor * X + Y


@cuda.jit
def add(X, Y, Z, factor):
    # --- your code: 3 lines ---
    i = cuda.grid(1)
    if i < X.shape[0]:
        Z[i] = factor * X[i] + Y[i]
    # --- end of your code ---


def launch(X, Y, factor):
    Z = nf.empty(len(X), np.float32)
    nf.launch(add, -(-len(X) // B), B, nf.to_device(X), nf.to_device(Y), Z, np.float32(factor))
    return nf.to_host(Z)
