"""Exercise 12_registers: 16 scores per thread. After "Several results per thread" in lesson 12, 7 lines.

The kernel `scores` forms S = scale·QKᵀ, one tile of T × T scores per block, as in 03_tile. But the block has 4 × 4
threads, and each of them owns 4 × 4 scores: thread (x, y) has the rows y, y + 4, y + 8 and y + 12 of the tile, and the
keys x, x + 4, x + 8 and x + 12. S_ij[u, w], in registers, is the score of its row y + 4·u and its key x + 4·w.

Close the lesson, then fill the hole: what a thread adds to S_ij at a step along d. For each of the T columns it takes
its 4 elements of Q_i into `q` and its 4 of K_j into `k`, and adds the 16 products. Indices of q, k and S_ij run through
range(4), a constant, so that they stay in registers (lesson 05). The loads of the tiles are there, with their barriers,
and so are the stores. What is outside of Q and K is 0 in the tiles. The bill it must meet:

    Q  loads   N·d·⌈N_k/T⌉
    K  loads   N_k·d·⌈N/T⌉
    S  stores  N·N_k

From shared memory a thread may load 8 elements per column; 16 sums, each with loads of its own, would take 32. What
counts is what you write. (Where a thread owns 16 scores and all ranges are constants, Numba's compiler for GPUs finds
by itself what is loaded twice: in this small kernel it makes 8 loads of the 32.)

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 12_registers
    python -m numba_flash check 12_registers --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf

T = 16                                                       # side of a tile; a block has 4 × 4 threads
PITCH = T + 1                                                # from row to row: what is below lies in another bank


def specification(Q, K, scale):
    return scale * (Q @ K.T)


@cuda.jit(device=True)
def load_or_zero(X, i, t):
    if i < X.shape[0] and t < X.shape[1]:
        return X[i, t]
    return float32(0)


@cuda.jit
def scores(Q, K, S, scale):
    Q_i = cuda.shared.array((T, PITCH), float32)
    K_j = cuda.shared.array((T, PITCH), float32)
    S_ij = cuda.local.array((4, 4), float32)                 # what this thread owns
    q = cuda.local.array(4, float32)                         # what is multiplied next
    k = cuda.local.array(4, float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i = cuda.blockIdx.y * T                                  # first query of the tile
    j = cuda.blockIdx.x * T                                  # first key
    for u in range(4):
        for w in range(4):
            S_ij[u, w] = float32(0)
    for t0 in range(0, Q.shape[1], T):                       # walk along d, one tile at a time
        for e in range(4 * y + x, T * T, 16):
            r, c = e // T, e % T
            Q_i[r, c] = load_or_zero(Q, i + r, t0 + c)
            K_j[r, c] = load_or_zero(K, j + r, t0 + c)
        cuda.syncthreads()                                   # Q_i and K_j are complete
        # --- your code: 7 lines ---
        for t in range(T):
            for u in range(4):
                q[u] = Q_i[y + 4 * u, t]
                k[u] = K_j[x + 4 * u, t]
            for u in range(4):
                for w in range(4):
                    S_ij[u, w] += q[u] * k[w]
        # --- end of your code ---
        cuda.syncthreads()                                   # nobody still reads what the next step overwrites
    for u in range(4):
        for w in range(4):
            if i + y + 4 * u < S.shape[0] and j + x + 4 * w < S.shape[1]:
                S[i + y + 4 * u, j + x + 4 * w] = S_ij[u, w] * scale


def launch(Q, K, scale):
    N, N_k = len(Q), len(K)
    S = nf.empty((N, N_k), np.float32)
    nf.launch(scores, (-(-N_k // T), -(-N // T)), (4, 4), nf.to_device(Q), nf.to_device(K), S, np.float32(scale))
    return nf.to_host(S)
