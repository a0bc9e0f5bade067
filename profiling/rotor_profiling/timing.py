"""Seconds that a piece of code takes on its device, whatever else the machine does meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

# Guesses. Fewer runs make times that jump from plan to plan, more runs make measuring take minutes.
FEWEST_RUNS = 3
MOST_RUNS = 7
ENOUGH_SECONDS = 0.02


class Stopwatch(Protocol):
    """Times the laps of one run: from `start` on, each up to a call of `lap`."""

    @property
    def exact(self) -> bool:
        """Whether every run shows the same, so that one is enough."""

    def start(self) -> None: ...

    def lap(self) -> None: ...

    def stop(self) -> list[float]:
        """The seconds of all laps since the start."""


@contextmanager
def cpu_stopwatch() -> Iterator[Stopwatch]:
    """A stopwatch for what this thread runs on the CPU."""
    with _waiting_for_a_core() as waited:
        yield _CpuStopwatch(waited)


def cuda_stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch for what this thread runs on a CUDA device."""
    return _CudaStopwatch(device)


def seconds_of(run: Callable[[], None], watch: Stopwatch, before: Callable[[], None] | None = None) -> float:
    """The seconds of `run`, which is repeated until they rest on enough runs; what comes `before` it is not counted."""
    measured: list[float] = []
    # Processes have to run equally often, but their clocks differ. With equal bounds no clock decides.
    most = FEWEST_RUNS if several_processes() else MOST_RUNS
    while len(measured) < FEWEST_RUNS or (sum(measured) < ENOUGH_SECONDS and len(measured) < most):
        if before is not None:
            before()
        watch.start()
        run()
        watch.lap()
        measured += watch.stop()
        if watch.exact:
            break
    return lower_quartile(measured)


def lower_quartile(samples: list[float]) -> float:
    """The value that a quarter of the `samples` is below: what disturbs a run makes it longer, and never shorter."""
    return _quantile(samples, 0.25)


def spread(samples: list[float]) -> float:
    """How far the middle half of the `samples` reaches, as a part of their median; 0 for a single one."""
    middle = _quantile(samples, 0.5)
    return (_quantile(samples, 0.75) - _quantile(samples, 0.25)) / middle if middle else 0.0


def several_processes() -> bool:
    """Whether this process is one of several: they may have to run as often, as a collective waits for all of them."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _quantile(samples: list[float], part: float) -> float:
    ordered = sorted(samples)
    at = part * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


@contextmanager
def _waiting_for_a_core() -> Iterator[Callable[[], float]]:
    """A function that says for how many seconds this thread has been ready to run, and something else ran instead.

    Linux counts them: the second number in `schedstat` (Documentation/scheduler/sched-stats.rst), in nanoseconds. Where
    nobody counts, it says 0.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)


class _CpuStopwatch:
    """Seconds in which this thread runs, or waits for something else than a core."""

    exact = False

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._times: list[float] = []

    def start(self) -> None:
        self._times = []
        self.lap()

    def lap(self) -> None:
        self._times.append(self._now())

    def _now(self) -> float:
        """The seconds in which the thread has not waited for a core.

        Both clocks are read until the thread has not waited in between. Else a lap would be as much too short, or too
        long, as it has waited; and the least of several is taken.
        """
        waited = self._waited()
        while True:
            now = time.perf_counter()
            if (after := self._waited()) == waited:
                return now - waited
            waited = after

    def stop(self) -> list[float]:
        # One clock counts in nanoseconds, and the other may not: a lap without work may come out negative.
        return [max(0.0, after - before) for before, after in zip(self._times, self._times[1:], strict=False)]


class _CudaStopwatch:
    """Events, not the host's clock: kernels run long after the call that launched them has returned."""

    exact = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        torch.cuda.synchronize(self._device)  # else the first lap would wait for earlier work
        self._events = []
        self.lap()

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def stop(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]
