"""Figure 2 (right): the line against predictions with masks, what is counted, the fits, times, what is said."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numba_flash as nf
from numba_flash import report
from numba_flash.blocks import tiles
from numba_flash.figures import right, runs
from numba_flash.figures.common import straight_line


@pytest.fixture(scope="module")
def figures():
    return right.compute(**right.PAPER)


# --- the line ---------------------------------------------------------------------------------------------------------


def step(n, d, blocks, mask=None):
    return nf.predict("flash2", n=n, d=d, blocks=blocks, block_mask=mask, direction="both")


@given(n=st.integers(1, 300), d=st.integers(1, 70), Br=st.integers(1, 70), Bc=st.integers(1, 70))
def test_the_line_goes_from_no_tile_to_all_tiles_at_ragged_lengths_too(n, d, Br, Bc):
    a, b, mask = (right.line(n, d, (Br, Bc))[part] for part in ("a", "b", "mask"))
    shape = tiles(n, Br), tiles(n, Bc)
    assert a == step(n, d, (Br, Bc), np.zeros(shape, bool)).elements
    full = step(n, d, (Br, Bc), np.ones(shape, bool))
    assert a + b == full.elements
    assert mask == full["block_mask"].loads
    assert a - mask == 11 * n * d + 4 * n


@given(n=st.integers(1, 300), Br=st.integers(1, 70), Bc=st.integers(1, 70))
def test_the_line_is_the_mean_of_masks_of_one_tile(n, Br, Bc):
    """Where tiles at the edge are short, masks with as many tiles differ: the line is their mean."""
    shape = tiles(n, Br), tiles(n, Bc)
    some = np.random.default_rng(0).permutation(shape[0] * shape[1])[:20]
    a, b = (right.line(n, 8, (Br, Bc))[part] for part in ("a", "b"))
    costs = []
    for one in range(shape[0] * shape[1]) if shape[0] * shape[1] <= 20 else some:
        mask = np.zeros(shape, bool)
        mask.flat[one] = True
        costs.append(step(n, 8, (Br, Bc), mask).elements - a)
    if n % Br == n % Bc == 0:
        assert set(costs) == {b // mask.size}
    elif mask.size <= 20:
        assert sum(costs) == b


def test_the_shares_are_the_predictions_with_random_masks(figures):
    n, d, Br, Bc = 4096, 64, *figures["blocks"]
    assert (Br, Bc) == (128, 32)
    order = np.random.default_rng(1).permutation(32 * 128)
    assert [share["percent"] for share in figures["shares"]] == list(range(10, 100, 10))
    for share in figures["shares"]:
        mask = (order < share["tiles"]).reshape(32, 128)
        assert share["tiles"] == round(32 * 128 * share["percent"] / 100)
        assert share["s"] == mask.mean()
        assert share["elements"] == step(n, d, (Br, Bc), mask).elements
    assert figures["dense"] == step(n, d, (Br, Bc)).elements


@pytest.mark.parametrize("side", right.SIDES)
def test_the_constants_of_proposition_4(figures, side):
    """With tiles of M/4d by M/4d, b is 8N²d²/M forward and (24 + 8/d)N²d²/M in a training step."""
    N, d = 4096, 64
    found = figures["sram"][str(side)]
    full = {"n": N, "d": d, "blocks": (side, side), "block_mask": np.ones((N // side, N // side), bool)}
    none = full | {"block_mask": ~full["block_mask"]}
    assert found["M"] == 4 * d * side
    for direction, constant in (("forward", 8), ("both", 24 + 8 / d)):
        bills = (nf.predict("flash2", **how, direction=direction).elements for how in (full, none))
        b = next(bills) - next(bills)
        assert found[direction] * found["M"] / (N * d) ** 2 == pytest.approx(constant, rel=1e-12)
        assert found[direction] == b


def test_a_straight_line_is_found_with_what_lies_off_it():
    assert straight_line([(0, 1.0), (1, 3.0)]) == pytest.approx({"a": 1, "b": 2, "off": 0})
    assert straight_line([(0, 0), (1, 3), (2, 0)]) == pytest.approx({"a": 1, "b": 0, "off": 2})
    assert straight_line([(1, 1), (1, 2)]) is None


def test_the_papers_times_are_a_line(figures):
    paper, times = figures["paper"], (27.2, 43.4, 60.3, 81.2, 99.4, 117.0, 135.6, 155.6, 175.6)
    assert list(paper["ms"].values()) == list(times)
    assert paper["dense"] == 188.4
    b, a = np.polyfit(np.arange(1, 10) / 10, times, 1)
    off = np.abs(np.array(times) - a - b * np.arange(1, 10) / 10).max()
    assert paper["line"] == pytest.approx({"a": a, "b": b, "off": off})
    assert off < 0.02 * paper["dense"]


# --- what is counted --------------------------------------------------------------------------------------------------


def test_masks_are_what_a_ledger_counts(figures):
    counted = figures["counted"]
    n, d, B = counted["n"], counted["d"], counted["side"]
    assert (n, d) == tuple(right.COUNTED.values())
    q, k, v = nf.testing.inputs((n, d), (n, d))
    masks = {m["mask"]: m for m in counted["masks"][-3:]}
    for name, m in masks.items():
        mask = getattr(nf.patterns, name)(n, n, (B, B))
        with nf.ledger() as bill:
            nf.attention_backward(q, k, v, q, block_mask=mask, blocks=(B, B), device="cpu")
        assert m["counted"] == bill.elements
        assert (m["tiles"], m["s"]) == (mask.sum(), mask.mean())
    assert list(masks) == ["local", "strided", "butterfly"]
    random = counted["masks"][:-3]
    assert [m["mask"] for m in random] == ["random"] * 9
    assert [m["tiles"] for m in random] == [round(k * (n // B) ** 2 / 10) for k in range(1, 10)]
    assert all(m["predicted"] == m["counted"] for m in counted["masks"])
    assert figures["equal"] is True


def test_all_of_them_lie_on_the_line_of_proposition_4(figures):
    counted = figures["counted"]
    a, b = (right.line(counted["n"], counted["d"], (counted["side"],) * 2)[part] for part in "ab")
    assert counted["line"] == pytest.approx({"a": a, "b": b, "off": 0}, rel=1e-9, abs=1e-3)
    for m in counted["masks"]:
        assert m["counted"] == a + b * m["tiles"] // (counted["n"] // counted["side"]) ** 2


@pytest.mark.parametrize(("n", "d"), [(1, 1), (70, 8), (100_000_000, 64), (100_000_000, 10_000)])
def test_any_size(n, d):
    found = right.compute(n=n, d=d, heads=2, batch=3)
    counted = found["counted"]
    assert (counted["n"], counted["d"]) == (min(n, right.COUNTED["n"]), min(d, right.COUNTED["d"]))
    assert found["equal"] is True
    assert (found["blocks"] is None) == (found["line"] is None) == (d == 10_000)


def test_nothing_runs_where_nothing_is_to_run(monkeypatch):
    monkeypatch.setattr(right, "attention_backward", None)
    monkeypatch.setattr(runs, "times", None)
    found = right.compute(**right.PAPER, run=False)
    assert (found["counted"], found["timed"], found["equal"]) == (None, None, True)


def test_an_access_too_many_is_exit_status_1(run, monkeypatch):
    once = right.attention_backward
    monkeypatch.setattr(right, "attention_backward", lambda *args, **how: once(*args, **how) and once(*args, **how))
    right.count.cache_clear()
    status, out, _ = run("right --n 20 --d 4")
    right.count.cache_clear()
    assert status == 1
    assert "PREDICTED AND COUNTED DIFFER" in out


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch):
    """As on a GPU whose times are 2 + 50s ms, and 40 without a mask."""

    def times(sizes, passes):
        given.update(passes)
        ms = {name: 40 if mask is None else 2 + 50 * mask.mean() for name, mask in masks(passes)}
        seconds = {name: {"median": t / 1e3, "min": t / 2e3, "max": t / 1e3} for name, t in ms.items()}
        return {"gpu": "GPU X", "repeats": 5, "seconds": seconds, "why": {}}

    given = {}
    monkeypatch.setattr(runs, "times", times)
    return given


def masks(passes):
    return [(name, how.get("block_mask")) for name, how in passes.items()]


def test_times_are_those_of_masks_with_such_a_share(timed):
    found = right.compute(**right.PAPER)
    assert list(timed) == [*(f"{p} %" for p in range(10, 100, 10)), "dense"]
    for how in timed.values():
        assert (how["stage"], how["direction"], tuple(how["blocks"])) == ("flash2", "both", (128, 32))
    for share, (_, mask) in zip(found["shares"], masks(timed)):
        assert mask.mean() == share["s"]
        assert mask.shape == (32, 128)
    assert found["timed"]["line"] == pytest.approx({"a": 2, "b": 50, "off": 0}, abs=1e-9)


def test_the_page_shows_times_and_their_line(run, timed):
    out = run("right")[1]
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:2] == ["50", "%"] and line[4:6] == ["27.0", "0.675"] for line in lines)
    assert any(line[:1] == ["dense"] and line[3:5] == ["40.0", "1.000"] for line in lines)
    assert max(map(len, out.splitlines())) <= report.WIDTH
    assert "flash2 ran on GPU X" in out
    assert ["flash2,", "ms", "2.0", "50.0", "0.0", "52.0"] in lines


def test_what_cannot_be_timed_is_said(run, monkeypatch):
    why = {f"{p} %": "too little memory" for p in range(10, 100, 10)} | {"dense": "too little memory"}
    monkeypatch.setattr(runs, "times", lambda sizes, passes: {"gpu": "X", "repeats": 5, "seconds": {}, "why": why})
    status, out, _ = run("right")
    assert status == 0
    assert out.count("too little memory") == 1


def test_the_kernels_run_with_masks_as_they_are_timed():
    """What `runs.times` calls, on the CPU engine."""
    n, d = 64, 8
    q, k, v = nf.testing.inputs((1, n, d), (1, n, d))
    mask = np.eye(4, dtype=bool)
    how = {"direction": "both", "blocks": (16, 16), "block_mask": mask}
    with nf.ledger() as bill:
        runs.work("flash2", (q, k, v, q), "cpu", **how)()
    assert bill == nf.predict("flash2", n=n, d=d, **how)


# --- the command ------------------------------------------------------------------------------------------------------


def words(out):
    return " ".join(out.split())


def test_the_page_shows_the_papers_numbers_and_ours(run, figures):
    status, out, err = run("right")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    for share in figures["shares"]:
        ms = figures["paper"]["ms"][str(share["percent"])]
        row = next(line for line in lines if line[:3] == [str(share["percent"]), "%", f"{ms:.1f}"])
        assert row[-2] == f"{share['elements']:,}"
        assert float(row[-1]) == pytest.approx(share["elements"] / figures["dense"], abs=6e-4)
    for m in figures["counted"]["masks"]:
        assert any(line[:1] == [m["mask"]] and line[-2:-1] == [f"{m['counted']:,}"] for line in lines)
    assert "Predicted and counted are equal" in words(out)


def test_json_holds_every_figure(run, figures):
    found = json.loads(run("right --json -")[1])
    assert found | {"timed": None} == figures | {"timed": None}  # on a GPU, no two times are equal


def test_another_configuration_leaves_the_paper_out(run):
    out = run("right --heads 4")[1]
    assert "The paper's times are left out: they are for N = 4,096" in words(out)
    assert "188.4" not in out


def test_where_the_last_tiles_are_short_not_all_masks_lie_on_the_line(run):
    out = words(run("right --n 250")[1])
    assert "so not all masks lie on it" in out
    assert "Ours is the mean over all masks with as many tiles" in out
    assert "All masks lie on it" in words(run("right")[1])


def test_what_proposition_4_says_is_left_out_where_tiles_are_short(run):
    for line, says in (("", True), ("--n 250", True), ("--n 1 --d 1", False), ("--n 100", False)):
        assert ("b falls as 1/M" in words(run(f"right --predict-only {line}")[1])) is says


def test_no_tiles_fit(run):
    status, out, _ = run("right --d 10000")
    assert status == 0
    assert "No tiles of flash2 fit at d = 10,000" in words(out)


def test_rows_are_one_observation_each(timed):
    found = right.compute(**right.PAPER)
    rows = right.rows(found)
    assert len({tuple(row) for row in rows}) == 1
    count = {s: sum(row["source"] == s for row in rows) for s in ("paper", "predicted", "counted", "timed")}
    assert count == {"paper": 10, "predicted": 10 + 12, "counted": 12, "timed": 10}
    paper = {row["s"]: row["value"] for row in rows if row["source"] == "paper"}
    assert paper[0.1] == 27.2
    assert [row["mask"] for row in rows if row["source"] == "paper"][-1] == "none"
    timed = [row for row in rows if row["source"] == "timed"]
    assert [row["value"] for row in timed][-1] == pytest.approx(40)
    assert {row["unit"] for row in timed} == {"ms"}


def test_the_plot_shows_all_series(timed):
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    found = right.compute(**right.PAPER)
    right.plot(found, canvas)
    times, counts = canvas.axes
    drawn = {line.get_label(): line.get_xydata() for line in times.lines}
    assert drawn["paper, ms"][:, 1] == pytest.approx([ms / 188.4 for ms in found["paper"]["ms"].values()])
    ours = drawn["flash2, HBM, predicted"]
    assert ours == pytest.approx(np.array([(100 * s["s"], s["elements"] / found["dense"]) for s in found["shares"]]))
    assert drawn["flash2 on GPU X, ms"][-1] == pytest.approx((100 * found["shares"][-1]["s"], 1.175), abs=0.01)
    labels = [line.get_label() for line in counts.lines]
    assert {"random", "local", "strided", "butterfly"} <= set(labels)
