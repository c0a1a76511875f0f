"""Causal order, key masks, dropout and block masks in every stage and both passes, with shared heads and N ≠ N_k."""

import re

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import dropout, patterns, reference, testing
from numba_flash.blocks import tiles

SIZES = [  # batch, heads, kv_heads, N, N_k, d
    (1, 1, 1, 1, 1, 1), (1, 2, 1, 7, 5, 3), (2, 2, 2, 5, 7, 3), (2, 4, 2, 17, 23, 8), (1, 1, 1, 23, 17, 8),
    (1, 1, 1, 5, 2, 4), (1, 1, 1, 2, 5, 4), (1, 1, 1, 5, 0, 4), (1, 2, 1, 20, 20, 16), (1, 1, 1, 70, 65, 16),
]  # fmt: skip
if nf.device().name == "gpu":  # each d is one more compilation of each kernel
    SIZES = [size for size in SIZES if size[-1] == 8]
FEATURES = {  # causal, key mask, dropout, block mask
    "causal": (1, 0, 0, 0), "keys": (0, 1, 0, 0), "dropout": (0, 0, 1, 0), "causal keys": (1, 1, 0, 0),
    "causal dropout": (1, 0, 1, 0), "keys dropout": (0, 1, 1, 0), "blocks": (0, 0, 0, 1), "causal blocks": (1, 0, 0, 1),
    "keys blocks": (0, 1, 0, 1), "dropout blocks": (0, 0, 1, 1), "all": (1, 1, 1, 1),
}  # fmt: skip
TILES = {"naive": [None], "tiled": [4], "online_softmax": [5], "flash": [None, (5, 3)], "flash2": [None, (5, 3)],
         "register_tiled": [(5, 9)]}  # fmt: skip
CONFIGURATIONS = [(stage, blocks) for stage in nf.stages.PORTABLE for blocks in TILES[stage]]
WITH = [
    (stage, blocks, name) for stage, blocks in CONFIGURATIONS for name, feature in FEATURES.items()
    if not feature[3] or (stage, blocks) == ("flash2", (5, 3))
]  # fmt: skip
MORE = ("causal dropout", "keys dropout", "causal keys")  # of register_tiled: for -m course
SPARED = [(stage, blocks, name) for stage, blocks, name in WITH if stage == "register_tiled" and name in MORE]
configurations = pytest.mark.parametrize("stage, blocks, feature", [
    pytest.param(*one, marks=pytest.mark.course if one in SPARED else ()) for one in WITH
])  # fmt: skip


def inputs(size, feature, dtype, seed=0, sides=(5, 3)):
    """q, k, v, dout, and the keywords of a feature: a key mask that hides the first three keys of the first batch, …"""
    B, H, G, N, N_k, d = size
    causal, keys, dropout, blocks = FEATURES[feature] if isinstance(feature, str) else feature
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal(s) for s in ((B, H, N, d), (B, G, N_k, d), (B, G, N_k, d), (B, H, N, d)))
    how = {"causal": bool(causal)}
    if keys:
        how["key_mask"] = rng.random((B, N_k)) < 0.6
        how["key_mask"][0, :3] = False
    if dropout:
        how |= {"dropout_p": 0.3, "seed": seed + 7}
    if blocks:
        how["block_mask"] = rng.random((tiles(N, sides[0]), tiles(N_k, sides[1]))) < 0.6
        how["blocks"] = sides
    return *(x.astype(dtype) for x in (2 * q, 2 * k, v + 1, dout)), how


def passes(stage):
    """(name, deterministic, from out and lse) of each way to the gradients."""
    for deterministic in (True, False) if stage == "flash2" else (True,):
        for from_lse in (False, True):
            yield deterministic, from_lse


@configurations
def test_bill_equals_the_closed_form(stage, blocks, feature):
    for size in SIZES:
        check_bill(stage, blocks, feature, size)


