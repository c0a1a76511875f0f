"""Exercise 07_recompute: P again, and dQ. After "flash2: each result has one owner" in lesson 07, 8 lines.

The forward pass has kept L = m + log l for each query, and D is known. The kernel `backward` owns dQ, one row per
thread: the keys pass by, in tiles of Bc, and no matrix of N × N_k goes to HBM. For each key a thread computes the score
S_ij again, from it P_ij, then dP_ij and dS_ij, and adds to its row dQ_i what that key gives. (Lines 11, 13, 17, 20 and
21 of the table in lesson 07; the scale of line 21 is left to the end, and there already.) Fill the hole: the keys of
one tile. What it needs is on chip: Q_i, dO_i, dQ_i, L_i and D_i in registers, K_j and V_j in shared memory.

Q, dO and dQ are (N, d), K and V are (N_k, d), L and D are (N). (d is a constant here, as arrays in registers ask for.
As in 02_softmax, the accesses of Q, dO and dQ are uncoalesced: neighbours among the threads have rows d elements apart.
Those of K and V are neighbours.) The bill it must meet:

    Q   loads   N·d
    dO  loads   N·d
    L   loads   N
    D   loads   N
    K   loads   N_k·d·⌈N/Br⌉
    V   loads   N_k·d·⌈N/Br⌉
    dQ  stores  N·d

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 07_recompute
    python -m numba_flash check 07_recompute --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

Br, Bc, d = 32, 8, 8                                         # queries and keys of a tile, columns


def specification(Q, K, V, dO, L, D, scale):
    P = np.exp(scale * (Q @ K.T) - L[:, None])
    dP = dO @ V.T
    dS = P * (dP - D[:, None])
    return scale * (dS @ K)


@cuda.jit
def backward(Q, K, V, dO, L, D, dQ, scale):
    K_j = cuda.shared.array((Bc, d), float32)
    V_j = cuda.shared.array((Bc, d), float32)
    Q_i = cuda.local.array(d, float32)                       # one row each: that of this thread
    dO_i = cuda.local.array(d, float32)
    dQ_i = cuda.local.array(d, float32)
    r = cuda.threadIdx.x
    i = cuda.blockIdx.x * Br + r                             # query of this thread
    N, N_k = Q.shape[0], K.shape[0]
    for t in range(d):
        Q_i[t] = Q[i, t] if i < N else float32(0)
        dO_i[t] = dO[i, t] if i < N else float32(0)
        dQ_i[t] = float32(0)
    L_i = L[i] if i < N else float32(0)
    D_i = D[i] if i < N else float32(0)
    for j in range(0, N_k, Bc):
        keys = min(Bc, N_k - j)                              # of this tile
        for e in range(r, keys * d, Br):
            K_j[e // d, e % d] = K[j + e // d, e % d]
            V_j[e // d, e % d] = V[j + e // d, e % d]
        cuda.syncthreads()                                   # K_j and V_j are complete
        # --- your code: 8 lines ---
        for c in range(keys):
            s, dp = float32(0), float32(0)
            for t in range(d):
                s += Q_i[t] * K_j[c, t]
                dp += dO_i[t] * V_j[c, t]
            ds = math.exp(s * scale - L_i) * (dp - D_i)
            for t in range(d):
                dQ_i[t] += ds * K_j[c, t]
        # --- end of your code ---
        cuda.syncthreads()                                   # nobody still reads what the next step overwrites
    if i < N:
        for t in range(d):
            dQ[i, t] = scale * dQ_i[t]


def launch(Q, K, V, dO, L, D, scale):
    dQ = nf.empty(Q.shape, np.float32)
    Q, K, V, dO, L, D = (nf.to_device(x) for x in (Q, K, V, dO, L, D))
    nf.launch(backward, -(-len(Q) // Br), Br, Q, K, V, dO, L, D, dQ, np.float32(scale))
    return nf.to_host(dQ)
