"""Exercise 11_split: merge the splits, and fetch m and l once. After "The kernels" in lesson 11, 15 lines.

Each of n splits of the keys has left O_s (not divided by l_s), m_s and l_s for each query. The kernel of lesson 11
has one thread per element of O, and all of them load all m_s twice and all l_s once. Do better: here a block has one
query, and its threads fetch each m_s and each l_s once, into shared memory. Then thread t, if there is a column t,
forms O[i, t]. Fill the hole.

O_s is (n, N, d), m_s and l_s are (n, N), O is (N, d). A block has B threads, at least n and at least d. A split may
have no keys: then its m_s is -∞, its l_s is 0 and its O_s is 0. If all splits of a query are like that, O is 0.
`weight(s, m)` is exp(s - m), and 0 where s is -∞. (The loads of O_s are coalesced: neighbours among the threads have
neighbours among the columns. Those of m_s and l_s, a row per split, are not.) The bill it must meet:

    O_s  loads   n·N·d
    m_s  loads   n·N
    l_s  loads   n·N
    O    stores  N·d

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 11_split
    python -m numba_flash check 11_split --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B = 32                                                       # threads per block; no more splits and columns than that


def specification(O_s, m_s, l_s):
    m = m_s.max(axis=0)
    w = np.exp(m_s - np.where(np.isneginf(m), 0, m))
    l = (w * l_s).sum(axis=0)
    return (w[:, :, None] * O_s).sum(axis=0) / np.where(l == 0, 1, l)[:, None]


@cuda.jit(device=True)
def weight(s, m):
    if s == float32(-math.inf):
        return float32(0)
    return math.exp(s - m)


@cuda.jit
def merge_splits(O_s, m_s, l_s, O):
    m_i = cuda.shared.array(B, float32)                      # one element per split
    l_i = cuda.shared.array(B, float32)
    i = cuda.blockIdx.x                                      # query
    t = cuda.threadIdx.x
    n = m_s.shape[0]
    # --- your code: 15 lines ---
    if t < n:
        m_i[t] = m_s[t, i]
        l_i[t] = l_s[t, i]
    cuda.syncthreads()
    if t < O.shape[1]:
        m = float32(-math.inf)
        for s in range(n):
            m = max(m, m_i[s])
        l = float32(0)
        acc = float32(0)
        for s in range(n):
            w = weight(m_i[s], m)
            l += w * l_i[s]
            acc += w * O_s[s, i, t]
        O[i, t] = acc / l if l != float32(0) else float32(0)
    # --- end of your code ---


def launch(O_s, m_s, l_s):
    O = nf.empty(O_s.shape[1:], np.float32)
    O_s, m_s, l_s = nf.to_device(O_s), nf.to_device(m_s), nf.to_device(l_s)
    nf.launch(merge_splits, O.shape[0], B, O_s, m_s, l_s, O)
    return nf.to_host(O)
