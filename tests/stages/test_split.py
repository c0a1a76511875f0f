"""Decoding: several blocks share the keys of a query, and a second kernel merges what they found."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference, testing

from .test_masks import inputs

SIZES = [  # batch, heads, kv_heads, N, N_k, d
    (1, 2, 1, 1, 29, 8), (2, 2, 2, 3, 33, 70), (1, 1, 1, 5, 2, 4), (1, 1, 1, 3, 0, 4), (1, 4, 2, 1, 200, 4),
    (1, 1, 1, 1, 1, 1),
]  # fmt: skip
if nf.device().name == "gpu":  # each d is one more compilation
    SIZES = [size for size in SIZES if size[-1] in (8, 70)]
FEATURES = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]
splits = pytest.mark.parametrize("split_kv", [1, 2, 5, 40])
blocks = pytest.mark.parametrize("blocks", [None, (1, 4)])


@pytest.mark.parametrize("feature", FEATURES, ids=str)
@splits
@blocks
def test_exact_and_its_bill(blocks, split_kv, feature):
    for size in SIZES:
        B, H, G, N, N_k, d = size
        for dtype in ("float32", "float64"):
            q, k, v, _, how = inputs(size, feature, dtype)
            with nf.ledger() as bill:
                out, lse = nf.attention(q, k, v, split_kv=split_kv, blocks=blocks, return_lse=True, **how)
            asked = {"causal": how["causal"], "key_mask": "key_mask" in how}
            sizes = {"n": N, "n_k": N_k, "d": d, "heads": H, "kv_heads": G, "batch": B, "dtype": dtype}
            predicted = nf.predict("flash2", split_kv=split_kv, blocks=blocks, **sizes, **asked)
            assert predicted.diff(bill) == []
            assert predicted == bill
            truth, L = reference.attention(q, k, v, **how)
            naive = nf.attention(q, k, v, stage="naive", **how)
            limit = testing.bound(truth, np.abs(naive - truth).max(initial=0), dtype, max_score=20, n_k=N_k)
            assert np.abs(out - truth).max(initial=0) <= limit
            assert np.array_equal(np.isneginf(lse), np.isneginf(L))
            np.testing.assert_allclose(lse, L, rtol=1e-5 if dtype == "float32" else 1e-12)


def test_every_case_of_the_testing_module():
    """Scores of any size: what a split leaves must hold log l beside m, however large m is."""
    for blocks in ((1, 8), (1, 32)):
        cases = [case for case in testing.cases() if case.k.shape[-2]]
        if nf.device().name == "gpu":  # each d is one more compilation
            cases = [case for case in cases if case.q.shape[-1] == 8]
        testing.assert_exact(
            lambda q, k, v, scale, blocks=blocks: nf.attention(q, k, v, scale=scale, split_kv=4, blocks=blocks),
            cases=cases,
        )


def test_empty_splits_change_nothing():
    """Forty splits of 5 tiles: 35 are empty."""
    q, k, v, _, _ = inputs((1, 2, 1, 2, 20, 8), "causal", np.float64)
    few, many = (nf.attention(q, k, v, split_kv=n, blocks=(1, 4), return_lse=True) for n in (5, 40))
    for one, other in zip(few, many, strict=True):
        assert np.array_equal(one, other)


def test_no_key_at_all():
    q, k, v, _, _ = inputs((1, 2, 1, 2, 20, 8), "causal", np.float32)
    out, lse = nf.attention(q, k, v, split_kv=3, blocks=(1, 4), key_mask=np.zeros((1, 20), bool), return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_the_keys_are_read_once_per_query():
    bill = nf.predict("flash2", n=1, n_k=65536, d=64, split_kv=128)
    assert bill["K"].loads == bill["V"].loads == 65536 * 64
    assert bill.elements - 2 * 65536 * 64 < 0.01 * bill.elements


BAD = [
    ({"split_kv": 0}, ValueError, "split_kv=0 is too small: pass 1 or more"),
    ({"split_kv": 2.0}, TypeError, "split_kv=2.0 is not an integer"),
    (
        {"split_kv": 70000},
        ValueError,
        "split_kv=70000 is too large: pass at most 65,535, as many blocks as a CUDA grid holds",
    ),
    (
        {"split_kv": 2, "dropout_p": 0.1},
        ValueError,
        "dropout_p=0.1: split_kv is for decoding, where nothing is dropped",
    ),
    ({"split_kv": 2, "stage": "flash"}, ValueError, "stage 'flash' does not split the keys; pass stage='flash2'"),
    ({"split_kv": 2, "blocks": "paper"}, ValueError, r"blocks='paper' is unknown: pass None or \(1, Bc\)"),
    ({"split_kv": 2, "blocks": (2, 4)}, ValueError, r"blocks=\(2, 4\): with split_kv a block has one query"),
    ({"split_kv": 2, "block_mask": np.ones((1, 1), bool)}, ValueError, "block_mask do not go together"),
    ({"split_kv": 2, "blocks": (1, 4000)}, nf.errors.SharedMemoryError, "the tiles of 'flash2', split, in float32"),
]


@pytest.mark.parametrize(("how", "error", "says"), BAD, ids=lambda x: str(x)[:30])
def test_bad_arguments(how, error, says):
    q = np.ones((5, 8), np.float32)
    with pytest.raises(error, match=says):
        nf.attention(q, q, q, **how)
    if "block_mask" not in how and "blocks" not in how:
        with pytest.raises(error, match=says):
            nf.predict(**{"stage": "flash2", **how}, n=5, d=8)


def test_split_kv_is_for_the_forward_pass():
    with pytest.raises(ValueError, match="split_kv=2 is for direction='forward', not 'both': leave it out"):
        nf.predict("flash2", n=5, d=8, split_kv=2, direction="both")