def check_bill(stage, blocks, feature, size):
    B, H, G, N, N_k, d = size
    q, k, v, dout, how = inputs(size, feature, np.float32)
    how |= {"blocks": blocks}
    sizes = {"n": N, "n_k": N_k, "d": d, "heads": H, "kv_heads": G, "batch": B}
    asked = sizes | how | {"key_mask": "key_mask" in how}
    asked.pop("seed", None)
    how["stage"] = stage
    with nf.ledger() as bill:
        out, lse = nf.attention(q, k, v, return_lse=True, **how)
    assert nf.predict(stage, return_lse=True, **asked).diff(bill) == []
    for deterministic, from_lse in passes(stage):
        with nf.ledger() as bill:
            kept = {"out": out, "lse": lse} if from_lse else {}
            nf.attention_backward(q, k, v, dout, deterministic=deterministic, **kept, **how)
        direction = "backward" if from_lse else "both"
        predicted = nf.predict(stage, direction=direction, deterministic=deterministic, **asked)
        assert predicted.diff(bill) == []
        assert predicted == bill


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@configurations
def test_exact(stage, blocks, feature, dtype):
    """Within twice naive's error and 4 · eps, in float64 1e-12, of the size of the terms; naive within its bounds."""
    for seed, size in enumerate(SIZES[1::2]):
        q, k, v, dout, how = inputs(size, feature, dtype, seed)
        results = run(stage, q, k, v, dout, **how | {"blocks": blocks})
        yardstick = by_naive(q, k, v, dout, **how)
        truth = *reference.attention(q, k, v, **how), *reference.attention_backward(q, k, v, dout, **how)
        largest = np.abs(reference.scores(*(x.astype(np.float64) for x in (q, k)))).max(initial=1)
        unit = 4 * np.finfo(dtype).eps if dtype == "float32" else 1e-12 * largest
        bounds = testing.gradient_bounds(q, k, v, dout, dtype=dtype, from_lse=True, **how)
        sizes = [unit * max(1, np.abs(x[np.isfinite(x)]).max(initial=0)) for x in truth[:2]] + list(bounds.values())
        most = [testing.naive_bound(q, k, x, None, dtype) / (1 - how.get("dropout_p", 0)) for x in (v, np.ones_like(v))]
        most += testing.naive_gradient_bounds(q, k, v, dout, dtype=dtype, **how).values()
        for result in results:
            for got, own, expected, size_of_terms, limit in zip(result, yardstick, truth, sizes, most, strict=True):
                assert got.dtype == dtype
                assert np.array_equal(np.isneginf(got), np.isneginf(expected))
                seen = np.isfinite(expected)
                error, naive = (np.abs(x[seen] - expected[seen]).max(initial=0) for x in (got, own))
                assert naive <= limit
                assert error <= (2 * naive if dtype == "float32" else 0) + size_of_terms


def by_naive(q, k, v, dout, *, block_mask=None, blocks=None, key_mask=None, **how):
    """(out, lse, dq, dk, dv) by the stage naive; with a block mask, a tile of queries at a time, that hides keys."""
    if block_mask is None:
        return run("naive", q, k, v, dout, key_mask=key_mask, **how)[0]
    N, N_k = q.shape[-2], k.shape[-2]
    parts, gradients = [], [0, 0]
    for a, begin in enumerate(range(0, N, blocks[0])):
        end = min(begin + blocks[0], N)
        keys = np.repeat(block_mask[a], blocks[1])[None, :N_k] & (True if key_mask is None else key_mask)
        seen = max(N_k - N + end, 0) if how["causal"] else N_k  # keys: the last is aligned with the last of the queries
        own = np.where(np.arange(end)[:, None] >= begin, dout[..., :end, :], 0).astype(q.dtype)
        part = *(q[..., :end, :], k[..., :seen, :], v[..., :seen, :], own), np.repeat(keys, len(q) // len(keys), 0)
        out, lse, dq, dk, dv = run("naive", *part[:4], key_mask=part[4][:, :seen], **how)[0]
        parts.append((out[..., begin:, :], lse[..., begin:], dq[..., begin:, :]))
        for at, dx in enumerate((dk, dv)):
            gradients[at] = gradients[at] + np.pad(dx, ((0, 0), (0, 0), (0, N_k - seen), (0, 0)))
    joined = [np.concatenate(x, axis=2) for x in zip(*parts, strict=True)]
    return *joined, *gradients


def run(stage, q, k, v, dout, **how):
    """(out, lse, dq, dk, dv) by each way to the gradients."""
    how = how | {"stage": stage}
    out, lse = nf.attention(q, k, v, return_lse=True, **how)
    return [
        (out, lse, *nf.attention_backward(
            q, k, v, dout, deterministic=deterministic, **({"out": out, "lse": lse} if from_lse else {}), **how))
        for deterministic, from_lse in passes(stage)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "stage, feature", [(stage, name) for stage, blocks, name in WITH if blocks == TILES[stage][-1]]
)
def test_central_differences(stage, feature):
    q, k, v, dout, how = inputs((2, 2, 1, 6, 8, 5), feature, np.float64, sides=(3, 2))
    how["stage"] = stage
    q, k, h = q / 2, k / 2, 1e-5
    rng = np.random.default_rng(1)
    for at, gradient in enumerate(nf.attention_backward(q, k, v, dout, **how)):
        step = rng.standard_normal(gradient.shape)
        ends = [[x + sign * h * step if i == at else x for i, x in enumerate((q, k, v))] for sign in (1, -1)]
        up, down = ((nf.attention(*moved, **how) * dout).sum() for moved in ends)
        assert (up - down) / (2 * h) == pytest.approx((gradient * step).sum(), abs=1e-8, rel=1e-8)


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_no_key_at_all(stage):
    q, k, v, dout, _ = inputs((1, 2, 1, 9, 7, 4), "causal", np.float32)
    nothing = np.zeros((1, 7), bool)
    for result in run(stage, q, k, v, dout, key_mask=nothing):
        out, lse, *gradients = result
        assert np.isneginf(lse).all()
        assert all(np.array_equal(x, np.zeros_like(x)) for x in (out, *gradients))


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_hidden_keys_weigh_nothing(stage):
    """Scores of -20,000: a hidden key with any finite score above them would have all the weight."""
    q, k = np.full((3, 4), 100, np.float32), np.full((5, 4), -50, np.float32)
    v = dout = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    how = {"scale": 1.0, "key_mask": np.arange(5) < 3}
    gradients = nf.attention_backward(q, k, v, dout[:3], stage=stage, device="cpu", **how)
    expected = nf.reference.attention_backward(q, k, v, dout[:3], **how)
    for ours, true in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, true, rtol=0.02, atol=1e-3)  # from lse, |lse| · eps is 2e-3


