"""Ready-made block masks: which tiles of scores are computed, for `attention(..., block_mask=..., blocks=...)`.

n queries and n_k keys are cut into tiles of blocks = (Br, Bc); the result is boolean, (⌈n/Br⌉, ⌈n_k/Bc⌉). A pattern is
a rule for places, stretches of max(Br, Bc) words; a tile is computed if the rule holds for a place of its queries and
one of its keys. The last query stands at the place of the last key, as in causal order. Sources: local and strided,
Child et al. 2019, arXiv:1904.10509; butterfly, Chen et al. 2021, arXiv:2112.00029.
"""

import numpy as np

from .checks import integer


def local(n, n_k, blocks, width=1):
    """Places no more than `width` apart: the diagonal, and what is near it."""
    width = min(integer("width", width), 2**62)
    return _tiles(n, n_k, blocks, lambda p, q: np.abs(p - q) <= width)


def strided(n, n_k, blocks, stride=4):
    """Places a multiple of `stride` apart, and neighbours."""
    stride = min(integer("stride", stride, 1), 2**62)
    return _tiles(n, n_k, blocks, lambda p, q: ((p - q) % stride == 0) | (np.abs(p - q) <= 1))


def butterfly(n, n_k, blocks):
    """Places whose numbers, in binary, differ in at most one digit: of T = 2ᵏ places, k + 1 for each."""
    return _tiles(n, n_k, blocks, lambda p, q: np.bitwise_count(p ^ q) <= 1)


def _tiles(n, n_k, blocks, rule):
    n, n_k = integer("n", n), integer("n_k", n_k)
    try:
        Br, Bc = blocks
    except (TypeError, ValueError):
        raise ValueError(f"blocks={blocks!r}: pass (Br, Bc)") from None
    Br, Bc = integer("blocks: Br", Br, 1), integer("blocks: Bc", Bc, 1)
    queries = _places(n, Br, max(Br, Bc), n_k - n)[:, :, None]
    keys = _places(n_k, Bc, max(Br, Bc), 0)[:, None]
    return np.any([rule(p, q) for p in queries for q in keys], axis=0)


def _places(length, side, place, offset):
    """The places of the first and of the last word of each tile, (2, tiles); word 0 stands at `offset`."""
    begin = np.arange(0, length, side)
    end = np.minimum(begin + side, length) - 1
    return np.maximum(np.stack([begin, end]) + offset, 0) // place
