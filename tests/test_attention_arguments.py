"""What attention() takes, what it gives back, and what it says to everything else."""

import fractions
import importlib
import inspect
import re

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import errors, reference, testing
from numba_flash.engine.launch import gpu_problem
from numba_flash.stages import LADDER

attention_module = importlib.import_module("numba_flash.attention")  # the package's attribute is the function


def arrays(q_shape, k_shape=None, dtype=np.float32):
    rng = np.random.default_rng(0)
    k_shape = k_shape or q_shape
    return [rng.standard_normal(shape).astype(dtype) for shape in (q_shape, k_shape, k_shape)]


Q, K, V = arrays((5, 4))
stages = pytest.mark.parametrize("stage", nf.stages.PORTABLE)


def huge(*shape):
    """A view of one number, so that only its shape is large."""
    return np.broadcast_to(np.float32(1), shape)


class DeviceArray:
    """An array that claims to be in GPU memory."""

    def __init__(self, shape, typestr="<f4"):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (0, False), "version": 3}


# ------------------------------------------------------------------------------------------------- what is given back


def test_the_default_stage_has_every_feature():
    assert inspect.signature(nf.attention).parameters["stage"].default == LADDER[-1]


@stages
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "q_shape, k_shape",
    [((5, 4), (7, 4)), ((6, 5, 4), (3, 7, 4)), ((2, 6, 5, 4), (2, 2, 7, 4))],
    ids=["(N, d)", "(H, N, d)", "(B, H, N, d)"],
)
def test_shapes_dtypes_and_values(stage, q_shape, k_shape, dtype):
    q, k, v = arrays(q_shape, k_shape, dtype)
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v)
    assert type(out) is type(lse) is np.ndarray
    assert out.dtype == lse.dtype == dtype
    np.testing.assert_allclose(out, expected, rtol=0, atol=20 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=20 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(out, nf.attention(q, k, v, stage=stage))


@pytest.mark.parametrize(
    "scale", [0.3, 1, -2, np.float64(0.3), np.float32(0.3), np.int8(2), fractions.Fraction(1, 3), 0]
)
def test_scales_of_every_real_kind(scale):
    expected, _ = reference.attention(Q, K, V, float(scale))
    np.testing.assert_allclose(nf.attention(Q, K, V, scale=scale), expected, atol=1e-6)


@stages
@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_no_queries(stage, heads):
    q, k, v = arrays((*heads, 0, 4), (*heads, 5, 4))
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], q.dtype)
    assert nf.attention(q, k, v, stage=stage).shape == q.shape


@stages
@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_no_keys(stage, heads):
    q, k, v = arrays((*heads, 5, 4), (*heads, 0, 4))
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    np.testing.assert_array_equal(out, np.zeros_like(q))
    np.testing.assert_array_equal(lse, np.full(q.shape[:-1], -np.inf))


@stages
def test_the_inputs_stay_as_they_are_and_the_result_is_new_memory(stage):
    q, k, v = arrays((3, 5, 4))
    for x in (q, k, v):
        x.flags.writeable = False
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    assert not any(np.shares_memory(x, y) for x in (q, k, v) for y in (out, lse))
    assert out.flags.writeable and lse.flags.writeable


@pytest.mark.parametrize("case", [c for c in testing.cases() if c.name.startswith("layout")], ids=str)
def test_layouts_give_the_bits_of_the_contiguous_copy(case):
    compact = [np.array(x, order="C") for x in (case.q, case.k, case.v)]
    np.testing.assert_array_equal(nf.attention(case.q, case.k, case.v), nf.attention(*compact))


def test_unaligned_memory_is_right():
    unaligned = np.frombuffer(b"x" + Q.tobytes(), dtype=np.uint8)[1:].view(np.float32).reshape(Q.shape)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(nf.attention(unaligned, K, V), nf.attention(Q, K, V))


def test_a_contiguous_array_is_not_copied(monkeypatch):
    seen = []
    stage = nf.STAGES["naive"]

    def forward(Q, K, V, scale, **keywords):
        seen.extend([Q, K, V, scale])
        return stage.forward(Q, K, V, scale, **keywords)

    monkeypatch.setitem(nf.STAGES, "naive", type(stage)(**vars(stage) | {"forward": forward}))
    nf.attention(Q, K, V, stage="naive", device="cpu")
    assert all(np.shares_memory(a, b) for a, b in zip(seen, (Q, K, V)))
    assert [x.shape for x in seen[:3]] == [(1, 5, 4)] * 3
    assert type(seen[3]) is np.float32


