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

from .engine.launch import device_name, to_device


@cache
def make_weight(real):
    """e^(s − m) for s ≤ m, and 0 where s is −∞: where m is −∞ too, s − m is no number."""

    @cuda.jit(device=True)
    def weight(s, m):
        if s == real(-math.inf):
            return real(0)
        return math.exp(s - m)

    return weight


@cache
def make_allowed(causal, masked):
    """allowed(mask, b, i, j): whether query i may attend to key j, in batch b; i is aligned, see above.

    causal, masked: 0 or 1. mask (B, N_k), one byte per key, is read where `masked` alone.
    """

    @cuda.jit(device=True)
    def allowed(mask, b, i, j):
        if causal and j > i:
            return False
        if masked:
            return mask[b, j] != 0
        return True

    return allowed


@cache
def make_seen(causal):
    """seen(i, N_k): how many keys, from the first on, the queries up to aligned i may see."""

    @cuda.jit(device=True)
    def seen(i, N_k):
        if causal:
            return max(0, min(i + 1, N_k))
        return N_k

    return seen


@cache
def make_first(causal):
    """first(j): the first query that may see key j, both aligned; queries before it see no key from j on."""

    @cuda.jit(device=True)
    def first(j):
        if causal:
            return max(0, j)
        return 0

    return first


@dataclass(frozen=True)
class Mask:
    """What attention is masked by: `causal`, and `keys`, (B, N_k) uint8 on the device, 0 for a key that is hidden."""

    causal: bool
    keys: Any
    masked: bool

    @property
    def allowed(self):
        return make_allowed(int(self.causal), int(self.masked))

    @property
    def seen(self):
        return make_seen(int(self.causal))

    @property
    def first(self):
        return make_first(int(self.causal))


def no_mask(device=None):
    """Every query sees every key."""
    return Mask(False, _one_byte(device_name(device)), False)


@cache
def _one_byte(device):
    return to_device(np.ones((1, 1), np.uint8), device)


def rows_with_keys(N, N_k, causal=False, key_mask=None):
    """Which queries see a key, in NumPy: (N,), or (B, N) with a key mask (B, N_k)."""
    keys = np.ones(N_k, bool) if key_mask is None else np.asarray(key_mask, bool)
    first = np.where(keys.any(axis=-1), keys.argmax(axis=-1) if N_k else 0, max(N, N_k) + N_k)  # the first key seen
    return np.arange(N) + (N_k - N if causal else N_k) >= first[..., None]


def to_dense(N, N_k, causal=False, key_mask=None):
    """The same in NumPy: (N, N_k), or (B, N, N_k) with a key mask (B, N_k); True where a query may attend to a key."""
    i, j = np.indices((N, N_k))
    seen = j <= i + N_k - N if causal else np.ones((N, N_k), bool)
    return seen if key_mask is None else seen & np.asarray(key_mask, bool)[..., None, :]
