"""Times: what the clock counts, and what is made of several runs."""

from __future__ import annotations

import time
from itertools import count

import pytest

from rotor_profiling import timing
from rotor_profiling.backends import stopwatch
from rotor_profiling.timing import lower_quartile, seconds_of, spread
from tests.profiling.costs import CPU

pytestmark = pytest.mark.timed


def test_the_clock_stands_still_while_something_else_has_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.5, 15.0])
    # In the second lap, 3.5 s of 4: it had to wait while the clocks were read, which are read again.
    early, late = [b"7 100000000 1"] * 5, [b"7 3600000000 2"] * 2
    waiting = iter([*early, *late])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(timing.os, "pread", lambda *_: next(waiting))
    monkeypatch.setattr(timing.os, "open", lambda *_: 0)
    monkeypatch.setattr(timing.os, "close", lambda *_: None)
    with stopwatch(CPU) as watch:
        watch.start()
        watch.lap()
        watch.lap()
        assert watch.stop() == pytest.approx([1.0, 0.5])


def test_where_waiting_is_not_counted_the_clock_is_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise FileNotFoundError

    now = iter([1.0, 3.0])
    monkeypatch.setattr(timing.os, "open", missing)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    with stopwatch(CPU) as watch:
        watch.start()
        watch.lap()
        assert watch.stop() == [2.0]


def test_a_run_that_was_disturbed_hardly_counts() -> None:
    assert lower_quartile([1.0, 1.0, 1.0, 1.0, 900.0]) == 1.0
    assert lower_quartile([5.0]) == 5.0
    assert lower_quartile([1.0, 2.0]) == 1.25
    assert spread([1.0, 1.0, 1.0, 1.0, 900.0]) == 0.0
    assert spread([1.0, 3.0]) == pytest.approx(0.5)
    assert spread([0.0, 0.0]) == 0.0


@pytest.mark.parametrize(("seconds", "runs"), [(1e-6, timing.MOST_RUNS), (1.0, timing.FEWEST_RUNS)])
def test_quick_code_runs_more_often_but_not_for_long(
    seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, done = count(step=seconds), []
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing.os, "pread", lambda *_: b"0 0 0")
    with stopwatch(CPU) as watch:
        assert seconds_of(lambda: done.append(1), watch) == pytest.approx(seconds)
    assert len(done) == runs
