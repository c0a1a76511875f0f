"""The GPU's bench, run on the CPU engine, NumPy in the place of hardware and torch. How fast it is, no test asks."""

import json
import math
import types

import numpy as np
import pytest

from numba_flash import __main__ as cli
from numba_flash import attention, attention_backward, device, launch, ledger, predict, reference, report, timing
from numba_flash.bench import command, gpu, gpu_page, peers
from numba_flash.errors import OutOfMemory
from numba_flash.stages import PORTABLE, STAGES

MACHINE = {"name": "GPU", "compute_capability": [9, 0], "multiprocessors": 6, "l2_bytes": 10_000, "free_bytes": 10**9}
SMALL = {"n": 70, "d": 4, "batch": 1, "heads": 2}


class FakeTorch:
    """What `peers.Torch` does, in NumPy: cuDNN has no kernel, the others are right."""

    version = "0"

    def share(self, x, dtype):
        return x.astype(dtype, copy=False)

    def to_host(self, x):
        return x.astype(np.float32)

    def attention(self, name, q, k, v, causal):
        if name == "torch cuDNN":
            raise RuntimeError("No available kernel. Aborting execution.")
        assert not causal or q.shape == k.shape  # torch's is_causal is aligned at the top left
        return reference.attention(q, k, v, causal=causal)[0].astype(q.dtype)

    def gradients(self, name, q, k, v, dout, causal):
        self.attention(name, q, k, v, causal)
        return lambda: [x.astype(q.dtype) for x in reference.attention_backward(q, k, v, dout, causal=causal)]

    def matmuls(self, side):
        return dict.fromkeys(peers.MATMULS, lambda: None)

    def give_back(self):
        pass


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "cpu")
    monkeypatch.setattr(gpu, "hardware", lambda: MACHINE)
    monkeypatch.setattr(gpu, "copy", lambda A, B: np.copyto(B, A))
    monkeypatch.setattr(gpu, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "idle", lambda: None)
    monkeypatch.setattr(timing, "configured", lambda *how: lambda *args: launch(*how, *args))
    monkeypatch.setattr(gpu, "COPIED", 2**16)
    monkeypatch.setattr(gpu, "LAUNCHED", {"n": 9, "d": 4, "stages": ("flash2", "register_tiled"), "repeats": 2})
    monkeypatch.setattr(peers, "load", lambda: (FakeTorch(), None))


@pytest.fixture
def one_second(monkeypatch):
    """Every work takes a second, the peers two; each is run twice."""

    def interleaved(works, repeats, clock=None, most=None):
        for work in works.values():
            work()
            work()
        return {name: [2.0 if name in peers.PEERS else 1.0] * repeats for name in works}

    monkeypatch.setattr(timing, "interleaved", interleaved)


def run(**how):
    return gpu.run(**SMALL | {"repeats": 1} | how)


def text(figures):
    return "\n".join(report.to_text(part) for part in gpu.page(figures))


def flat(figures):
    return " ".join(text(figures).split())


def test_everything_runs_is_right_and_is_printed():
    figures = run()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["right"] is True
    assert list(figures["passes"]) == ["forward", "backward", "decode"]
    for direction, timed in figures["passes"].items():
        splits = [f"flash2 split_kv={n}" for n in (3, 12, 48)] * (direction == "decode")
        assert list(timed["rows"]) == [*PORTABLE, *splits, "torch math", "torch efficient", "torch FA2"]
        assert timed["left_out"] == {"torch cuDNN": "No available kernel"}
        for name, row in timed["rows"].items():
            assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
            assert list(row["speed"]) == ["torch math", "torch efficient", "torch FA2"]
            assert 0 < row["error"] < (1e-2 if name == "torch FA2" else 1e-5)
    assert list(figures["counting"]["rows"]) == list(PORTABLE)
    assert list(figures["launch"]["rows"]) == ["flash2", "register_tiled", "torch efficient"]
    shown = text(figures)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("torch FA2, float16") == 3
    assert "Left out: torch cuDNN. No available kernel." in flat(figures)
    assert "float16 is another arithmetic" in flat(figures)


def test_rates_and_ratios(one_second):
    n, d, heads = 70, 4, 2
    figures = run(passes=("forward", "backward"))
    forward, backward = figures["passes"].values()
    matmul, copied = figures["rates"]["float32"]["median"], figures["rates"]["copy"]["median"]
    assert (matmul, copied) == (2 * figures["rates"]["side"] ** 3, 2 * 2**16)
    for timed, flop, tensors in ((forward, 4, 4), (backward, 10, 8)):
        ours, peer, half = (timed["rows"][name] for name in ("flash2", "torch math", "torch FA2"))
        assert ours["flop_per_second"] == flop * n**2 * d * heads
        assert ours["bytes_per_second"] == tensors * n * d * heads * 4
        assert ours["of_matmul"] == ours["flop_per_second"] / matmul
        assert timed["rows"]["torch efficient"]["of_matmul"] is None  # it has tensor cores
        assert ours["of_copy"] == ours["bytes_per_second"] / copied
        assert ours["speed"] == {"torch math": 2, "torch efficient": 2, "torch FA2": 2}
        assert peer["flop_per_second"] == ours["flop_per_second"] / 2
        assert half["bytes_per_second"] == ours["bytes_per_second"] / 4  # half the bytes in twice the time
    causal = run(passes=("forward",), causal=True)["passes"]["forward"]
    assert causal["flop"] == forward["flop"] / 2
    assert not causal["wrong"]