@pytest.mark.parametrize("kind", [np.matrix, np.memmap])
def test_a_subclass_counts_as_the_plain_array(kind, tmp_path):
    if kind is np.matrix:
        with pytest.warns(PendingDeprecationWarning):
            q = np.matrix(Q)
    else:
        q = np.memmap(tmp_path / "q", np.float32, "w+", shape=Q.shape)
        q[:] = Q
    out = nf.attention(q, K, V)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, nf.attention(Q, K, V))


def test_nan_in_the_input_reaches_the_rows_it_belongs_to():
    q = Q.copy()
    q[2, 1] = np.nan
    out = nf.attention(q, K, V)
    assert np.isnan(out[2]).all() and np.isfinite(out[[0, 1, 3, 4]]).all()


# ------------------------------------------------------------------------------------------- arrays in device memory

device_memory = pytest.mark.skipif(nf.device().name != "gpu", reason="kernels run in host memory here")


class Foreign:
    """A device array of some other library."""

    def __init__(self, array):
        self.owner, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


def never(*args, **keywords):
    raise AssertionError("a copy between host and device")


@device_memory
@stages
@pytest.mark.parametrize(
    "q_shape, k_shape", [((5, 4), (7, 4)), ((4, 5, 4), (2, 7, 4)), ((2, 4, 5, 4), (2, 2, 0, 4)), ((3, 0, 4), (3, 2, 4))]
)
def test_device_arrays_stay_on_the_device(stage, q_shape, k_shape, monkeypatch):
    host = arrays(q_shape, k_shape)
    on_device = [nf.to_device(x) for x in host]
    expected, expected_lse = nf.attention(*host, stage=stage, return_lse=True)
    with monkeypatch.context() as patch:
        patch.setattr(attention_module.engine, "to_device", never)
        patch.setattr(attention_module.engine, "to_host", never)
        out, lse = nf.attention(*on_device, stage=stage, return_lse=True)
    assert type(out) is type(lse) is type(on_device[0])
    np.testing.assert_array_equal(nf.to_host(out), expected)
    np.testing.assert_array_equal(nf.to_host(lse), expected_lse)


@device_memory
@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, ::2], lambda x: x[:, :, 1:], lambda x: x[:1], lambda x: x[1]],
    ids=["every second row", "some features", "some heads", "one head"],
)
def test_strided_device_arrays_give_the_bits_of_the_contiguous_copy(view):
    host = arrays((6, 6, 4))
    views = [view(nf.to_device(x)) for x in host]
    expected = nf.attention(*(np.array(view(x), order="C") for x in host))
    np.testing.assert_array_equal(nf.to_host(nf.attention(*views)), expected)
    if nf.device().name == "gpu":
        foreign = nf.attention(*(Foreign(x) for x in views))
        np.testing.assert_array_equal(nf.to_host(foreign), expected)


@device_memory
@pytest.mark.parametrize("strided", [False, True])
def test_masks_in_device_memory_stay_there(strided, monkeypatch):
    rng = np.random.default_rng(0)
    host = arrays((2, 2, 9, 4), (2, 1, 7, 4))
    step = 2 if strided else 1
    key_mask, block_mask = rng.random((2, 7 * step)) < 0.6, rng.random((3, 4 * step)) < 0.6
    blocks = {"blocks": (3, 2)}
    expected = nf.attention(*host, key_mask=key_mask[:, ::step], block_mask=block_mask[:, ::step], **blocks)
    on_device = [nf.to_device(x) for x in host]
    masks = {"key_mask": nf.to_device(key_mask)[:, ::step], "block_mask": nf.to_device(block_mask)[:, ::step]}
    with monkeypatch.context() as patch:
        patch.setattr(attention_module.engine, "to_device", never)
        patch.setattr(attention_module.engine, "to_host", never)
        out = nf.attention(*on_device, **masks, **blocks)
    np.testing.assert_array_equal(nf.to_host(out), expected)


@device_memory
def test_host_and_device_arrays_do_not_mix():
    with pytest.raises(TypeError, match=r"k is in GPU memory, but q is a NumPy array: bring all to one side with"):
        nf.attention(Q, nf.to_device(K), V)


