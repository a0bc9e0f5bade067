"""A watch counts, phase by phase, what runs outside of any context of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from rotor_profiling import Phase, memory_meter, watch_step
from rotor_profiling.step import CpuWatch, give_way
from tests.fields import raises
from tests.profiling.costs import CPU

KILO = 256
"""Numbers of four bytes: a kilobyte."""


def kilobytes(count: int) -> torch.Tensor:
    return torch.empty(count * KILO)


def watching() -> CpuWatch:
    found = watch_step(CPU, 0, 0)
    assert isinstance(found, CpuWatch)
    return found


def assert_a_meter_works() -> None:
    with memory_meter(CPU) as meter:
        held = kilobytes(2)
        meter.mark("")
    assert meter.phases[""].end == 2048
    del held


def test_phases_are_those_of_a_meter() -> None:
    def work(mark: Callable[[str], None]) -> None:
        first = kilobytes(3).requires_grad_()
        mark("loss")
        second = kilobytes(5)
        del second
        third = kilobytes(1)
        mark("backward")
        (2 * first).exp().sum().backward()
        mark("after")
        del first, third

    with memory_meter(CPU) as meter:
        work(meter.mark)
    watch = watch_step(CPU, 100, 0)
    assert watch is not None
    work(watch.mark)
    phases = watch.stop()
    assert phases == {name: Phase(100 + p.start, 100 + p.peak, 100 + p.end) for name, p in meter.phases.items()}
    assert phases["loss"] == Phase(100 + 3072, 100 + 8192, 100 + 4096)
    assert watch.stop() is None
    assert not torch.autograd._profiler_enabled()


def test_a_thread_has_one_profiler_and_a_watch_is_the_one_to_go() -> None:
    with torch.profiler.profile():
        assert watch_step(CPU, 0, 0) is None
    found: list[object] = []
    _backward_with(lambda: found.append(watch_step(CPU, 0, 0)), 1)
    assert found == [None]
    watch = watching()
    assert watch_step(CPU, 0, 0) is None
    assert_a_meter_works()
    assert watch.stop() is None
    watch.mark("nothing")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_watch_that_is_to_stop_inside_of_a_backward_ends_with_the_pass(depth: int) -> None:
    watch = watching()
    found: list[object] = []
    _backward_with(lambda: found.append(watch.stop()), depth)
    assert found == [None]
    assert not torch.autograd._profiler_enabled()
    assert watch.stop() is None
    watching()
    give_way()


def test_no_profiler_starts_inside_of_a_backward_that_is_watched() -> None:
    watch = watching()

    def measure() -> None:
        with raises(RuntimeError, "profiler_in_backward"), memory_meter(CPU):
            pass

    _backward_with(measure, 1)
    assert not torch.autograd._profiler_enabled()
    assert watch.stop() is None
    assert_a_meter_works()


def _backward_with(do: Callable[[], object], depth: int) -> None:
    """Call `do` in a backward, or in one that runs inside of another."""
    leaf = kilobytes(1).requires_grad_()
    leaf.register_hook(lambda _: do() if depth == 1 else _backward_with(do, depth - 1))
    with torch.enable_grad():  # as the engine calls a hook without
        value = (2 * leaf).sum()
    value.backward()


def test_another_thread_cannot_stop_it_but_its_own_can() -> None:
    watch = watching()
    found: list[object] = []
    thread = threading.Thread(target=lambda: (watch.mark("other"), give_way(), found.append(watch.stop())))
    thread.start()
    thread.join()
    assert found == [None]
    held = kilobytes(1)
    assert watch.stop() == {"": Phase(0, 1024, 1024)}
    del held


class Allocator:
    """CUDA's counters, as far as a watch reads them."""

    def __init__(self, held: int, peak: int) -> None:
        self.held, self.peak, self.resets = held, peak, 0

    def stats(self, device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        return {"allocated_bytes": {"all": {"current": self.held, "peak": self.peak}}}

    def reset(self, device: torch.device) -> None:
        self.peak, self.resets = self.held, self.resets + 1

    def take(self, size: int, kept: int = 0) -> None:
        self.peak = max(self.peak, self.held + size)
        self.held += kept


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator(held=10, peak=50)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", made.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    return made


@pytest.mark.parametrize("limit", [60, 40])
def test_cudas_counters_are_read_and_only_an_older_peak_beyond_the_limit_is_reset(
    allocator: Allocator, limit: int
) -> None:
    watch = watch_step(torch.device("cuda"), 0, limit_bytes=limit)
    assert watch is not None
    allocator.take(20, kept=15)  # below the peak that was there before: it cannot be seen, and is no harm
    watch.mark("loss")
    allocator.take(45, kept=5)
    watch.mark("backward")
    allocator.take(40, kept=-10)
    first = Phase(10, 30 if limit == 40 else 25, 25)
    assert watch.stop() == {"": first, "loss": Phase(25, 70, 30), "backward": Phase(30, 30, 20)}
    assert watch.stop() is None
    assert allocator.resets == (limit == 40)
