"""A recording has each access and each assignment, in order, and leaves alone what is not recorded."""

import re
from pathlib import Path

import numpy as np
import pytest

import numba_flash as nf
from numba_flash.engine import cpu, recorder
from numba_flash.engine.access import ATOMIC, NOTE, READ, WRITE
from numba_flash.engine.rewrite import function_of

from . import recorder_kernels as kernels

TEXT = Path(kernels.__file__).read_text(encoding="utf-8").splitlines()
LINES = {match[1]: number for number, text in enumerate(TEXT, 1) if (match := re.search(r"# (\w+)$", text))}


def launch(kernel, grid, block, *args):
    nf.launch(kernel, grid, block, *args, device="cpu")


def arguments():
    return np.arange(10, 14, dtype=np.float32), np.zeros((2, 2), np.float32), 2, np.zeros(1, np.int64)


def log_of(one):
    """(block, phase in it, thread, line of the kernel, kind, array or name, element, value) of each entry."""
    found, start = [], 0
    for block, end in zip(one.blocks, one.ends, strict=True):
        for at in range(start, end):
            is_note = one.kind[at] == NOTE
            name = one.notes[one.site[at]].name if is_note else one.arrays[one.array[at]].name
            phase = one.phase[at] - one.phase[start]
            entry = phase, one.thread[at], one.line[at], one.kind[at], name, one.element[at], one.value[at]
            found.append((block[0], *entry))
        start = end
    return found


def test_every_entry_of_a_small_kernel():
    A, B, n, C = arguments()
    with nf.ledger() as bill, nf.recording() as record:
        assert repr(record) == "Recording of 0 launches (none), 0 entries"
        launch(kernels.small, 2, 2, A, B, n, C)
    assert repr(record) == f"Recording of 1 launch (small), {record.entries:,} entries"
    assert B.tolist() == [[12, 11], [14, 13]] and C[0] == 2
    assert bill["A"].loads == 4 and bill["B"].stores == 4 and bill["C"].atomics == 4
    line = LINES
    expected = []
    for b in (0, 1):
        for r in (0, 1):
            expected += [
                (b, 0, r, line["r"], NOTE, "r", 0, r),
                (b, 0, r, line["fill"], READ, "A", 2 * b + r, 10 + 2 * b + r),
                (b, 0, r, line["fill"], WRITE, "T", r, 10 + 2 * b + r),
            ]
        for r in (0, 1):
            value = 11 + 2 * b - r
            expected += [
                (b, 1, r, line["swap"], READ, "T", 1 - r, value),
                (b, 1, r, line["swap"], NOTE, "value", 0, value),
            ]
        for r in (0, 1):
            value = 11 + 2 * b - r
            expected += [
                (b, 2, r, line["swap"], NOTE, "x", 0, value),
                (b, 2, r, line["loop"], NOTE, "k", 0, 0),
                (b, 2, r, line["add"], NOTE, "x", 0, value),
                (b, 2, r, line["loop"], NOTE, "k", 0, 1),
                (b, 2, r, line["add"], NOTE, "x", 0, value + 1),
                (b, 2, r, line["keep"], WRITE, "own", r, value + 1),
                (b, 2, r, line["out"], READ, "own", r, value + 1),
                (b, 2, r, line["out"], WRITE, "B", 2 * b + r, value + 1),
                (b, 2, r, line["count"], ATOMIC, "C", 0, 0),
            ]
    (one,) = record.launches
    arrays = {"T", "own", "row"}  # declarations and views are names too, without a value
    found = [entry for entry in log_of(one) if not (entry[4] == NOTE and entry[5] in arrays)]
    assert found == expected
    assert [note.is_loop for note in one.notes if note.name == "k"] == [True]
    sites = [one.sites[site].line for site, kind in zip(one.site, one.kind, strict=True) if kind == READ]
    assert set(sites) == {line["device"], line["inlined"], line["out"]}  # where it was read; `line` is the kernel's
    assert (one.kernel, one.grid, one.block, one.blocks) == ("small", (2, 1, 1), (2, 1, 1), [(0, 0, 0), (1, 0, 0)])
    spaces = {a.name: (a.space, a.shape) for a in one.arrays if a}
    assert spaces["T"] == ("shared", (2,)) and spaces["own"] == ("local", (1,)) and spaces["B"] == ("global", (2, 2))
    assert one.shared_bytes == 8 and one.arrays[2] is None
    assert one.source[0][0] == "@cuda.jit" and TEXT[one.source[1] - 1] == "@cuda.jit"


