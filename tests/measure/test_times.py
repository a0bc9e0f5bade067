"""How often stages are timed and in which order; what the clock counts, and the estimate from several runs."""

import random
import time
from collections.abc import Callable
from itertools import count, groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rotor_profiling import StageContext, measure_ways, stage_layouts, timing
from rotor_profiling.backends import stopwatch
from rotor_profiling.memory import CpuMeter
from rotor_profiling.stage.seconds import StageRun, estimate, time_ways
from rotor_profiling.timing import cpu_stopwatch, seconds_of
from rotor_py import Checkpointable
from rotor_py.execute.tape import single_stage_node
from rotor_py.measure.rounds import FEWEST_ROUNDS, MOST_ROUNDS, STEPS, STEPS_CLOSELY, StageTimes
from rotor_py.stage.runner import StageRunner
from tests.checkpointable.steps import CPU
from tests.fields import Noted

pytestmark = pytest.mark.timed


def timed(times: StageTimes, kinds: list[str], noise: float, ways: int = 1) -> list[set[int]]:
    """Time stages as a measurer does; the positions that were timed in each round."""
    generator, rounds = random.Random(1), []
    while wanted := times.wanted(kinds):
        rounds.append(wanted)
        for position in wanted:
            kind = kinds[position]
            seconds = (1 + ord(kind)) * generator.uniform(1, 1 + noise)
            many = ways if times.all_ways_wanted(kind) else 1
            node = (seconds, 2 * seconds) if times.again_wanted(kind) else None
            times.add(kind, StageRun(((seconds, seconds),) * many, node))
    return rounds


def test_stages_of_one_kind_are_timed_in_turn_and_an_exact_time_once() -> None:
    times = StageTimes()
    times.add("a", StageRun(((1.0, 2.0),), (1.0, 3.0)), exact=True)
    assert times.wanted(["a"] * 9) == set()
    assert timed(StageTimes(), list("aaaaaaaa"), 0.0) == [{0}, {1}, {2}]
    assert timed(StageTimes(), list("aabcaaaaaaaa"), 0.0) == [{0, 2, 3}, {1, 2, 3}, {2, 3, 4}]


@pytest.mark.parametrize("kinds", ["aaaaaaaa", "abcd"])
def test_rounds_end_when_the_time_of_a_step_is_known_well_or_at_the_most_plain_steps(kinds: str) -> None:
    for quiet in ("aaaaaaaa", "abbbbbbc"):
        times = StageTimes()
        assert len(timed(times, list(quiet), 0.01)) == FEWEST_ROUNDS + 1
        assert times.spread(list(quiet)) < 0.01
    often = []  # on a noisy machine
    for closely in (False, True):
        times = StageTimes(closely=closely)
        often.append(len(timed(times, list(kinds), 2.0)))
        assert often[-1] <= MOST_ROUNDS
        further = sum(run.all_seconds for kind in {*kinds} for run in times.runs_of(kind)[FEWEST_ROUNDS:])
        step = sum(times.runs_of(kind)[0].total for kind in kinds)
        assert further <= (STEPS_CLOSELY if closely else STEPS) * 3 * step
        assert times.spread(list(kinds)) > 0.1
    assert often[1] > often[0]


def test_a_round_that_would_take_too_long_does_not_begin_unless_it_takes_little_time() -> None:
    """Stages of four kinds with three ways each: a round is four steps and a half."""
    assert len(timed(StageTimes(), list("abcd"), 2.0, ways=3)) == FEWEST_ROUNDS
    assert len(timed(StageTimes(), list("abcd" * 4), 2.0, ways=3)) > FEWEST_ROUNDS
    times = StageTimes()
    for longer in (1, 1.5):
        times.add("a", StageRun(((1e-4, longer * 1e-4),) * 3, (1e-4, 2e-4)))
    assert times.wanted(["a"]) == {0}
    times.add("a", StageRun(((1e-2, 1e-2),), (1e-2, 2e-2)))
    assert times.wanted(["a"]) == set()


def test_other_ways_and_a_node_are_timed_once_in_the_fewest_rounds() -> None:
    """The run that shows bytes shows all ways."""
    times = StageTimes()
    assert times.all_ways_wanted("a")
    times.add("a", StageRun(((1.0, 2.0), (1.5, 2.5))))
    assert times.wanted(["a"] * 4) == {1}
    assert not times.all_ways_wanted("a")
    assert times.again_wanted("a")
    times.add("a", StageRun(((1.0, 2.0),), (1.0, 2.75)))
    assert [each.forward_seconds for each in times.of("a")] == [1.0, 1.5]
    assert times.of("a")[0].skipped_output_seconds == 0.25
    assert times.wanted(["a"] * 9) == {2}  # which shows both
    assert times.all_ways_wanted("a")
    assert times.again_wanted("a")


