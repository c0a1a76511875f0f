"""Frames hold what kernels did: their sums are the bill, their boxes the algorithm's tiles, their row the kernel's."""

from functools import cache

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import testing
from numba_flash.engine import recorder
from numba_flash.hbm.ledger import Bill
from numba_flash.masks import no_mask
from numba_flash.player import page
from numba_flash.player.frames import counts, frames
from numba_flash.player.paper import ALGORITHMS
from numba_flash.player.play import largest_n, play
from numba_flash.stages import LADDER, flash, online_softmax
from numba_flash.stages.naive import scores

ROW = 13
RAGGED = {"n": 21, "d": 3, "row": ROW}
TILES = {"naive": None, "tiled": 8, "online_softmax": 8, "flash": (4, 6), "flash2": (4, 6)}
heavy = pytest.mark.course
stages = pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=heavy if name in ("naive", "tiled") else ()) for name in LADDER]
)


@cache
def ragged(stage, causal=False):
    return play(stage, **RAGGED, blocks=TILES[stage], causal=causal)


def state(found, name):
    """What is known of `name` in the row after each frame."""
    now, states = None, []
    for frame in found:
        new = frame.row.get(name)
        now = {**(now or {}), **new} if isinstance(new, dict) else now if new is None else new
        states.append(now)
    return states


def as_float32(values):
    return np.array([values[t] for t in sorted(values)], np.float32)


def names(one, frame, kind, space="global"):
    """{array: (lo, hi, elements, accesses)} of what a frame touched."""
    arrays = one.launch(frame).arrays
    return {arrays[t.array].name: (t.lo, t.hi, t.elements, t.accesses) for t in frame.touches
            if t.kind == kind and arrays[t.array].space == space}  # fmt: skip


# --- the bill ---------------------------------------------------------------------------------------------------------


@stages
@pytest.mark.parametrize("causal", [False, True])
def test_the_frames_sum_to_the_bill(stage, causal):
    one = ragged(stage, causal)
    total = Bill()
    for frame in one.frames:
        total += Bill({one.launch(frame).kernel: counts(one.record, frame)})
    assert total == one.bill
    assert one.bill == nf.predict(stage, n=RAGGED["n"], d=RAGGED["d"], blocks=TILES[stage], causal=causal)
    last = one.frames[-1]
    assert (last.read_bytes, last.write_bytes) == (one.bill.read_bytes, one.bill.write_bytes)
    so_far = [(frame.read_bytes, frame.write_bytes) for frame in one.frames]
    assert so_far == sorted(so_far)
    q, k, v = testing.inputs((21, 3), (21, 3))
    with nf.ledger():
        out = nf.attention(q, k, v, stage=stage, blocks=TILES[stage], causal=causal, device="cpu")
    assert np.array_equal(one.out, out)


@stages
def test_every_entry_is_in_one_frame_and_lines_are_those_that_ran(stage):
    one = ragged(stage)
    for number, launch in enumerate(one.record.launches):
        mine = [frame for frame in one.frames if frame.launch == number]
        assert {line for frame in mine for line in frame.lines} == set(launch.line.tolist())
        assert sum(t.accesses for frame in mine for t in frame.touches) == (launch.kind != 3).sum()
        order = {block: at for at, block in enumerate(launch.blocks)}
        at = [(order[frame.block], frame.phase) for frame in mine]
        assert at == sorted(at)


# --- the tiles --------------------------------------------------------------------------------------------------------


