"""Exercise 10_blocks: leave out whole tiles. After "The kernel" in lesson 10, 6 lines.

The kernel `forward` is flash2 for a block mask: block_mask[a, b] is 0 where tile a of the queries must not see tile b
of the keys. (A tile of queries has Br of them, and is a block of threads; a tile of keys has Bc.) Fill the hole, the
beginning of the loop over the keys: go on to the next tile where the mask says so; else load the tile into K_j and
V_j, all threads together. A tile that is left out must not be loaded.

A query that sees no tile at all has O = 0.

(A block of eight threads leaves 24 of the 32 lanes of a warp idle: tiles are small here, so that few queries make many
of them. To be fast, a kernel takes Br = 32 or more. The accesses of Q and O, a row per thread, are uncoalesced, as in
02_softmax.)
The bill it must meet:

    Q           loads   N·d
    K           loads   visited·d
    V           loads   visited·d
    block_mask  loads   Tr·Br·Tc
    O           stores  N·d

with Tr = ⌈N/Br⌉, Tc = ⌈N_k/Bc⌉, and `visited` the number of keys in the tiles that are not left out, summed over the
tiles of queries.

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 10_blocks
    python -m numba_flash check 10_blocks --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

Br, Bc, d = 8, 4, 8                                          # queries and keys of a tile, columns: small, for the check


def specification(Q, K, V, block_mask, scale):
    seen = np.repeat(np.repeat(block_mask, Br, axis=0), Bc, axis=1)[: len(Q), : len(K)]
    S = np.where(seen != 0, scale * (Q @ K.T), -np.inf)
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
def forward(Q, K, V, block_mask, O, scale):
    K_j = cuda.shared.array((Bc, d), float32)
    V_j = cuda.shared.array((Bc, d), float32)
    S_ij = cuda.shared.array((Bc, Br), float32)
    Q_i = cuda.local.array(d, float32)
    O_i = cuda.local.array(d, float32)
    r = cuda.threadIdx.x
    i = cuda.blockIdx.x * Br + r                             # query of this thread
    N, N_k = Q.shape[0], K.shape[0]
    for t in range(d):
        Q_i[t] = Q[i, t] if i < N else float32(0)
        O_i[t] = float32(0)
    l_i = float32(0)
    m_i = float32(-math.inf)
    for j in range(0, N_k, Bc):                              # first key of a tile
        # --- your code: 6 lines ---
        if block_mask[cuda.blockIdx.x, j // Bc] == 0:
            continue
        for e in range(r, min(Bc, N_k - j) * d, Br):
            K_j[e // d, e % d] = K[j + e // d, e % d]
            V_j[e // d, e % d] = V[j + e // d, e % d]
        cuda.syncthreads()
        # --- end of your code ---
        m_new = m_i
        for c in range(min(Bc, N_k - j)):
            s = float32(0)
            for t in range(d):
                s += Q_i[t] * K_j[c, t]
            S_ij[c, r] = s * scale
            m_new = max(m_new, S_ij[c, r])
        old = weight(m_i, m_new)
        l_i *= old
        for t in range(d):
            O_i[t] *= old
        for c in range(min(Bc, N_k - j)):
            p = weight(S_ij[c, r], m_new)
            l_i += p
            for t in range(d):
                O_i[t] += p * V_j[c, t]
        m_i = m_new
        cuda.syncthreads()                                   # nobody still reads what the next step overwrites
    if i < N:
        for t in range(d):
            O[i, t] = O_i[t] / l_i if l_i != float32(0) else float32(0)


def launch(Q, K, V, block_mask, scale):
    O = nf.empty(Q.shape, np.float32)
    Q, K, V, block_mask = (nf.to_device(x) for x in (Q, K, V, block_mask))
    nf.launch(forward, -(-len(Q) // Br), Br, Q, K, V, block_mask, O, np.float32(scale))
    return nf.to_host(O)