@pytest.mark.parametrize("stage", ["online_softmax", "flash", "flash2"])
def test_hidden_tiles_change_no_bit(stage):
    """Tiles of hidden keys before, between and after those that are seen: m, l and O stay as they are, bit for bit."""
    q, k, v, _, _ = inputs((1, 1, 1, 6, 8, 4), "causal", np.float32)
    blocks = 4 if stage == "online_softmax" else (6, 4)
    alone = nf.attention(q, k, v, stage=stage, blocks=blocks, return_lse=True)
    rng = np.random.default_rng(7)
    noise = [rng.standard_normal((1, 1, 4, 4)).astype(np.float32) * 100 for _ in range(6)]
    wider = [
        np.concatenate([a, x[:, :, :4], b, x[:, :, 4:], c], axis=2) for x, (a, b, c) in ((k, noise[:3]), (v, noise[3:]))
    ]
    seen = np.repeat(np.array([False, True, False, True, False]), 4)[None]
    among = nf.attention(q, *wider, key_mask=seen, stage=stage, blocks=blocks, return_lse=True)
    for one, other in zip(alone, among, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
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


def test_traffic_of_a_block_mask_is_linear_in_its_tiles():
    """Proposition 4: elements = a + b · s, s the fraction of tiles, counted; a is what no tile asks for."""
    q, k, v, dout = inputs((1, 1, 1, 64, 64, 8), "causal", np.float32)[:4]
    blocks, rng = (8, 4), np.random.default_rng(0)
    for deterministic in (True, False):
        s, moved = [], []
        for kept in range(0, 129, 16):
            block_mask = rng.permutation(np.arange(128) < kept).reshape(8, 16)
            with nf.ledger() as bill:
                nf.attention_backward(q, k, v, dout, block_mask=block_mask, blocks=blocks, deterministic=deterministic)
            s.append(block_mask.mean())
            moved.append(bill.elements)
        b, a = np.polyfit(s, moved, 1)
        assert np.allclose(moved, a + b * np.array(s), rtol=1e-12)
        assert a + b == pytest.approx(
            nf.predict("flash2", n=64, d=8, direction="both", blocks=blocks, deterministic=deterministic,
                       block_mask=np.ones((8, 16), bool)).elements)  # fmt: skip
        assert a < 0.3 * (a + b)


def test_a_block_mask_of_ones_changes_no_bit():
    q, k, v, dout, _ = inputs((1, 2, 1, 23, 17, 8), "causal", np.float32)
    ones = {"blocks": (5, 3), "block_mask": np.ones((5, 6), bool)}
    assert np.array_equal(nf.attention(q, k, v, blocks=(5, 3)), nf.attention(q, k, v, **ones))
    for one, other in zip(
        nf.attention_backward(q, k, v, dout, blocks=(5, 3)), nf.attention_backward(q, k, v, dout, **ones), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)  # without a mask, the forward pass has other tiles


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_tiles_by_default(deterministic):
    """Those of the forward pass, 128 queries long: more than the kernel with atomics holds at a time."""
    q, k, v, dout, _ = inputs((1, 1, 1, 300, 290, 64), "causal", np.float32)
    block_mask = np.random.default_rng(0).random((3, 10)) < 0.5
    with nf.ledger() as bill:
        gradients = nf.attention_backward(q, k, v, dout, block_mask=block_mask, deterministic=deterministic)
    how = {"n": 300, "n_k": 290, "d": 64, "direction": "both"}
    assert bill == nf.predict("flash2", block_mask=block_mask, deterministic=deterministic, **how)
    truth = reference.attention_backward(q, k, v, dout, block_mask=block_mask, blocks=(128, 32))
    for got, expected in zip(gradients, truth, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("pattern", [patterns.local, patterns.strided, patterns.butterfly])
def test_patterns_are_block_masks(pattern):
    q, k, v, _, _ = inputs((1, 1, 1, 32, 48, 4), "causal", np.float64)
    how = {"blocks": (4, 3), "block_mask": pattern(32, 48, (4, 3))}
    np.testing.assert_allclose(nf.attention(q, k, v, **how), reference.attention(q, k, v, **how)[0], rtol=1e-12)


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
def test_one_generator_for_all(stage):
    """V = 1 column by column shows Z ∘ P, dO likewise Z ∘ P in dV: the same Z for any stage, tiles, pass and dtype."""
    H, N, N_k = 3, 19, 23
    Z = dropout.to_dense(2**40 + 5, 0.4, H, N, N_k) > 0
    for dtype in (np.float32, np.float64):
        q, k, v = np.zeros((H, N, 32), dtype), np.zeros((1, N_k, 32), dtype), np.eye(N_k, 32, dtype=dtype)[None]
        how = {"stage": stage, "dropout_p": 0.4, "seed": 2**40 + 5}
        for blocks in {"naive": [None], "tiled": [4, 7]}.get(
            stage, [8, 5] if stage == "online_softmax" else [(7, 4), (3, 5)]
        ):
            out = nf.attention(q, k, v, blocks=blocks, **how)
            assert np.array_equal(out[..., :N_k] > 0, Z)
            assert np.allclose(out[..., :N_k][Z], 1 / N_k / 0.6, rtol=1e-6)
            for deterministic in (True, False) if stage == "flash2" else (True,):
                for h in range(H):  # heads of q share one of v: one dO at a time
                    dout = np.zeros_like(q)
                    dout[h, :, :N] = np.eye(N, dtype=dtype)
                    dv = nf.attention_backward(q, k, v, dout, blocks=blocks, deterministic=deterministic, **how)[2]
                    assert np.array_equal(dv[0, :, :N].T > 0, Z[h])


def test_dropout_leaves_lse_alone_and_half_a_seed_is_another():
    q, k, v, _, _ = inputs((1, 2, 1, 20, 20, 16), "causal", np.float32)
    for stage in nf.stages.PORTABLE:
        plain, dropped, other = (
            nf.attention(q, k, v, stage=stage, return_lse=True, dropout_p=p, seed=seed)
            for p, seed in ((0.0, 3), (0.5, 3), (0.5, 3 + 2**32))
        )
        assert np.array_equal(plain[1], dropped[1])
        assert not np.array_equal(plain[0], dropped[0])
        assert not np.array_equal(other[0], dropped[0])
        assert np.array_equal(plain[0], nf.attention(q, k, v, stage=stage, seed=99))


def test_what_dropout_costs():
    """Two more matrices for the standard stages, one of bytes; nothing for the flash stages."""
    for stage in nf.stages.PORTABLE:
        for direction in ("forward", "backward", "both"):
            without, with_it = (
                nf.predict(stage, n=64, d=16, direction=direction, dropout_p=p, dtype="float32") for p in (0, 0.1)
            )
            more = with_it.elements - without.elements
            standard = {"forward": 3, "backward": 6, "both": 6}[direction]
            if stage == "online_softmax":
                standard = {"forward": 0, "backward": 6, "both": 6}[direction]
            assert more == (0 if nf.STAGES[stage].fused else standard * 64**2)
    assert nf.predict("naive", n=64, d=16, dropout_p=0.1)["Z"].write_bytes == 64**2


BAD = [
    ({"causal": 1}, TypeError, "causal=1 is not a truth value"),
    ({"key_mask": [True] * 7}, TypeError, "key_mask=.* is a list: pass a NumPy array, .* dtype=bool"),
    ({"key_mask": np.ones(7)}, TypeError, "key_mask has dtype float64: pass booleans, True for a key that is seen"),
    ({"key_mask": np.ones(6, bool)}, ValueError, r"key_mask has shape \(6,\): with q \(5, 4\) and 7 keys it must be"),
    ({"key_mask": np.ones((1, 7), bool)}, ValueError, r"key_mask has shape \(1, 7\): .* it must be \(7,\)"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p=1.0 is no probability to drop a weight: pass 0 or more, and less than"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p=-0.1 is no probability"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p=nan is no probability"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p='0.1' is a str: pass a float"),
    ({"dropout_p": True}, TypeError, "dropout_p=True is a bool: pass a float"),
    ({"seed": 1.5}, TypeError, "seed=1.5 is not an integer"),
    ({"seed": -1}, ValueError, "seed=-1 is too small: pass 0 or more"),
    ({"dropout_p": 1 - np.finfo(np.longdouble).eps / np.longdouble(2) ** 20}, ValueError, "is no probability"),
    ({"seed": 2**64}, ValueError, "seed=18446744073709551616 is too large: pass one below 2.*64"),
    ({"block_mask": np.ones((1, 1), bool), "stage": "flash"}, ValueError, "'flash' leaves out no tiles: pass stage="),
    ({"block_mask": [[True]]}, TypeError, "block_mask=.* is a list: pass a NumPy array, .* dtype=bool"),
    ({"block_mask": np.ones((1, 1))}, TypeError, "block_mask has dtype float64: pass booleans, True for a tile"),
    ({"block_mask": np.ones((2, 2), bool), "blocks": (3, 3)}, ValueError,
     r"block_mask has shape \(2, 2\): with blocks=\(3, 3\), N = 5 queries and N_k = 7 keys it must be \(2, 3\)"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "error", "says"), BAD)
def test_bad_masks(how, error, says):
    q, k = np.ones((5, 4), np.float32), np.ones((7, 4), np.float32)
    with pytest.raises(error, match=says):
        nf.attention(q, k, k, **how)
    with pytest.raises(error, match=says):
        nf.attention_backward(q, k, k, q, **how)


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 2, 5, 4)], ids=str)
def test_lse_of_hidden_rows_comes_back(shape):
    """With out and lse given, in 2, 3 and 4 axes: rows that see no key have lse = −∞, and others must not."""
    q = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    nothing = np.zeros((2, 5) if len(shape) == 4 else 5, bool)
    if len(shape) == 4:
        nothing[1] = True
    out, lse = nf.attention(q, q, q, key_mask=nothing, return_lse=True)
    dq, _, _ = nf.attention_backward(q, q, q, q, out=out, lse=lse, key_mask=nothing)
    assert np.isfinite(dq).all() and not dq.reshape(-1, 5, 4)[0].any()
    lse[..., 0] = np.inf
    with pytest.raises(ValueError, match="pass what attention"):
        nf.attention_backward(q, q, q, q, out=out, lse=lse, key_mask=nothing)


