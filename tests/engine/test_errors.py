"""Each error of the CPU engine, provoked: what it says, and the line, tensor, block and thread it names."""

import inspect

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.engine.rewrite import function_of
from numba_flash.errors import (
    BarrierDivergence,
    KernelError,
    OutOfBounds,
    RaceDetected,
    SharedMemoryError,
    UninitializedRead,
    Unsupported,
)

from . import error_kernels as kernels


def line_of(kernel, marker="FAULT"):
    lines, first = inspect.getsourcelines(function_of(kernel))
    return first + next(number for number, line in enumerate(lines) if marker in line)


def provoke(error, kernel, grid, block, *args, **options):
    with pytest.raises(error) as caught:
        nf.launch(kernel, grid, block, *args, device="cpu", **options)
    return caught.value


def check_place(error, kernel, tensor, block, thread, line=None):
    assert error.kernel == function_of(kernel).__name__
    assert (error.line, error.tensor) == (line or line_of(kernel), tensor)
    assert error.file == kernels.__file__
    assert (error.block, error.thread) == (block, thread)
    for part in (error.kernel, f"line {error.line}", error.tensor, str(block), str(thread)):
        assert part in str(error), part


def floats(*shape):
    return np.ones(shape, np.float32)


OUT_OF_BOUNDS = {
    "beyond the end": (
        kernels.too_far,
        2,
        4,
        (floats(6), floats(8)),
        "A",
        (1, 0, 0),
        (2, 0, 0),
        "index 6 of A, axis 0",
    ),
    "of the target": (kernels.too_far, 2, 4, (floats(8), floats(6)), "B", (1, 0, 0), (2, 0, 0), "size 6"),
    "below zero": (kernels.negative, 1, 4, (floats(4), floats(4)), "A", (0, 0, 0), (0, 0, 0), "index -1 of A"),
    "second axis": (
        kernels.second_axis,
        1,
        4,
        (floats(4), floats(1, 4)),
        "B",
        (0, 0, 0),
        (3, 0, 0),
        "index 4 of B, axis 1",
    ),
    "augmented": (kernels.augmented, 1, 4, (floats(1), floats(6)), "B", (0, 0, 0), (2, 0, 0), "index 6 of B"),
    "a view": (kernels.row_view, 3, 1, (floats(2, 3), floats(3)), "A", (2, 0, 0), (0, 0, 0), "index 2 of A, axis 0"),
    "an atomic": (kernels.atomic_out, 1, 2, (floats(3), floats(4)), "B", (0, 0, 0), (1, 0, 0), "index 4 of B"),
    "empty array": (kernels.too_far, 1, 1, (floats(0), floats(8)), "A", (0, 0, 0), (0, 0, 0), "size 0"),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
@pytest.mark.parametrize("strict", [False, True])
def test_out_of_bounds(name, strict):
    kernel, grid, block, args, tensor, at_block, at_thread, said = OUT_OF_BOUNDS[name]
    error = provoke(OutOfBounds, kernel, grid, block, *args, strict=strict)
    check_place(error, kernel, tensor, at_block, at_thread)
    assert said in str(error)
    assert isinstance(error, IndexError)


def test_out_of_bounds_in_shared_memory():
    kernel = kernels.make_shared_out(2)
    check_place(provoke(OutOfBounds, kernel, (1, 2), (4, 2), floats(1)), kernel, "tile", (0, 0, 0), (2, 0, 0))


def test_out_of_bounds_in_local_memory():
    kernel = kernels.make_local_out(3)
    for strict in (False, True):
        error = provoke(OutOfBounds, kernel, 1, (1, 2), floats(5), strict=strict)
        check_place(error, kernel, "row", (0, 0, 0), (0, 0, 0))


def test_out_of_bounds_in_a_device_function_names_its_line():
    error = provoke(OutOfBounds, kernels.in_device_function, 1, 4, floats(4), floats(4))
    line = line_of(kernels.fetch, "device load")
    check_place(error, kernels.in_device_function, "A", (0, 0, 0), (2, 0, 0), line)


def test_a_faulty_access_touches_no_memory():
    guard = np.zeros(12, np.float32)
    provoke(OutOfBounds, kernels.too_far, 2, 4, floats(8), guard[4:8])
    assert not guard[8:].any()


def test_a_store_to_a_read_only_array():
    A = floats(4)
    A.flags.writeable = False
    error = provoke(OutOfBounds, kernels.too_far, 1, 4, floats(4), A)
    check_place(error, kernels.too_far, "B", (0, 0, 0), (0, 0, 0))
    assert "read-only" in str(error)
    nf.launch(kernels.too_far, 1, 4, A, floats(4), device="cpu")


@pytest.mark.parametrize("kernel", [kernels.barrier_in_branch, kernels.two_barriers, kernels.early_return])
def test_barrier_divergence(kernel):
    error = provoke(BarrierDivergence, kernel, 2, 5, floats(3 if kernel is kernels.early_return else 5))
    assert (error.kernel, error.line, error.file) == (function_of(kernel).__name__, line_of(kernel), kernels.__file__)
    assert error.block == (0, 0, 0)
    assert error.thread == (0, 0, 0)
    assert "thread (3, 0, 0)" in str(error)
    assert ("has returned" in str(error)) is (kernel is not kernels.two_barriers)


RACES = {
    "no barrier": (kernels.make_missing_barrier(4), 1, 4, (floats(4), floats(4)), "tile", (0, 0, 0), (2, 0, 0)),
    "no second barrier": (
        kernels.make_late_barrier(4),
        1,
        4,
        (floats(3, 4), floats(3, 4)),
        "tile",
        (0, 0, 0),
        (2, 0, 0),
    ),
    "two writers": (kernels.write_write, 1, 4, (floats(4),), "A", (0, 0, 0), (1, 0, 0)),
    "two blocks": (kernels.blocks_race, 2, 4, (floats(4),), "A", (1, 0, 0), (0, 0, 0)),
    "atomic and plain": (kernels.mixed_atomic, 1, 4, (floats(1),), "A", (0, 0, 0), (1, 0, 0)),
}


@pytest.mark.parametrize("name", RACES)
def test_races(name):
    kernel, grid, block, args, tensor, at_block, at_thread = RACES[name]
    nf.launch(kernel, grid, block, *args, device="cpu")  # a GPU would not say either
    error = provoke(RaceDetected, kernel, grid, block, *args, strict=True)
    if "barrier" in name:
        assert f"line {line_of(kernel, 'too early')}" in str(error)
        assert "tile[2]" in str(error) if name == "no barrier" else "tile[" in str(error)
    check_place(error, kernel, tensor, at_block, at_thread)


NEXT_TURN = {  # how the message ends
    "written": (kernels.make_late_barrier, "thread (1, 0, 0) writes in line {early} in its next turn of the loop"),
    "read": (kernels.make_early_reader, "thread (1, 0, 0) reads in line {early} in its next turn of the loop"),
    "written by the other": (kernels.make_late_writer, "in its next turn of the loop it writes tile[1], which thread "
                             "(0, 0, 0) reads in line {early}"),
    "in a device function": (kernels.make_late_barriers_outside, "in its next turn of the loop"),
    "in a condition": (kernels.make_late_while, "in its next turn of the loop"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEXT_TURN)
def test_a_race_with_the_next_turn_of_a_loop_asks_for_a_barrier_at_its_end(name):
    make, says = NEXT_TURN[name]
    kernel = make(4)
    error = provoke(RaceDetected, kernel, 1, 4, floats(3, 4), floats(3, 4), strict=True)
    loop = line_of(kernel, "the loop" if name != "written" else "for row")
    assert str(error).endswith(f": a barrier is missing at the end of the loop in line {loop}")
    marker = "in the next turn" if name == "read" else "too early"
    assert (says.format(early=line_of(kernel, marker)) if "{" in says else says) in str(error)


@pytest.mark.parametrize("make", [kernels.make_missing_barrier, kernels.make_skipped_barrier, kernels.make_branches])
def test_a_race_within_a_turn_asks_for_a_barrier_between_the_two(make):
    shape = (4,) if make is kernels.make_missing_barrier else (3, 4)
    error = provoke(RaceDetected, make(4), 1, 4, floats(*shape), floats(*shape), strict=True)
    assert str(error).endswith("with no barrier between: put cuda.syncthreads() between the two")


def test_a_race_between_blocks_names_both_lines():
    kernel = kernels.block_reads_another
    error = provoke(RaceDetected, kernel, 3, 1, floats(4), floats(4), strict=True)
    written = line_of(kernel, "written here")
    check_place(error, kernel, "A", (1, 0, 0), (0, 0, 0), written - 1)
    assert f"block (0, 0, 0) writes in line {written}" in str(error)


UNWRITTEN = {
    "shared": (kernels.make_unwritten_shared(4), "tile"),
    "local": (kernels.make_unwritten_local(4), "row"),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_reads_of_memory_that_nothing_wrote(name):
    kernel, tensor = UNWRITTEN[name]
    nf.launch(kernel, 1, 4, np.zeros(4, np.int32), device="cpu")
    error = provoke(UninitializedRead, kernel, 1, 4, np.zeros(4, np.int32), strict=True)
    assert {"tile": "tile[0, 1]", "row": "row[3]"}[tensor] in str(error)
    check_place(error, kernel, tensor, (0, 0, 0), (0, 0, 0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_reads_of_a_fresh_output(dtype):
    A, B = np.ones(4, dtype), nf.empty(4, dtype, device="cpu")
    B[:2] = 0
    error = provoke(UninitializedRead, kernels.accumulate, 1, 4, A, B, strict=True)
    check_place(error, kernels.accumulate, "B", (0, 0, 0), (2, 0, 0))
    assert "B[2]" in str(error)
    B[:] = 0
    nf.launch(kernels.accumulate, 1, 4, A, B, device="cpu", strict=True)
    assert np.array_equal(B, A)


def test_one_array_under_two_names_has_one_history():
    A = floats(8)
    nf.launch(kernels.too_far, 1, 4, A, A, device="cpu", strict=True)  # each thread reads and writes its own element
    with pytest.raises(RaceDetected):
        nf.launch(kernels.shifted, 1, 4, A, A, device="cpu", strict=True)


def test_fresh_memory_is_nan():
    A = np.zeros(4, np.float32)
    nf.launch(kernels.make_unwritten_shared(4), 1, 4, A, device="cpu")
    assert (A == -1).all()
    assert np.isnan(nf.empty((2, 3), np.float32)[0, 0] if nf.device().name == "cpu" else np.nan)


UNSUPPORTED = {
    kernels.warp_shuffle: "cuda.shfl_sync is a warp primitive",
    kernels.warp_sync: "cuda.syncwarp is a warp primitive",
    kernels.warp_lane: "cuda.laneid is a warp primitive",
    kernels.sync_count: "cuda.syncthreads_count",
    kernels.plain_python: "device function with @cuda.jit(device=True)",
    kernels.unknown_name: "'nowhere' is not defined",
    kernels.global_array: "pass the array as an argument",
    kernels.comprehension: ": a list comprehension cannot",
    kernels.imports: ": an import statement cannot",
    kernels.deletes: ": a del statement cannot",
    kernels.no_call: "cuda.syncthreads is a function, and nothing calls it: write cuda.syncthreads(…)",
    kernels.asserts: "assert statement",
    kernels.raises: "raise statement",
    kernels.slice_store: "write a loop",
    kernels.returns: "a kernel returns nothing",
    kernels.make_computed_shape(2): "compile-time constant",
    kernels.too_many_indices: "3 indices for an array with 1 axes",
    kernels.float_index: "an array is indexed with integers and slices, not with float32",
    kernels.not_an_attribute: "max",
    kernels.math_of_array: "exp",
}


@pytest.mark.parametrize("kernel", UNSUPPORTED, ids=lambda kernel: function_of(kernel).__name__)
def test_what_cannot_run_is_named(kernel):
    error = provoke(Unsupported, kernel, 1, 1, floats(4))
    assert UNSUPPORTED[kernel] in str(error)
    assert error.line == line_of(kernel)
    assert f"line {error.line}" in str(error)
    assert error.kernel == function_of(kernel).__name__


def test_device_functions_that_cannot_run():
    assert "recurs" in str(provoke(Unsupported, kernels.calls_recursive, 1, 1, floats(4)))
    error = provoke(Unsupported, kernels.calls_barrier_twice, 1, 1, floats(4))
    assert error.line == line_of(kernels.barrier_twice)
    assert "returns once" in str(error)


def test_a_kernel_without_source():
    namespace = {}
    exec("from numba import cuda\n@cuda.jit\ndef typed(A):\n    A[0] = 1\n", namespace)
    error = provoke(Unsupported, namespace["typed"], 1, 1, floats(1))
    assert "in a file or a notebook cell" in str(error)


def test_too_much_static_shared_memory():
    error = provoke(SharedMemoryError, kernels.make_large(5000), 1, 1, floats(1))
    assert isinstance(error, ValueError)
    for part in ("60,000 B", "49,152 B", "one[5000]", "two[2, 5000]"):
        assert part in str(error)
    nf.launch(kernels.make_large(4096), 1, 1, floats(1), device="cpu")


def test_too_much_dynamic_shared_memory():
    assert "166,912 B" in str(provoke(SharedMemoryError, kernels.uses_dynamic, 1, 1, floats(1), shared_bytes=166_913))
    nf.launch(kernels.uses_dynamic, 1, 1, floats(1), shared_bytes=166_912, device="cpu")
    error = provoke(OutOfBounds, kernels.uses_dynamic, 1, 4, floats(1), shared_bytes=8)
    check_place(error, kernels.uses_dynamic, "values", (0, 0, 0), (2, 0, 0), line_of(kernels.uses_dynamic, "threadIdx"))


def test_every_error_is_a_kernel_error():
    for error in (BarrierDivergence, OutOfBounds, RaceDetected, SharedMemoryError, UninitializedRead, Unsupported):
        assert issubclass(error, KernelError)


HISTORIES = {
    "a second reader": (kernels.second_reader, 1, 3, (floats(2), floats(3)), "A", (0, 0, 0), (1, 0, 0)),
    "an earlier block": (kernels.third_block, 3, 1, (floats(1), floats(2)), "A", (2, 0, 0), (0, 0, 0)),
    "a read and an atomic": (kernels.read_and_atomic, 1, 2, (floats(1), floats(1)), "A", (0, 0, 0), (1, 0, 0)),
    "blocks without barriers": (kernels.next_block_without_barrier, 2, 2, (floats(1),), "A", (1, 0, 0), (1, 0, 0)),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_races_that_need_a_history(name):
    kernel, grid, block, args, tensor, at_block, at_thread = HISTORIES[name]
    error = provoke(RaceDetected, kernel, grid, block, *args, strict=True)
    check_place(error, kernel, tensor, at_block, at_thread)
    assert ("block (0, 0, 0) " in str(error).partition("which ")[2]) == ("block" in name)


def test_an_atomic_on_memory_that_nothing_wrote():
    error = provoke(UninitializedRead, kernels.atomic_on_unwritten, 1, 1, floats(1), strict=True)
    check_place(error, kernels.atomic_on_unwritten, "total", (0, 0, 0), (0, 0, 0))


def test_two_names_of_one_dynamic_array_have_one_history():
    error = provoke(RaceDetected, kernels.dynamic_twice, 1, 4, floats(4), shared_bytes=16, strict=True)
    assert error.line in (line_of(kernels.dynamic_twice, "one[i]"), line_of(kernels.dynamic_twice, "other name"))
    error = provoke(Unsupported, kernels.dynamic_of_two_types, 1, 1, floats(1), shared_bytes=16, strict=True)
    assert "different dtypes" in str(error)


def test_arguments_that_overlap_share_their_history():
    base = floats(5)
    nf.launch(kernels.too_far, 1, 4, base[:4], floats(4), device="cpu", strict=True)
    error = provoke(RaceDetected, kernels.too_far, 1, 4, base[:4], base[1:], strict=True)
    assert error.line == line_of(kernels.too_far)
    whole = np.ones(4)
    error = provoke(Unsupported, kernels.too_far, 1, 2, whole, whole.view(np.float32), strict=True)
    assert "elements of different sizes" in str(error)


def test_static_and_dynamic_memory_add_up():
    kernel = kernels.make_static_and_dynamic(10_000)
    nf.launch(kernel, 1, 1, floats(1), shared_bytes=126_912, device="cpu")
    assert "166,916 B" in str(provoke(SharedMemoryError, kernel, 1, 1, floats(1), shared_bytes=126_916))


def test_blocks_and_threads_in_three_dimensions():
    A = floats(4, 6, 4)
    error = provoke(OutOfBounds, kernels.far_corner, (2, 3, 2), (2, 2, 2), A)
    check_place(error, kernels.far_corner, "A", (1, 2, 1), (1, 1, 1))
