"""What a rewritten kernel finds in its module beside the access hook: decorators, atomics and the state words."""

from collections import namedtuple

from numba import njit

from .access import (
    BLOCK,
    DIVERGENCE,
    KIND,
    NOW_BLOCK,
    NOW_THREAD,
    OTHER_SITE,
    OTHER_THREAD,
    PHASE,
    SITE,
    STOP,
    STOP_NOW,
    THREAD,
    TURN,
    cell,
    load,
    mark,
    note,
    poison,
    stopped,
    store,
)

_nf_load, _nf_store, _nf_cell, _nf_poison, _nf_stopped, _nf_slice = load, store, cell, poison, stopped, slice
_nf_mark, _nf_note = mark, note
_nf_Dim3 = namedtuple("Dim3", "x y z")

# As on a GPU, dividing by zero gives inf or nan, not an exception.
compiled = njit(error_model="numpy")
compiled_and_cached = njit(error_model="numpy", nogil=True)


@compiled
def diverge(words, expected, thread, here, other):
    """Record that `thread` waits at barrier `expected` while `other` is at `here` (-1: its end)."""
    if words[KIND] == 0:
        words[KIND], words[SITE], words[THREAD], words[BLOCK] = DIVERGENCE, expected, thread, words[NOW_BLOCK]
        words[OTHER_SITE], words[OTHER_THREAD] = here, other


# Atomics are plain read-modify-write: one thread runs at a time. `element` points at the tensor's element.


@compiled
def _nf_atomic_add(element, value):
    old = element[0]
    element[0] = old + value
    return old


@compiled
def _nf_atomic_sub(element, value):
    old = element[0]
    element[0] = old - value
    return old


@compiled
def _nf_atomic_max(element, value):
    old = element[0]
    if value > old:
        element[0] = value
    return old


@compiled
def _nf_atomic_min(element, value):
    old = element[0]
    if value < old:
        element[0] = value
    return old


@compiled
def _nf_atomic_nanmax(element, value):
    old = element[0]
    if value > old or old != old:
        element[0] = value
    return old


@compiled
def _nf_atomic_nanmin(element, value):
    old = element[0]
    if value < old or old != old:
        element[0] = value
    return old


@compiled
def _nf_atomic_exch(element, value):
    old = element[0]
    element[0] = value
    return old


@compiled
def _nf_atomic_inc(element, limit):
    old = element[0]
    element[0] = 0 if old >= limit else old + 1
    return old


@compiled
def _nf_atomic_dec(element, limit):
    old = element[0]
    element[0] = limit if old == 0 or old > limit else old - 1
    return old


@compiled
def _nf_atomic_and(element, value):
    old = element[0]
    element[0] = old & value
    return old


@compiled
def _nf_atomic_or(element, value):
    old = element[0]
    element[0] = old | value
    return old


@compiled
def _nf_atomic_xor(element, value):
    old = element[0]
    element[0] = old ^ value
    return old


@compiled
def _nf_atomic_cas(element, expected, value):
    old = element[0]
    if old == expected:
        element[0] = value
    return old


__all__ = [
    "KIND",
    "NOW_BLOCK",
    "NOW_THREAD",
    "PHASE",
    "STOP",
    "STOP_NOW",
    "TURN",
    "compiled",
    "compiled_and_cached",
    "diverge",
]
__all__ += [name for name in globals() if name.startswith("_nf_")]
