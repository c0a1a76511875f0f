"""Exercise 05_attention: all of attention, yours. After "What changed, and what it costs" in lesson 05, 51 lines.

The capstone. Write `attention(Q, K, V, scale)`: it takes float32 arrays Q (N, d), K and V (N_k, d), and returns O (N,
d). It allocates O with `nf.empty`, launches one or more kernels of your own with `nf.launch`, and returns
`nf.to_host(O)`. No matrix of N × N_k goes to HBM. Any N and N_k, not only multiples of your tiles, and any d up to
32.

The kernels are yours: as many threads and tiles as you like. Do not take the stages of numba_flash; reading them is
allowed. An array in shared memory or in registers has a size fixed in advance, so a kernel that needs d for that is
made by a function of d; `@cache` keeps what it made, or a GPU would compile it anew at each call:

    @cache
    def make_forward(d):
        @cuda.jit
        def forward(Q, K, V, O, scale):
            Q_i = cuda.local.array(d, float32)
            ...
        return forward

It is launched as nf.launch(make_forward(Q.shape[1]), blocks, threads, Q, K, V, O, np.float32(scale)): a Python float
would be float64 in the kernel. Give it nf.to_device(Q), not Q, or a GPU copies it at each launch.

The bill is at most that of flash2 with 32 queries per tile, without L, for all tensors and kernels together; and a
thread must not do the work of others:

    total  2·N·d + 2·N_k·d·⌈N/Br⌉,   Br = 32

More queries per tile load K and V less often, and give a block more than one warp. (Where a thread has a row of Q and
O, neighbours read addresses d elements apart: as in 02_softmax, that is uncoalesced, and the bill does not show it.)

Leave the rest of the file as it is: `specification` is what the result should be, in NumPy. Check what you wrote, and
ask for hints, one after another:

    python -m numba_flash check 05_attention
    python -m numba_flash check 05_attention --hint 1
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32

import numba_flash as nf


def specification(Q, K, V, scale):
    S = scale * (Q @ K.T)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P @ V / P.sum(axis=1, keepdims=True)


# --- your code: 51 lines ---
def attention(Q, K, V, scale):
    return None
# --- end of your code ---
