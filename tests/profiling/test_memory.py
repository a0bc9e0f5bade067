"""Meters and watches count bytes phase by phase."""

import subprocess
import sys
from collections.abc import Callable
from queue import Queue
from threading import Thread, get_ident
from typing import Any

import pytest
import torch

from rotor_profiling import Phase, measured_peak, memory_meter, watch_step
from rotor_profiling.backends import stopwatch
from rotor_profiling.memory import CpuMeter
from rotor_profiling.step import CpuWatch, give_way
from tests.checkpointable.steps import CPU
from tests.fields import raises

KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_profilers_after_a_meter_that_an_error_leaves_see_operators_and_the_next_meter_works() -> None:
    with pytest.raises(KeyError, match="mine"), memory_meter(CPU) as meter:
        raise KeyError("mine")
    assert meter.phases == {}
    with torch.autograd.profiler.profile() as after:
        torch.ones(4).exp()
    assert "aten::exp" in {event.name for event in after.function_events}
    for instrument in (memory_meter, stopwatch):
        with raises(ValueError, "unknown_device", name="meta"):
            instrument(torch.device("meta"))
    with memory_meter(CPU) as meter:
        kept = block(1)
    assert meter.phases[""].end == KIB
    del kept


def test_phases_have_their_own_peaks_and_ends() -> None:
    old = block(50)
    with memory_meter(CPU) as meter:
        del old  # an older block does not count
        kept = block(3)
        meter.mark("peak")
        first, second = block(5), block(7)
        del first
        third = block(4)  # 11 at once, after a peak of 12
        del second
        meter.mark("nothing")
        meter.mark("free")
        del third, kept
        after = block(1)
        meter.mark("end")
    assert meter.phases == {
        "": Phase(0, 3 * KIB, 3 * KIB),
        "peak": Phase(3 * KIB, 15 * KIB, 7 * KIB),
        "nothing": Phase(7 * KIB, 7 * KIB, 7 * KIB),
        "free": Phase(7 * KIB, 7 * KIB, KIB),
        "end": Phase(KIB, KIB, KIB),
    }
    assert (meter.phases["peak"].rise, meter.phases["peak"].kept) == (12 * KIB, 4 * KIB)
    assert (meter.phases["free"].rise, meter.phases["free"].kept) == (0, -6 * KIB)
    del after


def test_views_take_nothing_and_allocations_of_a_backward_count() -> None:
    base, leaf = block(8), torch.ones(KIB, requires_grad=True)
    with memory_meter(CPU) as meter:
        views = [base[10:], base.view(64, -1), base.t(), torch.empty(0)]
        meter.mark("backward")
        leaf.exp().sum().backward()
    assert meter.phases[""] == Phase(0, 0, 0)
    assert meter.phases["backward"].end == leaf.grad.nbytes
    # exp's result and the gradient, two scalars
    assert 2 * leaf.nbytes <= meter.phases["backward"].peak <= 2 * leaf.nbytes + 8
    del views


def test_a_meter_prints_nothing_and_loses_nothing_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    sys.stderr.write("before\n")
    for _ in range(2):
        with memory_meter(CPU) as meter:
            meter.mark("work")
            sys.stderr.write("inside\n")
    sys.stderr.write("after\n")
    assert capfd.readouterr() == ("", "before\ninside\ninside\nafter\n")


@pytest.mark.gpu
def test_on_cuda_phases_peaks_and_ends_are_those_of_the_allocator(cuda: torch.device) -> None:
    with memory_meter(cuda) as meter:
        kept = torch.empty(4 * KIB, dtype=torch.uint8, device=cuda)
        meter.mark("work")
        torch.empty(16 * KIB, dtype=torch.uint8, device=cuda)
        odd = torch.empty(1, device=cuda)
    assert meter.phases == {"": Phase(0, 4 * KIB, 4 * KIB), "work": Phase(4 * KIB, 20 * KIB, 4 * KIB + 512)}
    del kept, odd


@pytest.mark.gpu
def test_on_cuda_a_backward_that_begins_with_a_matrix_product_is_measured_without_a_warning(cuda: torch.device) -> None:
    """In a process of its own: once a backward has run, cuBLAS has what it warns of."""
    measured = (
        "import torch; from rotor_profiling import memory_meter; "
        "layer = torch.nn.Linear(64, 64, device='cuda'); given = torch.randn(8, 64, device='cuda')\n"
        "with memory_meter(given.device): layer(given).backward(torch.randn(8, 64, device='cuda'))"
    )
    ran = subprocess.run([sys.executable, "-c", measured], capture_output=True, text=True, check=True)
    assert "context" not in ran.stderr