def test_tiles_of_a_block_mask_must_fit_both_passes():
    q = np.ones((8, 8), np.float32)
    for deterministic in (True, False):
        with pytest.raises(nf.errors.SharedMemoryError, match="the tiles of a block mask serve both passes") as error:
            nf.attention_backward(
                q, q, q, q, block_mask=np.ones((2, 1), bool), blocks=(4, 2000), deterministic=deterministic
            )
        Br, Bc = map(int, re.search(r"blocks=\((\d+), (\d+)\) fits", str(error.value)).groups())
        block_mask = np.ones((2, 1), bool)
        nf.attention_backward(q, q, q, q, block_mask=block_mask, blocks=(Br, Bc), deterministic=deterministic)


def test_predictions_of_a_block_mask_have_no_end():
    N = 2**33
    sizes = {"n": N, "d": 64, "blocks": (N, N), "key_mask": True}
    for causal in (False, True):
        dense, sparse = (
            nf.predict("flash2", causal=causal, block_mask=mask, **sizes)["mask"].loads
            for mask in (None, np.ones((1, 1), bool))
        )
        assert dense == sparse > N


def test_lse_must_fit_the_mask():
    q, k, v, dout, _ = inputs((1, 1, 1, 5, 2, 4), "causal", np.float32)
    out, lse = nf.attention(q, k, v, causal=True, return_lse=True)
    assert np.isneginf(lse[0, 0, :3]).all()
    nf.attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
    with pytest.raises(ValueError, match="a row with keys has a finite lse"):
        nf.attention_backward(q, k, v, dout, out=out, lse=lse)
    lse[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="a row without keys has −∞"):
        nf.attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
