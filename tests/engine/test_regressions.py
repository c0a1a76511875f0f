"""What once went wrong without a word, crashed or hung: right now, or refused by name."""

import importlib.util
import sys
import textwrap
from fractions import Fraction

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.errors import KernelError, OutOfBounds, SharedMemoryError, UninitializedRead, Unsupported

from . import regression_kernels as kernels


def run(kernel, block, *args, **options):
    nf.launch(kernel, 1, block, *args, device="cpu", **options)
    return args[0]


def test_globals_named_like_coordinates():
    assert list(run(kernels.coordinates_as_globals, 8, np.zeros(8, np.int64))) == [16] * 4 + [17] * 4
    assert run(kernels.load, 1, np.zeros(1))[0] == 3


def test_device_functions_of_one_name():
    assert run(kernels.same_names, 1, np.zeros(1))[0] == 1000
    assert list(run(kernels.same_closures, 1, np.zeros(2))) == [5, 3]


def test_the_result_of_a_barrier_function_may_be_dropped_but_not_its_work():
    A = np.zeros(1, np.int32)
    with nf.ledger() as bill:
        run(kernels.result_not_used, 4, A)
    assert A[0] == 4
    assert bill["A"].atomics == 4


def test_unsigned_closure_constants_keep_their_type():
    B = np.zeros(1, np.uint64)
    nf.launch(kernels.make_mulhi(np.uint32(0xD2511F53)), 1, 1, np.array([0xFFFFFFFF], np.uint32), B, device="cpu")
    assert B[0] == (0xFFFFFFFF * 0xD2511F53) >> 32


def test_a_wrapped_kernel_is_itself():
    assert run(kernels.wrapped, 1, np.zeros(1))[0] == 44


def test_enumerations_are_integers():
    assert list(run(kernels.enumerated, 1, np.zeros(2))) == [0, 6]


def test_shared_memory_of_a_function_called_twice_is_one():
    assert list(run(kernels.shared_once_per_function, 2, np.array([1, 2], np.float32))) == [1, 2]


def test_a_padded_tile():
    A = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    want = A.T.copy()
    assert np.array_equal(run(kernels.padded, (32, 32), A), want)


def test_a_comment_in_the_first_column():
    assert run(kernels.make_indented(), 1, np.zeros(1))[0] == 6