def test_runs_of_an_earlier_process_count_unless_the_machine_was_busy() -> None:
    def runs(*seconds: float) -> list[StageRun]:
        return [StageRun(((each, each),), (each, 2 * each)) for each in seconds]

    times = StageTimes()
    times.add_earlier("quiet", runs(1.0, 1.02, 1.0))
    times.add_earlier("busy", runs(1.0, 3.0, 2.0))
    assert times.wanted(["quiet", "busy"]) == {1}
    closely = StageTimes(closely=True)
    closely.add_earlier("quiet", runs(1.0, 1.04, 1.0))
    assert closely.wanted(["quiet"]) == {0}


class Noting(nn.Linear):
    """Notes of each run its width, and whether it has a graph."""

    runs: list[tuple[int, bool]]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = super().forward(value)
        type(self).runs.append((self.out_features, made.requires_grad))
        return made


def test_stages_are_timed_round_by_round_and_not_several_times_in_a_row() -> None:
    Noting.runs = order = Noted()
    widths = [8, 16, 24, 32]
    layers = nn.Sequential(*(Noting(width - 8 or 4, width) for width in widths))
    Checkpointable(layers, loss=torch.sum, cache=False).measure(torch.randn(64, 4))
    rounds = [width for width, _ in groupby(width for width, _ in order)]
    assert rounds == widths * (len(rounds) // len(widths))


def test_a_stage_that_is_a_node_takes_more_than_its_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a millisecond, as in a step; on a device that works meanwhile, it takes its runs."""

    def waits(runner: Any) -> Callable[[Any], Any]:
        run = single_stage_node(runner)
        return lambda value: (time.sleep(0.05), run(value))[1]

    monkeypatch.setattr("rotor_py.plan.measuring.single_stage_node", waits)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = Checkpointable(layers, torch.randn(2, 4), loss=torch.sum, cache=False)
    assert all(0.05 <= stage.nograd_time < 0.1 for stage in model.budget.chain.stages)


def test_a_node_shows_the_run_without_a_graph_and_the_skipped_output() -> None:
    for node, expected in (
        ((1.0, 2.7), (1.0, 0.3)),  # a backward that recomputes the stage may skip its output
        ((0.5, 3.2), (0.7, 0.0)),  # what it takes beyond forward and backward counts with the run without a graph
        ((0.5, 0.2), (0.5, 0.5)),  # noise: no more is skipped than a forward takes
    ):
        (found,) = estimate([StageRun(((1.0, 2.0),), node)])
        assert (found.nograd_seconds, found.skipped_output_seconds) == pytest.approx(expected)


def test_no_way_takes_less_than_storing_the_stage_whole_and_ways_and_nodes_may_be_in_some_of_the_runs_alone() -> None:
    runs = [StageRun(((1.0, 2.0), (0.8, 2.1)), (1.0, 3.0)), StageRun(((1.4, 2.0), (1.0, 3.5)), (1.0, 3.0))]
    whole, in_part = estimate(runs)
    assert in_part.forward_seconds >= whole.forward_seconds
    assert in_part.backward_seconds >= whole.backward_seconds
    # The run that shows bytes has all ways and no node; it comes first, and is slow at its beginning.
    first, later = StageRun(((3.0, 4.0), (3.5, 4.5))), StageRun(((2.0, 3.0),), (2.0, 5.5))
    whole, other = estimate([first, later])
    assert (whole.forward_seconds, whole.backward_seconds) == (2.25, 3.25)
    assert (other.forward_seconds, other.backward_seconds) == (3.5, 4.5)
    assert whole.nograd_seconds == other.nograd_seconds == 2.0
    assert whole.skipped_output_seconds == 0.0


@pytest.mark.parametrize("accident", [0.1, 900.0])
def test_no_accident_counts(accident: float) -> None:
    """Neither a run that was disturbed, nor one that seems to have taken hardly any time."""
    usual = StageRun(((1.0, 2.0), (1.1, 2.4)), (1.0, 3.5))
    odd = StageRun(((accident, accident),) * 2, (accident, accident))
    whole, other = estimate([odd, *[usual] * 4])
    assert (whole.forward_seconds, whole.backward_seconds, whole.nograd_seconds) == (1.0, 2.0, 1.5)
    assert (other.forward_seconds, other.backward_seconds) == (1.1, 2.4)


class Scripted:
    """A watch whose counted laps take the given seconds, in this order, and others a hundred."""

    exact = False

    def __init__(self, *seconds: float) -> None:
        self.seconds = [each for one in seconds for each in (100.0, one)]
        self.laps = 0

    def start(self) -> None: ...

    def lap(self) -> None:
        self.laps += 1

    def stop(self) -> list[float]:
        assert self.laps == len(self.seconds)
        return self.seconds


@pytest.mark.parametrize(
    ("again", "as_node", "laps", "expected"),
    [
        (True, single_stage_node, (2.0, 5.0, 2.5, 7.5), (2.5, 7.5)),
        (True, None, (2.0, 5.0, 2.5, 1.5), (2.5, 6.5)),  # the second run, and the backward of the first way
        (False, None, (2.0, 5.0), None),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_stage_is_timed_in_training_and_as_a_node_with_its_gradients(again, as_node, laps, expected, fresh) -> None:
    Noting.runs = runs = Noted()
    layer, watch, value = Noting(4, 4), Scripted(*laps), torch.randn(2, 4, requires_grad=True)
    context = StageContext(CPU, 32, fresh_gradients=fresh)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run, output = time_ways([StageRunner(layer, "layer")], value, context, watch, as_node=as_node, again=again)
    # Present gradients are added to, in no memory: each of the two new ones, to itself.
    added = [event for event in profiled.events() if event.name == "aten::add_"]
    assert len(added) == (0 if fresh else 4 if as_node is not None else 2)
    assert run == StageRun(((2.0, 5.0),), expected)
    assert [graph for _, graph in runs] == ([True, False, True] if again else [True])
    assert torch.equal(output, nn.functional.linear(value, layer.weight, layer.bias))
    assert output.is_leaf
    assert layer.weight.grad is None
    value.grad = None  # a stage that overwrites its input runs as a node too
    single_stage_node(StageRunner(nn.ReLU(inplace=True), "relu"))(value * 1).sum().backward()
    assert value.grad is not None


class Transposing(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value.t().contiguous())


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        # Of the input and of the weight's gradient. A leaf would also copy a gradient of another layout than its own.
        (Transposing(3, 4), ["aten::copy_"] * 2),
        # The engine alone holds a gradient, and adds to it in place; to one that is held, it would add in new memory.
        (lambda value: value + value.sin(), ["aten::add", "aten::add_"]),
    ],
)
def test_gradients_are_given_away_as_in_a_step(layer, expected: list[str]) -> None:
    value, context = torch.randn(3, 5, requires_grad=True), StageContext(CPU, 60, fresh_gradients=True)
    with cpu_stopwatch() as watch, profile(activities=[ProfilerActivity.CPU]) as profiled:
        time_ways([StageRunner(layer, "layer")], value, context, watch, again=False)
    names = [event.name for event in profiled.events() or ()]
    assert [name for name in names if name in ("aten::add", "aten::add_", "aten::copy_")] == expected
    assert value.grad is None


def test_the_runs_that_show_bytes_are_timed_without_the_marks_of_their_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = CpuMeter.mark
    monkeypatch.setattr(CpuMeter, "mark", lambda meter, name: (time.sleep(0.05), mark(meter, name))[1])
    stage, value = StageRunner(nn.Linear(4, 4), "stage"), torch.randn(2, 4, requires_grad=True)
    stage_layouts(stage, value, CPU, before_backward=lambda *_: None)
    with cpu_stopwatch() as watch:
        _, run, _ = measure_ways([stage], value, StageContext(CPU, 32), watch)
    assert all(0 < seconds < 0.05 for seconds in run.ways[0])


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

    # Where waiting is not counted, it is the wall clock.
    def missing(*_: object) -> int:
        raise FileNotFoundError

    now = iter([1.0, 3.0])
    monkeypatch.setattr(timing.os, "open", missing)
    with stopwatch(CPU) as watch:
        watch.start()
        watch.lap()
        assert watch.stop() == [2.0]


@pytest.mark.parametrize(("seconds", "runs"), [(1e-6, timing.MOST_RUNS), (1.0, timing.FEWEST_RUNS)])
def test_quick_code_runs_more_often_but_not_for_long(seconds, runs, monkeypatch) -> None:
    clock, done = count(step=seconds), []
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing.os, "pread", lambda *_: b"0 0 0")
    with stopwatch(CPU) as watch:
        assert seconds_of(lambda: done.append(1), watch) == pytest.approx(seconds)
    assert len(done) == runs
