"""Exercise 05_rescale: lines 10 to 13 of Algorithm 1. After "Algorithm 1" in lesson 05, 20 lines.

One tile of keys has come, and with it its scores S_ij. The kernel `update` brings O, l and m, which are in HBM, up to
date: lines 10 to 13 of the table in lesson 05, one thread per query. Before the first tile O = 0, l = 0 and m = -∞
(line 2); `launch` gives the kernel one tile after another, and after the last one O is the output. Fill the hole.

The row of scores of this thread is in S_i already, in registers. That asks for indices which the compiler knows: d and
Bc are constants here, and a loop over S_i is over range(Bc), not over range(keys), whose length is known only when the
kernel runs. So S_i is filled up with -∞, whose weight is 0. V_j, the tile of V, has no more than `keys` rows.

O holds O, not l·O. A score may be -∞; in a row where all scores so far are -∞, O and l stay 0. `weight(s, m)` is
exp(s - m), and 0 where s is -∞. (As in 02_softmax, the accesses of S_ij and O are uncoalesced: neighbours among the
threads have rows of their own. Those of V_j are one address for all.) The bill it must meet, for all Tc = ⌈N_k/Bc⌉
tiles together:

    S_ij  loads   N·N_k
    V_j   loads   N·N_k·d
    O     loads   Tc·N·d
    O     stores  Tc·N·d
    l     loads   Tc·N
    l     stores  Tc·N
    m     loads   Tc·N
    m     stores  Tc·N

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 05_rescale
    python -m numba_flash check 05_rescale --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B, Bc, d = 32, 8, 4                                          # threads per block, keys per tile, columns


def specification(S, V):
    m = S.max(axis=1)
    P = np.exp(S - np.where(np.isneginf(m), 0, m)[:, None])
    l = P.sum(axis=1)
    return P @ V / np.where(l == 0, 1, l)[:, None], l, m


@cuda.jit(device=True)
def weight(s, m):
    if s == float32(-math.inf):
        return float32(0)
    return math.exp(s - m)


@cuda.jit
def update(S_ij, V_j, O, l, m):
    S_i = cuda.local.array(Bc, float32)                      # one row: that of this thread
    i = cuda.grid(1)
    keys = S_ij.shape[1]                                     # at most Bc
    if i < O.shape[0]:
        for c in range(Bc):
            S_i[c] = S_ij[i, c] if c < keys else float32(-math.inf)
        # --- your code: 19 lines ---
        pass
        # --- end of your code ---


def launch(S, V):
    N, N_k = S.shape
    O, l, m = np.zeros((N, d), np.float32), np.zeros(N, np.float32), np.full(N, -np.inf, np.float32)
    O, l, m = nf.to_device(O), nf.to_device(l), nf.to_device(m)
    for j in range(0, N_k, Bc):
        S_ij, V_j = nf.to_device(S[:, j : j + Bc].copy()), nf.to_device(V[j : j + Bc].copy())
        nf.launch(update, -(-N // B), B, S_ij, V_j, O, l, m)
    return nf.to_host(O), nf.to_host(l), nf.to_host(m)