def test_decoding_in_bytes(one_second):
    figures = run(passes=("decode",), causal=True)
    row = figures["passes"]["decode"]["rows"]["flash2 split_kv=12"]
    assert row["bytes_per_second"] == (2 * 70 + 2) * 4 * 2 * 4
    assert "counting" not in figures and "launch" not in figures
    assert "One query and 70 keys per head" in flat(figures)


def test_the_backward_pass_is_timed_without_the_forward_pass(monkeypatch):
    bills = []

    def counted(*args, stage, **how):
        with ledger() as bill:
            gradients = attention_backward(*args, stage=stage, **how)
        bills.append((stage, bill))
        return gradients

    monkeypatch.setattr(gpu, "attention_backward", counted)
    assert run(passes=("backward",), causal=True)["right"]
    assert len(bills) == 2 * len(PORTABLE)
    assert all(bill == predict(stage, **SMALL, causal=True, direction="backward") for stage, bill in bills)


def test_runs_take_the_inputs_in_turn_and_they_are_larger_than_l2(monkeypatch):
    seen = []
    monkeypatch.setattr(gpu, "attention", lambda q, k, v, **how: seen.append(id(q)) or attention(q, k, v, **how))
    monkeypatch.setattr(peers, "load", lambda: (None, "no torch"))
    timed = run(passes=("forward",), stages=["flash2", "flash"], repeats=3)["passes"]["forward"]
    assert timed["copied_bytes"] > MACHINE["l2_bytes"]
    assert timed["copies"] == 4
    assert seen[:4] == seen[4:8]
    assert len(set(seen[:4])) == 4


@pytest.mark.parametrize("which", range(3))
def test_each_wrong_gradient_is_found(monkeypatch, which):
    def faulty(*args, stage, **how):
        gradients = [x.copy() for x in attention_backward(*args, stage=stage, **how)]
        gradients[which][0, 0, -1, 0] += np.float32(0.01 if stage == "flash" else 0)
        return gradients

    monkeypatch.setattr(gpu, "attention_backward", faulty)
    for causal in (False, True):
        figures = run(passes=("backward",), stages=["naive", "flash"], causal=causal)
        assert figures["passes"]["backward"]["wrong"] == ["flash"]


@pytest.mark.parametrize("fault", [1e-3, math.nan])
def test_a_wrong_result_is_said_and_fails(monkeypatch, fault):
    def faulty(*args, stage, **how):
        return attention(*args, stage=stage, **how) + np.float32(fault if stage == "flash" else 0)

    monkeypatch.setattr(gpu, "attention", faulty)
    figures = run(passes=("forward",), stages=["naive", "flash"])
    assert figures["passes"]["forward"]["wrong"] == ["flash"]
    assert figures["right"] is False
    assert "WRONG: flash." in flat(figures)


def test_a_bill_that_is_not_as_predicted_is_said_and_fails(monkeypatch):
    monkeypatch.setattr(gpu, "predict", lambda stage, *, n, **how: predict(stage, n=n + 1, **how))
    figures = run(passes=("forward",), stages=["flash2"])
    assert figures["counting"]["wrong"] == ["flash2"]
    assert figures["right"] is False
    assert "Every bill is as predicted" not in text(figures)


def test_a_matrix_that_does_not_fit_is_left_out_and_the_rest_goes_on(monkeypatch):
    free = 150_000  # S and P of two heads of 140 × 140 are 313,600 B
    monkeypatch.setattr(gpu, "free_bytes", lambda: free)
    figures = run(n=140, passes=("forward",))
    forward = figures["passes"]["forward"]
    assert list(forward["left_out"]) == ["naive", "tiled", "online_softmax", "torch cuDNN"]
    assert list(figures["counting"]["left_out"]) == ["naive", "tiled", "online_softmax"]
    assert list(forward["rows"]) == ["flash", "flash2", "register_tiled", "torch math", "torch efficient", "torch FA2"]
    assert figures["right"] is True
    reason = forward["left_out"]["naive"]
    assert reason == "S and P: 318 kB are needed, and 150 kB are free; --n 64 fits"
    assert flat(figures).count("Left out: naive. S and P: 318 kB are needed") == 2


@pytest.mark.parametrize(
    ("free", "way_out"), [(10_000, "--n 50 fits"), (70_000, "--n 128 fits"), (3, "use fewer heads")]
)
def test_a_size_that_fits(monkeypatch, free, way_out):
    monkeypatch.setattr(gpu, "free_bytes", lambda: free)
    with pytest.raises(OutOfMemory, match=f"^x: 160 kB are needed, and .* are free; {way_out}$"):
        gpu.refuse_if_too_large(lambda n: 4 * n * n, 200, "x")
    gpu.refuse_if_too_large(lambda n: free, 200, "x")


