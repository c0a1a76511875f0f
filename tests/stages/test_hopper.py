"""Stage `hopper`: what lies where in shared memory; the compiled code, without a GPU; exactness and bills, on one."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import errors, masks
from numba_flash.stages import hopper

COMPILES = importlib.util.find_spec("numba_cuda") is not None and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1"
needs_numba_cuda = pytest.mark.skipif(not COMPILES, reason="needs numba-cuda (pip install numba_flash[cu13])")
SHARED = 232448  # bytes that a block can have on an H100 or H200


def on_hopper():
    if nf.device().name != "gpu":
        return False
    from numba_flash.engine.gpu import limits

    return limits().compute_capability == (9, 0)


# ---------------------------------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize("d", [64, 128])
def test_shared_memory_is_shared_out_without_overlap(d):
    plan = hopper.make_plan(d)
    parts = [(plan.O, plan.Br * d * 2)]
    for ring in (plan.Q, plan.K, plan.V):
        assert ring.first % 1024 == 0 and ring.size % 1024 == 0 and ring.full % 8 == 0
        parts += [(ring.first, ring.slots * ring.size), (ring.full, 8 * ring.slots), (ring.empty, 8 * ring.slots)]
    parts.sort()
    assert parts[0][0] == 0
    for (start, size), (following, _) in pairwise(parts):
        assert start + size == following
    end = sum(parts[-1])
    assert end + 1023 <= plan.shared_bytes <= SHARED - 8 * plan.Q.slots  # beside them: which tile is in each slot of Q


@pytest.mark.parametrize("d", [64, 128])
def test_registers_that_move_are_those_of_the_launch(d):
    plan = hopper.make_plan(d)
    launched = 65536 // plan.threads // 8 * 8
    consumer, producer = plan.registers
    assert plan.consumers * consumer + producer <= (plan.consumers + 1) * launched


@pytest.mark.parametrize("d", [64, 128])
def test_arrivals_are_those_of_the_readers(d):
    plan = hopper.make_plan(d)
    assert plan.threads == 128 * (plan.consumers + 1) and plan.Br == 64 * plan.consumers
    assert plan.K.readers == plan.V.readers == plan.consumers  # one thread of each group
    assert plan.Q.readers == 4 * plan.consumers  # one lane of each warp


def test_heads_of_one_key_head_are_handed_out_together():
    assert hopper.heads_together(8192, 128, 4, causal=True) == 5 * 4 - 5 * 4 % 4
    assert hopper.heads_together(10**6, 128, 4, causal=True) == 4
    assert hopper.heads_together(8192, 128, 4, causal=False) == 1


# ------------------------------------------------------------------------------------------------------ what it refuses
def test_another_device_is_refused_with_a_sentence():
    Q = np.zeros((1, 4, 64), np.float16)
    with pytest.raises(errors.Unsupported, match=r"compute capability 9\.0 \(H100, H200\)"):
        hopper.forward(Q, Q, Q, 1.0, device="cpu")


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that is there to be asked what it is, and no more."""
    pytest.importorskip("numba_cuda")
    from numba_flash.engine import gpu

    here = SimpleNamespace(name="H200", compute_capability=(9, 0))
    monkeypatch.setattr(hopper, "device_name", lambda device: "gpu")
    monkeypatch.setattr(gpu, "limits", lambda: here)
    return here


def test_an_older_gpu_is_refused(pretended):
    pretended.name, pretended.compute_capability = "A100", (8, 0)
    with pytest.raises(errors.Unsupported, match=r"9\.0 .*A100 has 8\.0"):
        hopper.check(np.zeros((1, 4, 64), np.float16), None, None, None)


@pytest.mark.parametrize(
    "shape, dtype, blocks, said",
    [
        ((1, 4, 64), np.float32, None, "float32"),
        ((1, 4, 96), np.float16, None, "not 96"),
        ((1, 4, 64), np.float16, (64, 64), r"\(64, 64\).*\(192, 128\)"),
    ],
)
def test_input_it_cannot_take_is_named(pretended, shape, dtype, blocks, said):
    with pytest.raises(ValueError, match=said):
        hopper.check(np.zeros(shape, dtype), None, blocks, None)


def test_what_it_takes_passes(pretended):
    for dtype in (np.float16, np.dtype("V2")):
        hopper.check(np.zeros((1, 4, 128), dtype), None, (128, 128), None)


def test_dropout_is_refused(pretended):
    mask = masks.Mask(False, None, False, None, p_drop=np.float64(0.1))
    with pytest.raises(errors.Unsupported, match="flash2"):
        hopper.check(np.zeros((1, 4, 64), np.float16), mask, None, None)


# ---------------------------------------------------------------------------------------------------- the compiled code
# d, dtype, causal, masked, hide_all, scaled, simple
VARIANTS = {
    "d128": (128, "f16", False, False, False, False, False),
    "d128 causal": (128, "f16", True, False, False, False, False),
    "d64 causal": (64, "f16", True, False, True, False, False),
    "d64 bf16, all": (64, "bf16", True, True, True, True, False),
    "d128 bf16, simple": (128, "bf16", False, True, True, True, True),
}


def arguments():
    from numba.cuda import types

    def array(ty, ndim):
        return types.Array(ty, ndim, "C")

    half = array(types.uint16, 3)
    others = array(types.uint8, 2), array(types.uint64, 2), half, array(types.float32, 2), array(types.int32, 1)
    return half, half, half, *others, types.int64, types.int64, types.float32


