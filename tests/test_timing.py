"""Runs are interleaved, nothing that compiles is timed, and the GPU's clock reads the GPU alone."""

import contextlib
import types

import pytest
from numba import cuda

from numba_flash import timing


def test_each_round_runs_every_work_once_and_begins_with_another():
    log = []
    works = {name: (lambda name=name: log.append(name)) for name in "abc"}

    def clock(work):
        work()
        log[-1] = log[-1].upper()
        return len(log)

    assert timing.interleaved(works, 3, clock) == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}
    assert "".join(log) == "abcABCBCACAB"


def test_a_work_that_has_used_up_its_time_sits_out():
    seconds = {"long": 5.0, "short": 0.4}
    works = {name: (lambda name=name: name) for name in seconds}
    times = timing.interleaved(works, 4, lambda work: seconds[work()], most=1)
    assert times == {"long": [5.0], "short": [0.4, 0.4, 0.4]}
    assert timing.interleaved(works, 2, lambda work: 1.0) == {"long": [1.0, 1.0], "short": [1.0, 1.0]}


def test_spread():
    assert timing.spread([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}
    assert timing.spread([2.0, 1.0]) == {"median": 1.5, "min": 1.0, "max": 2.0}


def test_the_clock_is_that_of_the_device(monkeypatch):
    for place, clock in (("cpu", "wall_seconds"), ("sim", "wall_seconds"), ("gpu", "event_seconds")):
        monkeypatch.setattr(timing, "device", lambda: types.SimpleNamespace(name=place))  # noqa: B023
        monkeypatch.setattr(timing, "wall_seconds", lambda work: "wall_seconds")
        monkeypatch.setattr(timing, "event_seconds", lambda work: "event_seconds")
        assert timing.interleaved({"x": list}, 1) == {"x": [clock]}


def test_wall_seconds(monkeypatch):
    clock = iter([10.0, 13.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timing.wall_seconds(list) == 3.5


@pytest.fixture
def log(monkeypatch):
    """A GPU that writes down what is asked of it."""
    log = []

    def event():
        return types.SimpleNamespace(record=lambda: log.append("record"), synchronize=lambda: log.append("wait"))

    @contextlib.contextmanager
    def defer_cleanup():
        log.append("keep")
        yield
        log.append("free")

    monkeypatch.setattr(cuda, "event", event)
    monkeypatch.setattr(cuda, "synchronize", lambda: log.append("idle"))
    monkeypatch.setattr(cuda, "event_elapsed_time", lambda start, stop: 2000.0)
    monkeypatch.setattr(cuda, "defer_cleanup", defer_cleanup, raising=False)
    flush = types.SimpleNamespace(deallocations=types.SimpleNamespace(clear=lambda: log.append("clear")))
    monkeypatch.setattr(cuda, "current_context", lambda: flush)
    monkeypatch.setattr(timing, "head_start", lambda: log.append("sleep"))
    return log


def test_events_bracket_the_work_and_nothing_else(log):
    assert timing.event_seconds(lambda: log.append("work")) == 2
    assert log == ["clear", "idle", "sleep", "keep", "record", "work", "record", "wait", "free"]
