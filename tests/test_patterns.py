"""The block masks that come ready-made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_flash import patterns

counts = st.integers(0, 20)


def drawn(mask):
    return ["".join(".#"[int(x)] for x in row) for row in mask]


def test_what_they_look_like():
    assert drawn(patterns.local(4, 4, 1)) == ["##..", "###.", ".###", "..##"]
    assert drawn(patterns.local(2, 4, 0)) == ["##..", "..##"]
    assert drawn(patterns.local(4, 2, 0)) == ["#.", "#.", ".#", ".#"]
    assert drawn(patterns.strided(4, 4, 2)) == ["##.#", ".#.#", ".###", ".#.#"]
    assert drawn(patterns.butterfly(4, 4)) == ["###.", "##.#", "#.##", ".###"]


@given(counts, counts, st.integers(0, 5), st.integers(1, 6))
def test_each_query_sees_its_own_place(Tr, Tc, width, stride):
    for mask in (patterns.local(Tr, Tc, width), patterns.strided(Tr, Tc, stride), patterns.butterfly(Tr, Tc)):
        assert mask.shape == (Tr, Tc)
        assert mask.dtype == bool
        if Tr and Tc:
            i, j = np.indices((Tr, Tc))
            middle = (2 * i + 1) * Tc // (2 * Tr) == j
            assert mask.any(axis=1).all()
            if Tr == Tc:
                assert mask[middle].all()


def test_a_butterfly_has_log_tiles_a_row():
    assert (patterns.butterfly(64, 64).sum(axis=1) == 7).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda: patterns.local(-1, 2), "Tr=-1 is too small"), (lambda: patterns.strided(2, 2, 0), "stride=0 is too"),
     (lambda: patterns.butterfly(2, 1.5), "Tc=1.5 is not an integer"), (lambda: patterns.local(2, 2, -1), "width=-1")],
)  # fmt: skip
def test_bad_arguments(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
