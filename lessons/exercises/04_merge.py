"""Exercise 04_merge: two parts of the keys become one. After "Why any order will do" in lesson 04, 9 lines.

Each of two parts of the keys has gone through a softmax of its own, and left m, l and O for each query: the largest
score, the sum of exp(S_ij - m) over its keys, and the output, divided by l already. Fill the hole: form m, l and O of
all keys from the two. One thread per query.

O_1, O_2 and O are (N, d), the m and l are (N). A part may have no keys: then its m is -∞, its l is 0 and its O is 0.
Where that is so in both parts, O is 0. `weight(s, m)` is exp(s - m), and 0 where s is -∞. (As in 02_softmax, the
accesses of O_1, O_2 and O are uncoalesced: neighbours among the threads have rows d elements apart. Those of m and l
are neighbours.) The bill it must meet:

    m_1  loads   N
    m_2  loads   N
    l_1  loads   N
    l_2  loads   N
    O_1  loads   N·d
    O_2  loads   N·d
    m    stores  N
    l    stores  N
    O    stores  N·d

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy, and `launch` is how the
kernel is run. Check what you wrote, and ask for hints, one after another:

    python -m numba_flash check 04_merge
    python -m numba_flash check 04_merge --hint 1
"""

import math

import numpy as np
from numba import cuda, float32

import numba_flash as nf

B = 32                                                       # threads per block


def specification(m_1, l_1, O_1, m_2, l_2, O_2):
    m = np.maximum(m_1, m_2)
    finite = np.where(np.isneginf(m), 0, m)                  # neither part has a key
    l_1, l_2 = np.exp(m_1 - finite) * l_1, np.exp(m_2 - finite) * l_2
    l = l_1 + l_2
    O = (l_1[:, None] * O_1 + l_2[:, None] * O_2) / np.where(l == 0, 1, l)[:, None]
    return m, l, O


@cuda.jit(device=True)
def weight(s, m):
    if s == float32(-math.inf):
        return float32(0)
    return math.exp(s - m)


@cuda.jit
def merge(m_1, l_1, O_1, m_2, l_2, O_2, m, l, O):
    i = cuda.grid(1)                                         # query
    if i < m.shape[0]:
        # --- your code: 9 lines ---
        pass
        # --- end of your code ---


def launch(m_1, l_1, O_1, m_2, l_2, O_2):
    m, l, O = nf.empty(m_1.shape, np.float32), nf.empty(l_1.shape, np.float32), nf.empty(O_1.shape, np.float32)
    parts = (nf.to_device(x) for x in (m_1, l_1, O_1, m_2, l_2, O_2))
    nf.launch(merge, -(-len(m_1) // B), B, *parts, m, l, O)
    return nf.to_host(m), nf.to_host(l), nf.to_host(O)
