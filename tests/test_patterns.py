"""The block masks that come ready-made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_flash import patterns

lengths = st.integers(0, 60)
sides = st.integers(1, 9)
PATTERNS = [patterns.local, patterns.strided, patterns.butterfly, lambda *of: patterns.local(*of, width=0)]


def drawn(mask):
    return ["".join(".#"[int(x)] for x in row) for row in mask]


def test_what_they_look_like():
    assert drawn(patterns.local(16, 16, (4, 4))) == ["##..", "###.", ".###", "..##"]
    assert drawn(patterns.local(16, 16, (8, 4), 0)) == ["##..", "..##"]
    assert drawn(patterns.local(16, 16, (4, 8), 0)) == ["#.", "#.", ".#", ".#"]
    assert drawn(patterns.local(4, 16, (4, 4), 0)) == ["...#"]
    assert drawn(patterns.strided(28, 28, (4, 4), 3)) == [
        "##.#..#", "###.#..", ".###.#.", "#.###.#", ".#.###.", "..#.###", "#..#.##"]  # fmt: skip
    assert drawn(patterns.butterfly(16, 16, (4, 4))) == ["###.", "##.#", "#.##", ".###"]


@given(lengths, lengths, sides, sides)
def test_each_query_sees_the_key_at_its_place(n, n_k, Br, Bc):
    """Also where the last tile is short, and where tiles of queries and of keys have sides that do not divide."""
    for pattern in PATTERNS:
        mask = pattern(n, n_k, (Br, Bc))
        assert mask.shape == (-(-n // Br), -(-n_k // Bc))
        assert mask.dtype == bool
        for i in range(max(n - n_k, 0), n):
            assert mask[i // Br, (i + n_k - n) // Bc]


@given(lengths, sides, sides, st.integers(0, 3))
def test_local_holds_all_keys_within_the_width_and_none_far_away(n, Br, Bc, width):
    mask = patterns.local(n, n, (Br, Bc), width)
    place = max(Br, Bc)
    for i in range(n):
        for j in range(n):
            if abs(i // place - j // place) <= width:
                assert mask[i // Br, j // Bc]
            if abs(i - j) > (width + 3) * place:
                assert not mask[i // Br, j // Bc]


def test_any_width_and_stride():
    for wide in (10, 2**63, 10**30):
        assert patterns.local(3, 3, (1, 1), wide).all()
        assert np.array_equal(patterns.strided(3, 3, (1, 1), wide), patterns.local(3, 3, (1, 1)))


def test_a_butterfly_has_log_tiles_a_row():
    assert (patterns.butterfly(256, 256, (4, 4)).sum(axis=1) == 7).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda: patterns.local(-1, 2, (1, 1)), "n=-1 is too small"),
     (lambda: patterns.strided(2, 2, (1, 1), 0), "stride=0 is too small"),
     (lambda: patterns.butterfly(2, 1.5, (1, 1)), "n_k=1.5 is not an integer"),
     (lambda: patterns.local(2, 2, (1, 1), -1), "width=-1 is too small"),
     (lambda: patterns.local(2, 2, 4), r"blocks=4: pass \(Br, Bc\)"),
     (lambda: patterns.local(2, 2, (4, 0)), "blocks: Bc=0 is too small")],
)  # fmt: skip
def test_bad_arguments(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
