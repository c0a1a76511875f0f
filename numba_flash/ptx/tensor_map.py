"""Tensor maps: 128 bytes that tell TMA where a tensor lies and what a box of it is. Made on the host, by the driver.

CUDA driver API, cuTensorMapEncodeTiled; PTX ISA manual, "Tensors: Tensor-map". TMA wants a base address and
strides that are multiples of 16 bytes, and elements side by side along the innermost axis.
"""

from functools import lru_cache

import numpy as np
from numba import cuda

from ..errors import KernelError

COLUMNS = 64  # of a box: 128 bytes, as wide as the swizzle


def copied_if_unaligned(array):
    """`array`, or a copy of it where its base address is no multiple of 16. Raises ValueError unless in C order."""
    if not array.is_c_contiguous():
        raise ValueError(f"an array of shape {array.shape} has strides {array.strides}; TMA is given arrays in C order")
    if _address(array) % 16 == 0:
        return array
    copy = cuda.device_array(array.shape, array.dtype)
    copy.copy_to_device(array)
    return copy


def tensor_maps(kind, *tensors):
    """One map for each (array, rows): array (heads, N, d) of 2-byte numbers on the GPU, box of `rows` × 64 of one head.

    kind: "f16" or "bf16". Returns a device array (tensors, 16) of uint64. Raises KernelError where the driver refuses.
    """
    described = tuple((_address(array), *array.shape, rows) for array, rows in tensors)
    return _uploaded(cuda.current_context().device.id, kind, described)


def _address(array):
    return array.__cuda_array_interface__["data"][0]


@lru_cache(maxsize=256)
def _uploaded(device, kind, described):
    """The same tensors have the same maps, so that a training loop makes them once. A copy in a stream's order, unlike
    one without a stream, does not wait for the kernels before it."""
    maps = np.stack([encode(kind, *tensor) for tensor in described])
    return cuda.to_device(maps, stream=cuda.default_stream())


def encode(kind, address, heads, N, d, rows):
    """One map, as 16 uint64."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    result, tensor_map = driver.cuTensorMapEncodeTiled(
        {"f16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}[kind],
        3,
        address,
        [u64(d), u64(N), u64(heads)],
        [u64(2 * d), u64(2 * N * d)],
        [u32(COLUMNS), u32(rows), u32(1)],
        [u32(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        tensor = f"(heads, N, d) = {(heads, N, d)} at address {address:#x}, boxes of {rows} × {COLUMNS}"
        raise KernelError(f"the driver makes no tensor map of {tensor}: {result.name}")
    return np.array([int(word) for word in tensor_map.opaque], np.uint64)