def test_flash_walks_its_tiles_as_algorithm_1_says():
    one = ragged("flash")
    N, d, (Br, Bc) = 21, 3, TILES["flash"]
    initialise, rest = one.frames[0], one.frames[2:]  # the second frame: every thread finds its place
    assert initialise.paper == (2,) and names(one, initialise, "written")["O"] == ((0, 0, 0), (0, 20, 2), 63, 63)
    assert one.frames[1].paper == () and not one.frames[1].touches and one.frames[1].queries is None
    expected, found = [], []
    for j in range(0, N, Bc):
        keys = min(Bc, N - j)
        expected.append(((5, 6), j, None, {"K": ((0, j, 0), (0, j + keys - 1, d - 1), keys * d, keys * d)}, {}))
        for i in range(0, N, Br):
            rows = min(Br, N - i)
            tile = (0, i, 0), (0, i + rows - 1, d - 1), rows * d, rows * d
            vector = (0, i), (0, i + rows - 1), rows, rows
            turn = j, (i, i + rows - 1)
            expected += [
                ((7, 8), *turn, {"Q": tile, "O": tile, "l": vector, "m": vector}, {}),
                ((9, 10), *turn, {}, {}),
                ((10,), *turn, {}, {}),
                ((11,), *turn, {}, {}),
                ((12,), *turn, {}, {}),
                ((12,), *turn, {}, {"O": tile}),
                ((13,), *turn, {}, {"l": vector, "m": vector}),
            ]
    for frame in rest:
        read = names(one, frame, "read")
        if "V" in read:
            assert read.pop("V") == read["K"]
        found.append((frame.paper, frame.turns["j"][0], frame.turns.get("i"), read, names(one, frame, "written")))
        if "i" in frame.turns:
            assert frame.queries == frame.turns["i"]
    assert found == expected
    on_chip = [frame for frame in rest if frame.paper == (9, 10)]
    assert names(one, on_chip[0], "read", "shared") == {"K_j": ((0, 0), (5, 2), 18, 18 * 4)}
    assert names(one, on_chip[0], "read", "local") == {"Q_i": ((0, 0), (3, 2), 12, 12 * 6)}
    assert names(one, on_chip[0], "written", "shared") == {"S_ij": ((0, 0), (5, 3), 24, 24)}
    assert names(one, on_chip[5], "written", "shared") == {"S_ij": ((0, 0), (5, 0), 6, 6)}  # one query is left
    assert rest[0].filled == {"K_j": 18, "V_j": 18, "S_ij": 0} and on_chip[0].filled["S_ij"] == 24


def test_flash2_walks_its_tiles_with_the_queries_outside():
    one = ragged("flash2")
    steps = [(frame.block[0], frame.turns["j"][0]) for frame in one.frames if names(one, frame, "read").get("K")]
    assert steps == [(i, j) for i in range(6) for j in range(0, 21, 6)]
    block = [frame for frame in one.frames if frame.block == (5, 0, 0)]
    cycle = [(6, 7), (8, 9), (10,), (9, 10)]
    assert [frame.paper for frame in block] == [(3,), (4, 5), *cycle * 4, (12, 14), (13, 15)]
    assert [frame.phase for frame in block] == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 6, 7, 7, 7, 8, 8]
    assert names(one, block[-2], "written") == {"O": ((0, 20, 0), (0, 20, 2), 3, 3)}


def test_causal_leaves_out_what_no_query_sees():
    one = ragged("flash2", causal=True)
    seen = {(frame.block[0], frame.turns["j"][0]) for frame in one.frames if "j" in frame.turns}
    assert seen == {(i, j) for i in range(6) for j in range(0, 21, 6) if j < 4 * i + 4}


def test_comments_name_lines_that_the_algorithm_has():
    for stage in ("online_softmax", "flash", "flash2"):
        one = ragged(stage)
        numbers = {line.number for line in ALGORITHMS[stage].lines}
        assert all(set(frame.paper) <= numbers for frame in one.frames)
        lit = {n for frame in one.frames for n in one.algorithm(frame)}
        silent = {1, 3, 4} if stage == "flash" else {1, 2} if stage == "flash2" else set()  # what no kernel does
        assert {n for n, line in enumerate(ALGORITHMS[stage].lines) if line.number not in silent} == lit


# --- the row: what the kernel gives when it is stopped after so many keys ---------------------------------------------


def inputs(keys):
    q, k, v = testing.inputs((21, 3), (21, 3))
    return q[None], k[None, :keys], v[None, :keys]


def scale():
    return np.float32(1 / np.sqrt(3))


def test_m_l_and_O_of_flash_after_each_tile_are_those_of_the_kernel():
    one = ragged("flash")
    m, l, O, S, P = (state(one.frames, name) for name in ("m", "l", "O", "S_ij", "P_ij"))
    first = one.frames[0]
    assert first.row["m"] == -np.inf and first.row["l"] == 0 and set(first.row["O"].values()) == {0.0}
    mask = no_mask("cpu")
    for j in range(0, 21, 6):
        at = [n for n, frame in enumerate(one.frames) if frame.turns == {"j": (j, j), "i": (12, 15)}]
        keys = min(j + 6, 21)
        O_j, l_j, m_j = flash.forward_lm(*inputs(keys), scale(), mask, blocks=TILES["flash"], device="cpu")
        assert np.float32(m[at[-1]]) == m_j[0, ROW] and np.float32(l[at[-1]]) == l_j[0, ROW]
        assert np.array_equal(as_float32(O[at[-1]]), O_j[0, ROW])
        expected = scores(*inputs(21)[:2], scale(), mask, device="cpu")[0, ROW, j:keys]
        tile = as_float32(S[at[1]])[: keys - j]
        assert np.array_equal(tile, expected)
        assert np.float32(one.frames[at[3]].row["m"]) == m_j[0, ROW]  # line 11
        weights = as_float32(P[at[2]])[: keys - j]
        assert weights.max() == 1 and np.allclose(weights, np.exp(expected - expected.max()), rtol=1e-6)
    assert np.array_equal(as_float32(O[-1]), one.out[ROW])


