"""Ready-made block masks: which tiles of scores are computed, boolean (Tr, Tc), for `attention(..., block_mask=...)`.

Tr tiles of queries and Tc tiles of keys divide the same text, each evenly: a tile of queries may be as long as several
of keys. Sources: local and strided, Child et al. 2019, arXiv:1904.10509; butterfly, Chen et al. 2021, arXiv:2112.00029.
"""

import numpy as np

from .checks import integer


def local(Tr, Tc, width=1):
    """The diagonal and what is near: a tile of queries sees the keys of its own place and of `width` places around."""
    i, j = _indices(Tr, Tc)
    width = integer("width", width)
    return ((i - width) * Tc < (j + 1) * Tr) & (j * Tr < (i + width + 1) * Tc)


def strided(Tr, Tc, stride=4):
    """The diagonal, and the last of every `stride` tiles of keys for all queries."""
    _, j = _indices(Tr, Tc)
    stride = integer("stride", stride, 1)
    return local(Tr, Tc, 0) | (j % stride == stride - 1)


def butterfly(Tr, Tc):
    """The pairs of places whose numbers, in binary, differ in at most one digit: log2(T) + 1 of T places for each."""
    i, j = _indices(Tr, Tc)
    places = min(Tr, Tc)
    return np.bitwise_count((i * places // max(Tr, 1)) ^ (j * places // max(Tc, 1))) <= 1


def _indices(Tr, Tc):
    return np.indices((integer("Tr", Tr), integer("Tc", Tc)), sparse=True)
