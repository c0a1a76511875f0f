"""The names of dtypes, and bfloat16, which NumPy lacks: the upper half of a float32.

In host memory it is the dtype of the package ml_dtypes, where that is installed, or else two bytes without a meaning to
NumPy, dtype V2. In GPU memory it is "<V2" in any case: torch and ml_dtypes describe their arrays so.
"""

from functools import cache

import numpy as np

BFLOAT16 = np.dtype("V2")
HALVES = "float16", "bfloat16"
SINGLES = "float32", "float64"
DTYPES = HALVES + SINGLES


def name_of(dtype):
    """The name of a dtype, or of what numpy.dtype takes; "bfloat16" for every way to write that. TypeError for None."""
    if dtype is None:
        raise TypeError("None is no dtype")
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype
    dtype = np.dtype(dtype)
    return "bfloat16" if dtype == BFLOAT16 or dtype.name == "bfloat16" else dtype.name


def array_dtype(name):
    """The NumPy dtype of a host array of float16, bfloat16, float32 or float64."""
    return _bfloat16() if name == "bfloat16" else np.dtype(name)


def lse_dtype(dtype):
    """The dtype of L, and of D: float32 for halves, whose stages sum in float32, and otherwise `dtype`."""
    return np.dtype(np.float32 if name_of(dtype) in HALVES else dtype)


@cache
def _bfloat16():
    try:
        import ml_dtypes
    except ImportError:
        return BFLOAT16
    return np.dtype(ml_dtypes.bfloat16)


def rounded(x, dtype):
    """`x`, floats of any kind, in `dtype` (a name or a NumPy dtype), rounded to the nearest, ties to even."""
    if name_of(dtype) != "bfloat16":
        return widened(x).astype(dtype)
    single = widened(x).astype(np.float32, order="C")
    bits = single.view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    upper[np.isnan(single)] = 0x7FC0  # the sum above could carry into the sign
    return upper.astype(np.uint16).view(array_dtype("bfloat16"))


def widened(x):
    """`x` as it is, but an array of bfloat16 as float32, which holds every value of it."""
    x = np.asarray(x)
    if name_of(x.dtype) != "bfloat16":
        return x
    return (np.asarray(x).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
