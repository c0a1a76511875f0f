"""Tensor maps: what the driver is asked for, and what becomes of a refusal. Needs cuda.bindings, but no driver."""

import importlib.util
import os
from types import SimpleNamespace

import numpy as np
import pytest

from numba_flash import errors

if importlib.util.find_spec("numba_cuda") is None or os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("needs numba-cuda", allow_module_level=True)

from cuda.bindings import driver

from numba_flash.ptx import tensor_map, wgmma


def test_the_driver_is_told_what_the_tensor_is(monkeypatch):
    asked = []

    def encode(*arguments):
        asked.extend(arguments)
        return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(opaque=[7] * 16)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    np.testing.assert_array_equal(tensor_map.encode("bf16", 4096, 6, 1000, 128, 192), np.full(16, 7, np.uint64))
    kind, rank, address, sizes, strides, box, steps = asked[:7]
    assert kind == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert (rank, address) == (3, 4096)
    assert [int(x) for x in sizes] == [128, 1000, 6]
    assert [int(x) for x in strides] == [256, 256_000]
    assert [int(x) for x in box] == [64, 192, 1] and [int(x) for x in steps] == [1, 1, 1]


def test_a_refusal_names_the_tensor(monkeypatch):
    refuse = driver.CUresult.CUDA_ERROR_INVALID_VALUE, None
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *_: refuse)
    with pytest.raises(errors.KernelError, match=r"\(6, 1000, 128\) at address 0x1008.*CUDA_ERROR_INVALID_VALUE"):
        tensor_map.encode("f16", 0x1008, 6, 1000, 128, 128)


class Array:
    """As much of a device array as is looked at."""

    def __init__(self, address, contiguous=True):
        self.shape, self.dtype, self.strides = (2, 8, 64), np.dtype(np.float16), (1024, 128, 2)
        self.__cuda_array_interface__ = {"data": (address, False)}
        self.is_c_contiguous = lambda: contiguous
        self.copied = None

    def copy_to_device(self, source):
        self.copied = source


def test_an_unaligned_array_is_copied_once(monkeypatch):
    monkeypatch.setattr(tensor_map.cuda, "device_array", lambda shape, dtype: Array(4096))
    aligned, odd = Array(4096 + 16), Array(4096 + 2)
    assert tensor_map.copied_if_unaligned(aligned) is aligned
    assert tensor_map.copied_if_unaligned(odd).copied is odd


def test_other_strides_are_refused():
    with pytest.raises(ValueError, match="C order"):
        tensor_map.copied_if_unaligned(Array(4096, contiguous=False))


def test_descriptors_have_the_manuals_fields():
    K, V = wgmma.descriptor(), wgmma.descriptor(panel=128 * 128)
    for descriptor, leading in ((K, 16), (V, 128 * 128)):
        assert descriptor >> 62 == 1  # 128-byte swizzle
        assert descriptor >> 32 & 0x3FFF == 1024 >> 4
        assert descriptor >> 16 & 0x3FFF == leading >> 4
        assert descriptor & 0x3FFF == 0
