"""Exercise 08_skip: do not load what nobody sees. After "What can be skipped" in lesson 08, 2 lines.

The kernel `forward` is flash2 in causal order. It is right as it is: a score that must not be seen becomes -∞. But it
loads all tiles of K and V, also those that no query of its tile sees. Replace the line in the hole: `keys` is the
number of keys, from the first on, that this tile of queries goes through.

A tile has Br queries, block b has those from b·Br on, and the last tile may have fewer. N and N_k may differ: the
last query is aligned with the last key.

(A block of eight threads leaves 24 of the 32 lanes of a warp idle: tiles are small here, so that few queries make many
of them. To be fast, a kernel takes Br = 32 or more. The accesses of Q and O, a row per thread, are uncoalesced, as in
02_softmax.)
The bill it must meet:

    Q  loads   N·d
    K  loads   seen·d
    V  loads   seen·d
    O  stores  N·d

with `seen` the number of keys that the last query of a tile sees, summed over all tiles of queries.

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 08_skip
    python -m numba_flash check 08_skip --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

Br, Bc, d = 8, 4, 8                                          # queries and keys of a tile, columns: small, for the check


def specification(Q, K, V, scale):
    N, N_k = len(Q), len(K)
    i, j = np.arange(N)[:, None], np.arange(N_k)
    S = np.where(j <= i + N_k - N, scale * (Q @ K.T), -np.inf)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    l = P.sum(axis=1, keepdims=True)
    return P @ V / np.where(l == 0, 1, l)


@cuda.jit(device=True)
def weight(s, m):
    if s == float32(-math.inf):
        return float32(0)
    return math.exp(s - m)


@cuda.jit
def forward(Q, K, V, O, scale):
    K_j = cuda.shared.array((Bc, d), float32)
    V_j = cuda.shared.array((Bc, d), float32)
    S_ij = cuda.shared.array((Bc, Br), float32)
    Q_i = cuda.local.array(d, float32)
    O_i = cuda.local.array(d, float32)
    r = cuda.threadIdx.x
    i = cuda.blockIdx.x * Br + r                             # query of this thread
    N, N_k = Q.shape[0], K.shape[0]
    # --- your code: 2 lines ---
    keys = N_k                                               # all of them
    # --- end of your code ---
    for t in range(d):
        Q_i[t] = Q[i, t] if i < N else float32(0)
        O_i[t] = float32(0)
    l_i = float32(0)
    m_i = float32(-math.inf)
    for j in range(0, keys, Bc):
        for e in range(r, min(Bc, keys - j) * d, Br):
            K_j[e // d, e % d] = K[j + e // d, e % d]
            V_j[e // d, e % d] = V[j + e // d, e % d]
        cuda.syncthreads()                                   # K_j and V_j are complete
        m_new = m_i
        for c in range(min(Bc, keys - j)):
            s = float32(0)
            for t in range(d):
                s += Q_i[t] * K_j[c, t]
            S_ij[c, r] = s * scale if j + c <= i + N_k - N else float32(-math.inf)
            m_new = max(m_new, S_ij[c, r])
        old = weight(m_i, m_new)
        l_i *= old
        for t in range(d):
            O_i[t] *= old
        for c in range(min(Bc, keys - j)):
            p = weight(S_ij[c, r], m_new)
            l_i += p
            for t in range(d):
                O_i[t] += p * V_j[c, t]
        m_i = m_new
        cuda.syncthreads()                                   # nobody still reads what the next step overwrites
    if i < N:
        for t in range(d):
            O[i, t] = O_i[t] / l_i if l_i != float32(0) else float32(0)


def launch(Q, K, V, scale):
    O = nf.empty(Q.shape, np.float32)
    Q, K, V = nf.to_device(Q), nf.to_device(K), nf.to_device(V)
    nf.launch(forward, -(-len(Q) // Br), Br, Q, K, V, O, np.float32(scale))
    return nf.to_host(O)
