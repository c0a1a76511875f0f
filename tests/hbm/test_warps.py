"""What the warps of a launch ask for, against counts by hand and against a count of each thread's accesses."""

import linecache

import numpy as np
import pytest
from numba import cuda, float32, float64

import numba_flash as nf
from numba_flash import testing
from numba_flash.hbm.warps import Access, warp_accesses

STRIDE = 37


@cuda.jit
def neighbours(A, B):
    i = cuda.grid(1)
    if i < B.shape[0]:
        B[i] = A[i]


@cuda.jit
def far_apart(A, B):
    i = cuda.grid(1)
    if i * STRIDE < A.shape[0]:
        B[i] = A[i * STRIDE]


@cuda.jit
def one_for_all(A, B):
    B[cuda.grid(1)] = A[5]


def make_transpose(width, real=float32):
    @cuda.jit
    def transpose(A, B):
        tile = cuda.shared.array((32, width), real)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        for r in range(y, 32, 8):
            tile[r, x] = A[r, x]
        cuda.syncthreads()
        for r in range(y, 32, 8):
            B[r, x] = tile[x, r]

    return transpose


@cuda.jit
def odd_block(A, B):
    B[cuda.threadIdx.y, cuda.threadIdx.x] = A[cuda.threadIdx.y, cuda.threadIdx.x]


def of(kernel, grid, block, *args):
    with nf.recording() as record:
        nf.launch(kernel, grid, block, *args, device="cpu")
    (launch,) = record.launches
    return {(one.array, one.kind): one for one in warp_accesses(launch)}


def numbers(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def counted(one):
    return one.elements, one.requests, one.units, one.least


def test_neighbours_share_sectors():
    found = of(neighbours, 3, 64, numbers(150), numbers(150))
    assert counted(found["A", "loads"]) == (150, 5, 4 * 4 + 3, 4 * 4 + 3)  # 4 whole warps, and one of 22 threads
    assert counted(found["B", "stores"]) == (150, 5, 19, 19)
    found = of(neighbours, 1, 64, numbers(64, dtype=np.float64), numbers(64, dtype=np.float64))
    assert counted(found["A", "loads"]) == (64, 2, 16, 16)


def test_far_apart_each_has_a_sector_of_its_own():
    found = of(far_apart, 1, 32, numbers(32 * STRIDE), numbers(32))
    assert counted(found["A", "loads"]) == (32, 1, 32, 4)
    assert counted(found["B", "stores"]) == (32, 1, 4, 4)


def test_one_element_for_all_is_one_sector():
    assert counted(of(one_for_all, 2, 64, numbers(8), numbers(128))["A", "loads"]) == (128, 4, 4, 4)


@pytest.mark.parametrize("width, waves", [(32, 32), (33, 1), (34, 2), (36, 4), (40, 8)])
def test_banks(width, waves):
    """A column of a tile: its rows begin gcd(width, 32) banks apart."""
    found = of(make_transpose(width), 1, (32, 8), numbers(32, 32), numbers(32, 32))
    assert counted(found["tile", "stores"]) == (1024, 32, 32, 32)
    assert counted(found["tile", "loads"]) == (1024, 32, 32 * waves, 32)
    assert counted(found["A", "loads"]) == (1024, 32, 128, 128)


def test_elements_of_8_bytes_go_in_halves():
    """A half of a warp is 16 × 8 bytes, all the banks: two wavefronts at least; 33 doubles apart, they suffice."""
    found = of(
        make_transpose(33, float64), 1, (32, 8), numbers(32, 32, dtype=np.float64), numbers(32, 32, dtype=np.float64)
    )
    assert counted(found["tile", "loads"]) == (1024, 32, 64, 64)
    found = of(
        make_transpose(32, float64), 1, (32, 8), numbers(32, 32, dtype=np.float64), numbers(32, 32, dtype=np.float64)
    )
    assert counted(found["tile", "loads"]) == (1024, 32, 32 * 32, 64)


def test_a_warp_is_32_threads_in_the_order_of_x():
    """Rows of 8 threads: a warp has four of them, 20 elements apart: sectors are used whole or in part."""
    found = of(odd_block, 1, (8, 6), numbers(6, 20), numbers(6, 8))
    sectors = [{(row * 20 + x) // 8 for row in rows for x in range(8)} for rows in (range(4), range(4, 6))]
    assert counted(found["A", "loads"]) == (48, 2, sum(map(len, sectors)), 4 + 2)


@pytest.mark.parametrize("stage", ["naive", "tiled", "flash2", "register_tiled"])
def test_elements_are_those_of_the_bill(stage):
    q, k, v = testing.inputs((2, 19, 12), (2, 23, 12))
    with nf.ledger() as bill, nf.recording() as record:
        nf.attention(q, k, v, stage=stage, device="cpu")
    for launch in record.launches:
        for name, count in bill.kernels[launch.kernel].items():
            found = [one for one in warp_accesses(launch) if one.space == "global" and one.array == name]
            assert sum(one.elements for one in found if one.kind == "loads") == count.loads
            assert sum(one.elements for one in found if one.kind == "stores") == count.stores
            assert all(one.least <= one.units and one.requests <= one.elements <= 32 * one.requests for one in found)


def test_shared_tiles_of_register_tiled_have_no_conflicts_but_where_they_are_filled():
    """Products read 4 rows of 8 neighbours or one element for all; a tile is filled by 4 rows of 8 threads."""
    q, k, v = testing.inputs((64, 64), (64, 64))
    with nf.recording() as record:
        nf.attention(q, k, v, stage="register_tiled", device="cpu")
    found = [one for one in warp_accesses(record.launches[0]) if one.space == "shared"]
    assert {one.array for one in found} == {"Q_i", "K_j", "V_j", "P_ij", "part"}
    for one in found:
        assert one.units == one.least if one.kind == "loads" else one.units <= 2 * one.least, one


def test_an_access_knows_its_line():
    found = of(neighbours, 1, 32, numbers(32), numbers(32))
    one = found["A", "loads"]
    assert isinstance(one, Access) and one.space == "global" and one.per_request == 4
    assert linecache.getline(__file__, one.line).strip() == "B[i] = A[i]"
