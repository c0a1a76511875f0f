"""Exercise 07_recompute: P again, and dS. After "FlashAttention: recompute" in lesson 07, 7 lines.

The forward pass has kept L = m + log l for each query, and D is known. The kernel `backward` forms dS, one element
per thread: it computes the score S_ij again, from it P_ij, then dP_ij, then dS_ij. (Lines 11, 13, 17 and 20 of the
table in lesson 07.) Fill the hole.

Q and dO are (N, d), K and V are (N_k, d), L and D are (N), dS is (N, N_k). x runs along the keys, y along the
queries. The bill it must meet:

    Q   loads   N·N_k·d
    K   loads   N·N_k·d
    V   loads   N·N_k·d
    dO  loads   N·N_k·d
    L   loads   N·N_k
    D   loads   N·N_k
    dS  stores  N·N_k

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 07_recompute
    python -m numba_flash check 07_recompute --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

T = 16                                                       # threads along each side of a block


def specification(Q, K, V, dO, L, D, scale):
    P = np.exp(scale * (Q @ K.T) - L[:, None])
    dP = dO @ V.T
    return P * (dP - D[:, None])


@cuda.jit
def backward(Q, K, V, dO, L, D, dS, scale):
    j, i = cuda.grid(2)                                      # key, query
    if i < dS.shape[0] and j < dS.shape[1]:
        # --- your code: 7 lines ---
        pass
        # --- end of your code ---


def launch(Q, K, V, dO, L, D, scale):
    N, N_k = len(Q), len(K)
    dS = nf.empty((N, N_k), np.float32)
    nf.launch(backward, (-(-N_k // T), -(-N // T)), (T, T), Q, K, V, dO, L, D, dS, scale)
    return nf.to_host(dS)
