"""Time code on its device, robust against other load on the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

# Guesses. With fewer runs, times vary from plan to plan; with more, measuring takes minutes.
FEWEST_RUNS = 3
MOST_RUNS = 7
ENOUGH_SECONDS = 0.02


class Stopwatch(Protocol):
    """Times the laps of one run: from `start` on, each up to a call of `lap`."""

    @property
    def exact(self) -> bool:
        """Whether every run shows the same, so that one suffices."""

    def start(self) -> None: ...

    def lap(self) -> None: ...

    def stop(self) -> list[float]:
        """Return the seconds of all laps since the start."""


@contextmanager
def cpu_stopwatch() -> Iterator[Stopwatch]:
    """Make a stopwatch for this thread's work on the CPU.

    It leaves out the time for which the thread was runnable but not running. Linux counts it: the second number in
    `schedstat` (Documentation/scheduler/sched-stats.rst), in nanoseconds. Other systems do not.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        yield _CpuStopwatch(lambda: 0.0)
        return
    try:
        yield _CpuStopwatch(lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9)
    finally:
        os.close(file)


def seconds_of(run: Callable[[], object], watch: Stopwatch, before: Callable[[], None] | None = None) -> float:
    """Return the seconds of `run`, repeated often enough; calls of `before` do not count."""
    measured: list[float] = []
    # Processes must run equally often, but their clocks differ. Equal bounds keep clocks out of the decision.
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
    """Return the lower quartile of the `samples`: disturbances only make a run longer."""
    return _quantile(samples, 0.25)


def spread(samples: list[float]) -> float:
    """Return the interquartile range of the `samples` over their median; 0 for a single one."""
    middle = _quantile(samples, 0.5)
    return (_quantile(samples, 0.75) - _quantile(samples, 0.25)) / middle if middle else 0.0


def several_processes() -> bool:
    """Whether this process is one of several, which may have to run equally often since collectives wait for all."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _quantile(samples: list[float], part: float) -> float:
    ordered = sorted(samples)
    at = part * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


class _CpuStopwatch:
    exact = False

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited, self._times = waited, list[float]()

    def start(self) -> None:
        self._times = []
        self.lap()

    def lap(self) -> None:
        self._times.append(self._now())

    def _now(self) -> float:
        # Reads both clocks until no wait comes in between, by which a lap would be too short or too long.
        waited = self._waited()
        while True:
            now = time.perf_counter()
            if (after := self._waited()) == waited:
                return now - waited
            waited = after

    def stop(self) -> list[float]:
        # One clock counts in nanoseconds, and the other may not: an empty lap may come out negative.
        return [max(0.0, after - before) for before, after in zip(self._times, self._times[1:], strict=False)]


class CudaStopwatch:
    """Times CUDA events, not the host's clock: kernels run long after their launch returns."""

    exact = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, list[torch.cuda.Event]()

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
