"""Exercise 02_softmax: softmax of a row, with care. After "Softmax and output" in lesson 02, 12 lines.

The kernel `softmax` turns each row of S (N, N_k) into weights P (N, N_k) whose sum is 1, one row per thread:

    P_ij = exp(S_ij - m_i) / l_i,   m_i the largest score of row i, l_i the sum of the exponentials

Two things need care. exp(x) is ∞ in float32 for x above 88.7, and 0 below -104: that is why m is subtracted, and why
m is found first. And a score may be -∞, which stands for a key that is not to be seen: its weight is 0. Where all
scores of a row are -∞, all weights are 0; but -∞ - (-∞) is not a number (nan), so do not compute it. (-∞ is
`float32(-math.inf)`.) Fill the hole.

One thread per row is easy to write, not fast: 32 threads that run together, a warp, read 32 rows at the same column,
addresses N_k elements apart. A GPU fetches memory by sectors of 32 bytes, 8 neighbours in float32. For 32 neighbours it
fetches 4 sectors, in one request; for 32 rows it fetches 32, and 7 of 8 elements that come are not what was asked for.
Such loads are called uncoalesced. The bill counts elements, and does not show it. The bill it must meet:

    S  loads   3·N·N_k
    P  stores  N·N_k

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 02_softmax
    python -m numba_flash check 02_softmax --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B = 32                                                       # threads per block


def specification(S):
    m = S.max(axis=1, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)                       # a row of -∞ alone
    P = np.exp(S - m)
    l = P.sum(axis=1, keepdims=True)
    return P / np.where(l == 0, 1, l)


@cuda.jit
def softmax(S, P):
    i = cuda.grid(1)                                         # row
    if i < S.shape[0]:
        # --- your code: 12 lines ---
        m = float32(-math.inf)
        for j in range(S.shape[1]):
            m = max(m, S[i, j])
        if m == float32(-math.inf):
            m = float32(0)
        l = float32(0)
        for j in range(S.shape[1]):
            l += math.exp(S[i, j] - m)
        if l == float32(0):
            l = float32(1)
        for j in range(S.shape[1]):
            P[i, j] = math.exp(S[i, j] - m) / l
        # --- end of your code ---


def launch(S):
    P = nf.empty(S.shape, np.float32)
    nf.launch(softmax, -(-len(S) // B), B, nf.to_device(S), P)
    return nf.to_host(P)
