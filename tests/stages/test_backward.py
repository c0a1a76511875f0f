"""Every stage, backward: exact against float64, its bill equal to the closed form, and the same bits at every run."""

import contextlib

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference
from numba_flash.engine import cpu
from numba_flash.hbm.ledger import Bill

SIZES = [  # heads, kv_heads, N, N_k, d
    (1, 1, 1, 1, 1), (1, 1, 2, 5, 3), (2, 2, 17, 33, 8), (4, 2, 31, 32, 16), (3, 1, 33, 31, 40), (2, 1, 97, 64, 64),
    (1, 1, 16, 16, 16), (1, 1, 5, 0, 4), (2, 1, 0, 5, 4), (1, 1, 8, 70, 256),
]  # fmt: skip
CONFIGURATIONS = [  # stage, blocks, deterministic
    ("naive", None, True), ("tiled", None, True), ("tiled", 7, True), ("online_softmax", 5, True),
    ("flash", None, True), ("flash", (3, 5), True), ("flash2", None, True), ("flash2", (7, 3), True),
    ("flash2", None, False), ("flash2", (5, 3), False),
    ("register_tiled", None, True), ("register_tiled", (3, 4), True),
]  # fmt: skip
configurations = pytest.mark.parametrize("stage, blocks, deterministic", CONFIGURATIONS)


