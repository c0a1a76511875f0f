"""The chart and the slope that figures share."""

import pytest

from numba_flash import report
from numba_flash.figures.common import aligned, chart, slope


def test_a_line_of_slope_minus_1_is_drawn_as_a_diagonal():
    lines = list(chart({"x": [(2**k, 2 ** (10 - k)) for k in range(4, 9)]}, "M"))
    drawn = [line.partition("│")[2] for line in lines[:5]]
    assert drawn == [" " * 4 * k + "x" for k in range(5)]
    assert [line[:7].strip() for line in lines[:5]] == ["2^6", "", "2^4", "", "2^2"]
    assert lines[-1].split() == ["M", "2^4", "2^6", "2^8"]
    assert [lines[-1].index(f"2^{k}") for k in (4, 6, 8)] == [lines[k].index("x") for k in (0, 2, 4)]


def test_the_axis_begins_at_a_power_of_two_where_the_points_do_not():
    lines = list(chart({"x": [(12, 1), (24, 2)]}, "N"))
    assert lines[-1].split() == ["N", "2^3"]
    assert lines[-1].index("2^3") + 2 == lines[1].index("x")  # 12 is 2^3.58, at 4 columns for each doubling
    assert lines[0].index("x") - lines[1].index("x") == 4


@pytest.mark.parametrize("doublings", range(1, 45))
def test_however_wide_the_axis_ticks_stand_under_their_points_and_lines_are_short(doublings):
    lines = list(chart({"x": [(2**k, 2) for k in range(3, 4 + doublings)]}, "M"))
    assert max(map(len, lines)) <= report.WIDTH - 1
    for tick in lines[-1].split()[1:]:
        at = lines[-1].index(f" {tick}") + 1
        if int(tick[2:]) <= 3 + doublings:
            assert lines[0][at] == "x"
    assert len(lines[-1].split()) > min(2, doublings / 2)


def test_the_slope_is_the_exponent():
    assert slope([(x, 5 * x**2) for x in (1, 3, 10)]) == pytest.approx(2)
    assert slope([(x, 7 / x) for x in (1, 3, 10)]) == pytest.approx(-1)


def test_texts_are_aligned_to_the_right_beside_the_names():
    lines = report.to_text(aligned(["name", "a"], [["x", "1"], ["long", "1,000"]])).splitlines()
    assert lines == [" name      a", " x         1", " long  1,000"]
