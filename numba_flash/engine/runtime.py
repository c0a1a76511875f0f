"""What a rewritten kernel finds in its module beside the access hook: decorators, atomics and the state words."""

from collections import namedtuple

from numba import njit

from . import access
from .access import BLOCK, DIVERGENCE, KIND, NOW_BLOCK, OTHER_SITE, OTHER_THREAD, SITE, THREAD

NOW_THREAD, PHASE, STOP, TURN = access.NOW_THREAD, access.PHASE, access.STOP, access.TURN

Dim3 = namedtuple("Dim3", "x y z")

# As on a GPU, dividing by zero gives inf or nan, not an exception.
compiled = njit(error_model="numpy")
compiled_and_cached = njit(error_model="numpy", nogil=True)


@compiled
def diverge(words, expected, thread, here, other):
    """Record that `thread` waits at barrier `expected` while `other` is at `here` (-1: its end)."""
    words[KIND], words[SITE], words[THREAD], words[BLOCK] = DIVERGENCE, expected, thread, words[NOW_BLOCK]
    words[OTHER_SITE], words[OTHER_THREAD] = here, other


# Atomics are plain read-modify-write: one thread runs at a time. `element` points at the tensor's element.


@compiled
def atomic_add(element, value):
    old = element[0]
    element[0] = old + value
    return old


@compiled
def atomic_sub(element, value):
    old = element[0]
    element[0] = old - value
    return old


@compiled
def atomic_max(element, value):
    old = element[0]
    if value > old:
        element[0] = value
    return old


@compiled
def atomic_min(element, value):
    old = element[0]
    if value < old:
        element[0] = value
    return old


@compiled
def atomic_nanmax(element, value):
    old = element[0]
    if value > old or old != old:
        element[0] = value
    return old


@compiled
def atomic_nanmin(element, value):
    old = element[0]
    if value < old or old != old:
        element[0] = value
    return old


@compiled
def atomic_exch(element, value):
    old = element[0]
    element[0] = value
    return old


@compiled
def atomic_inc(element, limit):
    old = element[0]
    element[0] = 0 if old >= limit else old + 1
    return old


@compiled
def atomic_dec(element, limit):
    old = element[0]
    element[0] = limit if old == 0 or old > limit else old - 1
    return old


@compiled
def atomic_and(element, value):
    old = element[0]
    element[0] = old & value
    return old


@compiled
def atomic_or(element, value):
    old = element[0]
    element[0] = old | value
    return old


@compiled
def atomic_xor(element, value):
    old = element[0]
    element[0] = old ^ value
    return old


@compiled
def atomic_cas(element, expected, value):
    old = element[0]
    if old == expected:
        element[0] = value
    return old
