"""Exercise 08_causal: who sees whom. After "What a mask is" in lesson 08, 7 lines.

The kernel `scores` forms S = scale·QKᵀ in causal order: -∞ where the query must not see the key. With N queries and
N_k keys the last query is aligned with the last key, as in lesson 08. Fill the hole. A key that is hidden is not
needed: the bill pays for the pairs that are seen, and for the stores of all scores.

Q is (N, d), K is (N_k, d), S is (N, N_k). (-∞ is `float32(-math.inf)`. As in 02_softmax, the loads of K are
uncoalesced: neighbours among the threads have keys d elements apart. The stores of S are neighbours.) The bill it must
meet:

    Q  loads   seen·d
    K  loads   seen·d
    S  stores  N·N_k

with `seen` the number of pairs of a query and a key that it sees.

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 08_causal
    python -m numba_flash check 08_causal --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

T = 16                                                       # threads along each side of a block


def specification(Q, K, scale):
    N, N_k = len(Q), len(K)
    i, j = np.arange(N)[:, None], np.arange(N_k)
    return np.where(j <= i + N_k - N, scale * (Q @ K.T), -np.inf)


@cuda.jit
def scores(Q, K, S, scale):
    j, i = cuda.grid(2)                                      # key, query
    N, N_k = S.shape[0], S.shape[1]
    if i < N and j < N_k:
        # --- your code: 7 lines ---
        if j <= i + N_k - N:
            acc = float32(0)
            for t in range(Q.shape[1]):
                acc += Q[i, t] * K[j, t]
            S[i, j] = acc * scale
        else:
            S[i, j] = float32(-math.inf)
        # --- end of your code ---


def launch(Q, K, scale):
    N, N_k = len(Q), len(K)
    S = nf.empty((N, N_k), np.float32)
    nf.launch(scores, (-(-N_k // T), -(-N // T)), (T, T), nf.to_device(Q), nf.to_device(K), S, np.float32(scale))
    return nf.to_host(S)
