import contextlib
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_flash.hbm import ledger as hbm
from numba_flash.hbm.ledger import Bill, Count, Launch, ledger
from numba_flash.report import in_bytes

amounts = st.integers(0, 10**13)
counts = st.builds(Count, amounts, amounts, amounts, st.just(4))
bills = st.dictionaries(
    st.sampled_from(["scores", "softmax", "output"]), st.dictionaries(st.sampled_from("QKVS"), counts, max_size=4)
).map(Bill)


def record(kernel="scores", **tensors):
    hbm.record(kernel, (2, 1, 1), (16, 16, 1), tensors or {"Q": (4, 8, 0, 0), "S": (4, 0, 5, 1)})


def test_count_elements_and_bytes():
    count = Count(loads=3, stores=2, atomics=5, itemsize=8)
    assert count.elements == 3 + 2 + 2 * 5
    assert (count.read_bytes, count.write_bytes) == (8 * 8, 7 * 8)


def test_counts_of_one_element_size_add():
    assert Count(1, 2, 3, 8) + Count(10, 20, 30, 8) == Count(11, 22, 33, 8)
    assert Count() + Count(1, 0, 0, 8) == Count(1, 0, 0, 8) + Count() == Count(1, 0, 0, 8)
    with pytest.raises(ValueError, match="4 and of 8 bytes"):
        Count(1) + Count(1, itemsize=8)


def test_a_launch_is_counted_in_every_open_ledger():
    with ledger() as outer:
        record()
        with ledger() as inner:
            record()
        record()
    record()
    assert inner["Q"] == Count(loads=8)
    assert outer["Q"] == Count(loads=24)
    assert outer["S"] == Count(stores=15, atomics=3)
    assert outer.launches == [Launch("scores", (2, 1, 1), (16, 16, 1))] * 3
    assert len(inner.launches) == 1
    assert not hbm.active()


def test_a_ledger_closes_when_its_body_raises():
    with pytest.raises(ZeroDivisionError), ledger() as bill:
        record()
        raise ZeroDivisionError
    assert not hbm.active()
    assert bill.loads == 8


def test_ledgers_that_close_out_of_order():
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        a, b = first.enter_context(ledger()), second.enter_context(ledger())
        first.close()
        record()
        assert hbm.active()
    assert (a.loads, b.loads) == (0, 8)


def test_each_thread_has_its_own_ledgers():
    seen = {}

    def work():
        seen["active"] = hbm.active()
        record()
        with ledger() as seen["bill"]:
            record(Q=(4, 1, 0, 0))

    with ledger() as bill:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        record()
    assert not seen["active"]
    assert seen["bill"]["Q"] == Count(loads=1)
    assert bill["Q"] == Count(loads=8)


def test_kernels_and_tensors_keep_their_order():
    with ledger() as bill:
        record("softmax", S=(4, 3, 0, 0), P=(4, 0, 1, 0))
        record("scores", Q=(4, 1, 0, 0))
        record("softmax", S=(4, 3, 0, 0), P=(4, 0, 1, 0))
    assert list(bill.kernels) == ["softmax", "scores"]
    assert bill.kernels["softmax"] == {"S": Count(loads=6), "P": Count(stores=2)}


def test_one_tensor_in_two_dtypes_is_refused():
    with ledger() as bill:
        record(Q=(4, 1, 0, 0))
        with pytest.raises(ValueError, match=r"scores: Q: .* keep a bill for each dtype"):
            record(Q=(8, 1, 0, 0))
    assert bill["Q"] == Count(loads=1)


def test_sums_over_tensors_of_different_element_size():
    bill = Bill({"scores": {"Q": Count(10, itemsize=8), "mask": Count(6, itemsize=1), "S": Count(stores=4, atomics=1)}})
    assert (bill.loads, bill.stores, bill.atomics, bill.elements) == (16, 4, 1, 22)
    assert (bill.read_bytes, bill.write_bytes, bill.total_bytes) == (80 + 6 + 4, 16 + 4, 110)


def test_an_unknown_tensor_lists_those_there_are():
    with pytest.raises(KeyError, match=r"no tensor 'P' .* Q, S"):
        Bill({"scores": {"Q": Count(), "S": Count()}})["P"]
    with pytest.raises(KeyError, match="empty"):
        Bill()["P"]


@given(bills, bills, bills)
def test_addition(a, b, c):
    before = a.to_json(), b.to_json()
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Bill() == a
    assert (a + b).elements == a.elements + b.elements
    assert (a.to_json(), b.to_json()) == before


@given(bills, st.integers(0, 5))
def test_scaling_is_repeated_addition(bill, k):
    assert bill.scaled(k) == sum([bill] * k, Bill())


@pytest.mark.parametrize(("k", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("2", TypeError)])
def test_scaling_by_nonsense(k, error):
    with pytest.raises(error, match=f"k={k!r}"):
        Bill().scaled(k)


@given(bills, bills)
def test_diff_is_empty_exactly_when_equal(a, b):
    assert (a == b) == (not a.diff(b)) == (not b.diff(a))
    assert a == a and not a.diff(a)


def test_what_is_not_accessed_equals_what_is_not_there():
    assert Bill({"scores": {"Q": Count(itemsize=8)}, "softmax": {}}) == Bill()
    assert Bill({"scores": {"Q": Count(1)}}) != Bill({"scores": {"K": Count(1)}})
    assert Bill({"scores": {"Q": Count(1)}}) != Bill({"scores": {"Q": Count(1, itemsize=8)}})
    assert Bill() != 0


def test_launches_are_not_compared():
    with ledger() as bill:
        record(Q=(4, 8, 0, 0))
    assert bill == Bill({"scores": {"Q": Count(loads=8)}})


def test_diff_names_kernel_tensor_kind_and_figures():
    a = Bill({"scores": {"Q": Count(loads=1000), "S": Count(stores=7)}})
    b = Bill({"scores": {"Q": Count(loads=2500), "S": Count(7, itemsize=8)}, "output": {"O": Count(atomics=1)}})
    assert a.diff(b) == [
        "scores: Q loads 1,000 against 2,500 (-1,500)",
        "scores: S loads 0 against 7 (-7)",
        "scores: S stores 7 against 0 (+7)",
        "scores: S bytes per element 4 against 8 (-4)",
        "output: O atomics 0 against 1 (-1)",
    ]
    with pytest.raises(TypeError, match="other=3"):
        a.diff(3)


@given(bills)
def test_json_round_trip(bill):
    assert Bill.from_json(bill.to_json()) == bill


def test_json_keeps_kernels_and_launches():
    with ledger() as bill:
        record()
    back = Bill.from_json(bill.to_json())
    assert (back.kernels, back.launches) == (bill.kernels, bill.launches)
    assert json.loads(bill.to_json())["kernels"]["scores"]["S"] == {
        "loads": 0,
        "stores": 5,
        "atomics": 1,
        "itemsize": 4,
    }


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernels": {"a": {"Q": {"bytes": 1}}}, "launches": []}', None])
def test_json_that_is_no_bill(text):
    with pytest.raises(ValueError, match="is no bill"):
        Bill.from_json(text)


def test_a_bill_prints_as_a_table():
    with ledger() as bill:
        record()
    text = str(bill)
    assert "counted" in text and "atomics" in text and in_bytes(bill.total_bytes) in text
    assert "predicted" in str(bill.scaled(2))
    assert repr(bill) == "<Bill of scores: 15 elements, 60 bytes>"
