"""Times: what the clock counts, and what is made of several runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import timing
from rotor_profiling.instruments import stopwatch
from rotor_profiling.memory import CpuMeter
from rotor_profiling.stage.clocked_meter import ClockedMeter
from rotor_profiling.stage.cost import measure_ways
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.seconds import StageRun, cautious, errors_of, estimate, spread_of, time_stage
from rotor_profiling.timing import cpu_stopwatch, error_of, lower_quartile, seconds_of, spread
from rotor_py.stage.runner import StageRunner

CPU = torch.device("cpu")

pytestmark = pytest.mark.timed


def run(nograd: float = 1.0, forward: float = 1.0, backward: float = 2.0, again: float = 1.0) -> StageRun:
    return StageRun(nograd, ((forward, backward),), again)


def test_the_clock_stands_still_while_something_else_has_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.0, 11.0, 14.5, 15.0, 15.0])
    # In the second lap, 3.5 s of 4: it had to wait while the clocks were read, which are read again.
    early, late = [b"7 100000000 1"] * 6, [b"7 3600000000 2"] * 3
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
        assert watch.waiting == pytest.approx(3.5 / 5)


def test_where_nobody_counts_waiting_the_clock_is_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise FileNotFoundError

    now = iter([1.0, 1.0, 3.0])
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


def test_what_is_quick_runs_more_often_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def ticking(seconds: float) -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += seconds

    for seconds, runs in ((1e-6, timing.MOST_RUNS), (1.0, timing.FEWEST_RUNS)):
        clock, count = ticking(seconds), []
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: next(clock))
        monkeypatch.setattr(timing.os, "pread", lambda *_: b"0 0 0")
        with stopwatch(CPU) as watch:
            assert seconds_of(lambda count=count: count.append(1), watch) == pytest.approx(seconds)
        assert len(count) == runs


def test_skipping_the_output_saves_what_is_left_after_the_graph_of_its_own() -> None:
    (found,) = estimate([run(forward=1.0, again=0.7)])
    assert found.skipped_output_seconds == pytest.approx(0.3)
    assert found.nograd_seconds == 1.0


def test_a_graph_of_its_own_that_costs_more_counts_with_the_run_without_one() -> None:
    (found,) = estimate([run(nograd=0.5, forward=1.0, again=1.2)])
    assert found.skipped_output_seconds == 0.0
    assert found.nograd_seconds == pytest.approx(0.7)


def test_a_backward_at_once_finds_in_caches_what_the_run_before_it_has_made() -> None:
    """What it takes less for that is counted with the run."""
    watch = Scripted(nograd=1.0, forward=2.0, backward=5.0, again=2.5, at_once=4.0)
    layer = nn.Linear(4, 4)
    runner, value = StageRunner(layer, "layer"), torch.randn(2, 4, requires_grad=True)
    timed, _ = time_stage([runner], value, [*layer.parameters()], watch, between_bytes=1234)
    assert timed == StageRun(1.0, ((2.0, 5.0),), 2.5, 4.0)
    (found,) = estimate([timed, replace(timed, again=2.25, at_once=4.5), StageRun(1.0, ((2.0, 5.25),), None)])
    assert (found.skipped_output_seconds, found.nograd_seconds) == (0.75, 1.0)  # 2 - 2.25 + 5 - 4
    assert watch.cooled == [1234, 1234]
    given, gradient = watch.warmed
    assert given.data_ptr() == value.data_ptr()
    assert torch.equal(gradient, torch.ones(2, 4))
    # Both backwards add their gradients up, as in a step that has some.
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [2 * len(value)] * 4  # the output gets ones


def test_a_gradient_in_another_layout_than_the_input_is_not_copied() -> None:
    """In a step, the backward of the stage before takes it as it is; a leaf would keep a copy."""

    class Transposing(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value.t().contiguous())

    layer = Transposing(3, 4)
    value = torch.randn(3, 5, requires_grad=True)
    with cpu_stopwatch() as watch, Copies() as copies:
        time_stage([StageRunner(layer, "layer")], value, [*layer.parameters()], watch, fresh_gradients=True)
    assert (3, 5) not in copies.shapes
    assert value.grad is None


class Copies(TorchDispatchMode):
    """Notes the shapes of all tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._opname in ("clone", "copy_"):
            self.shapes.add(tuple(found.shape))
        return found


