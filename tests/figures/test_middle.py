"""Figure 2 (middle): ours against its numbers, every term against the prediction, the slopes against Theorem 2."""

import json
import math

import pytest

import numba_flash as nf
from numba_flash.figures import middle as figures


@pytest.fixture(scope="module")
def middle():
    return figures.compute(**figures.PAPER, run=False)


# --- Figure 2 (middle) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("Bc", "gb"), [("64", "6.58"), ("128", "3.36"), ("256", "1.74"), ("512", "0.94")])
def test_ours_equal_the_papers_bars_to_three_digits(middle, Bc, gb):
    assert f"{middle['blocks'][Bc]['shown_bytes'] / 1e9:.3g}" == gb
    assert middle["paper"][Bc]["gb"] == float(gb)
    assert middle["equal"] is True


@pytest.mark.parametrize(
    ("n", "d", "heads", "batch"), [(1024, 64, 16, 64), (1000, 48, 3, 2), (65, 1, 1, 1), (1, 7, 2, 1)]
)
def test_the_terms_add_up_to_the_prediction_and_follow_their_closed_forms(n, d, heads, batch):
    N = n
    for Bc, ours in figures.compute(n=n, d=d, heads=heads, batch=batch, run=False)["blocks"].items():
        Tc = math.ceil(N / int(Bc))
        bill = nf.predict("flash", n=n, d=d, heads=heads, batch=batch, blocks=(ours["Br"], ours["Bc"]))
        assert heads * batch * sum(ours["terms"].values()) == bill.elements
        assert ours["full_bytes"] == bill.total_bytes // 2  # float32 has 4 bytes, float16 2
        assert ours["shown_bytes"] == 2 * heads * batch * ours["shown"]
        assert ours["shown"] == (1 + 3 * Tc) * N * d
        assert ours["full"] - ours["shown"] == N * d + 4 * Tc * N + N * d + 2 * N
        assert ours["Tc"] == Tc
        for name, form in (figures.SHOWN | figures.LEFT_OUT).items():
            form = form.replace("−", "-").replace("TcN", "Tc*N").replace(")N", ")*N").replace("Nd", "N*d")
            form = form.replace("2T", "2*T").replace("2N", "2*N")
            assert ours["terms"][name] == eval(form, {"Tc": Tc, "N": N, "d": d}), name


def test_the_terms_are_what_a_ledger_counts():
    n, d, blocks = 70, 8, (8, 64)
    q, k, v = nf.testing.inputs((n, d), (n, d))
    with nf.ledger() as bill:
        nf.attention(q, k, v, stage="flash", blocks=blocks, device="cpu")
    assert bill.elements == sum(figures.terms(n, d, blocks).values())


def test_bars_that_differ_are_exit_status_1(run, monkeypatch):
    monkeypatch.setattr(figures, "BARS", figures.BARS | {512: (0.95, 3.2)})
    status, out, _ = run("middle --predict-only")
    assert status == 1
    assert "DIFFER FROM THE PAPER'S BARS" in out


# --- what is counted and timed ----------------------------------------------------------------------------------------


def test_each_block_size_is_counted_at_the_largest_d_that_fits(monkeypatch):
    monkeypatch.setattr(figures, "RUN", {"n": 70, "d": 64})
    found = figures.compute(n=2048, d=64, heads=1, batch=1)
    assert found["equal"] is True  # although there are no bars to compare with
    for Bc, row in found["counted"].items():
        d = row["d"]
        assert row["n"] == 70
        assert row["counted"] == nf.predict("flash", n=70, d=d, blocks=(row["Br"], int(Bc))).elements
        assert row["Br"] == min(int(Bc), d)
        for columns, fits in ((d, True), (d + 1, False)):  # K_j, V_j and S_ij of 4 bytes in 48 KiB
            assert (4 * int(Bc) * (2 * columns + min(int(Bc), columns)) <= 49_152) is fits
    assert figures.compute(n=8, d=3, heads=1, batch=1)["counted"]["512"]["d"] == 3


def test_a_count_that_differs_is_exit_status_1(run, monkeypatch):
    wrong = {"n": 8, "d": 4, "predicted": 5, "counted": 7, "diff": ["flash: Q loads 7 against 5 (+2)"], "equal": False}
    monkeypatch.setattr(figures.runs, "count", lambda stage, **how: wrong)
    status, out, _ = run("middle")
    assert status == 1
    assert "Ours equal the paper's bars" in out
    assert "PREDICTED AND COUNTED DIFFER:" in out
    assert "    64: flash: Q loads 7 against 5 (+2)" in out
    assert json.loads(run("middle --json")[1])["equal"] is False


def test_blocks_that_fit_are_timed_beside_the_paper(run, monkeypatch):
    asked = []

    def times(sizes, passes):
        asked.append((sizes, passes))
        spread = {"median": 0.0123, "min": 0.012, "max": 0.02}
        return {"gpu": "H0", "repeats": 5, "seconds": {"64": spread}, "why": {"512": "512 keys are too many"}}

    monkeypatch.setattr(figures.runs, "times", times)
    status, out, _ = run("middle")
    assert status == 0
    sizes, passes = asked[0]
    assert sizes == figures.PAPER
    assert passes["64"] == {"stage": "flash", "direction": "forward", "blocks": (64, 64)}
    assert passes["512"]["blocks"] == (64, 512)
    lines = [line.split() for line in out.splitlines()]
    assert ["64", "12.30", "12.00", "20.00", "8.60"] in lines
    assert ["512", "-", "-", "-", "3.20"] in lines
    assert " Bc = 512 is not timed.\n     512 keys are too many\n" in out
    assert "in float32 on H0, all heads, in ms" in " ".join(out.split())


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_holds_every_figure(run, middle, tmp_path):
    status, out, err = run("middle --predict-only --json -")
    assert (status, err) == (0, "")
    assert json.loads(out) == middle
    file = tmp_path / "figures.json"
    assert run(f"middle --predict-only --json {file}")[1].endswith(f" written: {file}\n")
    assert json.loads(file.read_text()) == middle
    assert set(middle) > {"figure", "n", "d", "heads", "batch", "itemsize", "paper", "blocks", "equal", "theorem2"}
    assert (middle["counted"], middle["times"], middle["equal"]) == (None, None, True)
    assert list(middle["blocks"]) == list(middle["paper"]) == ["64", "128", "256", "512"]


def test_the_page_shows_the_papers_numbers_ours_and_the_slopes(run, middle):
    _, out, _ = run("middle --predict-only")
    for gb, ms in figures.BARS.values():
        assert f"{gb:.2f}" in out
        assert f"{ms:.2f}" in out
    assert "(1 + 3Tc)Nd elements a head" in out
    assert "Ours equal the paper's bars in all digits it prints" in out
    for ours in middle["blocks"].values():
        assert f"{ours['shown']:,}" in out
        assert f"{ours['full']:,}" in out
    for f in middle["theorem2"]["slopes"]:
        assert f"{f['all']:+.3f}" in out


def test_another_configuration_leaves_the_paper_out(run):
    status, out, _ = run("middle --predict-only --n 2048")
    assert status == 0
    assert "The paper's bars are left out: they are for N = 1,024, d = 64, 16 heads" in " ".join(out.split())
    assert "8.60" not in out
    found = json.loads(run("middle --predict-only --n 2048 --json")[1])
    assert (found["n"], found["paper"], found["equal"]) == (2048, None, None)
