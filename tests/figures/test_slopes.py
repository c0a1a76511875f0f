"""Theorems 2 and 5: every point in closed form, the constants for all M, the slopes within what the terms allow."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_flash.figures import slopes

# Of each pass: what goes by at each of Tc steps, times N × d, and times N; and what goes by once.
TERMS = {slopes.FORWARD: (3, 4, 3, 2), slopes.BACKWARD: (5, 2, 5, 0)}
PASSES = pytest.mark.parametrize("one", TERMS, ids=lambda one: one.direction)


def theorem(one):
    return slopes.theorem(one, n=65_536, d=64)


@PASSES
def test_points_follow_the_papers_rule_from_d_to_Nd(one):
    thin, rows, thin_once, rows_once = TERMS[one]
    found = slopes.theorem(one, n=65_536, d=64, heads=3)
    for p in found["points"]:
        N, d, M = p["n"], p["d"], p["M"]
        assert p["Bc"] == math.ceil(M / (4 * d))
        assert p["Br"] == min(p["Bc"], d)
        assert p["Tc"] == math.ceil(N / p["Bc"])
        assert p[one.part] == 3 * thin * p["Tc"] * N * d
        assert p["all"] == 3 * ((thin_once + thin * p["Tc"]) * N * d + (rows * p["Tc"] + rows_once) * N)
        assert d <= M <= N * d
    assert {p["d"]: p["M"] for p in found["points"]} == {d: 65_536 * d for d in (32, 64, 128)}


@PASSES
@given(n=st.integers(1, 10**8), d=st.integers(1, 10**4), share=st.floats(0, 1), heads=st.integers(1, 10))
def test_the_constant_lies_between_two_bounds_for_every_M(one, n, d, share, heads):
    """All terms over N²d²/M, for any d ≤ M ≤ Nd.

    Tc is r · 4Nd/M, where r ≥ 1/(1 + 4d/M) ≥ 1/5, since Bc < M/4d + 1, and r ≤ 1 + M/4Nd ≤ 5/4, since Tc < N/Bc + 1.
    So the terms at each step are r · 4 · (thin + rows/d), and the others at most thin_once + rows_once/d.
    """
    thin, rows, thin_once, rows_once = TERMS[one]
    M = round(d * n**share)
    at_each_step = 4 * (thin + rows / d)
    found = slopes.constant(slopes.point(one, n=n, d=d, M=M, heads=heads), heads)
    assert at_each_step / 5 <= found <= thin_once + rows_once / d + at_each_step * 5 / 4


# Nothing rounded, Tc = 4Nd/M, all terms are a/M + b, with a = N²(4·thin·d² + 4·rows·d) and b = N(thin_once·d +
# rows_once). A slope by least squares lies between the least and the largest local slope, and those are
#   over M: −1/(1 + bM/a), which grows with M from −1;
#   over N: 2 − 1/(1 + a/bM), which grows with N up to 2, since a/b is N times what does not depend on N;
#   over d: that of d² + αd + c, 2 − (αd + 2c)/(d² + αd + c), which grows with d up to 2.
# Rounding multiplies Tc by r to r(1 + e). That moves the slope by at most log(1 + e)·Σ|w|/2, for the weights
# w = (x − mean)/Σ(x − mean)² of least squares, which add up to 0.


def moved_by_rounding(over, points):
    x = [math.log(p[over]) for p in points]
    mean = sum(x) / len(x)
    rounded = [p["Tc"] * p["M"] / (4 * p["n"] * p["d"]) for p in points]
    e = max(rounded) / min(rounded) - 1
    return math.log1p(e) * sum(abs(x - mean) for x in x) / sum((x - mean) ** 2 for x in x) / 2 + 1e-12  # of arithmetic


def terms(one, N, d):
    thin, rows, thin_once, rows_once = TERMS[one]
    return N**2 * (4 * thin * d**2 + 4 * rows * d), N * (thin_once * d + rows_once)


@PASSES
def test_slopes_over_M(one):
    found = theorem(one)
    fits = [f for f in found["slopes"] if f["over"] == "M"]
    assert [(f["d"], f["to"]) for f in fits] == [(d, 65_536 * d // share) for share in (16, 1) for d in (32, 64, 128)]
    for f in fits:
        points = [p for p in found["points"] if p["d"] == f["d"] and f["from"] <= p["M"] <= f["to"]]
        assert len(points) == f["points"]
        move = moved_by_rounding("M", points)
        a, b = terms(one, 65_536, f["d"])
        last = -1 / (1 + b * f["to"] / a)
        assert last < (-0.98 if 65_536 * f["d"] > f["to"] else -0.79)
        assert -1 - move <= f["all"] <= last + move
        assert abs(f[one.part] + 1) <= move
        assert f["all"] == pytest.approx(-1, abs=0.04)


@PASSES
@pytest.mark.parametrize("over", ["d", "n"])
def test_slopes_over_d_and_N(one, over):
    fits = [f for f in theorem(one)["slopes"] if f["over"] == over]
    assert [f["M"] for f in fits] == [2**14, 2**16]
    values = (32, 48, 64, 96, 128) if over == "d" else [2**k for k in range(12, 17)]
    for f in fits:
        assert (f["from"], f["to"], f["points"]) == (values[0], values[-1], 5)
        points = [slopes.point(one, **{"n": 65_536, "d": 64, "M": f["M"]} | {over: value}) for value in values]
        move = moved_by_rounding(over, points)
        a, b = terms(one, points[0]["n"], points[0]["d"])
        first = 2 - 1 / (1 + a / (b * f["M"]))
        if over == "d":
            thin, rows, thin_once, rows_once = TERMS[one]
            d, alpha, c = (
                32,
                (rows + thin_once * f["M"] / (4 * 65_536)) / thin,
                rows_once * f["M"] / (4 * thin * 65_536),
            )
            first = 2 - (alpha * d + 2 * c) / (d**2 + alpha * d + c)
        assert first > (1.95 if over == "d" else 1.9)
        assert first - move <= f["all"] <= 2 + move
        assert abs(f[one.part] - 2) <= move
        assert f["all"] == pytest.approx(2, abs=0.04)


@PASSES
@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 10_000), (2, 64), (63, 64), (10**8, 1), (10**8, 10_000), (100, 100)])
def test_any_size_has_points_within_the_theorem(one, n, d):
    found = slopes.theorem(one, n=n, d=d)
    assert {p["d"] for p in found["points"]} == set(found["d"])
    for p in found["points"]:
        assert p["d"] <= p["M"] <= n * p["d"]
    assert all(f["points"] > 1 for f in found["slopes"])
    assert bool(found["slopes"]) == (n > 2)
