"""Exercise 07_delta: D from dO and O. After "The derivation" in lesson 07, 6 lines.

The backward pass needs D_i = ∑_j P_ij·dP_ij for each row i. Lesson 07 shows that D is rowsum(dO ∘ O), too, so that no
row of P is needed. The kernel `rowsum` computes it, one row per thread. Fill the hole.

dO and O are (N, d), D is (N). (As in 02_softmax, the loads are uncoalesced: neighbours among the threads read
addresses d elements apart, which costs a GPU more than the bill says.) The bill it must meet:

    dO  loads   N·d
    O   loads   N·d
    D   stores  N

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 07_delta
    python -m numba_flash check 07_delta --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B = 32                                                       # threads per block


def specification(dO, O):
    return (dO * O).sum(axis=1)


@cuda.jit
def rowsum(dO, O, D):
    # --- your code: 6 lines ---
    i = cuda.grid(1)
    if i < O.shape[0]:
        D_i = float32(0)
        for t in range(O.shape[1]):
            D_i += dO[i, t] * O[i, t]
        D[i] = D_i
    # --- end of your code ---


def launch(dO, O):
    D = nf.empty(len(O), np.float32)
    nf.launch(rowsum, -(-len(O) // B), B, nf.to_device(dO), nf.to_device(O), D)
    return nf.to_host(D)
