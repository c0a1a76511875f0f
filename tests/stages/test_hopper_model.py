"""The `hopper` kernel's source on a model of Hopper, without a GPU: its numbers, its barriers, its queue."""

import math

import numpy as np
import pytest

from numba_flash import masks
from numba_flash.stages import hopper

from . import hopper_model

TILES = {64: (192, 128), 128: (128, 128)}


def check(H, G, N, N_k, d, *, causal=False, blocks=1, scale=0.2, masked=False, plan=None):
    random = np.random.default_rng(N)
    shapes = (H, N), (G, N_k), (G, N_k)
    Q, K, V = (random.standard_normal((heads, n, d)).astype(np.float16).astype(float) for heads, n in shapes)
    keys = (random.random((1, N_k)) > 0.4).astype(np.uint8)
    plan = plan or hopper.make_plan(d)
    every = masked or (causal and (plan.Bc % plan.Br != 0 or (N_k - N) % plan.Bc != 0))
    options = {"causal": causal, "masked": masked, "hide_all": every, "scaled": scale <= 0}
    factor = scale * math.log2(math.e)
    O, L = hopper_model.run(plan, (Q, K, V, keys), **options, factor=factor, blocks=blocks, together=H // G)
    S = np.einsum("hid,hjd->hij", Q, np.repeat(K, H // G, 0)) * scale
    S = np.where(masks.to_dense(N, N_k, causal, keys[0] if masked else None), S, -math.inf)
    m = np.maximum(S.max(-1), -1e300)
    P = np.exp(S - m[..., None])
    l = P.sum(-1)
    reference = P / np.where(l > 0, l, 1)[..., None] @ np.repeat(V, H // G, 0)
    assert np.isfinite(O).all()
    assert np.linalg.norm(O - reference) <= 5e-4 * np.linalg.norm(reference)
    np.testing.assert_array_equal(np.isneginf(L), l == 0)
    np.testing.assert_allclose(L[l > 0], (m + np.log(np.maximum(l, 1e-300)))[l > 0], atol=1e-4)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_one_two_and_three_tiles_of_keys_and_of_queries(d, tiles):
    Br, Bc = TILES[d]
    check(1, 1, Br * (tiles - 1) + 1, Bc * tiles - 7, d)


@pytest.mark.parametrize(
    "H, G, N, N_k, d, options",
    [
        (1, 1, 1, 1, 128, {}),
        (4, 2, 129, 129, 128, {"causal": True, "blocks": 3}),  # the queue gives the fourth tile to one of three blocks
        (1, 1, 193, 193, 64, {"causal": True, "blocks": 2}),
        (1, 1, 300, 129, 128, {"causal": True}),  # the first queries see nothing
        (
            1,
            1,
            384,
            256,
            128,
            {"causal": True},
        ),  # a whole tile sees nothing, and masks are for a tile's first block only
        (1, 1, 177, 300, 64, {"causal": True, "scale": -0.2}),
        (1, 1, 130, 200, 128, {"causal": True, "scale": 0.0}),
        (1, 1, 150, 333, 64, {"masked": True}),
        (2, 2, 100, 150, 128, {"masked": True, "causal": True}),
        (1, 1, 129, 257, 128, {"plan": hopper.make_plan(128, simple=True)}),
    ],
)
def test_masks_lengths_and_scales(H, G, N, N_k, d, options):
    check(H, G, N, N_k, d, **options)


def faulty(part, **changes):
    plan = hopper.make_plan(128)
    return plan._replace(**{part: getattr(plan, part)._replace(**changes)})


@pytest.mark.parametrize("part", "QKV")
@pytest.mark.parametrize("more", [-1, 1])
def test_a_wrong_number_of_arrivals_is_found(part, more, monkeypatch):
    monkeypatch.setattr(hopper_model, "PATIENCE", 1)
    plan = faulty(part, readers=getattr(hopper.make_plan(128), part).readers + more)
    with pytest.raises((hopper_model.Stuck, AssertionError)):
        check(1, 1, 385, 129, 128, plan=plan)


def test_a_wrong_number_of_bytes_is_found(monkeypatch):
    monkeypatch.setattr(hopper_model, "PATIENCE", 1)
    with pytest.raises((hopper_model.Stuck, AssertionError)):
        check(1, 1, 1, 1, 128, plan=faulty("V", size=hopper.make_plan(128).V.size - 1024))