def test_the_inputs_must_fit(monkeypatch):
    monkeypatch.setattr(gpu, "free_bytes", lambda: 50_000)
    with pytest.raises(OutOfMemory, match="the input: .* are free; --n"):
        run(passes=("backward",))
    figures = run(passes=("backward", "decode"))
    assert list(figures["left_out"]) == ["backward"]
    assert list(figures["passes"]) == ["decode"]
    assert "Left out: backward. The input: " in flat(figures)


def test_more_heads_than_a_grid_holds():
    with pytest.raises(ValueError, match="--batch 300 × --heads 300 is more than the 65,535 heads"):
        run(batch=300, heads=300)


def test_no_torch_is_one_sentence_and_the_rest_runs(monkeypatch):
    monkeypatch.setattr(peers, "load", lambda: (None, "torch is not there"))
    figures = run(stages=["naive", "flash2"])
    assert list(figures["passes"]["backward"]["rows"]) == ["naive", "flash2"]
    assert figures["passes"]["forward"]["rows"]["naive"]["of_matmul"] is None
    assert set(figures["rates"]) == {"side", "copied_bytes", "copy"}
    shown = flat(figures)
    assert shown.count("Torch is not there.") == 1
    assert "speed" not in shown and "% matmul" not in shown and "float16" not in shown


def test_long_runs_are_fewer(monkeypatch):
    monkeypatch.setattr(timing, "wall_seconds", lambda work: (work(), 0.6)[1])
    figures = run(passes=("forward",), stages=["flash2"], repeats=3)
    assert figures["passes"]["forward"]["rows"]["flash2"]["runs"] == 2
    assert "Fewer runs than 3, since they add up to a second: flash2 2, torch math 2" in flat(figures)


def test_the_bare_launch_is_that_of_attention():
    q = np.ones((5, 4), np.float32)
    before = STAGES["flash2"].forward.__globals__["launch"]
    bare = gpu.bare_launch("flash2", q, q, q)
    assert STAGES["flash2"].forward.__globals__["launch"] is before
    with ledger() as bill:
        bare()
    assert bill == predict("flash2", n=5, d=4)


def test_what_a_call_adds(monkeypatch):
    times = {"call": [5.0], "bare": [4.0], "": [2.0]}
    monkeypatch.setattr(timing, "interleaved", lambda works, *how: {name: times[name] for name in works})
    times["call"] += [4.5, 9.0]
    row = gpu.against_events({"call": list, "bare": list}, list, 1)
    assert row["added"] == 3
    figures = {"n": 9, "repeats": 1, "rows": {"flash2": row}, "left_out": {}}
    shown = report.to_text(next(gpu_page.launch(figures))).splitlines()[1]
    assert shown.split() == ["flash2", "5000000", "2000000", "3000000", "2500000", "2000000"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(command, "device", lambda: types.SimpleNamespace(name="gpu", why="so it is"))


def test_flags_reach_the_run(on_a_gpu, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(gpu, "run", lambda **how: calls.append(how) or {"right": True, "passes": {}})
    monkeypatch.setattr(gpu, "page", lambda figures: [])
    assert cli.main(["bench"]) == 0
    sizes = ["--n", "8", "--d", "4", "--batch", "2", "--heads", "3"]
    assert cli.main(["bench", "--pass", "decode", *sizes, "--causal", "--stages", "flash", "--repeats", "2"]) == 0
    default, chosen = calls
    assert default == {"passes": gpu.PASSES, "repeats": 5, "n": 4096, "d": 64, "batch": 4, "heads": 16, "causal": False}
    sizes = {"n": 8, "d": 4, "batch": 2, "heads": 3, "causal": True, "stages": ["flash"]}
    assert chosen == {"passes": ("decode",), "repeats": 2, **sizes}


def test_the_exit_status(on_a_gpu, monkeypatch, capsys):
    small = ["bench", "--pass", "forward", "--n", "140", "--d", "4", "--batch", "1", "--heads", "2"]
    small += ["--repeats", "1", "--json"]
    assert cli.main([*small, "--stages", "flash2"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "gpu"
    monkeypatch.setattr(gpu, "free_bytes", lambda: 150_000)
    assert cli.main([*small, "--stages", "flash2", "naive"]) == 1  # asked for, and left out
    assert cli.main(small) == 0
    monkeypatch.setattr(gpu, "attention", lambda *args, **how: attention(*args, **how) + 1)
    assert cli.main([*small, "--stages", "flash2"]) == 1


@pytest.mark.skipif(device().name != "gpu", reason="needs a GPU")
def test_a_gpu_is_measured(monkeypatch):
    monkeypatch.undo()
    figures = gpu.run(n=64, d=64, batch=1, heads=2, repeats=2)
    assert figures["right"] is True
    assert list(figures["passes"]["forward"]["rows"])[:2] == ["naive", "tiled"]
    assert max(map(len, text(figures).splitlines())) <= 80
