"""Every stage, forward: exact against float64, and its bill equal to the closed form, at ragged sizes."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import reference

SIZES = [  # heads, kv_heads, N, N_k, d
    (1, 1, 1, 1, 1), (1, 1, 2, 5, 3), (2, 2, 17, 33, 8), (4, 2, 31, 32, 16), (3, 1, 33, 31, 40), (1, 1, 63, 65, 59),
    (2, 1, 97, 64, 64), (1, 1, 16, 16, 16), (1, 1, 5, 0, 4), (1, 1, 0, 5, 4), (1, 1, 8, 70, 256),
]  # fmt: skip
BLOCKS = {
    "naive": [None],
    "tiled": [None, 4, 7, (32, 32)],
    "online_softmax": [None, 5],
    "flash": [None, (7, 5), (64, 8)],
    "flash2": [None, (7, 5), (33, 8)],
    "register_tiled": [None, (3, 5)],
}
CONFIGURATIONS = [(stage, blocks) for stage in nf.stages.PORTABLE for blocks in BLOCKS[stage]]


def inputs(H, G, N, N_k, d, dtype, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in ((H, N, d), (G, N_k, d), (G, N_k, d)))
    return (2 * q).astype(dtype), (2 * k).astype(dtype), (v + 1).astype(dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("stage, blocks", CONFIGURATIONS)
def test_bill_equals_the_closed_form(stage, blocks, size):
    H, G, N, N_k, d = size
    q, k, v = inputs(H, G, N, N_k, d, np.float32)
    for return_lse in (False, True):
        with nf.ledger() as bill:
            nf.attention(q, k, v, stage=stage, blocks=blocks, return_lse=return_lse)
        predicted = nf.predict(stage, n=N, n_k=N_k, d=d, heads=H, kv_heads=G, blocks=blocks, return_lse=return_lse)
        assert predicted.diff(bill) == []
        assert predicted == bill


def test_bill_of_float64_has_8_bytes_an_element():
    q, k, v = inputs(1, 1, 9, 9, 4, np.float64)
    for stage in nf.stages.PORTABLE:
        with nf.ledger() as bill:
            nf.attention(q, k, v, stage=stage)
        assert bill == nf.predict(stage, n=9, d=4, dtype="float64")
        assert bill.read_bytes == 8 * bill.loads


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage, blocks", CONFIGURATIONS)
def test_exact_on_every_case(stage, blocks, dtype):
    def fn(q, k, v, scale):
        return nf.attention(q, k, v, stage=stage, blocks=blocks, scale=scale, return_lse=True)

    nf.testing.assert_exact(fn, dtype=dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_naive_within_its_derived_bound(size):
    H, G, N, N_k, d = size
    q, k, v = inputs(H, G, N, N_k, d, np.float32)
    out = nf.attention(q, k, v, stage="naive")
    truth, _ = reference.attention(q, k, v)
    assert np.isfinite(out).all()
    error = np.abs(out - truth).max(initial=0)
    assert error <= nf.testing.naive_bound(q, k, v, None, "float32")


@pytest.mark.parametrize("stage", ["online_softmax", "flash", "flash2"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_scores_that_overflow_to_minus_infinity(stage, first):
    """A whole tile of them must leave m, l and O as they were: −∞ − (−∞) is no number."""
    q, k = np.full((3, 8), 1e20, np.float32), np.zeros((12, 8), np.float32)
    k[:8] = -1e20
    v = np.arange(12, dtype=np.float32).reshape(12, 1) * np.ones(8, np.float32)
    if not first:
        k, v = k[::-1], v[::-1]
    blocks = 4 if stage == "online_softmax" else (2, 4)
    out, lse = nf.attention(q, k, v, stage=stage, blocks=blocks, return_lse=True)
    assert np.array_equal(out, np.full((3, 8), 9.5, np.float32))
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


@pytest.mark.parametrize("stage", nf.stages.PORTABLE)
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_no_number_in_no_number_out(stage, what):
    """A row whose output is NaN does not pass for one with a finite lse."""
    q, k, v = inputs(1, 1, 3, 9, 4, np.float32)
    q = np.abs(q)
    k[0, 5] = what
    out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
    assert np.isnan(out).all()
    assert not np.isfinite(lse).any()


def test_batches_are_heads():
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((2, 4, 9, 5)).astype(np.float32),
        *rng.standard_normal((2, 2, 2, 7, 5)).astype(np.float32),
    )
    for stage in nf.stages.PORTABLE:
        out, lse = nf.attention(q, k, v, stage=stage, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
        for b in range(2):
            for h in range(4):
                one = nf.attention(q[b, h], k[b, h // 2], v[b, h // 2], stage=stage)
                assert np.array_equal(out[b, h], one)
