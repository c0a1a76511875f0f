"""Exercise 03_tile: scores through shared tiles. After "Two barriers, and what each is for" in lesson 03, 6 lines.

The kernel `scores` forms S = scale·QKᵀ, one tile of T × T scores per block. Close the lesson, then fill the hole: one
step along d. Each thread loads one element of Q_i and one of K_j, and adds to `acc` what the two tiles give for its
own score. Mind the two barriers.

Q is (N, d), K is (N_k, d), S is (N, N_k). `row` is the query of this thread, `col` its key; `load_or_zero` gives 0
outside a matrix. Let neighbours along x load neighbours in HBM, so tx is the column: a GPU fetches neighbours together
(such loads are coalesced). Loaded the other way round, the bill is the same and the time is not. The bill it must meet:

    Q  loads   N·d·⌈N_k/T⌉
    K  loads   N_k·d·⌈N/T⌉
    S  stores  N·N_k

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 03_tile
    python -m numba_flash check 03_tile --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf

T = 8                                                        # side of a tile, and of a block


def specification(Q, K, scale):
    return scale * (Q @ K.T)


@cuda.jit(device=True)
def load_or_zero(X, i, t):
    if i < X.shape[0] and t < X.shape[1]:
        return X[i, t]
    return float32(0)


@cuda.jit
def scores(Q, K, S, scale):
    Q_i = cuda.shared.array((T, T), float32)
    K_j = cuda.shared.array((T, T), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty                           # query of this thread
    col = cuda.blockIdx.x * T + tx                           # key of this thread
    acc = float32(0)
    for t0 in range(0, Q.shape[1], T):                       # walk along d, one tile at a time
        # --- your code: 6 lines ---
        pass
        # --- end of your code ---
    if row < S.shape[0] and col < S.shape[1]:
        S[row, col] = acc * scale


def launch(Q, K, scale):
    N, N_k = len(Q), len(K)
    S = nf.empty((N, N_k), np.float32)
    nf.launch(scores, (-(-N_k // T), -(-N // T)), (T, T), nf.to_device(Q), nf.to_device(K), S, np.float32(scale))
    return nf.to_host(S)
