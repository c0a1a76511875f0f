"""Causal order and key masks in every stage and both passes: exact, their bills, and rows that see no key."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference, testing

SIZES = [  # batch, heads, kv_heads, N, N_k, d
    (1, 1, 1, 1, 1, 1), (1, 2, 1, 7, 5, 3), (2, 2, 2, 5, 7, 3), (2, 4, 2, 17, 23, 8), (1, 1, 1, 23, 17, 8),
    (1, 1, 1, 5, 2, 4), (1, 1, 1, 2, 5, 4), (1, 1, 1, 5, 0, 4), (1, 2, 1, 20, 20, 16), (1, 1, 1, 70, 65, 16),
]  # fmt: skip
MASKS = [(True, False), (False, True), (True, True)]
TILES = {"naive": [None], "tiled": [4], "online_softmax": [5], "flash": [None, (5, 3)], "flash2": [None, (5, 3)]}
CONFIGURATIONS = [(stage, blocks) for stage in nf.STAGES for blocks in TILES[stage]]
configurations = pytest.mark.parametrize("stage, blocks", CONFIGURATIONS)
masks = pytest.mark.parametrize("causal, masked", MASKS, ids=["causal", "keys", "both"])


def inputs(size, masked, dtype, seed=0):
    """q, k, v, dout, and a key mask that hides the first three keys of the first batch, or None."""
    B, H, G, N, N_k, d = size
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal(s) for s in ((B, H, N, d), (B, G, N_k, d), (B, G, N_k, d), (B, H, N, d)))
    key_mask = rng.random((B, N_k)) < 0.6 if masked else None
    if masked:
        key_mask[0, :3] = False
    return *(x.astype(dtype) for x in (2 * q, 2 * k, v + 1, dout)), key_mask


def passes(stage, blocks):
    """(name, deterministic, from out and lse) of each way to the gradients."""
    for deterministic in (True, False) if stage == "flash2" else (True,):
        for from_lse in (False, True):
            yield deterministic, from_lse


@pytest.mark.parametrize("size", SIZES, ids=str)
@masks
@configurations
def test_bill_equals_the_closed_form(stage, blocks, causal, masked, size):
    B, H, G, N, N_k, d = size
    q, k, v, dout, key_mask = inputs(size, masked, np.float32)
    sizes = {"n": N, "n_k": N_k, "d": d, "heads": H, "kv_heads": G, "batch": B}
    asked = sizes | {"causal": causal, "key_mask": masked, "blocks": blocks}
    how = {"stage": stage, "causal": causal, "key_mask": key_mask, "blocks": blocks}
    with nf.ledger() as bill:
        out, lse = nf.attention(q, k, v, return_lse=True, **how)
    assert nf.predict(stage, return_lse=True, **asked).diff(bill) == []
    for deterministic, from_lse in passes(stage, blocks):
        with nf.ledger() as bill:
            kept = {"out": out, "lse": lse} if from_lse else {}
            nf.attention_backward(q, k, v, dout, deterministic=deterministic, **kept, **how)
        direction = "backward" if from_lse else "both"
        predicted = nf.predict(stage, direction=direction, deterministic=deterministic, **asked)
        assert predicted.diff(bill) == []
        assert predicted == bill


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@masks
@configurations
def test_exact(stage, blocks, causal, masked, dtype):
    """Within twice the error of naive and 4 · eps, in float64 within 1e-12, of the size of the terms."""
    for seed, size in enumerate(SIZES):
        q, k, v, dout, key_mask = inputs(size, masked, dtype, seed)
        how = {"causal": causal, "key_mask": key_mask}
        results = run(stage, blocks, q, k, v, dout, **how)
        yardstick = run("naive", None, q, k, v, dout, **how)[0]
        truth = *reference.attention(q, k, v, **how), *reference.attention_backward(q, k, v, dout, **how)
        largest = np.abs(reference.scores(*(x.astype(np.float64) for x in (q, k)))).max(initial=1)
        unit = 4 * np.finfo(dtype).eps if dtype == "float32" else 1e-12 * largest
        bounds = testing.gradient_bounds(q, k, v, dout, dtype=dtype, from_lse=True)
        sizes = [unit * max(1, np.abs(x[np.isfinite(x)]).max(initial=0)) for x in truth[:2]] + list(bounds.values())
        for result in results:
            for got, own, expected, size_of_terms in zip(result, yardstick, truth, sizes, strict=True):
                assert got.dtype == dtype
                assert np.array_equal(np.isneginf(got), np.isneginf(expected))
                seen = np.isfinite(expected)
                error, naive = (np.abs(x[seen] - expected[seen]).max(initial=0) for x in (got, own))
                assert error <= (2 * naive if dtype == "float32" else 0) + size_of_terms


def run(stage, blocks, q, k, v, dout, **how):
    """(out, lse, dq, dk, dv) by each way to the gradients."""
    how = how | {"stage": stage, "blocks": blocks}
    out, lse = nf.attention(q, k, v, return_lse=True, **how)
    return [
        (out, lse, *nf.attention_backward(
            q, k, v, dout, deterministic=deterministic, **({"out": out, "lse": lse} if from_lse else {}), **how))
        for deterministic, from_lse in passes(stage, blocks)
    ]  # fmt: skip


@masks
@pytest.mark.parametrize("stage", nf.STAGES)
def test_central_differences(stage, causal, masked):
    q, k, v, dout, key_mask = inputs((2, 2, 1, 6, 8, 5), masked, np.float64)
    how = {"stage": stage, "causal": causal, "key_mask": key_mask}
    q, k, h = q / 2, k / 2, 1e-5
    rng = np.random.default_rng(1)
    for at, gradient in enumerate(nf.attention_backward(q, k, v, dout, **how)):
        step = rng.standard_normal(gradient.shape)
        ends = [[x + sign * h * step if i == at else x for i, x in enumerate((q, k, v))] for sign in (1, -1)]
        up, down = ((nf.attention(*moved, **how) * dout).sum() for moved in ends)
        assert (up - down) / (2 * h) == pytest.approx((gradient * step).sum(), abs=1e-8, rel=1e-8)


@pytest.mark.parametrize("stage", nf.STAGES)
def test_no_key_at_all(stage):
    q, k, v, dout, _ = inputs((1, 2, 1, 9, 7, 4), False, np.float32)
    nothing = np.zeros((1, 7), bool)
    for result in run(stage, None, q, k, v, dout, key_mask=nothing):
        out, lse, *gradients = result
        assert np.isneginf(lse).all()
        assert all(np.array_equal(x, np.zeros_like(x)) for x in (out, *gradients))


@pytest.mark.parametrize("stage", ["online_softmax", "flash", "flash2"])
def test_hidden_tiles_change_no_bit(stage):
    """Tiles of hidden keys before, between and after those that are seen: m, l and O stay as they are, bit for bit."""
    q, k, v, _, _ = inputs((1, 1, 1, 6, 8, 4), False, np.float32)
    blocks = 4 if stage == "online_softmax" else (6, 4)
    alone = nf.attention(q, k, v, stage=stage, blocks=blocks, return_lse=True)
    rng = np.random.default_rng(7)
    noise = [rng.standard_normal((1, 1, 4, 4)).astype(np.float32) * 100 for _ in range(6)]
    wider = [
        np.concatenate([a, x[:, :, :4], b, x[:, :, 4:], c], axis=2) for x, (a, b, c) in ((k, noise[:3]), (v, noise[3:]))
    ]
    seen = np.repeat([[False, True, False, True, False]], 4, axis=1).reshape(1, 5, 4)
    seen = np.repeat(np.array([False, True, False, True, False]), 4)[None]
    among = nf.attention(q, *wider, key_mask=seen, stage=stage, blocks=blocks, return_lse=True)
    for one, other in zip(alone, among, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("stage", nf.STAGES)
def test_a_hidden_key_has_no_weight_beside_scores_far_below(stage):
    """Every live score is about −2·10⁹: to a mask of −10⁹ the hidden key would be all there is."""
    q = np.full((3, 4), -(2.0**15), np.float32)
    k = np.full((6, 4), 2.0**14, np.float32)
    v = np.arange(6, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    key_mask = np.arange(6) != 5
    out = nf.attention(q, k, v, stage=stage, key_mask=key_mask, blocks=TILES[stage][-1])
    assert np.array_equal(out, np.full((3, 4), 2, np.float32))


def test_causal_order_halves_the_traffic_of_keys():
    dense, causal = (nf.predict("flash2", n=4096, d=64, causal=causal) for causal in (False, True))
    loads = [bill["K"].loads + bill["V"].loads for bill in (dense, causal)]
    assert loads[1] <= 0.53 * loads[0]
    for stage in ("flash", "flash2"):
        for direction in ("forward", "backward"):
            dense, causal = (
                nf.predict(stage, n=4096, d=64, causal=causal, direction=direction) for causal in (False, True)
            )
            assert causal.elements < 0.6 * dense.elements
            assert nf.flops(stage, n=4096, d=64, causal=True, direction=direction) < 0.6 * nf.flops(
                stage, n=4096, d=64, direction=direction
            )


def test_prediction_of_any_size():
    one = nf.predict("flash2", n=2**40, d=64, causal=True)
    assert one["K"].loads == sum(128 * k for k in (1, 2**33)) * 2**32 * 64  # an arithmetic series of 2³³ tiles


BAD = [
    ({"causal": 1}, TypeError, "causal=1 is not a truth value"),
    ({"key_mask": [True] * 7}, TypeError, "key_mask=.* is a list: pass a NumPy array"),
    ({"key_mask": np.ones(7)}, TypeError, "key_mask has dtype float64: pass booleans, True for a key that is seen"),
    ({"key_mask": np.ones(6, bool)}, ValueError, r"key_mask has shape \(6,\): with q \(5, 4\) and 7 keys it must be"),
    ({"key_mask": np.ones((1, 7), bool)}, ValueError, r"key_mask has shape \(1, 7\): .* it must be \(7,\)"),
]


@pytest.mark.parametrize(("how", "error", "says"), BAD)
def test_bad_masks(how, error, says):
    q, k = np.ones((5, 4), np.float32), np.ones((7, 4), np.float32)
    with pytest.raises(error, match=says):
        nf.attention(q, k, k, **how)
    with pytest.raises(error, match=says):
        nf.attention_backward(q, k, k, q, **how)


def test_lse_must_fit_the_mask():
    q, k, v, dout, _ = inputs((1, 1, 1, 5, 2, 4), False, np.float32)
    out, lse = nf.attention(q, k, v, causal=True, return_lse=True)
    assert np.isneginf(lse[0, 0, :3]).all()
    nf.attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
    with pytest.raises(ValueError, match="a row with keys has a finite lse"):
        nf.attention_backward(q, k, v, dout, out=out, lse=lse)
    lse[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="a row without keys has −∞"):
        nf.attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
