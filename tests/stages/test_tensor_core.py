"""Stage `tensor_core`: warps in Python against float64, and what the compiler makes of the kernels."""

import math
import re

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference, testing
from numba_flash.blocks import tiles
from numba_flash.masks import Mask, make_first, make_seen, no_mask
from numba_flash.stages import tensor_core, tensor_core_backward

from ..ptx.compiling import BITS, BYTES, FLOATS, assembled, pretended, ptx_of, twin_ptx, types  # noqa: F401
from ..ptx.emulator import run, to_bits, to_float

SCALE = types.float32
ROUNDING = {"f16": 2**-11, "bf16": 2**-8}
FORWARD = BITS, BITS, BITS, BYTES, BITS, FLOATS, SCALE
DKDV = BITS, BITS, BITS, BYTES, BITS, FLOATS, FLOATS, BITS, BITS, SCALE
DQ = BITS, BITS, BITS, BYTES, BITS, FLOATS, FLOATS, BITS, SCALE
SPILLED = {64: 8, 128: 128}  # bytes a thread, at most: m, l and numbers that the loop leaves alone, once a tile
CASES = [  # N, N_k, d, heads of Q and of K, kind, causal, keys hidden, scale, (Br, Bc)
    pytest.param(70, 80, 64, 2, 1, "f16", 0, 0, 0.2, (64, 32), id="grouped heads, three tiles"),
    pytest.param(100, 70, 64, 1, 1, "bf16", 1, 1, -0.2, (64, 32), id="rows without keys"),
    pytest.param(70, 130, 128, 1, 1, "f16", 1, 0, 0.1, (64, 64), id="causal, 128 columns"),
    pytest.param(1, 1, 64, 1, 1, "f16", 0, 0, -0.1, (64, 16), id="one key: its gradients of Q and K are 0"),
    pytest.param(1, 3, 64, 1, 1, "bf16", 0, 0, 1e37, (64, 16), id="huge scores"),
]


