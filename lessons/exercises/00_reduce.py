"""Exercise 00_reduce: the sum of a block. After "A barrier inside the guard" in lesson 00, 6 lines.

Each block adds up its B elements of X, and stores the sum in Y, one element per block. Its tile in shared memory is
filled already. Fill the hole: fold the tile onto itself until all of the sum is in tile[0]. With 8 elements:

    half = 4    thread 0 adds tile[4] to tile[0], thread 1 tile[5] to tile[1], up to thread 3
    half = 2    thread 0 adds tile[2] to tile[0], thread 1 tile[3] to tile[1]
    half = 1    thread 0 adds tile[1] to tile[0]

A thread reads what another one wrote, so think of where a barrier is needed, and of who comes to it. B is a power of
2, and past the end of X the tile holds zeros. The bill it must meet, for N elements:

    X  loads   N
    Y  stores  ⌈N/B⌉

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 00_reduce
    python -m numba_flash check 00_reduce --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B = 64                                                       # threads per block


def specification(X):
    return [X[b : b + B].sum() for b in range(0, len(X), B)]


@cuda.jit
def block_sum(X, Y):
    tile = cuda.shared.array(B, float32)
    i = cuda.grid(1)
    tx = cuda.threadIdx.x
    tile[tx] = X[i] if i < X.shape[0] else float32(0)
    half = B // 2
    # --- your code: 6 lines ---
    pass
    # --- end of your code ---
    if tx == 0:
        Y[cuda.blockIdx.x] = tile[0]


def launch(X):
    Y = nf.empty(-(-len(X) // B), np.float32)
    nf.launch(block_sum, len(Y), B, nf.to_device(X), Y)
    return nf.to_host(Y)
