"""Philox 4×32-10 against known answers, in NumPy and on the device; Z of dropout, apart from any stage."""

import numpy as np
import pytest
from numba import cuda

import numba_flash as nf
from numba_flash import dropout

KNOWN = [  # counter, key, four words: Random123, tests/kat_vectors
    ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((2**32 - 1,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    random = dropout.philox(*map(np.uint64, counter), np.uint64(key))
    assert [f"{int(word):08x}" for word in random] == words.split()


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers_on_the_device(counter, key, words):
    device_philox = cuda.jit(device=True)(dropout.philox)

    @cuda.jit
    def draw(counter, key, out):
        a, b, c, d = device_philox(counter[0], counter[1], counter[2], counter[3], key)
        out[0], out[1], out[2], out[3] = a, b, c, d

    out = nf.empty(4, np.uint64)
    nf.launch(draw, 1, 1, nf.to_device(np.array(counter, np.uint64)), np.uint64(key), out)
    assert [f"{int(word):08x}" for word in nf.to_host(out)] == words.split()


def test_the_device_draws_what_numpy_draws():
    H, N, N_k, seed, p = 2, 33, 47, 2**63 + 11, 0.25
    keep = dropout.make_keep(np.float64, 1)

    @cuda.jit
    def draw(Z, seed, p):
        j, i = cuda.grid(2)
        h = cuda.blockIdx.z
        if i < Z.shape[1] and j < Z.shape[2]:
            Z[h, i, j] = keep(seed, p, h, i, j)

    Z = nf.empty((H, N, N_k), np.float64)
    nf.launch(draw, (6, 5, H), (8, 8), Z, np.uint64(seed), np.float64(p))
    assert np.array_equal(nf.to_host(Z), dropout.to_dense(seed, p, H, N, N_k))


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 0.999])
def test_as_many_as_p_says(p):
    Z = dropout.to_dense(1, p, 3, 400, 300)
    n = Z.size
    assert set(np.unique(Z)) <= {0.0, 1 / (1 - p)}
    assert abs((Z == 0).sum() - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + n * 2**-32


def test_rows_columns_heads_and_seeds_differ():
    Z = dropout.to_dense(0, 0.5, 2, 64, 64)
    for one, other in ((Z[0], Z[1]), (Z[0, :32], Z[0, 32:]), (Z[0, :, :32], Z[0, :, 32:]), (Z[0], Z[0].T)):
        agree = (one == other).mean()
        assert abs(agree - 0.5) < 0.06
    other = dropout.to_dense(2**32, 0.5, 2, 64, 64)
    assert abs((other == Z).mean() - 0.5) < 0.06
    assert np.array_equal(Z[:1, :10, :20], dropout.to_dense(0, 0.5, 1, 10, 20))