def inputs(H, G, N, N_k, d, dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (H, N, d), (G, N_k, d), (G, N_k, d), (H, N, d)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return (2 * q).astype(dtype), (2 * k).astype(dtype), (v + 1).astype(dtype), dout.astype(dtype)


def gradients(stage, q, k, v, dout, *, from_lse, **how):
    """The gradients, from out and lse where `from_lse`, and otherwise with the forward pass on the way."""
    kept = {}
    if from_lse:
        scale = {"scale": how["scale"]} if "scale" in how else {}
        out, lse = nf.attention(q, k, v, stage=stage, return_lse=True, **scale)
        kept = {"out": out, "lse": lse}
    return nf.attention_backward(q, k, v, dout, stage=stage, **kept, **how)


@pytest.mark.parametrize("size", SIZES, ids=str)
@configurations
def test_bill_equals_the_closed_form(stage, blocks, deterministic, size):
    H, G, N, N_k, d = size
    q, k, v, dout = inputs(H, G, N, N_k, d, np.float32)
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    how = {"blocks": blocks, "deterministic": deterministic}
    for direction, kept in (("both", {}), ("backward", {"out": out, "lse": lse})):
        with nf.ledger() as bill:
            nf.attention_backward(q, k, v, dout, stage=stage, **kept, **how)
        predicted = nf.predict(stage, n=N, n_k=N_k, d=d, heads=H, kv_heads=G, direction=direction, **how)
        assert predicted.diff(bill) == []
        assert predicted == bill


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_the_forward_pass_has_lines_of_its_own(stage):
    square = stage in ("tiled", "online_softmax")
    both, forward = (
        nf.predict(stage, n=40, d=8, direction=direction, blocks=4 if square else None)
        for direction in ("both", "forward")
    )
    assert {name: both.kernels[name] for name in forward.kernels} == forward.kernels
    assert len(both.kernels) > len(forward.kernels)


WAYS = {"both passes": ("float32", False), "from out and lse": ("float32", True), "float64": ("float64", False)}


@pytest.mark.parametrize(
    "stage, blocks, deterministic, way",
    [(*one, way) for one in CONFIGURATIONS for way in WAYS if way == "both passes" or one[1] or one[0] == "naive"],
)
def test_exact_on_every_case(stage, blocks, deterministic, way):
    dtype, from_lse = WAYS[way]

    def fn(q, k, v, dout, scale):
        how = {"scale": scale, "blocks": blocks, "deterministic": deterministic}
        return gradients(stage, q, k, v, dout, from_lse=from_lse, **how)

    cases = list(nf.testing.cases(dtype))
    if nf.device().name == "gpu":  # each d is one more compilation of each kernel
        cases = [case for case in cases if case.q.shape[-1] in (8, 12, 64)]
    if (stage, dtype) == ("register_tiled", "float64"):
        cases = [case for case in cases if case.q.shape[-1] <= 224]
    nf.testing.assert_exact_backward(
        fn, cases=cases, dtype=dtype, from_lse=from_lse or stage in ("flash2", "register_tiled")
    )


def test_a_stage_without_tiles_for_many_columns():
    q = np.ones((3, 256))
    with pytest.raises(ValueError, match="no tiles of 'register_tiled', backward with d = 256 .*pass another stage"):
        nf.attention_backward(q, q, q, q, stage="register_tiled", device="cpu")
    with pytest.raises(ValueError, match="no tiles of 'register_tiled', backward with d = 256 .*pass another stage"):
        nf.attention_backward(q, q, q, q, stage="register_tiled", blocks=(8, 8), device="cpu")
    nf.attention_backward(q[:, :224], q[:, :224], q[:, :224], q[:, :224], stage="register_tiled", device="cpu")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("from_lse", [False, True])
def test_naive_within_a_bound(size, from_lse):
    """In float32 every stage is measured by naive: its own gradients need a bound that is not their error."""
    H, G, N, N_k, d = size
    q, k, v, dout = inputs(H, G, N, N_k, d, np.float32)
    limits = nf.testing.naive_gradient_bounds(q, k, v, dout)
    got = gradients("naive", q, k, v, dout, from_lse=from_lse)
    for name, one, truth in zip(limits, got, reference.attention_backward(q, k, v, dout), strict=True):
        assert np.isfinite(one).all()
        assert np.abs(one - truth).max(initial=0) <= limits[name]


@pytest.mark.parametrize("score", ["-32768", "-2^31", "-2^101"])
@pytest.mark.parametrize("stage", ["naive", "tiled", "online_softmax", "flash"])
def test_m_and_l_lose_nothing_where_lse_does(stage, score):
    """Huge scores without a rounding error: L has no room for all of log l, P or m and l have."""
    case = next(case for case in nf.testing.cases() if case.name.startswith(f"every score {score}"))
    dout = nf.testing.random_dout(case)
    truth = reference.attention_backward(case.q, case.k, case.v, dout, case.scale)
    for at in (1, 2):  # dq is 0: all keys are equal
        error = {
            from_lse: np.abs(
                gradients(stage, case.q, case.k, case.v, dout, from_lse=from_lse, scale=case.scale)[at] - truth[at]
            ).max()
            for from_lse in (False, True)
        }
        assert error[False] < 1e-6 * np.abs(truth[at]).max()
        assert error[True] > 1e-5 * np.abs(truth[at]).max()


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_central_differences(stage):
    """The derivative of Σ(out ∘ dout) along a random direction, from two forward passes in float64."""
    q, k, v, dout = inputs(4, 2, 9, 7, 5, np.float64)
    q, k, h = q / 2, k / 2, 1e-5
    rng = np.random.default_rng(1)
    for at, gradient in enumerate(nf.attention_backward(q, k, v, dout, stage=stage)):
        direction = rng.standard_normal(gradient.shape)
        values = []
        for sign in (1, -1):
            moved = [x + sign * h * direction if i == at else x for i, x in enumerate((q, k, v))]
            values.append((nf.attention(*moved, stage=stage) * dout).sum())
        assert (values[0] - values[1]) / (2 * h) == pytest.approx((gradient * direction).sum(), abs=1e-8, rel=1e-8)


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_twenty_runs_give_the_same_bits(stage):
    q, k, v, dout = inputs(2, 1, 70, 67, 16, np.float32)
    first = nf.attention_backward(q, k, v, dout, stage=stage)
    for run in range(1, 20):
        with cpu.shuffled_blocks(run):  # a GPU shuffles them itself
            again = nf.attention_backward(q, k, v, dout, stage=stage)
        for one, other in zip(first, again, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_order_of_the_blocks(deterministic):
    """Blocks that run in another order, as they may on a GPU: nothing but sums by atomics depends on it."""
    q, k, v, dout = inputs(2, 1, 40, 64, 16, np.float32)
    how = {"stage": "flash2", "blocks": (8, 4), "deterministic": deterministic, "device": "cpu"}
    runs = []
    for seed in (None, 1, 2, 3):
        with cpu.shuffled_blocks(seed) if seed else contextlib.nullcontext():
            runs.append(nf.attention_backward(q, k, v, dout, **how))
    same = [all(np.array_equal(run[at], runs[0][at]) for run in runs) for at in range(3)]
    assert same == [deterministic, True, True]
    truth = reference.attention_backward(q, k, v, dout)
    for run in runs:
        for got, expected in zip(run, truth, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_shared_heads_add_up():
    q, k, v, dout = inputs(6, 2, 9, 7, 4, np.float64)
    for stage in nf.stages.PORTABLE:
        dq, dk, dv = nf.attention_backward(q, k, v, dout, stage=stage)
        alone = [nf.attention_backward(q[h], k[h // 3], v[h // 3], dout[h], stage=stage) for h in range(6)]
        np.testing.assert_allclose(dq, [a[0] for a in alone], rtol=1e-12)
        for got, at in ((dk, 1), (dv, 2)):
            np.testing.assert_allclose(got, [sum(a[at] for a in alone[3 * g : 3 * g + 3]) for g in range(2)], 1e-11)


def test_batches_are_heads():
    q, k, v, dout = (x.reshape(2, -1, *x.shape[1:]) for x in inputs(8, 4, 9, 7, 4, np.float32))
    for stage in nf.stages.PORTABLE:
        out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
        gradients = nf.attention_backward(q, k, v, dout, out=out, lse=lse, stage=stage)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        for b in range(2):
            one = nf.attention_backward(q[b], k[b], v[b], dout[b], out=out[b], lse=lse[b], stage=stage)
            assert all(np.array_equal(x[b], y) for x, y in zip(gradients, one, strict=True))


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_nothing_to_attend_to(stage):
    q, k, v, dout = inputs(2, 1, 5, 0, 4, np.float32)
    dq, dk, dv = nf.attention_backward(q, k, v, dout, stage=stage)
    assert np.array_equal(dq, np.zeros_like(q))
    assert dk.shape == dv.shape == (1, 0, 4)
    with nf.ledger() as bill:
        dq, dk, dv = nf.attention_backward(q[:, :0], q[:1], q[:1], dout[:, :0], stage=stage)
    assert dq.shape == (2, 0, 4)
    assert np.array_equal(dk, np.zeros((1, 5, 4)))
    assert np.array_equal(dv, dk)
    assert bill == Bill()
