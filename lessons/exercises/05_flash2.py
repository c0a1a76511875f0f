"""Exercise 05_flash2: a step of flash2. After "What changed, and what it costs" in lesson 05, 17 lines.

The kernel `forward` is FlashAttention-2 without masks and heads. A block of threads has a tile of Br queries, one per
thread, and walks through all keys, in tiles of Bc. Q_i and O_i (a row each), l_i and m_i are in registers. The loads
are there, and so is the end, where O_i is divided by l_i. Fill the hole: what a thread does with one tile of keys.

Column r of S_ij is for this thread alone: compute its scores into it, and the new maximum m_new. Bring l_i and O_i to
the new scale. Add to l_i and to O_i what each key gives. It is what you did in 04_online, for a tile in place of a
key. O_i holds l·O, not O. Any N and N_k; the tile has `keys` keys. (As in 02_softmax, the accesses of Q and O are
uncoalesced: neighbours among the threads have rows d elements apart. Those of K and V are neighbours, since the threads
load the tiles together.) The bill it must meet:

    Q  loads   N·d
    K  loads   N_k·d·⌈N/Br⌉
    V  loads   N_k·d·⌈N/Br⌉
    O  stores  N·d

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 05_flash2
    python -m numba_flash check 05_flash2 --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

Br, Bc, d = 64, 8, 16                                        # queries and keys of a tile, columns


def specification(Q, K, V, scale):
    S = scale * (Q @ K.T)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P @ V / P.sum(axis=1, keepdims=True)


@cuda.jit
def forward(Q, K, V, O, scale):
    K_j = cuda.shared.array((Bc, d), float32)
    V_j = cuda.shared.array((Bc, d), float32)
    S_ij = cuda.shared.array((Bc, Br), float32)
    Q_i = cuda.local.array(d, float32)                       # one row each: that of this thread
    O_i = cuda.local.array(d, float32)
    r = cuda.threadIdx.x
    i = cuda.blockIdx.x * Br + r                             # query of this thread
    N, N_k = Q.shape[0], K.shape[0]
    for t in range(d):
        Q_i[t] = Q[i, t] if i < N else float32(0)
        O_i[t] = float32(0)
    l_i = float32(0)
    m_i = float32(-math.inf)
    for j in range(0, N_k, Bc):
        keys = min(Bc, N_k - j)                              # of this tile
        for e in range(r, keys * d, Br):
            K_j[e // d, e % d] = K[j + e // d, e % d]
            V_j[e // d, e % d] = V[j + e // d, e % d]
        cuda.syncthreads()                                   # K_j and V_j are complete
        # --- your code: 17 lines ---
        pass
        # --- end of your code ---
        cuda.syncthreads()                                   # nobody still reads what the next step overwrites
    if i < N:
        for t in range(d):
            O[i, t] = O_i[t] / l_i


def launch(Q, K, V, scale):
    O = nf.empty(Q.shape, np.float32)
    Q, K, V = nf.to_device(Q), nf.to_device(K), nf.to_device(V)
    nf.launch(forward, -(-len(Q) // Br), Br, Q, K, V, O, np.float32(scale))
    return nf.to_host(O)