def test_numbers_of_every_kind_and_while_and_augmented_stores():
    A, B = np.array([1, 2**60]), np.zeros(2)
    with nf.recording() as record:
        launch(kernels.numbers, 1, 2, A, B)
    log = log_of(record.launches[0])
    assert [entry[-1] for entry in log if entry[3] == LINES["truth"]] == [0, 1]
    assert [entry[-1] for entry in log if entry[3] == LINES["half"]] == [1.5, 2.0**60]
    assert [entry[-1] for entry in log if entry[3] == LINES["n"]] == [1, 2, 1, 2]
    assert sum(entry[3] == LINES["while"] for entry in log) == 4
    again = [(entry[4], entry[-1]) for entry in log if entry[3] == LINES["again"] and entry[2] == 0]
    assert again == [(READ, 1.5), (WRITE, 2.5)]
    assert record.launches[0].words[0, 3] == 0  # an integer is kept as it is


def test_what_is_not_recorded_is_compiled_and_run_as_before():
    function = function_of(kernels.small)
    launch(kernels.small, 2, 2, *arguments())
    before = cpu.program_of(function)
    with nf.recording() as record:
        launch(kernels.small, 2, 2, *arguments())
    assert cpu.program_of(function) is before and "_nf_note" not in before.source and not before.notes
    assert "_nf_note" in cpu.program_of(function, recorded=True).source
    assert "recorded" not in str(cpu._modules[before.source]["run"].signatures)
    entries = record.entries
    launch(kernels.small, 2, 2, *arguments())
    assert record.entries == entries and len(record.launches) == 1


def test_recordings_nest_and_give_the_same_each_time(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_DEVICE", "gpu")  # where nobody names a device, it is the CPU engine all the same
    with nf.recording() as outer:
        nf.launch(kernels.small, 2, 2, *arguments())
        with nf.recording() as inner:
            nf.launch(kernels.small, 2, 2, *arguments())
    assert len(outer.launches) == 2 and inner.launches == outer.launches[1:]
    assert np.array_equal(outer.launches[0].words, outer.launches[1].words)


@pytest.mark.parametrize(
    "how, error, said",
    [
        ({"strict": True}, ValueError, r"strict=True \(or NUMBA_FLASH_STRICT=1\): small is being recorded"),
        ({"B": np.zeros((2, 4), np.float32)[:, ::2]}, ValueError, "argument B of small is not contiguous"),
        ({"limit": 10}, ValueError, r"block 1 of 2 has 34 accesses .* of the 10 of a recording 10 are left"),
        ({"limit": 40}, ValueError, r"block 2 of 2 has 34 accesses .* of the 40 of a recording 6 are left"),
        ({"limit": 0}, ValueError, r"has more than \d+ accesses"),
    ],
)
def test_what_cannot_be_recorded_is_refused(how, error, said, monkeypatch):
    A, B, n, C = arguments()
    monkeypatch.setattr(recorder, "LIMIT", how.get("limit", recorder.LIMIT))
    with nf.recording() as record, pytest.raises(error, match=said):
        nf.launch(kernels.small, 2, 2, A, how.get("B", B), n, C, device="cpu", strict=how.get("strict"))
    assert not record.launches
    assert not recorder.active()


def test_a_faulty_kernel_fails_as_it_does_elsewhere_and_is_not_in_the_recording():
    with nf.recording() as record, pytest.raises(nf.errors.OutOfBounds, match="index 2 of A"):
        launch(kernels.beyond, 1, 2, np.zeros(2, np.float32))
    assert not record.launches