def made(N, N_k, d, H, G, kind, keys_hidden):
    """Q, K, V, dO as bits and as float64, and a key mask."""
    random = np.random.default_rng(N)
    shapes = (H, N, d, 2, 0), (G, N_k, d, 1, 0), (G, N_k, d, 1, 0.5), (H, N, d, 1, 0)
    bits = [to_bits(random.standard_normal((h, n, d)) * size + mean, kind) for h, n, d, size, mean in shapes]
    keys = np.ones((1, 1), np.uint8)
    if keys_hidden:
        keys = (random.random((1, N_k)) < 0.6).astype(np.uint8)
        keys[0, : N_k // 3] = 0
    return bits, [to_float(x, kind).astype(float)[None] for x in bits], keys


def nothing(array):
    return np.full(array.shape, 0xFFFF, np.uint16)


def close(bits, expected, kind):
    """Each error against the largest number: P and dS are rounded, and the result is."""
    return np.abs(to_float(bits, kind) - expected[0]).max() <= 3 * ROUNDING[kind] * np.abs(expected).max()


def limits(q, k, v, dout, scale, kind, masks):
    """The bounds of the errors of out, dq, dk and dv."""
    name = {"f16": "float16", "bf16": "bfloat16"}[kind]
    gradients = testing.half_gradient_bounds(q, k, v, dout, scale, name, **masks)
    return testing.half_bounds(q, k, v, scale, name, **masks)["out"], *(gradients[x] for x in ("dq", "dk", "dv"))


@pytest.mark.parametrize("N, N_k, d, H, G, kind, causal, keys_hidden, scale, blocks", CASES)
def test_forward(N, N_k, d, H, G, kind, causal, keys_hidden, scale, blocks):
    (Q, K, V, _), (q, k, v, _), keys = made(N, N_k, d, H, G, kind, keys_hidden)
    O, L = nothing(Q), np.full((H, N), np.nan, np.float32)
    Br, Bc = blocks
    kernel = tensor_core.make_forward(Br, Bc, d, kind, keys_hidden, make_seen(causal), math.copysign(1, scale))
    shared = tensor_core.shared_bytes(Br, Bc, d)
    run(kernel, (tiles(N, Br), H), 128, shared, kind, Q, K, V, keys, O, L, np.float32(abs(scale)))
    masks = {"key_mask": keys.astype(bool)} if keys_hidden else {}
    out, lse = reference.attention(q, k, v, float(np.float32(scale)), causal=bool(causal), **masks)
    seen = np.isfinite(lse[0])
    assert close(O, out, kind)
    assert np.array_equal(np.isneginf(L), ~seen) and not to_float(O, kind)[~seen].any()
    assert (np.abs(L[seen] - lse[0][seen]) <= 4e-6 * np.maximum(1, np.abs(lse[0][seen]))).all()


@pytest.mark.parametrize("N, N_k, d, H, G, kind, causal, keys_hidden, scale, blocks", CASES[:4])
def test_backward(N, N_k, d, H, G, kind, causal, keys_hidden, scale, blocks):
    (Q, K, V, dO), (q, k, v, dout), keys = made(N, N_k, d, H, G, kind, keys_hidden)
    masks = {"causal": bool(causal)} | ({"key_mask": keys.astype(bool)} if keys_hidden else {})
    out, lse = reference.attention(q, k, v, scale, **masks)
    O, L, D = to_bits(out[0], kind), lse[0].astype(np.float32), np.full((H, N), np.nan, np.float32)
    rowsum, rows = tensor_core_backward.make_rowsum(kind, d)
    run(rowsum, (tiles(N, rows), H), 128, 0, kind, dO, O, D)
    assert np.abs(D - (dout[0] * to_float(O, kind)).sum(-1)).max() < 1e-5
    dQ, dK, dV = map(nothing, (Q, K, V))
    given = Q, K, V, keys, dO, L, D
    kernel = tensor_core_backward.make_dKdV(32, 64, d, kind, keys_hidden, make_first(causal))
    shared = tensor_core_backward.bytes_dKdV(32, 64, d)
    run(kernel, (tiles(N_k, 64), G), 128, shared, kind, *given, dK, dV, np.float32(scale))
    kernel = tensor_core_backward.make_dQ(64, 32, d, kind, keys_hidden, make_seen(causal))
    run(kernel, (tiles(N, 64), H), 128, tensor_core_backward.bytes_dQ(64, 32, d), kind, *given, dQ, np.float32(scale))
    expected = reference.attention_backward(q, k, v, dout, scale, **masks)
    for bits, true, limit in zip((dQ, dK, dV), expected, limits(q, k, v, dout, scale, kind, masks)[1:]):
        assert (np.abs(to_float(bits, kind) - true[0]) <= limit[0]).all()


LENGTHS = [(1, 1), (64, 64), (129, 129), (177, 300), (300, 177), (1000, 1000), (5, 0)]


@pytest.mark.skipif(nf.device().name != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("N, N_k", LENGTHS)
@pytest.mark.parametrize("causal, keys_hidden", [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("d", [64, 128])
def test_on_the_gpu(d, kind, causal, keys_hidden, N, N_k):
    bits, (q, k, v, dout), keys = made(N, N_k, d, 4, 2, kind, keys_hidden)
    dtype = np.float16 if kind == "f16" else np.dtype("V2")
    Q, K, V, dO = (nf.to_device(x).view(dtype) for x in bits)
    mask = Mask(bool(causal), nf.to_device(keys), bool(keys_hidden), no_mask().keys)
    masks = {"causal": bool(causal)} | ({"key_mask": keys.astype(bool)} if keys_hidden else {})
    out, lse = reference.attention(q, k, v, -0.1, **masks)
    results = []
    for _ in range(2):
        O, L = tensor_core.forward(Q, K, V, -0.1, mask=mask)
        gradients = tensor_core_backward.backward(Q, K, V, dO, -0.1, O=O, L=L, mask=mask)
        results.append([nf.to_host(x.view(np.uint16)) for x in (O, *gradients)] + [nf.to_host(L)])
    for first, second in zip(*results):
        assert np.array_equal(first, second)
    *bits, L = results[0]
    seen = np.isfinite(lse[0])
    assert np.array_equal(np.isneginf(L), ~seen)
    assert (np.abs(L[seen] - lse[0][seen]) <= 4e-6 * np.maximum(1, np.abs(lse[0][seen]))).all()
    expected = out, *reference.attention_backward(q, k, v, dout, -0.1, **masks)
    for x, true, limit in zip(bits, expected, limits(q, k, v, dout, -0.1, kind, masks)):
        assert (np.abs(to_float(x, kind) - true[0]) <= limit[0]).all()


def kernels(d, kind, causal, masked):
    """name -> (kernel, its signature), with the tiles that are used."""
    Br, Bc = tensor_core.DEFAULT[d]
    made = {"forward": (tensor_core.make_forward(Br, Bc, d, kind, masked, make_seen(causal)), FORWARD)}
    Br, Bc = tensor_core_backward.KEYS_OWNED[d]
    made["dKdV"] = tensor_core_backward.make_dKdV(Br, Bc, d, kind, masked, make_first(causal)), DKDV
    Br, Bc = tensor_core_backward.QUERIES_OWNED[d]
    made["dQ"] = tensor_core_backward.make_dQ(Br, Bc, d, kind, masked, make_seen(causal)), DQ
    return made


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind, causal, masked", [("f16", 0, 0), ("bf16", 1, 1)])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["forward", "dKdV", "dQ"])
def test_ptx(pretended, tmp_path, name, d, kind, causal, masked, cc):  # noqa: F811
    kernel, signature = kernels(d, kind, causal, masked)[name]
    ptx = ptx_of(kernel, signature, cc)
    assert ".local" not in ptx and ".f64" not in ptx and "call" not in ptx.replace("calling", "")
    for instruction in (
        f"m16n8k16.row.col.f32.{kind}",
        "x4.trans.shared",
        "cp.async.cg.shared.global",
        "cp.async.wait_group",
    ):
        assert instruction in ptx
    said = assembled(ptx, tmp_path, cc)
    if said:
        assert "C75" not in said
        assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= SPILLED[d]


@pytest.mark.parametrize("name, counted", [("forward", 5), ("dKdV", 8), ("dQ", 7)])
def test_ptx_of_the_counting_twin(pretended, name, counted):  # noqa: F811
    """One counter a tensor that is accessed, added to by each thread at its end."""
    kernel, signature = kernels(64, "f16", 0, 0)[name]
    ptx = twin_ptx(kernel, signature)
    assert ptx.count("atom.global.add.u64") == counted
    assert ".local" not in ptx
