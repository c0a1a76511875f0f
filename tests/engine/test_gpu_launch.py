"""On a GPU: a launch that does not ask Numba again does what Numba's does; small blocks of memory are used again."""

import gc
from itertools import pairwise

import numpy as np
import pytest
from numba import cuda

import numba_flash as nf
from numba_flash import errors

if nf.device().name != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from numba_flash.engine import launch as engine
from numba_flash.engine.pool import pool


@cuda.jit
def weigh(A, B, numbers, factor, out):
    i, j = cuda.grid(2)
    if i < A.shape[0] and j < A.shape[1]:
        out[i, j] = (A[i, j] + B[j]) * factor + numbers


NUMBERS = [3, -(2**40), 2.5, np.float32(0.1), np.float64(0.1), np.int32(-7), np.int64(2**50), np.uint64(2**63), True]
NUMBERS += [np.bool_(True), np.uint8(200)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__} {n}")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
def test_the_second_launch_gives_what_the_first_gave(number, dtype):
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((5, 7), (7,)))
    results = []
    for _ in range(3):
        out = nf.empty((5, 7), np.float64)
        nf.launch(weigh, (1, 1), (8, 8), nf.to_device(A), nf.to_device(B), number, np.float32(2), out)
        results.append(nf.to_host(out))
    expected = (A.astype(np.float64) + B) * 2 + np.float64(number)
    np.testing.assert_allclose(results[0], expected, rtol=1e-6)
    assert all((result == results[0]).all() for result in results[1:])


@pytest.mark.parametrize("order", ["columns", "strided", "zero stride", "read-only"])
def test_arrays_of_another_kind_still_go_numbas_way(order):
    A, B, out = np.arange(35.0).reshape(5, 7), np.arange(7.0), nf.empty((5, 7), np.float64)
    given = nf.to_device(A), nf.to_device(B)
    for _ in range(2):
        nf.launch(weigh, (1, 1), (8, 8), *given, 1, np.float32(2), out)
    if order == "columns":
        given = nf.to_device(np.asfortranarray(A)), given[1]
    elif order == "strided":
        given = cuda.to_device(np.repeat(A, 2, axis=0))[::2], given[1]
    elif order == "zero stride":
        given = cuda.to_device(np.broadcast_to(A, (5, 7))), given[1]
    else:
        A.flags.writeable = B.flags.writeable = False
        given = A, B
    for _ in range(2):
        out = nf.empty((5, 7), np.float64)
        nf.launch(weigh, (1, 1), (8, 8), *given, 1, np.float32(2), out)
        np.testing.assert_array_equal(nf.to_host(out), (A + B) * 2 + 1)


def test_what_the_driver_refuses_is_said_in_the_second_launch_too():
    arrays = [nf.to_device(np.zeros(shape)) for shape in ((5, 7), (7,))]
    out = nf.empty((5, 7), np.float64)
    for _ in range(2):
        nf.launch(weigh, 1, (8, 8), *arrays, 1, 1.0, out)
    with pytest.raises(errors.SharedMemoryError, match="'weigh' asks for 10,000,000 bytes of shared memory"):
        nf.launch(weigh, 1, (8, 8), *arrays, 1, 1.0, out, shared_bytes=10**7)


def test_a_small_block_is_used_again_and_holds_nan():
    gc.collect()
    a = nf.empty((3, 5), np.float32)
    a.copy_to_device(np.ones((3, 5), np.float32))
    address = a.device_ctypes_pointer.value
    view = a.reshape(15)[2:9]
    del a
    b = nf.empty((3, 5), np.float32)
    assert b.device_ctypes_pointer.value != address, "a view still uses the block"
    del view
    c = nf.empty(16, np.float32)
    assert c.device_ctypes_pointer.value == address
    assert np.isnan(nf.to_host(c)).all()


def test_arrays_made_together_are_apart_and_hold_nan():
    shapes = (1,), (3, 5), (0, 2), (65,)
    arrays = engine.empties(*shapes, dtype=np.float32)
    assert [a.shape for a in arrays] == list(shapes)
    for i, a in enumerate(arrays):
        a.copy_to_device(np.full(a.shape, i, np.float32))
    for i, a in enumerate(arrays):
        assert (nf.to_host(a) == i).all()
    last = arrays[-1]
    del a, arrays
    assert all(np.isnan(nf.to_host(a)).all() for a in engine.empties(*shapes, dtype=np.float32) if a.size)
    assert (nf.to_host(last) == 3).all(), "it still uses the block"


