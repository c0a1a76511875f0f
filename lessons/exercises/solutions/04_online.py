"""Exercise 04_online: softmax and product in one pass. After "The stage" in lesson 04, 11 lines.

The kernel `statistics` of lesson 04 carries m and l along a row of S. The trace by hand carried l·O along as well. Do
that in a kernel, for d = 1, so that V has one number per key: one thread per row of S, one pass over it, and at the
end O = (l·O)/l. Fill the hole.

S is (N, N_k), V is (N_k), O is (N). `weight(s, m)` is the guarded exp of the lesson: exp(s - m), and 0 where s is -∞.
In a row where all scores are -∞, O is 0. (As in 02_softmax, the loads of S are uncoalesced: neighbours among the
threads read addresses N_k elements apart. Those of V are one address for all.) The bill it must meet:

    S  loads   N·N_k
    V  loads   N·N_k
    O  stores  N

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 04_online
    python -m numba_flash check 04_online --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B = 32                                                       # threads per block


def specification(S, V):
    m = S.max(axis=1, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)                       # a row of -∞ alone
    P = np.exp(S - m)
    l = P.sum(axis=1)
    return P @ V / np.where(l == 0, 1, l)


@cuda.jit(device=True)
def weight(s, m):
    if s == float32(-math.inf):
        return float32(0)
    return math.exp(s - m)


@cuda.jit
def online(S, V, O):
    i = cuda.grid(1)                                         # row
    if i < S.shape[0]:
        # --- your code: 11 lines ---
        m_i = float32(-math.inf)
        l_i = float32(0)
        lO_i = float32(0)
        for j in range(S.shape[1]):
            s = S[i, j]
            m_new = max(m_i, s)
            old, p = weight(m_i, m_new), weight(s, m_new)
            l_i = l_i * old + p
            lO_i = lO_i * old + p * V[j]
            m_i = m_new
        O[i] = lO_i / l_i if l_i != float32(0) else float32(0)
        # --- end of your code ---


def launch(S, V):
    O = nf.empty(len(S), np.float32)
    nf.launch(online, -(-len(S) // B), B, nf.to_device(S), nf.to_device(V), O)
    return nf.to_host(O)