# -------------------------------------------------------------------------------------------------- what is refused

REFUSED = {  # name: (arguments in place of the right ones, error, all of the message)
    "a list": (
        {"q": [[1.0, 2.0]]},
        TypeError,
        r"q=\[\[1.0, 2.0\]\] is a list: pass a NumPy array, for example np.asarray\(q, dtype=np.float32\), .*",
    ),
    "None": ({"v": None}, TypeError, "v=None is a NoneType: pass a NumPy array.*"),
    "a long list": ({"k": list(range(1000))}, TypeError, r"k=\[0, 1, 2, 3, 4, 5, \.\.\.\] is a list: pass .*"),
    "a masked array": (
        {"k": np.ma.masked_array(K, K > 0)},
        TypeError,
        r"k is a masked array, whose mask attention would ignore: pass k.filled\(0\).*",
    ),
    "integers": (
        {"q": Q.astype(int)},
        TypeError,
        r"q has dtype int64: attention takes float16, bfloat16, float32 and float64, so convert it, "
        r"for example q.astype\(np.float32\)",
    ),
    "integers everywhere": ({n: np.ones((5, 4), int) for n in "qkv"}, TypeError, "q has dtype int64.*"),
    "half precision": ({"k": K.astype(np.float16)}, TypeError, r"k has dtype float16, but q .* k.astype\(np.float32\)"),
    "long double": ({"k": K.astype(np.longdouble)}, TypeError, r"k has dtype (float128|longdouble|float96): .*"),
    "complex": ({"v": V.astype(complex)}, TypeError, r"v has dtype complex128: .* v.real.astype\(np.float32\)"),
    "objects": ({"v": V.astype(object)}, TypeError, r"v has dtype object: .* v.astype\(np.float32\)"),
    "another byte order": (
        {"q": Q.astype(Q.dtype.newbyteorder())},
        TypeError,
        r"q has dtype [<>]f4: .* q.astype\(np.float32\)",
    ),
    "two precisions": (
        {"k": K.astype(np.float64)},
        TypeError,
        r"k has dtype float64, but q has float32: give all one dtype, for example k.astype\(np.float32\)",
    ),
    "no axis": (
        {"q": np.array(1, np.float32)},
        ValueError,
        r"q has shape \(\): pass \(N, d\), \(heads, N, d\) or \(batch, heads, N, d\)",
    ),
    "one axis": ({"q": Q[0]}, ValueError, r"q has shape \(4,\): pass \(N, d\).*"),
    "five axes": (
        {n: np.ones((1, 1, 1, 5, 4), np.float32) for n in "qkv"},
        ValueError,
        r"q has shape \(1, 1, 1, 5, 4\): pass .*",
    ),
    "mixed ranks": (
        {"k": K[None]},
        ValueError,
        r"k has shape \(1, 5, 4\), but q has \(5, 4\): give all one number of axes",
    ),
    "d of k": (
        {"k": K[:, :3]},
        ValueError,
        r"k has shape \(5, 3\) with d = 3, but q has d = 4: give all three the same last axis",
    ),
    "d of v": ({"v": V[:, :3]}, ValueError, r"v has shape \(5, 3\) with d = 3, but q has d = 4: .*"),
    "d = 0": (
        {n: np.ones((5, 0), np.float32) for n in "qkv"},
        ValueError,
        r"q has shape \(5, 0\), so d = 0: the last axis must hold 1 to 256 features",
    ),
    "d = 257": (
        {n: np.ones((5, 257), np.float32) for n in "qkv"},
        ValueError,
        r"q has shape \(5, 257\), so d = 257: .* 1 to 256 features",
    ),
    "lengths of k and v": (
        {"v": V[:3]},
        ValueError,
        r"k has shape \(5, 4\), but v has \(3, 4\): each key needs its value, so give both one shape",
    ),
    "heads of k and v": (
        dict(zip("qkv", (*arrays((4, 5, 4), (2, 5, 4))[:2], arrays((4, 5, 4))[0]))),
        ValueError,
        r"k has shape \(2, 5, 4\), but v has \(4, 5, 4\): .*",
    ),
    "no heads": (
        {n: np.ones((0, 5, 4), np.float32) for n in "qkv"},
        ValueError,
        r"q has shape \(0, 5, 4\), which holds no heads: pass at least one",
    ),
    "no heads in k": (
        dict(zip("qkv", arrays((4, 5, 4), (0, 5, 4)))),
        ValueError,
        r"k has shape \(0, 5, 4\), which holds no heads: pass at least one",
    ),
    "no batch": (
        {n: np.ones((0, 2, 5, 4), np.float32) for n in "qkv"},
        ValueError,
        r"q has shape \(0, 2, 5, 4\), which holds no heads: .*",
    ),
    "heads that do not divide": (
        dict(zip("qkv", arrays((4, 5, 4), (3, 5, 4)))),
        ValueError,
        "k and v have 3 heads, but q has 4: the heads of k and v must divide those of q",
    ),
    "more heads in k": (
        dict(zip("qkv", arrays((2, 5, 4), (4, 5, 4)))),
        ValueError,
        "k and v have 4 heads, but q has 2: .*",
    ),
    "another batch": (
        dict(zip("qkv", arrays((2, 3, 5, 4), (1, 3, 5, 4)))),
        ValueError,
        r"k has shape \(1, 3, 5, 4\), but q has \(2, 3, 5, 4\): give both the same batch, the first axis",
    ),
    "65,536 heads": (
        {n: huge(65_536, 1, 4) for n in "qkv"},
        ValueError,
        r"q has shape \(65536, 1, 4\), 65,536 heads over the batch: a CUDA grid holds 65,535, "
        "so call attention for parts of the batch, with dropout each with a seed of its own",
    ),
    "65,536 heads over the batch": (
        {n: huge(256, 256, 1, 4) for n in "qkv"},
        ValueError,
        "q has shape .*, 65,536 heads over the batch: .*",
    ),
    "scores beyond 64 bits": (
        {n: huge(2**33, 64) for n in "qkv"},
        ValueError,
        "the scores, heads × N_q × N_k, would hold 73,786,976,294,838,206,464 elements, more than 64-bit addresses "
        "reach: shorten q or k",
    ),
    "q beyond 64 bits": (
        {n: DeviceArray((2**56, 64)) for n in "qkv"},
        ValueError,
        "q would hold .* elements, more than 64-bit addresses reach: .*",
    ),
    "scale NaN": (
        {"scale": float("nan")},
        ValueError,
        "scale=nan is not finite in float32: pass a finite number, or None for 1/√d",
    ),
    "scale infinite": ({"scale": -np.inf}, ValueError, "scale=-inf is not finite in float32: .*"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, r"scale=1e\+39 is not finite in float32: .*"),
    "scale beyond floats": ({"scale": 10**400}, ValueError, r"scale=10+\.\.\.0+ is not finite in float32: .*"),
    "scale a word": ({"scale": "0.5"}, TypeError, "scale='0.5' is a str: pass a float, or None for 1/√d"),
    "scale complex": ({"scale": 0.5 + 0j}, TypeError, r"scale=\(0.5\+0j\) is a complex: .*"),
    "scale a bool": ({"scale": True}, TypeError, "scale=True is a bool: .*"),
    "scale an array": ({"scale": np.array(0.5)}, TypeError, r"scale=array\(0.5\) is a ndarray: .*"),
    "return_lse a word": ({"return_lse": "no"}, TypeError, "return_lse='no' is not a truth value: pass True or False"),
    "an unknown stage": ({"stage": "flahs"}, ValueError, "stage='flahs' is unknown: use one of 'naive', 'tiled'.*"),
    "a stage misspelt": (
        {"stage": "tilde"},
        ValueError,
        "stage='tilde' is unknown: use one of .*; did you mean 'tiled'.*",
    ),
    "a stage that is no name": ({"stage": 3}, TypeError, "stage=3 must be the name of a stage: one of 'naive', .*"),
    "an unknown device": ({"device": "tpu"}, ValueError, "device='tpu' is unknown: use one of .*"),
    "GPU arrays on the CPU": (
        {n: DeviceArray((5, 4)) for n in "qkv"} | {"device": "cpu"},
        TypeError,
        r"q is in GPU memory, but the kernels run on the CPU: copy it first, numba_flash.to_host\(q\), or pass "
        "device='gpu'",
    ),
    "one GPU array on the CPU": ({"k": DeviceArray((5, 4)), "device": "cpu"}, TypeError, "k is in GPU memory, .*"),
    "GPU array of integers": ({"k": DeviceArray((5, 4), "<i4")}, TypeError, "k has dtype int32: .*"),
}


