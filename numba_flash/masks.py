"""Which keys a query may attend to: what the kernels ask, and the same in NumPy.

A kernel passes positions aligned at the bottom right: query i of N and key j of N_k have causal order j ≤ i + N_k − N,
as in the flash-attn package (PyTorch's `is_causal` is aligned at the top left).
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from .dropout import make_keep
from .engine.launch import device_name, to_device


@cache
def make_weight(real):
    """e^(s − m) for s ≤ m, and 0 where s is −∞: where m is −∞ too, s − m is no number, but s − 0 is −∞."""

    @cuda.jit(device=True)
    def weight(s, m):
        return math.exp(s - (m if m > real(-math.inf) else real(0)))

    return weight


@cache
def make_allowed(causal, masked):
    """allowed(mask, b, i, j): whether query i may attend to key j, in batch b; i is aligned, see above.

    causal, masked: 0 or 1. mask (B, N_k), one byte per key, is read where `masked` alone.
    """

    @cuda.jit(device=True)
    def allowed(mask, b, i, j):
        if causal == 1 and j > i:
            return False
        if masked == 1:
            return mask[b, j] != 0
        return True

    return allowed


@cache
def make_seen(causal):
    """seen(i, N_k): how many keys, from the first on, the queries up to aligned i may see."""

    @cuda.jit(device=True)
    def seen(i, N_k):
        if causal == 1:
            return max(0, min(i + 1, N_k))
        return N_k

    return seen


@cache
def make_first(causal, step=1):
    """first(j): the first query that may see key j − N + N_k; queries before it see no key from that one on.

    step: it is rounded down to a multiple of that.
    """

    @cuda.jit(device=True)
    def first(j):
        if causal == 1:
            return max(0, j) // step * step
        return 0

    return first


@cache
def make_visited(sparse, Br, Bc):
    """visited(block_mask, i, j): whether the tile of Br × Bc scores that holds query i and key j is to be computed.

    sparse: 0 or 1. block_mask (Tr, Tc), one byte per tile, is read where `sparse` alone.
    """

    @cuda.jit(device=True)
    def visited(block_mask, i, j):
        if sparse == 1:
            return block_mask[i // Br, j // Bc] != 0
        return True

    return visited


@dataclass(frozen=True)
class Mask:
    """What attention leaves out, and what it drops.

    keys: (B, N_k) uint8 on the device, 0 for a key that is hidden; read where `masked`. blocks: (Tr, Tc) uint8 on the
    device, 0 for a tile of `sides` = (Br, Bc) that is left out; sides None: no tile is. seed, p_drop: of dropout.
    """

    causal: bool
    keys: Any
    masked: bool
    blocks: Any
    sides: tuple | None = None
    seed: Any = np.uint64(0)  # noqa: RUF009
    p_drop: Any = np.float64(0)  # noqa: RUF009

    @property
    def allowed(self):
        return make_allowed(int(self.causal), int(self.masked))

    @property
    def seen(self):
        return make_seen(int(self.causal))

    def first(self, step=1):
        """`step`: the queries of the tiles that a kernel walks along; where tiles count, it begins with a whole one."""
        return make_first(int(self.causal), step if self.sides else 1)

    @property
    def visited(self):
        return make_visited(int(self.sides is not None), *(self.sides or (1, 1)))

    @property
    def drops(self):
        return self.p_drop > 0

    def keep(self, real):
        return make_keep(real, int(self.drops))


def no_mask(device=None):
    """Every query sees every key."""
    one = _one_byte(device_name(device))
    return Mask(False, one, False, one)


@cache
def _one_byte(device):
    return to_device(np.ones((1, 1), np.uint8), device)


def rows_with_keys(N, N_k, causal=False, key_mask=None, block_mask=None, sides=None):
    """Which queries see a key, in NumPy: (N,), or (B, N) with a key mask (B, N_k); block_mask as for `to_dense`."""
    tile, keys = np.zeros(N, int), np.ones((1, N_k), bool)
    if block_mask is not None:
        tile, keys = np.arange(N) // sides[0], np.asarray(block_mask, bool)[:, np.arange(N_k) // sides[1]]
    if key_mask is not None:
        keys = keys & np.asarray(key_mask, bool)[..., None, :]
    first = np.where(keys.any(axis=-1), keys.argmax(axis=-1) if N_k else 0, max(N, N_k) + N_k)  # the first key seen
    return np.arange(N) + (N_k - N if causal else N_k) >= first[..., tile]


def to_dense(N, N_k, causal=False, key_mask=None, block_mask=None, sides=None):
    """The same in NumPy: (N, N_k), or (B, N, N_k) with a key mask (B, N_k); True where a query may attend to a key.

    block_mask: (Tr, Tc), for tiles of `sides` = (Br, Bc).
    """
    i, j = np.indices((N, N_k), sparse=True)
    seen = np.broadcast_to(j <= i + N_k - N if causal else True, (N, N_k))
    if block_mask is not None:
        seen = seen & np.asarray(block_mask, bool)[i // sides[0], j // sides[1]]
    return seen if key_mask is None else seen & np.asarray(key_mask, bool)[..., None, :]