def test_the_curve_of_a_meter_shows_the_bytes_held_at_each_time() -> None:
    with CpuMeter() as meter:
        first, kept = block(5), block(7)
        del first
    times, sizes = zip(*meter.curve, strict=True)
    assert sizes == (5 * KIB, 12 * KIB, 7 * KIB)
    assert times == (0, *sorted(times[1:]))
    del kept


def test_frees_by_other_threads_show_when_the_memory_is_used_again() -> None:
    """The profiler does not report what a thread frees that was not started by the one that measures."""
    given: Queue[list[torch.Tensor]] = Queue()
    freed: Queue[None] = Queue()

    def free() -> None:
        for _ in range(50):
            given.get().clear()
            freed.put(None)

    addresses: set[int] = set()

    def make_and_have_freed() -> None:
        for _ in range(50):
            made = [torch.empty(2**16)]
            addresses.add(made[0].data_ptr())
            given.put(made)
            freed.get()

    thread = Thread(target=free)
    thread.start()
    peak = measured_peak(make_and_have_freed, [], CPU)
    thread.join()
    # How often an address comes back is up to malloc. A block is never counted twice at one address.
    assert peak == len(addresses) * 2**18


def assert_a_meter_works() -> None:
    with memory_meter(CPU) as meter:
        held = block(2)
        meter.mark("")
    assert meter.phases[""].end == 2048
    del held


def test_phases_are_those_of_a_meter() -> None:
    def work(mark: Callable[[str], None]) -> None:
        first = torch.ones(3 * KIB // 4, requires_grad=True)
        mark("loss")
        second = block(5)
        del second
        third = block(1)
        mark("backward")
        (2 * first).exp().sum().backward()
        mark("after")
        del first, third

    with memory_meter(CPU) as meter:
        work(meter.mark)
    watch = watch_step(CPU, 100, 0)
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
    watch = watch_step(CPU, 0, 0)
    assert watch_step(CPU, 0, 0) is None
    assert_a_meter_works()
    assert watch.stop() is None
    watch.mark("nothing")


def measure() -> None:
    with raises(RuntimeError, "profiler_in_backward"), memory_meter(CPU):
        pass


@pytest.mark.parametrize(("do", "depth"), [(CpuWatch.stop, 1), (CpuWatch.stop, 2), (lambda watch: measure(), 1)])
def test_a_watch_that_is_to_stop_or_give_way_inside_of_a_backward_ends_with_the_pass(do: Any, depth: int) -> None:
    watch = watch_step(CPU, 0, 0)
    found: list[object] = []
    _backward_with(lambda: found.append(do(watch)), depth)
    assert found == [None]
    assert not torch.autograd._profiler_enabled()
    assert watch.stop() is None
    assert_a_meter_works()
    watch_step(CPU, 0, 0)
    give_way()


def _backward_with(do: Callable[[], object], depth: int) -> None:
    """Call `do` in a backward, or in one that runs inside of another."""
    leaf = torch.ones(KIB // 4, requires_grad=True)
    leaf.register_hook(lambda _: do() if depth == 1 else _backward_with(do, depth - 1))
    with torch.enable_grad():  # as the engine calls a hook without
        value = (2 * leaf).sum()
    value.backward()


def test_another_thread_cannot_stop_it_but_its_own_can() -> None:
    watch = watch_step(CPU, 0, 0)
    found: list[object] = []
    thread = Thread(target=lambda: (watch.mark("other"), give_way(), found.append(watch.stop())))
    thread.start()
    thread.join()
    assert found == [None]
    held = block(1)
    assert watch.stop() == {"": Phase(0, 1024, 1024)}
    del held


def test_a_thread_with_the_number_of_the_ended_one_that_began_it_cannot_stop_it() -> None:
    began: list[Any] = []
    found: list[Any] = []

    def begins() -> None:
        began.extend((get_ident(), watch_step(CPU, 0, 0)))

    def stops() -> None:
        if get_ident() == began[0]:
            found.extend((began[1].mark("other"), began[1].stop()))

    for work in (begins, *[stops] * 1000):  # the system may give the number later
        thread = Thread(target=work)
        thread.start()
        thread.join()
        if found:
            break
    assert found == [None, None]


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
def test_cudas_counters_are_read_and_only_an_older_peak_beyond_the_limit_is_reset(allocator, limit) -> None:
    watch = watch_step(torch.device("cuda"), 0, limit_bytes=limit)
    allocator.take(20, kept=15)  # below the peak that was there before: it cannot be seen, and is no harm
    watch.mark("loss")
    allocator.take(45, kept=5)
    watch.mark("backward")
    allocator.take(40, kept=-10)
    first = Phase(10, 30 if limit == 40 else 25, 25)
    assert watch.stop() == {"": first, "loss": Phase(25, 70, 30), "backward": Phase(30, 30, 20)}
    assert watch.stop() is None
    assert allocator.resets == (limit == 40)
