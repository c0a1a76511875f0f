"""Exercise 09_dropout: draw Z again. After "Flash: draw Z again" in lesson 09, 2 lines.

In the backward pass with dropout, dS = P ∘ (Z ∘ dP - D): an element of dP counts only if the forward pass kept its
weight. Z was not stored. But Z_ij is a function of the seed and of the place (head h, query i, key j). Fill the hole:
one element of dS per thread. `keep(seed, p_drop, h, i, j)` is the function of lesson 09: it gives Z_ij.

P, dP and dS are (H, N, N_k), for H heads; D is (H, N). The bill it must meet, with no Z in it:

    P   loads   H·N·N_k
    dP  loads   H·N·N_k
    D   loads   H·N·N_k
    dS  stores  H·N·N_k

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 09_dropout
    python -m numba_flash check 09_dropout --hint 1
"""

import numpy as np
from numba import cuda, float32

import numba_flash as nf
from numba_flash import dropout

T = 8                                                        # threads along each side of a block

keep = dropout.make_keep(float32, 1)


def specification(P, dP, D, seed, p_drop):
    Z = dropout.to_dense(seed, p_drop, *P.shape)             # the same generator in NumPy
    return P * (Z * dP - D[:, :, None])


@cuda.jit
def backward(P, dP, D, dS, seed, p_drop):
    j, i = cuda.grid(2)                                      # key, query
    h = cuda.blockIdx.z                                      # head
    if i < dS.shape[1] and j < dS.shape[2]:
        # --- your code: 2 lines ---
        pass
        # --- end of your code ---


def launch(P, dP, D, seed, p_drop):
    H, N, N_k = P.shape
    dS = nf.empty(P.shape, np.float32)
    P, dP, D = nf.to_device(P), nf.to_device(dP), nf.to_device(D)
    nf.launch(backward, (-(-N_k // T), -(-N // T), H), (T, T), P, dP, D, dS, seed, p_drop)
    return nf.to_host(dS)
