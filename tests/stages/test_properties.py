"""What attention is whatever computes it: properties of every stage, on random input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numba_flash as nf
from numba_flash import reference

stages = pytest.mark.parametrize("stage", nf.stages.PORTABLE)
TILES = {
    "naive": None,
    "tiled": 4,
    "online_softmax": 4,
    "flash": (5, 3),
    "flash2": (5, 3),
    "register_tiled": (5, 9),
}  # several each way
shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 12), st.integers(1, 20), st.sampled_from([1, 3, 8]), st.integers(0, 2**32 - 1)
)
few = settings(max_examples=15)


def inputs(shape):
    H, N, N_k, d, seed = shape
    rng = np.random.default_rng(seed)
    return rng, *(2 * rng.standard_normal(size) for size in ((H, N, d), (H, N_k, d), (H, N_k, d)))


def attention(q, k, v, stage, **how):
    return nf.attention(q, k, v, stage=stage, blocks=TILES[stage], **how)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@stages
@few
@given(shapes)
def test_the_order_of_the_keys_changes_nothing(stage, shape):
    rng, q, k, v = inputs(shape)
    order = rng.permutation(k.shape[1])
    close(attention(q, k[:, order], v[:, order], stage), attention(q, k, v, stage))


@stages
@few
@given(shapes)
def test_a_constant_added_to_all_scores_changes_nothing_but_lse(stage, shape):
    """An extra column, c in Q and 1 in K, adds c to each score; in V it holds what it likes."""
    _, q, k, v = inputs(shape)
    c = 7.5
    wider_q, wider_k = (np.concatenate([x, np.full((*x.shape[:-1], 1), value)], -1) for x, value in ((q, c), (k, 1.0)))
    wider_v = np.concatenate([v, v[..., :1]], -1)
    out, lse = attention(q, k, v, stage, scale=1, return_lse=True)
    moved, moved_lse = attention(wider_q, wider_k, wider_v, stage, scale=1, return_lse=True)
    close(moved[..., :-1], out)
    close(moved_lse, lse + c)


@stages
@few
@given(shapes)
def test_heads_have_nothing_to_do_with_each_other(stage, shape):
    rng, q, k, v = inputs(shape)
    order = rng.permutation(q.shape[0])
    out = attention(q, k, v, stage)
    assert np.array_equal(attention(q[order], k[order], v[order], stage), out[order])
    batched = attention(q[:, None], k[:, None], v[:, None], stage)
    assert np.array_equal(batched[:, 0], out)


@stages
@few
@given(shapes)
def test_the_output_is_a_mean_of_the_values(stage, shape):
    _, q, k, v = inputs(shape)
    out, lse = attention(q, k, v, stage, return_lse=True)
    slack = 1e-12 * np.abs(v).max()
    assert (out <= v.max(axis=1, keepdims=True) + slack).all()
    assert (out >= v.min(axis=1, keepdims=True) - slack).all()
    S = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    close(np.exp(S - lse[..., None]).sum(axis=-1), 1)


@stages
@settings(max_examples=25)
@given(shapes, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.4]), st.booleans())
def test_whatever_is_hidden_and_dropped(stage, shape, causal, masked, dropout_p, sparse):
    """Any lengths, any key mask, any tiles left out: out, lse and the gradients are those of float64."""
    rng, q, k, v = inputs(shape)
    how = {"causal": causal, "dropout_p": dropout_p, "seed": int(rng.integers(2**63))}
    if masked:
        how["key_mask"] = rng.random(k.shape[1]) < 0.5
    if sparse and stage == "flash2":
        how |= {"block_mask": rng.random((-(-q.shape[1] // 5), -(-k.shape[1] // 3))) < 0.5, "blocks": (5, 3)}
    blocks = {"stage": stage, "blocks": TILES[stage]}
    dout = rng.standard_normal(q.shape)
    out, lse = nf.attention(q, k, v, return_lse=True, **how | blocks)
    expected, expected_lse = reference.attention(q, k, v, **how)
    close(out, expected)
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    close(lse[np.isfinite(lse)], expected_lse[np.isfinite(lse)])
    gradients = nf.attention_backward(q, k, v, dout, out=out, lse=lse, **how | blocks)
    for got, expected in zip(gradients, reference.attention_backward(q, k, v, dout, **how), strict=True):
        close(got, expected)
