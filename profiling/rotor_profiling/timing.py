"""Seconds that a piece of code takes on its device: medians of repeated runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

# Guesses. Fewer runs make times that jump from plan to plan, more runs make measuring take minutes. A stage of five
# milliseconds is timed ten times; a long one three times, so that a single outlier cannot be the median.
FEWEST_RUNS = 3
MOST_RUNS = 20
ENOUGH_SECONDS = 0.05


def median_seconds(runs: Callable[[Callable[[], None]], None], device: torch.device, laps: int) -> list[float]:
    """The median seconds of each lap: `runs` has `laps` consecutive parts, and calls its argument after each."""
    measured = lap_seconds(runs, device, laps)
    return [statistics.median(run[lap] for run in measured) for lap in range(laps)]


def lap_seconds(runs: Callable[[Callable[[], None]], None], device: torch.device, laps: int) -> list[list[float]]:
    """The seconds of each lap, run by run: `runs` has `laps` consecutive parts, and calls its argument after each.

    `runs` is repeated until medians rest on enough runs. CUDA work is timed with events on the current stream.
    """
    # Events, not the host's clock: kernels run long after the call that launched them has returned.
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
    measured: list[list[float]] = []
    spent = 0.0
    # Processes have to run equally often, but their clocks differ. With equal bounds no clock decides.
    most = FEWEST_RUNS if together() else MOST_RUNS
    while len(measured) < FEWEST_RUNS or (spent < ENOUGH_SECONDS and len(measured) < most):
        clock.start()
        runs(clock.lap)
        measured.append(clock.stop())
        assert len(measured[-1]) == laps
        spent += sum(measured[-1])
    return measured


def together() -> bool:
    """Whether other processes may have to run as often: a collective in a stage waits for all of them."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _CpuClock:
    def __init__(self) -> None:
        self._times: list[float] = []

    def start(self) -> None:
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        self._times.append(time.perf_counter())

    def stop(self) -> list[float]:
        return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]


class _CudaClock:
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