def kernel_of(variant):
    from numba_flash.stages import hopper_kernels

    d, dtype, causal, masked, hide_all, scaled, simple = VARIANTS[variant]
    plan = hopper.make_plan(d, simple)
    return hopper_kernels.make_forward(plan, dtype, causal, masked, hide_all, scaled), plan.threads


@cache
def ptx_of(variant):
    from numba import cuda
    from numba.cuda import dispatcher

    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
    try:
        kernel, threads = kernel_of(variant)
        options = {"cc": (9, 0, "a"), "fastmath": True, "launch_bounds": (threads, 1)}
        return cuda.compile_ptx(kernel.py_func, arguments(), **options)[0]
    finally:
        dispatcher.get_current_device = before


@cache
def assembled(variant, folder):
    """What ptxas says, and the machine code's file."""
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(re.sub(r"^\.version 9\.\d", ".version 9.0", ptx_of(variant), flags=re.M))
    command = ["ptxas", "-arch=sm_90a", "-v", str(source), "-o", str(cubin)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr, cubin


@needs_numba_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_ptx_keeps_all_tiles_in_registers_and_uses_hopper(variant):
    ptx, dtype = ptx_of(variant), VARIANTS[variant][1]
    assert not re.search(r"\.local\b", ptx)
    for expected in (
        f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{dtype}.{dtype}",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier",
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group",
        "mbarrier.try_wait.parity",
        "setmaxnreg.inc",
        "setmaxnreg.dec",
        ".maxntid",
    ):
        assert expected in ptx, expected
    assert ("bar.arrive" in ptx) == (not VARIANTS[variant][6])


@needs_numba_cuda
@pytest.mark.skipif(not shutil.which("ptxas"), reason="needs ptxas")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ptx_is_assembled_without_spills_and_serialisation(variant, tmp_path):
    said, cubin = assembled(variant, tmp_path)
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said) == [("0", "0")]
    assert not re.findall(r"C75\d\d", said)
    disassembler = shutil.which("nvdisasm") or shutil.which("cuobjdump")
    if disassembler:
        sass = subprocess.run([disassembler, *(["-sass"] if "cuobjdump" in disassembler else []), str(cubin)],
                              capture_output=True, text=True).stdout  # fmt: skip
        assert all(name in sass for name in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"))


# --------------------------------------------------------------------------------------------------------- on a GPU
hopper_only = pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")


def run(H, G, N, N_k, d, causal=False, scale=None, keys=None):
    """O, L and float64's O, L, of the stage itself."""
    random = np.random.default_rng(N + N_k)
    q, k, v = (random.standard_normal((heads, n, d)).astype(np.float16) for heads, n in ((H, N), (G, N_k), (G, N_k)))
    v += np.float16(0.5)
    scale = 2 / math.sqrt(d) if scale is None else scale
    one = masks.no_mask().keys
    mask = masks.Mask(causal, one if keys is None else nf.to_device(keys), keys is not None, one)
    O, L = hopper.forward(*(nf.to_device(x) for x in (q, k, v)), scale, mask=mask)
    S = np.einsum("hid,hjd->hij", q.astype(float), np.repeat(k.astype(float), H // G, 0)) * scale
    seen = masks.to_dense(N, N_k, causal, keys)
    S = np.where(seen if keys is None else np.repeat(seen, H // len(keys), 0), S, -math.inf)
    m = np.max(S, axis=-1, initial=-1e300)
    P = np.exp(S - m[..., None])
    with np.errstate(divide="ignore"):
        expected = m + np.log(P.sum(-1))
    P /= np.where(P.sum(-1) > 0, P.sum(-1), 1)[..., None]
    return nf.to_host(O), nf.to_host(L), P @ np.repeat(v.astype(float), H // G, 0), expected


@hopper_only
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("N, N_k", [(1, 1), (64, 64), (129, 129), (177, 300), (300, 177), (384, 384), (1000, 37)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.1])
def test_exact_on_hopper(d, N, N_k, causal, scale):
    O, L, reference, expected = run(4, 2, N, N_k, d, causal, scale)
    assert np.linalg.norm(O - reference) <= 6e-4 * np.linalg.norm(reference)
    np.testing.assert_array_equal(np.isneginf(L), np.isneginf(expected) | (expected < -1e299))
    there = np.isfinite(L)
    np.testing.assert_allclose(L[there], expected[there], rtol=0, atol=1e-4 * (1 + np.abs(expected[there]).max()))
    assert not O[~there].any()


@hopper_only
@pytest.mark.parametrize("d", [64, 128])
def test_key_mask_on_hopper(d):
    keys = (np.random.default_rng(0).random((2, 333)) > 0.5).astype(np.uint8)
    keys[1, :200] = 0
    O, _, reference, _ = run(4, 4, 300, 333, d, keys=keys)
    assert np.linalg.norm(O - reference) <= 6e-4 * np.linalg.norm(reference)


@hopper_only
def test_tma_boxes_are_counted_on_hopper():
    H, G, N, N_k, d = 4, 2, 300, 500, 64
    with nf.ledger() as bill:
        run(H, G, N, N_k, d)
    Tr = -(-N // hopper.make_plan(d).Br)
    assert (bill["Q"].loads, bill["K"].loads, bill["V"].loads) == (H * N * d, H * Tr * N_k * d, H * Tr * N_k * d)
    assert (bill["O"].stores, bill["L"].stores) == (H * N * d, H * N)
    assert (bill["queue"].atomics, bill["queue"].stores) == (Tr * H, 1)