@pytest.mark.parametrize("changes, error, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused(changes, error, message):
    with pytest.raises(error) as caught:
        nf.attention(**{"q": Q, "k": K, "v": V} | changes)
    assert type(caught.value) is error
    assert re.fullmatch(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 250


def test_positional_options_are_refused():
    with pytest.raises(TypeError, match="positional"):
        nf.attention(Q, K, V, "naive")


def test_a_mix_of_host_and_device_arrays_is_refused():
    operands = attention_module._operands({"q": Q, "k": DeviceArray((5, 4)), "v": V})
    with pytest.raises(TypeError, match=r"k is in GPU memory, but q is a NumPy array: bring all to one side with"):
        attention_module._at("gpu", operands)
    operands = attention_module._operands({"q": Q, "k": K, "v": V})
    operands[0] = operands[0]._replace(on_device=True)
    with pytest.raises(TypeError, match=r"k is a NumPy array, but q is in GPU memory: bring all to one side with"):
        attention_module._at("gpu", operands)


def test_a_gpu_that_is_not_there():
    if not gpu_problem():
        pytest.skip("there is a GPU")
    with pytest.raises(errors.KernelError, match="device='gpu' cannot be used: "):
        nf.attention(Q, K, V, device="gpu")


def test_copies_beyond_free_memory_are_refused_before_anything_is_allocated(monkeypatch):
    allocated = []
    monkeypatch.setattr(np, "require", lambda *args, **keywords: allocated.append(args))
    q, k = huge(2**36, 64), huge(3, 64)  # 16 TiB
    with pytest.raises(
        errors.OutOfMemory, match=r"contiguous copy of q, k and v needs 17,592,186,0\d\d,\d\d\d B; [\d,]+ B are free"
    ):
        nf.attention(q, k, k)
    assert not allocated


def test_out_of_memory_is_a_memory_error_that_counts_only_copies(monkeypatch):
    monkeypatch.setattr(attention_module.engine, "free_bytes", lambda device=None: 150)
    with pytest.raises(MemoryError, match=r"needs 160 B; 150 B are free"):
        nf.attention(Q[::-1], K[:, ::-1], V, device="cpu")
    monkeypatch.setattr(attention_module.engine, "free_bytes", lambda device=None: 1000)
    nf.attention(Q[::-1], K[:, ::-1], V, device="cpu")


def test_axes_of_one_element():
    """A view with a new axis has odd strides there, on the host and on the device."""
    q, k, v = arrays((3, 6, 4))
    expected = nf.attention(q, k, v)
    batched = nf.attention(q[:, None], k[:, None], v[:, None])
    np.testing.assert_array_equal(batched[:, 0], expected)


# ------------------------------------------------------------------------------------------------------- the backward

OUT, LSE = nf.attention(Q, K, V, return_lse=True)
GIVEN = {"q": Q, "k": K, "v": V, "dout": np.ones_like(Q), "out": OUT, "lse": LSE}


def with_one(x, value):
    x = x.copy()
    x.flat[1] = value
    return x


REFUSED_BACKWARD = {  # name: (arguments in place of the right ones, error, all of the message)
    "dout a list": ({"dout": [[1.0]]}, TypeError, r"dout=\[\[1.0\]\] is a list: pass a NumPy array.*"),
    "dout a number": ({"dout": 1.0}, TypeError, "dout=1.0 is a float: pass a NumPy array.*"),
    "dout of another dtype": (
        {"dout": np.ones((5, 4))},
        TypeError,
        r"dout has dtype float64, but q has float32: give all one dtype, for example dout.astype\(np.float32\)",
    ),
    "dout of another shape": (
        {"dout": np.ones((5, 3), np.float32)},
        ValueError,
        r"dout has shape \(5, 3\): with q \(5, 4\) it must be \(5, 4\)",
    ),
    "out of another shape": (
        {"out": OUT[:-1]},
        ValueError,
        r"out has shape \(4, 4\): with q \(5, 4\) it must be \(5, 4\)",
    ),
    "out of another rank": (
        {"out": OUT[None]},
        ValueError,
        r"out has shape \(1, 5, 4\): with q \(5, 4\) it must be .*",
    ),
    "out of another dtype": ({"out": OUT.astype(float)}, TypeError, "out has dtype float64, but q has float32: .*"),
    "out alone": ({"lse": None}, ValueError, "out is given without lse: pass both, or none .*"),
    "lse alone": ({"out": None}, ValueError, "lse is given without out: pass both, or none .*"),
    "lse of another shape": (
        {"lse": LSE[:, None]},
        ValueError,
        r"lse has shape \(5, 1\): with q \(5, 4\) it must be \(5,\)",
    ),
    "lse of integers": ({"lse": LSE.astype(int)}, TypeError, "lse has dtype int64: .*"),
    "lse with NaN": (
        {"lse": with_one(LSE, np.nan)},
        ValueError,
        r"lse\[1\] is nan, and a row with keys has a finite lse: pass what attention\(.*",
    ),
    "lse with -infinity": ({"lse": with_one(LSE, -np.inf)}, ValueError, r"lse\[1\] is -inf, and a row with keys .*"),
    "lse with infinity": ({"lse": with_one(LSE, np.inf)}, ValueError, r"lse\[1\] is inf, and a row with keys .*"),
    "atomics in a stage without": (
        {"stage": "flash", "deterministic": False},
        ValueError,
        "deterministic=False: stage 'flash' has no variant with atomics; leave it True, or pass stage='flash2'",
    ),
    "deterministic a word": ({"deterministic": "no"}, TypeError, "deterministic='no' is not a truth value: .*"),
    "q of another length": ({"q": Q[:3]}, ValueError, r"dout has shape \(5, 4\): with q \(3, 4\) it must be .*"),
    "blocks that do not fit": (
        {"blocks": (8, 2048)},
        ValueError,
        r"blocks=\(8, 2048\): the tiles of 'flash2', backward, in float32 with d = 4 need .* blocks=\(8, .*\) fits",
    ),
    "an unknown stage": ({"stage": "flsh"}, ValueError, "stage='flsh' is unknown: .*did you mean 'flash'.*"),
}


@pytest.mark.parametrize("changes, error, message", REFUSED_BACKWARD.values(), ids=REFUSED_BACKWARD.keys())
def test_refused_backward(changes, error, message):
    with pytest.raises(error) as caught:
        nf.attention_backward(**GIVEN | changes)
    assert re.fullmatch(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 300


def test_lse_of_rows_without_keys_may_be_minus_infinity():
    out, lse = nf.attention(Q, K[:0], V[:0], return_lse=True)
    dq, dk, _ = nf.attention_backward(Q, K[:0], V[:0], GIVEN["dout"], out=out, lse=lse)
    assert np.array_equal(dq, np.zeros_like(Q))
    assert dk.shape == (0, 4)


def test_backward_takes_any_layout_and_leaves_its_input_alone():
    arguments = {name: np.asfortranarray(x) for name, x in GIVEN.items()}
    before = {name: x.copy() for name, x in arguments.items()}
    for one, other in zip(nf.attention_backward(**arguments), nf.attention_backward(**GIVEN), strict=True):
        assert np.array_equal(one, other)
        assert one.flags.owndata or one.base is not None
    assert all(np.array_equal(arguments[name], before[name]) for name in before)


@device_memory
def test_backward_of_device_arrays_stays_on_the_device():
    on_device = {name: nf.to_device(x) for name, x in GIVEN.items()}
    for got, expected in zip(nf.attention_backward(**on_device), nf.attention_backward(**GIVEN), strict=True):
        assert hasattr(got, "__cuda_array_interface__") or type(got).__name__ == "FakeCUDAArray"
        assert np.array_equal(nf.to_host(got), expected)


def test_lse_of_scores_that_overflow_is_not_answered_with_itself():
    """What attention gave is passed, and is not finite: the way out is in q and k."""
    k = K.copy()
    k[0, 0] = np.inf
    out, lse = nf.attention(Q, k, V, return_lse=True, device="cpu")
    with pytest.raises(ValueError, match="if you did, q or k holds values that are not finite, or .* overflow$"):
        nf.attention_backward(Q, k, V, np.ones_like(out), out=out, lse=lse, device="cpu")
