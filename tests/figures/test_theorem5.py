"""Theorem 5: what is counted in the backward pass, the bounds, and what is said."""

import json
import math

import pytest

import numba_flash as nf
from numba_flash.figures import slopes, theorem5
from numba_flash.hbm.predict import algorithm0


@pytest.fixture(scope="module")
def figures():
    return theorem5.compute(**theorem5.PAPER)


def test_points_are_what_a_ledger_counts_in_the_backward_pass(figures):
    n, d = theorem5.COUNTED.values()
    assert [(p["n"], p["d"], p["M"]) for p in figures["counted"]] == [(n, d, d * times) for times in (32, 64, 128, 256)]
    q, k, v = nf.testing.inputs((n, d), (n, d))
    out, lse = nf.attention(q, k, v, return_lse=True, device="cpu")
    for p in figures["counted"]:
        with nf.ledger() as bill:
            blocks = (p["Br"], p["Bc"])
            nf.attention_backward(q, k, v, q, out=out, lse=lse, stage="flash", blocks=blocks, device="cpu")
        kernels = [bill.kernels[name] for name in ("initialise_dQ", "flash_backward")]
        assert p["counted"] == sum(count.elements for tensors in kernels for count in tensors.values())
        assert p["counted"] == p["all"]
    assert figures["equal"] is True


@pytest.mark.parametrize(("n", "d"), [(1, 1), (70, 8), (100_000_000, 10_000)])
def test_other_sizes_are_counted_at_no_more_than_what_takes_a_second(n, d):
    found = theorem5.compute(n=n, d=d, heads=2, batch=3)
    assert found["equal"] is True
    assert found["counted"]
    for p in found["counted"]:
        assert (p["n"], p["d"]) == (min(n, theorem5.COUNTED["n"]), min(d, theorem5.COUNTED["d"]))
        assert p["d"] <= p["M"] <= p["n"] * p["d"]
    assert found["theorem"]["heads"] == 6
    assert all(low <= p["constant"] <= high for p in found["counted"] for low, high in [theorem5.bounds(p["d"])])


def test_nothing_runs_where_nothing_is_to_run(monkeypatch, figures):
    monkeypatch.setattr(theorem5, "attention_backward", None)
    found = theorem5.compute(**theorem5.PAPER, run=False)
    assert (found["counted"], found["equal"]) == ([], True)
    assert found["theorem"] == figures["theorem"]


def test_an_access_too_many_is_exit_status_1(run, monkeypatch):
    step = theorem5.attention_backward

    monkeypatch.setattr(theorem5, "attention_backward", lambda *args, **how: step(*args, **how) and step(*args, **how))
    theorem5.count.cache_clear()
    status, out, _ = run("theorem5 --n 64 --d 4")
    theorem5.count.cache_clear()
    assert status == 1
    assert "PREDICTED AND COUNTED DIFFER" in out


def test_flash_moves_less_than_algorithm_3_where_M_is_larger_than_about_3d2():
    N, d = 65_536, 64
    standard = algorithm0(n=N, d=d, direction="backward").elements
    less = {M: slopes.point(slopes.BACKWARD, n=N, d=d, M=int(M * d * d))["all"] < standard for M in (2.5, 3.5)}
    assert less == {2.5: False, 3.5: True}


def test_rows_hold_each_point(figures):
    rows = theorem5.rows(figures)
    points = figures["theorem"]["points"]
    assert len(rows) == len(points) + 2 * len(figures["counted"])
    assert len({tuple(row) for row in rows}) == 1
    assert [row["value"] for row in rows][: len(points)] == [p["all"] for p in points]
    counted, predicted = ([r for r in rows if r["source"] == s and r["n"] == 512] for s in ("counted", "predicted"))
    assert [r | {"source": ""} for r in counted] == [r | {"source": ""} for r in predicted]


def test_the_plot_has_a_line_for_each_d(figures):
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    theorem5.plot(figures, canvas)
    (axes,) = canvas.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    for d in figures["theorem"]["d"]:
        points = [[p["M"], p["all"]] for p in figures["theorem"]["points"] if p["d"] == d]
        assert drawn[f"d = {d}, N = 65,536"] == points
    assert [p["M"] for p in figures["counted"]] in [[x for x, _ in xy] for xy in drawn.values()]


def test_the_page_shows_the_slopes_and_what_is_counted(run, figures):
    status, out, err = run("theorem5")
    assert (status, err) == (0, "")
    for f in figures["theorem"]["slopes"]:
        assert f"{f['all']:+.3f}" in out
    lines = [line.split() for line in out.splitlines()]
    for p in figures["counted"]:
        Tc = math.ceil(p["n"] / p["Bc"])
        elements = f"{(5 + 5 * Tc) * p['n'] * p['d'] + 2 * Tc * p['n']:,}"
        assert any(line[-3:-1] == [elements, elements] for line in lines)
    assert "Predicted and counted are equal, tensor by tensor." in out


def test_small_sizes_say_so(run):
    assert "N = 1 is too small for slopes" in " ".join(run("theorem5 --n 1")[1].split())
    assert json.loads(run("theorem5 --n 1 --json")[1])["theorem"]["slopes"] == []
