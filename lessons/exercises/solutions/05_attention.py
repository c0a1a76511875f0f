"""Exercise 05_attention: all of attention, yours. After "What changed, and what it costs" in lesson 05, 51 lines.

The capstone. Write `attention(Q, K, V, scale)`: it takes float32 arrays Q (N, d), K and V (N_k, d), and returns O (N,
d). It allocates O with `nf.empty`, launches one or more kernels of your own with `nf.launch`, and returns
`nf.to_host(O)`. No matrix of N × N_k goes to HBM. Any N and N_k, not only multiples of your tiles, and any d up to
32.

The kernels are yours: as many threads and tiles as you like. Do not take the stages of numba_flash; reading them is
allowed. An array in shared memory or in registers has a size fixed in advance, so a kernel that needs d for that is
made by a function of d; `@cache` keeps what it made, or a GPU would compile it anew at each call:

    @cache
    def make_forward(d):
        @cuda.jit
        def forward(Q, K, V, O, scale):
            Q_i = cuda.local.array(d, float32)
            ...
        return forward

It is launched as nf.launch(make_forward(Q.shape[1]), blocks, threads, Q, K, V, O, np.float32(scale)): a Python float
would be float64 in the kernel. Give it nf.to_device(Q), not Q, or a GPU copies it at each launch.

The bill is at most that of flash2 with 32 queries per tile, without L, for all tensors and kernels together; and a
thread must not do the work of others:

    total  2·N·d + 2·N_k·d·⌈N/Br⌉,   Br = 32

More queries per tile load K and V less often, and give a block more than one warp. (Where a thread has a row of Q and
O, neighbours read addresses d elements apart: as in 02_softmax, that is uncoalesced, and the bill does not show it.)

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy. Check what you wrote, and
ask for hints, one after another:

    python -m numba_flash check 05_attention
    python -m numba_flash check 05_attention --hint 1
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32

import numba_flash as nf


def specification(Q, K, V, scale):
    S = scale * (Q @ K.T)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P @ V / P.sum(axis=1, keepdims=True)


# --- your code: 51 lines ---
Br, Bc = 64, 16                                              # queries and keys per tile


@cache
def make_forward(d):
    @cuda.jit
    def forward(Q, K, V, O, scale):
        K_j = cuda.shared.array((Bc, d), float32)
        V_j = cuda.shared.array((Bc, d), float32)
        S_ij = cuda.shared.array((Bc, Br), float32)
        Q_i = cuda.local.array(d, float32)
        O_i = cuda.local.array(d, float32)
        r = cuda.threadIdx.x
        i = cuda.blockIdx.x * Br + r
        N, N_k = Q.shape[0], K.shape[0]
        for t in range(d):
            Q_i[t] = Q[i, t] if i < N else float32(0)
            O_i[t] = float32(0)
        l_i = float32(0)
        m_i = float32(-math.inf)
        for j in range(0, N_k, Bc):
            keys = min(Bc, N_k - j)
            for e in range(r, keys * d, Br):
                K_j[e // d, e % d] = K[j + e // d, e % d]
                V_j[e // d, e % d] = V[j + e // d, e % d]
            cuda.syncthreads()
            m_new = m_i
            for c in range(keys):
                s = float32(0)
                for t in range(d):
                    s += Q_i[t] * K_j[c, t]
                S_ij[c, r] = s * scale
                m_new = max(m_new, S_ij[c, r])
            old = math.exp(m_i - m_new)
            l_i *= old
            for t in range(d):
                O_i[t] *= old
            for c in range(keys):
                p = math.exp(S_ij[c, r] - m_new)
                l_i += p
                for t in range(d):
                    O_i[t] += p * V_j[c, t]
            m_i = m_new
            cuda.syncthreads()
        if i < N:
            for t in range(d):
                O[i, t] = O_i[t] / l_i

    return forward


def attention(Q, K, V, scale):
    O = nf.empty(Q.shape, np.float32)
    Q, K, V = nf.to_device(Q), nf.to_device(K), nf.to_device(V)
    nf.launch(make_forward(Q.shape[1]), -(-len(Q) // Br), Br, Q, K, V, O, np.float32(scale))
    return nf.to_host(O)
# --- end of your code ---
