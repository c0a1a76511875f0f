"""The record of what is allocated."""

import threading

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.engine.memory import allocations


def test_each_array_is_recorded_in_order():
    with allocations() as made:
        nf.empty((2, 3), np.float32)
        nf.empty(5, "int64")
    assert made == [((2, 3), np.dtype(np.float32)), ((5,), np.dtype(np.int64))]


def test_nothing_outside_the_body_is_recorded_and_a_copy_is_not():
    nf.empty(1, np.float32)
    with allocations() as made:
        nf.to_device(np.zeros(3))
    nf.empty(2, np.float32)
    assert made == []


def test_what_was_refused_is_not_recorded():
    with allocations() as made:
        with pytest.raises(ValueError, match="negative"):
            nf.empty(-1, np.float32)
        with pytest.raises(nf.errors.OutOfMemory):
            nf.empty(2**60, np.float32)
    assert made == []


def test_records_nest_and_close_when_the_body_raises():
    with allocations() as outer:
        with pytest.raises(KeyError), allocations() as inner:
            nf.empty(1, np.float32)
            raise KeyError
        nf.empty(2, np.float32)
    assert [shape for shape, _ in outer] == [(1,), (2,)]
    assert [shape for shape, _ in inner] == [(1,)]


def test_equal_records_are_told_apart():
    with allocations() as outer:
        with allocations():
            pass
        nf.empty(1, np.float32)
    assert len(outer) == 1


def test_each_thread_has_its_own():
    with allocations() as made:
        thread = threading.Thread(target=nf.empty, args=(4, np.float32))
        thread.start()
        thread.join()
    assert made == []
