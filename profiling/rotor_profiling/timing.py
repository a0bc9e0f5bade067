"""Time code on a CPU or a GPU, with little influence of other programs on the result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

# Code is run FEWEST_RUNS times, then until all runs together took ENOUGH_SECONDS, but at most MOST_RUNS times. Guesses:
# with fewer runs, times vary from plan to plan; with more, measuring takes minutes.
FEWEST_RUNS = 3
MOST_RUNS = 7
ENOUGH_SECONDS = 0.02


class Stopwatch(Protocol):
    """Times the laps of one run. The first lap begins at `start`; each call of `lap` ends one and begins the next."""

    exact: bool  # whether every run gives the same seconds, so that one run suffices

    def start(self) -> None: ...

    def lap(self) -> None: ...

    def stop(self) -> list[float]:
        """Return the seconds of all laps since the start."""


@contextmanager
def cpu_stopwatch() -> Iterator[Stopwatch]:
    """Make a stopwatch for this thread's work on the CPU.

    On Linux, its laps exclude the time for which the thread waited for a CPU: the second number in `schedstat`, in
    nanoseconds (Documentation/scheduler/sched-stats.rst). Other systems do not report this time.
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
    """Return the lower quartile of the seconds of several calls of `run`; calls of `before` do not count."""
    measured: list[float] = []
    # Several processes must call `run` equally often, but measure different seconds: each calls it FEWEST_RUNS times.
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
    """Return the lower quartile of the seconds `samples`: other programs only slow runs, so fast runs are typical."""
    return float(np.quantile(samples, 0.25))


def spread(samples: list[float]) -> float:
    """Return the interquartile range of the `samples`, divided by their median; 0 for a single sample."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float((high - low) / middle) if middle else 0.0


def several_processes() -> bool:
    """Return whether several processes train together: all must then run each collective equally often."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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
        # Read both clocks again if the thread waited for a CPU in between: one clock would include that wait.
        waited = self._waited()
        while True:
            now = time.perf_counter()
            if (after := self._waited()) == waited:
                return now - waited
            waited = after

    def stop(self) -> list[float]:
        return [max(0.0, after - before) for before, after in zip(self._times, self._times[1:], strict=False)]


class CudaStopwatch:
    """Stopwatch of CUDA events. The CPU's clock would time the launches of kernels, which return before kernels end."""

    exact = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, list[torch.cuda.Event]()

    def start(self) -> None:
        torch.cuda.synchronize(self._device)  # else the first lap would include earlier work
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
