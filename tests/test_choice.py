"""Which stage takes what, what is said of the rest, and what stage="auto" stands for."""

import re
from dataclasses import replace

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference
from numba_flash.dtypes import array_dtype, rounded, widened
from numba_flash.engine import launch as engine
from numba_flash.errors import KernelError
from numba_flash.stages import PORTABLE

from .halves import install

NEW = "tensor_core", "hopper"
HALVES = "float16", "bfloat16"
AUTO = "stage='auto' finds none: "


def arrays(q_shape, k_shape=None, dtype="float16", count=3):
    rng = np.random.default_rng(0)
    shapes = (q_shape, *[k_shape or q_shape] * 2, q_shape)[:count]
    return [rounded(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability, as far as a choice asks; nothing runs on it."""

    def there(*capability):
        monkeypatch.setattr(engine, "compute_capability", lambda: capability)
        monkeypatch.setattr(engine, "device", lambda name=None: engine.Device("gpu", "a GPU and numba-cuda are there"))

    return there


# --------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    "capability, dtype, d, more, stage",
    [
        ((9, 0), "float16", 64, {}, "hopper"),
        ((9, 0), "bfloat16", 128, {"direction": "backward"}, "tensor_core"),  # hopper has no backward pass
        ((8, 0), "float16", 64, {}, "tensor_core"),
        ((8, 9), "bfloat16", 128, {}, "tensor_core"),
        ((10, 0), "float16", 64, {}, "tensor_core"),  # wgmma is of 9.0 alone
        ((12, 0), "float16", 64, {}, "tensor_core"),
        ((9, 0), "float32", 64, {}, "register_tiled"),
        ((7, 5), "float32", 64, {}, "register_tiled"),
        ((9, 0), "float64", 224, {"direction": "backward"}, "register_tiled"),
        ((9, 0), "float64", 256, {"direction": "backward"}, "flash2"),  # register_tiled has no tiles for it
        ((9, 0), "float32", 64, {"dropout_p": 0.1}, "register_tiled"),
        ((9, 0), "float32", 64, {"block_mask": True}, "flash2"),
        ((9, 0), "float32", 64, {"split_kv": 4}, "flash2"),
        ((9, 0), "float32", 64, {"deterministic": False, "direction": "backward"}, "flash2"),
    ],
)
def test_the_fastest_stage_that_takes_it(gpu, capability, dtype, d, more, stage):
    gpu(*capability)
    choice = nf.choose_stage(d=d, dtype=dtype, **more)
    assert choice.name == stage
    assert f"for {dtype}, d = {d}" in choice.why and "gpu" in choice.why
    assert str(choice) == f"{stage} ({choice.why})"


def test_what_is_passed_over_is_named(gpu):
    gpu(8, 0)
    assert "which hopper cannot run" in nf.choose_stage(d=64, dtype="float16").why
    assert "cannot run" not in nf.choose_stage(d=64).why
    assert "a block mask, which register_tiled cannot run" in nf.choose_stage(d=64, block_mask=True).why


@pytest.mark.parametrize("dtype", ["float32", "float64", np.float32])
@pytest.mark.parametrize("more", [{}, {"block_mask": True}, {"split_kv": 3}, {"dropout_p": 0.5}])
def test_without_a_gpu(dtype, more):
    assert nf.choose_stage(d=256, dtype=dtype, device="cpu", **more).name == "flash2"


@pytest.mark.parametrize(
    "capability, more, error, message",
    [
        ((9, 0), {"d": 96}, ValueError, AUTO + "d=96: stage 'tensor_core' takes d = 64 and 128; pad .*"),
        ((9, 0), {"dropout_p": 0.1}, ValueError, AUTO + "dropout_p=0.1: stage 'tensor_core' drops .*"),
        ((9, 0), {"split_kv": 4}, ValueError, AUTO + "split_kv=4: stage 'tensor_core' does not .*"),
        ((7, 5), {}, KernelError, AUTO + "stage 'tensor_core' needs a GPU of compute capability 8.0 or later, and this "
                                         "one has 7.5; convert q, k and v to float32 and pass one of 'naive'.*"),
        ((9, 0), {"d": 0}, ValueError, "d=0 is too small: .*"),
        ((9, 0), {"dtype": "int8"}, ValueError, "dtype='int8' is not one .*"),
        ((9, 0), {"dtype": None}, ValueError, "dtype=None is not one .*"),
        ((9, 0), {"direction": "both"}, ValueError, "direction='both' is unknown: .*"),
        ((9, 0), {"block_mask": 1}, TypeError, "block_mask=1 is not a truth value: .*"),
    ],
)  # fmt: skip
def test_no_stage_takes_it(gpu, capability, more, error, message):
    gpu(*capability)
    with pytest.raises(error) as caught:
        nf.choose_stage(**{"d": 64, "dtype": "float16"} | more)
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


def test_auto_runs_what_it_says():
    q, k, v = arrays((2, 70, 16), (2, 50, 16), "float32")
    with nf.ledger() as bill:
        out = nf.attention(q, k, v, stage="auto", device="cpu")
        gradients = nf.attention_backward(q, k, v, q, stage="auto", device="cpu")
    assert nf.choose_stage(d=16, device="cpu").name in bill.kernels
    assert np.array_equal(out, nf.attention(q, k, v, stage="flash2", device="cpu"))
    for got, expected in zip(gradients, nf.attention_backward(q, k, v, q, stage="flash2", device="cpu")):
        assert np.array_equal(got, expected)


def test_auto_takes_every_feature():
    q, k, v = arrays((8, 4), (6, 4), "float32")
    seen = np.ones((4, 3), bool)
    masked = nf.attention(q, k, v, stage="auto", block_mask=seen, blocks=(2, 2), device="cpu")
    assert np.array_equal(masked, nf.attention(q, k, v, block_mask=seen, blocks=(2, 2), device="cpu"))
    split = nf.attention(q, k, v, stage="auto", split_kv=2, device="cpu")
    assert np.array_equal(split, nf.attention(q, k, v, split_kv=2, device="cpu"))
    atomic = nf.attention_backward(q, k, v, q, stage="auto", deterministic=False, device="cpu")
    np.testing.assert_allclose(atomic[0], nf.attention_backward(q, k, v, q, device="cpu")[0], atol=1e-6)


def test_a_stage_without_a_backward_pass(gpu, monkeypatch):
    monkeypatch.setitem(nf.STAGES, "hopper", replace(nf.STAGES["hopper"], backward=None))
    with pytest.raises(ValueError, match="stage 'hopper' has no backward pass: pass stage='auto'"):
        nf.attention_backward(*F16, F16[0], stage="hopper")
    gpu(9, 0)
    assert nf.choose_stage(d=64, dtype="float16").name == "hopper"
    assert nf.choose_stage(d=64, dtype="float16", direction="backward").name == "tensor_core"


def test_tiles_belong_to_a_stage():
    q, k, v = arrays((5, 4), None, "float32")
    with pytest.raises(ValueError, match=r"blocks=\(4, 4\): tiles belong to a stage, .* name the stage"):
        nf.attention(q, k, v, stage="auto", blocks=(4, 4))


def test_every_stage_says_what_it_takes():
    for name, stage in nf.STAGES.items():
        assert (stage.compute_capability is None) == (name in PORTABLE)
        assert set(stage.dtypes) <= {"float16", "bfloat16", "float32", "float64"}
    assert [name for name, stage in nf.STAGES.items() if stage.block_mask] == ["flash2"]


# ------------------------------------------------------------------------------------------- halves through attention


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stage", [*NEW, "auto"])
@pytest.mark.parametrize(
    "q_shape, k_shape", [((5, 64), (7, 64)), ((4, 5, 64), (2, 7, 64)), ((2, 4, 5, 128), (2, 1, 9, 128))]
)
def test_halves_in_halves_out(monkeypatch, dtype, stage, q_shape, k_shape):
    calls = []
    install(monkeypatch, *NEW, calls=calls)
    q, k, v, dout = arrays(q_shape, k_shape, dtype, 4)
    out, lse = nf.attention(q, k, v, stage=stage, causal=True, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], np.float32)
    expected, expected_lse = reference.attention(q, k, v, causal=True)
    eps = 2**-11 if dtype == "float16" else 2**-8
    np.testing.assert_allclose(widened(out), expected, rtol=0, atol=8 * eps)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)
    gradients = nf.attention_backward(q, k, v, dout, out=out, lse=lse, stage=stage, causal=True)
    truth = reference.attention_backward(q, k, v, dout, causal=True)
    for got, right, x in zip(gradients, truth, (q, k, v)):
        assert (got.shape, got.dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(widened(got), right, rtol=0, atol=16 * eps)
    for (Q, K, V, *_, scale), keywords in calls:
        assert {x.dtype for x in (Q, K, V)} == {np.dtype("V2" if dtype == "bfloat16" else np.float16)}
        assert type(scale) is np.float32 and keywords["mask"].causal


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("what", ["no queries", "no keys", "strided", "Fortran"])
def test_halves_of_every_layout(monkeypatch, dtype, what):
    install(monkeypatch, *NEW)
    q, k, v = arrays((3, 9, 64), (3, 8, 64), dtype)
    if what.startswith("no"):
        q, k, v = (q[:, :0], k, v) if what == "no queries" else (q, k[:, :0], v[:, :0])
    change = {"strided": lambda x: x[:, ::2], "Fortran": np.asfortranarray}.get(what, lambda x: x)
    out, lse = nf.attention(change(q), change(k), change(v), stage="hopper", return_lse=True)
    expected, expected_lse = reference.attention(*(np.array(change(x), order="C") for x in (q, k, v)))
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    np.testing.assert_allclose(widened(out), expected, rtol=0, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)
    dq, dk, dv = nf.attention_backward(change(q), change(k), change(v), change(q), stage="hopper")
    assert (dq.dtype, dk.dtype, dv.dtype) == (q.dtype,) * 3
    assert all(np.isfinite(widened(x)).all() for x in (dq, dk, dv))


def test_bfloat16_of_ml_dtypes_comes_back_as_such_and_V2_as_V2(monkeypatch):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    install(monkeypatch, *NEW)
    q = np.ones((3, 64), ml_dtypes.bfloat16)
    assert array_dtype("bfloat16") == q.dtype
    assert nf.attention(q, q, q, stage="hopper").dtype == q.dtype
    bare = q.view("V2")
    assert nf.attention(bare, bare, bare, stage="hopper").dtype == np.dtype("V2")


# -------------------------------------------------------------------------------------------------- what does not fit

F16, BF16, F32, F64 = (arrays((5, 64), None, dtype) for dtype in ("float16", "bfloat16", "float32", "float64"))
D96 = arrays((5, 96))
TAKES = r"float16 and bfloat16; pass stage='register_tiled', or convert q, k and v, for example q.astype\(np.float16\)"
REFUSED = {  # name: (q, k, v, keywords, error, all of the message)
    "float32 for hopper": (
        F32, {"stage": "hopper"}, TypeError,
        f"q has dtype float32: stage 'hopper' takes {TAKES}",
    ),
    "float64 for tensor_core": (
        F64, {"stage": "tensor_core"}, TypeError,
        f"q has dtype float64: stage 'tensor_core' takes {TAKES}",
    ),
    "float16 for flash2": (
        F16, {"stage": "flash2"}, TypeError,
        "q has dtype float16: stage 'flash2' takes float32 and float64; pass stage='auto', or convert q, k and v, for "
        r"example q.astype\(np.float32\)",
    ),
    "float16 for the default": (F16, {}, TypeError, "q has dtype float16: stage 'flash2' takes .*"),
    "bfloat16 for naive": (BF16, {"stage": "naive"}, TypeError, "q has dtype bfloat16: stage 'naive' takes float32 .*"),
    "two halves": (
        [F16[0], BF16[1], F16[2]], {"stage": "hopper"}, TypeError,
        r"k has dtype bfloat16, but q has float16: give all one dtype, for example k.astype\(np.float16\)",
    ),
    "a half and a bfloat16": (
        [BF16[0], F32[1], BF16[2]], {"stage": "hopper"}, TypeError,
        r"k has dtype float32, but q has bfloat16: give all one dtype, for example k.astype\(ml_dtypes.bfloat16\)",
    ),
    "d": (
        D96, {"stage": "tensor_core"}, ValueError,
        r"q has shape \(5, 96\), so d = 96: stage 'tensor_core' takes d = 64 and 128; pad q, k and v with zeros to "
        "d = 128 and pass the scale, or convert them to float32 and pass stage='register_tiled'",
    ),
    "d beyond the largest": (
        arrays((5, 200)), {"stage": "hopper"}, ValueError,
        r"q has shape \(5, 200\), so d = 200: stage 'hopper' takes d = 64 and 128; convert them to .*",
    ),
    "dropout": (
        F16, {"stage": "hopper", "dropout_p": 0.1}, ValueError,
        "dropout_p=0.1: stage 'hopper' drops nothing; leave it out, or convert q, k and v to float32 and pass "
        "stage='register_tiled'",
    ),
    "a block mask": (
        F16, {"stage": "tensor_core", "block_mask": np.ones((1, 1), bool)}, ValueError,
        "block_mask is given, but stage 'tensor_core' leaves out no tiles: pass stage='flash2'",
    ),
    "split_kv": (
        F16, {"stage": "hopper", "split_kv": 2}, ValueError,
        "split_kv=2: stage 'hopper' does not split the keys; pass stage='flash2'",
    ),
    "a dtype of nobody": (
        [x.astype(np.longdouble) for x in F32], {"stage": "auto"}, TypeError,
        "q has dtype .*: attention takes float16, bfloat16, float32 and float64, so convert it, .*",
    ),
    "an unknown stage": (F16, {"stage": "atuo"}, ValueError, "stage='atuo' is unknown: .*'auto'; .* 'auto'.*"),
}  # fmt: skip


@pytest.mark.parametrize("inputs, keywords, error, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused(inputs, keywords, error, message):
    for run in (
        lambda: nf.attention(*inputs, **keywords),
        lambda: nf.attention_backward(*inputs, inputs[0], **keywords),
    ):
        with pytest.raises(error) as caught:
            run()
        assert re.fullmatch(message, str(caught.value)), str(caught.value)
        if "split_kv" in keywords:
            return


def test_atomics_are_refused():
    with pytest.raises(ValueError, match="deterministic=False: stage 'tensor_core' has no variant with atomics; .*"):
        nf.attention_backward(*F16, F16[0], stage="tensor_core", deterministic=False)


def test_lse_of_halves_is_float32():
    with pytest.raises(TypeError) as caught:
        nf.attention_backward(*F16, F16[0], out=F16[0], lse=F16[0][:, 0], stage="hopper")
    message = (
        "lse has dtype float16, but q has float16, which goes with lse in float32: for example lse.astype(np.float32)"
    )
    assert str(caught.value) == message


@pytest.mark.parametrize("stage", NEW)
def test_no_gpu(stage):
    for device in ("cpu", None) if nf.device().name == "cpu" else ("cpu",):
        with pytest.raises(KernelError) as caught:
            nf.attention(*F16, stage=stage, device=device)
        which = "9.0" if stage == "hopper" else "8.0 or later"
        start = f"stage {stage!r} needs a GPU of compute capability {which}, and kernels run on cpu ("
        assert str(caught.value).startswith(start)
        way_out = f"convert q, k and v to float32 and pass one of {', '.join(map(repr, PORTABLE))}"
        assert str(caught.value).endswith(way_out)


@pytest.mark.parametrize(
    "capability, message",
    [
        ((8, 0), "9.0, and this one has 8.0; pass stage='tensor_core', or convert .*"),
        ((10, 0), "9.0, and this one has 10.0; pass stage='tensor_core', or convert .*"),
        ((7, 5), "9.0, and this one has 7.5; convert .*"),
    ],
)
def test_another_gpu(gpu, capability, message):
    gpu(*capability)
    with pytest.raises(KernelError) as caught:
        nf.attention(*F16, stage="hopper")
    message = f"stage 'hopper' needs a GPU of compute capability {message}"
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


def test_float64_is_never_asked_of_a_stage_for_halves_by_a_copy(monkeypatch):
    """A refusal comes before anything is allocated or launched."""
    calls = []
    install(monkeypatch, *NEW, calls=calls)
    monkeypatch.setitem(nf.STAGES, "hopper", replace(nf.STAGES["hopper"], head_dims=(32,)))
    with pytest.raises(ValueError, match="takes d = 32; convert"):
        nf.attention(*F16, stage="hopper")
    assert not calls
