"""Which weights dropout keeps: Z of Algorithm 4, line 14 (Dao et al. 2022, arXiv:2205.14135), in kernels and in NumPy.

Z_ij is drawn by a counter-based generator, Philox 4×32-10 (Salmon et al. 2011, Random123): ten rounds that turn a key,
the seed, and a counter, here (i, j, h, 0), into four random words, the first of which decides. So any thread can form
any Z_ij at any time, in any order, and it is the same. (NumPy's `Philox` is 4×64-10, another generator.)
"""

from functools import cache

import numpy as np
from numba import cuda

from .checks import seed_of_64_bits

MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
STEP_0, STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # of the key, from round to round
LOW = np.uint64(0xFFFFFFFF)  # the lower 32 bits
HALF = np.uint64(32)
WORDS = 2**32  # values that a word may have
ROUNDS = 10


def philox(c_0, c_1, c_2, c_3, key):
    """Philox 4×32-10: the counter's four words and a key of 64 bits -> four random words.

    Words are 32 bits wide, kept in uint64, which holds their products; they may be NumPy arrays.
    """
    k_0, k_1 = key & LOW, key >> HALF
    for _ in range(ROUNDS):
        even, odd = MULTIPLIER_0 * c_0, MULTIPLIER_1 * c_2
        c_0, c_1 = (odd >> HALF) ^ c_1 ^ k_0, odd & LOW
        c_2, c_3 = (even >> HALF) ^ c_3 ^ k_1, even & LOW
        k_0, k_1 = (k_0 + STEP_0) & LOW, (k_1 + STEP_1) & LOW
    return c_0, c_1, c_2, c_3


_philox = cuda.jit(device=True)(philox)


@cache
def make_keep(real, dropped):
    """keep(seed, p_drop, h, i, j) = Z_ij: 0 with probability p_drop, else 1 / (1 − p_drop); 1 without dropout.

    dropped: 0 or 1. h counts heads over the whole batch; i and j are the query and the key, below 2³². seed: uint64.
    p_drop: float64; what decides is its part in multiples of 2⁻³².
    """

    @cuda.jit(device=True)
    def keep(seed, p_drop, h, i, j):
        if dropped == 1:
            word = _philox(np.uint64(i), np.uint64(j), np.uint64(h), np.uint64(0), seed)[0]
            return real(1 / (1 - p_drop)) if word >= np.uint64(p_drop * WORDS) else real(0)
        return real(1)

    return keep


def to_dense(seed, p_drop, H, N, N_k, first=(0, 0)):
    """Z in NumPy, (H, N, N_k) float64: 0 for a weight that is dropped, 1 / (1 − p_drop) for one that is kept.

    first: the head and the query that it begins with.
    """
    seed = seed_of_64_bits(seed)
    h, i, j = (index.astype(np.uint64) for index in np.indices((H, N, N_k), sparse=True))
    h, i = h + np.uint64(first[0]), i + np.uint64(first[1])
    words = philox(i, j, h, np.uint64(0), seed)[0]
    return np.where(words >= np.uint64(p_drop * WORDS), 1 / (1 - p_drop), 0.0)