class Scripted:
    """A watch whose laps take the seconds that it is given, in this order; those between them, which count for nothing,
    take a hundred.
    """

    exact = False

    def __init__(self, **seconds: float) -> None:
        nograd, *others = seconds.values()
        self.seconds = [nograd, *(each for one in others[:3] for each in (100.0, one)), others[3]]
        self.laps, self.cooled, self.warmed = 0, list[int](), list[torch.Tensor]()

    def start(self) -> None: ...

    def lap(self) -> None:
        self.laps += 1

    def warm(self, tensors: Iterable[torch.Tensor]) -> None:
        self.warmed += tensors

    def cool(self, nbytes: int = timing.PRIVATE) -> None:
        self.cooled.append(nbytes)

    def stop(self) -> list[float]:
        assert self.laps == len(self.seconds)
        return self.seconds


def test_caches_are_as_large_as_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Path", lambda _: tmp_path)
    assert timing._cached_bytes() == timing.PRIVATE  # nobody says
    for number, text in enumerate(("512K\n", "32768K\n", "something\n")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(text)
    assert timing._cached_bytes() == 2**25


def test_what_plans_choose_by_takes_as_long_as_it_may() -> None:
    runs = [
        StageRun(1.0, ((1.0, 2.0), (1.1, 2.4)), 0.8),
        StageRun(1.2, ((1.0, 2.2), (1.3, 2.8)), 0.7),
        StageRun(1.4, ((1.0, 2.4), (1.2, 3.0)), 0.9),
    ]
    (whole, in_part), (first, other), errors = estimate(runs), cautious(runs), errors_of(runs)
    assert (first.forward_seconds, first.backward_seconds) == (whole.forward_seconds, whole.backward_seconds)
    assert other.forward_seconds == pytest.approx(in_part.forward_seconds + errors[1].forward_seconds)
    assert other.backward_seconds == pytest.approx(in_part.backward_seconds + errors[1].backward_seconds)
    assert first.nograd_seconds == pytest.approx(whole.nograd_seconds + error_of([run.nograd for run in runs]))
    assert first.skipped_output_seconds == pytest.approx(
        whole.skipped_output_seconds - errors[0].skipped_output_seconds
    )
    assert min(errors[1].forward_seconds, errors[1].backward_seconds, errors[0].skipped_output_seconds) > 0
    # What is not saved for sure is not counted on; nor is it counted twice.
    slow = [replace(run, again=run.again + 0.3) for run in runs]
    (most, *_), (middle, *_) = cautious(slow), estimate(slow)
    assert most.skipped_output_seconds == middle.skipped_output_seconds == 0
    assert most.nograd_seconds == pytest.approx(middle.nograd_seconds + errors_of(slow)[0].nograd_seconds)
    assert cautious(runs[:1]) == estimate(runs[:1])


def test_other_ways_are_compared_inside_of_a_run() -> None:
    # The second run was three times as slow altogether: what the other way takes longer is known from each.
    runs = [StageRun(1.0, ((1.0, 2.0), (1.1, 2.4)), 1.0), StageRun(3.0, ((3.0, 6.0), (3.1, 6.4)), 3.0)]
    whole, in_part = estimate(runs)
    assert in_part.forward_seconds - whole.forward_seconds == pytest.approx(0.1)
    assert in_part.backward_seconds - whole.backward_seconds == pytest.approx(0.4)
    assert spread_of(runs) == pytest.approx(0.5)


def test_a_way_that_one_run_has_is_known_no_better_than_the_stage() -> None:
    runs = [StageRun(1.0, ((1.0, 2.0), (1.5, 2.25)), 1.0), StageRun(3.0, ((3.0, 6.0),), 3.0)]
    for several in (runs, runs[::-1]):
        whole, in_part = estimate(several)
        assert in_part.forward_seconds - whole.forward_seconds == pytest.approx(0.5)
        assert in_part.backward_seconds - whole.backward_seconds == pytest.approx(0.25)
        stored, other = errors_of(several)
        assert (stored.forward_seconds, stored.backward_seconds) == (0, 0)  # in every plan once, whatever it is
        assert other.forward_seconds > 0.5
        assert other.backward_seconds > 1
    twice = [runs[0], replace(runs[1], ways=(*runs[1].ways, (3.5, 6.25)))]
    assert errors_of(twice)[1].forward_seconds == 0


def test_a_way_that_one_run_has_is_compared_with_the_least_of_all_runs() -> None:
    """That run is often the first of all, slow at its beginning, where the stage is stored whole."""
    first, later = StageRun(1.0, ((3.0, 4.0), (3.0, 4.0)), None), StageRun(1.0, ((2.0, 3.0),), None)
    whole, other = estimate([replace(first, again=2.0), later])
    assert (whole.forward_seconds, whole.backward_seconds) == (2.0, 3.0)
    assert (other.forward_seconds, other.backward_seconds) == (3.0, 4.0)
    # Two runs that have it are enough to compare within them.
    both = estimate(
        [replace(first, again=2.0), StageRun(1.0, ((2.0, 3.0), (2.5, 3.25)), None), StageRun(1.0, ((1.5, 2.5),), None)]
    )
    assert (both[1].forward_seconds, both[1].backward_seconds) == (2.0, 2.75)


def test_a_skipped_output_that_was_timed_once_is_known_no_better_than_its_forward() -> None:
    twice = [run(forward=1.0, again=0.5), run(forward=3.0, again=2.5)]
    once = [run(forward=1.0, again=0.5), replace(run(forward=3.0), again=None)]
    assert errors_of(twice)[0].skipped_output_seconds == 0
    assert errors_of(once)[0].skipped_output_seconds > 0.5
    assert estimate(once)[0].skipped_output_seconds == 0.5


@pytest.mark.parametrize(
    ("layer", "fresh", "shown"),
    [
        (nn.LayerNorm(4), True, True),
        (nn.LayerNorm(4), False, False),  # its gradients are added to those that are there, which measuring does not
        (nn.LayerNorm(4, elementwise_affine=False), False, True),
        (nn.Linear(4, 4), True, False),  # training skips its output
    ],
)
def test_the_run_that_shows_bytes_shows_what_it_takes_to_run_again_where_that_is_as_in_training(
    layer: nn.Module, fresh: bool, shown: bool
) -> None:
    place = Place(CPU, 32, fresh_gradients=fresh)
    value = torch.randn(2, 4, requires_grad=True)
    with cpu_stopwatch() as watch:
        found = measure_ways([StageRunner(layer, "layer")], value, place, watch).run
    assert found is not None
    assert (found.again is not None, found.at_once is not None) == (shown, shown)


def test_under_a_meter_caches_are_written_over_before_what_comes_later_in_a_step() -> None:
    watch = Scripted(nograd=0.0, forward=0.0, backward=0.0, again=0.0, at_once=0.0)
    watch.stop = list  # type: ignore[method-assign]  # it counts the laps of another test
    with ClockedMeter(CpuMeter(), watch, 1234) as meter:
        for name, cooled in (("forward", 0), ("gradients", 1), ("backward", 1), ("attach", 2), ("replay", 2)):
            meter.mark(name)
            meter.hold(torch.empty(1))
            assert watch.cooled == [1234] * cooled


def test_the_runs_under_a_meter_are_timed_without_its_marks() -> None:
    class Slow(CpuMeter):
        def mark(self, name: str) -> None:
            time.sleep(0.05)
            super().mark(name)

        def hold(self, tensor: torch.Tensor) -> None:
            time.sleep(0.05)
            super().hold(tensor)

    with cpu_stopwatch() as watch:
        meter = ClockedMeter(Slow(), watch)
        with meter:
            meter.mark("work")
            time.sleep(0.005)
            meter.hold(torch.empty(1))
            time.sleep(0.005)
            meter.mark("between")
    assert 0.01 <= meter.seconds["work"] < 0.05
    assert set(meter.seconds) == {"", "work"}
    assert set(meter.phases) == {"", "work", "between"}
