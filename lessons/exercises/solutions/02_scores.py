"""Exercise 02_scores: one score per thread. After "The scores, one thread per element" in lesson 02, 6 lines.

The kernel `scores` forms S = scale·QKᵀ, one element per thread. Close the lesson, then fill the hole: which element
belongs to this thread, is it inside S, and what is it?

There is one head here, so Q is (N, d), K is (N_k, d) and S is (N, N_k): a query Q[i], a key K[j], a score S[i, j].
Blocks are squares of T × T threads; x runs along the keys, y along the queries. The bill it must meet:

    Q  loads   N·N_k·d
    K  loads   N·N_k·d
    S  stores  N·N_k

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 02_scores
    python -m numba_flash check 02_scores --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf

T = 16                                                       # threads along each side of a block


def specification(Q, K, scale):
    return scale * (Q @ K.T)


@cuda.jit
def scores(Q, K, S, scale):
    # --- your code: 6 lines ---
    j, i = cuda.grid(2)
    if i < S.shape[0] and j < S.shape[1]:
        acc = float32(0)
        for t in range(Q.shape[1]):
            acc += Q[i, t] * K[j, t]
        S[i, j] = acc * scale
    # --- end of your code ---


def launch(Q, K, scale):
    N, N_k = len(Q), len(K)
    S = nf.empty((N, N_k), np.float32)
    nf.launch(scores, (-(-N_k // T), -(-N // T)), (T, T), nf.to_device(Q), nf.to_device(K), S, np.float32(scale))
    return nf.to_host(S)
