"""A kernel that spells the names of CUDA in every way that Python allows (Numba's simulator knows only `cuda.name`)."""

import numba
import numba.cuda
from numba import cuda as C
from numba.cuda import gridsize, syncthreads
from numba.types import int32 as whole


@C.jit
def renamed(A):
    seen = C.shared.array(4, whole)
    i = numba.cuda.grid(1)
    if i < A.shape[0]:
        seen[C.threadIdx.x] = numba.cuda.blockIdx.x * C.blockDim.x + C.threadIdx.x - i + gridsize(1)
    syncthreads()
    if i < A.shape[0]:
        A[i] = seen[C.threadIdx.x]
