"""Which element of a matrix lies in which register of which thread: the operands and the result of `mma`.

A thread is known by its lane, 0 to 31. PTX ISA, "Matrix fragments for mma.m16n8k16". Each function takes integers, in
a kernel or on the host, or NumPy arrays.
"""


def row_of(lane, e):
    """Row, of 16, of element e (0 to 3) of the result C (16 × 8)."""
    return lane // 4 + e // 2 * 8


def column_of(lane, e):
    """Column, of 8, of element e (0 to 3) of the result C (16 × 8)."""
    return lane % 4 * 2 + e % 2


def left(lane, register, half):
    """(row, column) of an element of A (16 × 16): register 0 to 3, half 0 (the lower 16 bits) or 1."""
    return lane // 4 + register % 2 * 8, lane % 4 * 2 + register // 2 * 8 + half


def right(lane, register, half):
    """(row, column) of an element of B (16 × 8): register 0 or 1, half 0 (the lower 16 bits) or 1."""
    return lane % 4 * 2 + register * 8 + half, lane // 4