def test_a_file_that_changed_since_it_was_imported(tmp_path):
    file = tmp_path / "edited_kernels.py"
    text = "from numba import cuda\n\n@cuda.jit\ndef k(A):\n    A[0] = {}\n"
    file.write_text(text.format(1))
    spec = importlib.util.spec_from_file_location("edited_kernels", file)
    module = sys.modules["edited_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file.write_text(textwrap.dedent(text.format(100)) + "# longer\n")
    with pytest.raises(Unsupported, match="has changed since it was imported"):
        run(module.k, 1, np.zeros(1))


def test_views_of_fresh_memory_are_fresh():
    fresh = nf.empty((2, 4), np.int32, device="cpu")
    for view in (fresh[0], fresh.reshape(8)[2:6], fresh[1, ::2]):
        with pytest.raises(UninitializedRead):
            nf.launch(kernels.copy, 1, len(view), view, np.zeros(8, np.int32), device="cpu", strict=True)
    fresh[0] = 1
    nf.launch(kernels.copy, 1, 4, fresh[0], np.zeros(8, np.int32), device="cpu", strict=True)


def test_small_integers_raise_no_false_alarm():
    fresh = nf.empty(256, np.uint8, device="cpu")
    fresh[:] = np.arange(256)
    nf.launch(kernels.copy, 1, 256, fresh, np.zeros(256, np.uint8), device="cpu", strict=True)


def test_a_bill_refuses_a_second_element_size_as_a_whole():
    with nf.ledger() as bill:
        nf.launch(kernels.copy, 1, 1, np.zeros(1), np.zeros(1), device="cpu")
        with pytest.raises(ValueError, match="copy: B"):
            nf.launch(kernels.copy, 1, 1, np.zeros(1), np.zeros(1, np.float32), device="cpu")
    assert (bill["A"].loads, bill["B"].stores) == (1, 1)


REFUSED = {
    "a slice of step 0": (kernels.zero_step, (np.zeros(3), 0), KernelError, "step cannot be zero"),
    "shared objects": (kernels.shared_objects, (np.zeros(1),), Unsupported, "object is no dtype"),
    "huge local": (kernels.huge_local, (np.zeros(1),), Unsupported, "800,000,000 B of local memory per thread (row)"),
    "huge shared": (kernels.huge_shared, (np.zeros(1),), SharedMemoryError, "73,786,976,294,838,206,464 B"),
    "a tuple": (kernels.tuple_too_short, (np.zeros(1), 7), KernelError, "tuple_too_short, block (0, 0, 0), thread"),
    "a range": (kernels.endless_range, (np.zeros(1), 0), KernelError, "endless_range, block (0, 0, 0), thread"),
    "half precision": (kernels.half_inside, (np.zeros(1),), Unsupported, "float16"),
    "bound later": (kernels.make_late()[0], (np.zeros(1),), Unsupported, "'bound_later' is not defined"),
    "star arguments": (kernels.calls_starred, (np.zeros(1),), Unsupported, "*args"),
    "2**70": (kernels.identity, (np.zeros(1), 2**70), TypeError, "argument x of identity is 1180591620717411303424"),
    "2**63": (kernels.identity, (np.zeros(1), 2**63), TypeError, "beyond 64 bits"),
    "a fraction": (kernels.identity, (np.zeros(1), Fraction(1, 2)), TypeError, "argument x of identity is a Fraction"),
    "a long double": (kernels.identity, (np.zeros(1), np.longdouble(2)), TypeError, "argument x of identity"),
    "half argument": (kernels.identity, (np.zeros(1), np.float16(2)), TypeError, "argument x of identity"),
    "a masked array": (kernels.load, (np.ma.zeros(1),), TypeError, "A.filled(0)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    kernel, args, error, said = REFUSED[name]
    nf.launch(kernels.identity, 1, 1, np.zeros(1), 5, device="cpu")  # an int64 argument compiled before
    with pytest.raises(error) as caught:
        nf.launch(kernel, 1, 1, *args, device="cpu")
    assert said in str(caught.value)


def test_an_unwritten_flag_ends_the_loop_that_spins_on_it():
    with pytest.raises(UninitializedRead) as caught:
        run(kernels.spins_on_unwritten, 2, np.zeros(1), strict=True)
    assert caught.value.tensor == "flag"


def test_an_unwritten_flag_is_the_cause_of_the_divergence_it_makes():
    with pytest.raises(UninitializedRead):
        run(kernels.diverges_on_unwritten, 4, np.zeros(1), strict=True)


def test_strict_is_a_truth_value(monkeypatch):
    with pytest.raises(TypeError, match="strict='no'"):
        run(kernels.load, 1, np.zeros(1), strict="no")
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "yes please")
    with pytest.raises(ValueError, match="NUMBA_FLASH_STRICT='yes please'"):
        run(kernels.load, 1, np.zeros(1))
    monkeypatch.setenv("NUMBA_FLASH_STRICT", "true")
    with pytest.raises(OutOfBounds):
        run(kernels.load, 2, np.zeros(1))


BAD_SHAPES = [("abc", "f4", TypeError), (None, "f4", TypeError), (3.0, "f4", TypeError), ((2, -1), "f4", ValueError)]
BAD_SHAPES += [(3, "U5", TypeError), (3, object, TypeError), (3, "no dtype", TypeError)]


@pytest.mark.parametrize("shape, dtype, error", BAD_SHAPES)
def test_empty_refuses_what_is_no_shape_or_dtype(shape, dtype, error):
    with pytest.raises(error, match="shape=|dtype="):
        nf.empty(shape, dtype)


@pytest.mark.parametrize("x", [[1, 2], None, np.float32(1)])
def test_to_host_takes_arrays(x):
    with pytest.raises(TypeError, match="x="):
        nf.to_host(x)
