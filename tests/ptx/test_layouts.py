"""Fragments and swizzled tiles, in NumPy."""

import numpy as np
import pytest

from numba_flash.ptx.fragments import column_of, left, right, row_of
from numba_flash.ptx.swizzle import place

LANES = np.arange(32)


def covered(rows, columns, shape):
    """How often each element occurs."""
    count = np.zeros(shape, int)
    np.add.at(count, (np.ravel(rows), np.ravel(columns)), 1)
    return count


def test_each_element_lies_in_one_register():
    lane, register, half = np.meshgrid(LANES, np.arange(4), np.arange(2), indexing="ij")
    assert (covered(*left(lane, register, half), (16, 16)) == 1).all()
    lane, register, half = np.meshgrid(LANES, np.arange(2), np.arange(2), indexing="ij")
    assert (covered(*right(lane, register, half), (16, 8)) == 1).all()
    lane, e = np.meshgrid(LANES, np.arange(4), indexing="ij")
    assert (covered(row_of(lane, e), column_of(lane, e), (16, 8)) == 1).all()


def test_two_results_side_by_side_are_one_left_operand():
    """P = exp(S − m) is multiplied by V without a move between threads: register q holds elements of block q // 2."""
    lane, register, half = np.meshgrid(LANES, np.arange(4), np.arange(2), indexing="ij")
    e = register % 2 * 2 + half
    row, column = row_of(lane, e), column_of(lane, e) + 8 * (register // 2)
    assert np.array_equal((row, column), left(lane, register, half))


@pytest.mark.parametrize("row_bytes", [128, 256])
def test_a_swizzled_tile_holds_each_chunk_once(row_bytes):
    row, chunk = np.meshgrid(np.arange(64), np.arange(row_bytes // 16), indexing="ij")
    assert sorted(place(row, chunk, row_bytes).ravel()) == list(range(0, 64 * row_bytes, 16))


@pytest.mark.parametrize("row_bytes", [128, 256])
def test_eight_rows_of_a_swizzled_tile_lie_in_different_banks(row_bytes):
    rows = np.arange(8)
    for chunk in range(row_bytes // 16):
        for first in (0, 8, 24):
            banks = place(first + rows, chunk, row_bytes) // 4 % 32
            assert len(set(banks)) == 8
            assert len(set((first + rows) * row_bytes // 4 % 32)) == 1  # without the swizzle: all in one


@pytest.mark.parametrize("row_bytes", [128, 256])
def test_a_step_along_a_swizzled_row_is_an_exclusive_or(row_bytes):
    """What `ldmatrix` makes of start, along and down."""
    row, chunk = np.meshgrid(np.arange(8), np.arange(2), indexing="ij")
    start = place(row, chunk, row_bytes)
    for k in range(row_bytes // 32):
        for n in range(4):
            assert np.array_equal((start ^ 32 * k) + 16 * n * row_bytes, place(row + 16 * n, 2 * k + chunk, row_bytes))
