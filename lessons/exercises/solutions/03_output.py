"""Exercise 03_output: O = PV through shared tiles. After "Two barriers, and what each is for" in lesson 03, 13 lines.

The kernel `output` forms O = PV, one tile of T × T elements of O per block. Which tiles of P and of V does a block
need? It walks along the keys, T at a time: in each step it loads one tile of P and one of V. Fill the hole, all of it
after the two tiles are declared. Draw the picture of lesson 03 first, with P, V and O in place of Q, K and S.

P is (N, N_k), V is (N_k, d), O is (N, d). x runs along the columns of O, y along its rows. `load_or_zero` gives 0
outside a matrix. The bill it must meet:

    P  loads   N·N_k·⌈d/T⌉
    V  loads   N_k·d·⌈N/T⌉
    O  stores  N·d

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 03_output
    python -m numba_flash check 03_output --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf

T = 8                                                        # side of a tile, and of a block


def specification(P, V):
    return P @ V


@cuda.jit(device=True)
def load_or_zero(X, i, t):
    if i < X.shape[0] and t < X.shape[1]:
        return X[i, t]
    return float32(0)


@cuda.jit
def output(P, V, O):
    P_ij = cuda.shared.array((T, T), float32)
    V_j = cuda.shared.array((T, T), float32)
    # --- your code: 13 lines ---
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty
    col = cuda.blockIdx.x * T + tx
    acc = float32(0)
    for j0 in range(0, P.shape[1], T):
        P_ij[ty, tx] = load_or_zero(P, row, j0 + tx)
        V_j[ty, tx] = load_or_zero(V, j0 + ty, col)
        cuda.syncthreads()
        for j in range(T):
            acc += P_ij[ty, j] * V_j[j, tx]
        cuda.syncthreads()
    if row < O.shape[0] and col < O.shape[1]:
        O[row, col] = acc
    # --- end of your code ---


def launch(P, V):
    N, d = len(P), V.shape[1]
    O = nf.empty((N, d), np.float32)
    nf.launch(output, (-(-d // T), -(-N // T)), (T, T), nf.to_device(P), nf.to_device(V), O)
    return nf.to_host(O)