def test_m_l_and_O_of_flash2_after_each_tile_are_those_of_the_kernel():
    one = ragged("flash2")
    m, l, O, L = (state(one.frames, name) for name in "mlOL")
    for j in range(0, 21, 6):
        at = max(n for n, frame in enumerate(one.frames) if frame.turns == {"j": (j, j)} and frame.block[0] == ROW // 4)
        q, k, v = (x[0] for x in inputs(min(j + 6, 21)))
        O_j, L_j = nf.attention(q, k, v, blocks=TILES["flash2"], scale=scale(), return_lse=True, device="cpu")
        m_j, l_j = np.float32(m[at]), np.float32(l[at])
        assert np.array_equal(as_float32(O[at]) / l_j, O_j[ROW])
        assert m_j == scores(*inputs(min(j + 6, 21))[:2], scale(), no_mask("cpu"), device="cpu")[0, ROW].max()
        assert abs(m_j + np.log(l_j) - L_j[ROW]) <= 2 * np.spacing(abs(L_j[ROW]))
    assert np.array_equal(as_float32(O[-1]), one.out[ROW])
    assert np.float32(L[-1]) == L_j[ROW]


def test_m_and_l_of_online_softmax_after_each_key_are_those_of_the_kernel():
    one = ragged("online_softmax")
    m, l, O, S = (state(one.frames, name) for name in "mlOS")
    mask = no_mask("cpu")
    seen = 0
    for at, frame in enumerate(one.frames):
        if one.launch(frame).kernel == "statistics" and "j" in frame.turns:
            j, seen = frame.turns["j"][0], seen + 1
            if j in (0, 1, 7, 19, 20):
                _, S_j, m_j, l_j = online_softmax.forward_Sml(*inputs(j + 1), scale(), mask, 8, device="cpu")
                assert np.float32(m[at]) == m_j[0, ROW] and np.float32(l[at]) == l_j[0, ROW]
    assert seen == 21
    assert np.array_equal(as_float32(S[-1]), S_j[0, ROW])
    assert np.array_equal(as_float32(O[-1]), one.out[ROW])


@heavy
@pytest.mark.parametrize("stage", ["naive", "tiled"])
def test_S_P_and_O_of_the_first_stages_are_those_of_the_kernels(stage):
    one = ragged(stage)
    S = scores(*inputs(21)[:2], scale(), no_mask("cpu"), device="cpu")[0, ROW]
    assert np.array_equal(as_float32(state(one.frames, "S")[-1]), S)
    P = as_float32(state(one.frames, "P")[-1])
    assert np.allclose(P, np.exp(S - S.max()) / np.exp(S - S.max()).sum(), rtol=1e-5)
    assert np.array_equal(as_float32(state(one.frames, "O")[-1]), one.out[ROW])
    assert state(one.frames, "m")[-1] == S.max()


def test_a_row_of_another_head_is_another_row():
    q, k, v = testing.inputs((2, 8, 3), (2, 8, 3))
    with nf.recording() as record:
        out = nf.attention(q, k, v, stage="flash2", blocks=(4, 4), device="cpu")
    for head in (0, 1):
        assert np.array_equal(as_float32(state(frames(record, 5, head), "O")[-1]), out[head, 5])


# --- recording again, and what is too much ----------------------------------------------------------------------------


def test_two_recordings_give_the_same_page():
    again = play("flash", **RAGGED, blocks=TILES["flash"])
    assert page.page([again]) == page.page([ragged("flash")])


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"n": 10**6}, "n=1000000 leaves too many accesses to record: with d=16, n=134 is the most"),
        ({"row": 64}, "row=64 is outside: with n=64 there are queries 0 to 63"),
        ({"blocks": (16, 1000), "d": 256, "n": 30}, "need .* bytes of shared memory"),
    ],
)
def test_what_cannot_be_played_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        play("flash", **wrong)


def test_too_many_steps_are_refused(monkeypatch):
    one = ragged("flash2")
    monkeypatch.setattr("numba_flash.player.frames.MAX_FRAMES", 20)
    with pytest.raises(ValueError, match="flash2 has more than 20 steps"):
        frames(one.record)


@heavy
@stages
@pytest.mark.parametrize("d", [16, 100])
def test_the_largest_size_is_recorded(stage, d):
    one = play(stage, n=largest_n(d), d=d, row=0)
    assert recorder.LIMIT // 20 < one.record.entries <= recorder.LIMIT
    elements = [count.elements for frame in one.frames for count in counts(one.record, frame).values()]
    assert sum(elements) == one.bill.elements