def test_arrays_that_live_share_no_memory():
    arrays = [nf.empty(n, np.uint8) for n in (1, 2, 64, 65, 1000, 2**20, 2**20 + 1) for _ in range(20)]
    spans = sorted((a.device_ctypes_pointer.value, a.nbytes) for a in arrays)
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(spans))
    del arrays
    assert not pool().used


def test_the_pool_keeps_no_more_than_it_says_and_gives_it_back(monkeypatch):
    pool().clear()
    before = cuda.current_context().get_memory_info().free
    monkeypatch.setattr("numba_flash.engine.pool.KEPT", 5 * 2**24)
    arrays = [nf.empty(2**24, np.uint8) for _ in range(8)]
    del arrays
    assert pool().kept == 5 * 2**24 == sum(size * len(blocks) for size, blocks in pool().spare.items())
    nf.empty(2**29, np.uint8)
    assert pool().kept == 5 * 2**24
    again = nf.empty(2**24, np.uint8)
    assert pool().kept == 4 * 2**24
    del again
    pool().clear()
    assert pool().kept == 0
    assert cuda.current_context().get_memory_info().free == before


def test_what_the_pool_keeps_is_no_reason_to_refuse():
    for _ in range(3):
        arrays = [nf.empty(2**28, np.uint8) for _ in range(4)]
        del arrays
    free = engine.free_bytes("gpu")
    half = free * 6 // 10
    for _ in range(2):
        nf.empty(half, np.uint8)
    for n in (2 * free, 2**70):
        with pytest.raises(errors.OutOfMemory, match=rf"an array of shape \({n},\) needs {n:,} B; [\d,]+ B are free"):
            nf.empty(n, np.uint8)


def on_device(rng, *shapes):
    return [nf.to_device(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]


@pytest.mark.parametrize("stage", ["naive", "flash2", "register_tiled"])
def test_a_call_of_a_known_kind_gives_what_the_first_gave(stage):
    rng = np.random.default_rng(0)
    kinds = [{}, {"causal": True}, {"scale": 0.5}, {"dropout_p": 0.5}, {"dropout_p": 0.5, "seed": 1}]
    kinds += [{"return_lse": True}, {"key_mask": np.arange(9) % 2 == 0}]
    for shapes in (((7, 8), (9, 8), (9, 8)), ((2, 7, 8), (1, 9, 8), (1, 9, 8)), ((0, 8), (9, 8), (9, 8))):
        q, k, v = on_device(rng, *shapes)
        host = [nf.to_host(x) for x in (q, k, v)]
        for _ in range(3):
            for kind in kinds:
                out, expected = (nf.attention(*x, stage=stage, **kind) for x in ((q, k, v), host))
                if not kind.get("return_lse"):
                    out, expected = [out], [expected]
                for given, true in zip(out, expected, strict=True):
                    np.testing.assert_array_equal(nf.to_host(given), true)


@pytest.mark.parametrize("wrong", [{"scale": True}, {"causal": 1}, {"seed": True}, {"dropout_p": False}])
def test_what_equals_a_known_value_is_still_refused(wrong):
    q, k, v = on_device(np.random.default_rng(0), *[(5, 4)] * 3)
    for right in ({"scale": 1}, {"causal": True}, {"seed": 1}, {"dropout_p": 0.0}):
        nf.attention(q, k, v, **right)
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        nf.attention(q, k, v, **wrong)


def test_known_calls_are_counted_and_their_arrays_may_be_views():
    q, k, v = on_device(np.random.default_rng(0), *[(6, 4)] * 3)
    expected = nf.to_host(nf.attention(q, k, v))
    for _ in range(2):
        with nf.ledger() as bill:
            nf.attention(q, k, v)
        assert bill == nf.predict("flash2", n=6, d=4)
    rows = q[::2]
    np.testing.assert_array_equal(nf.to_host(nf.attention(rows, k, v)), expected[::2])
