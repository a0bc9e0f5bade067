"""How often stages are timed, and in which order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.stage.seconds import StageRun
from rotor_py import Checkpointable
from rotor_py.capture.graph.graph_stage import GraphStage
from rotor_py.execute.lone_node import lone_node
from rotor_py.measure import stage_measurer
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_py.measure.walks.precision import ALL_PLANS, CLOSELY, CLOSEST, ONE_PLAN, Precision
from rotor_py.measure.walks.stage_times import FEWEST_RUNS, MOST_PER_WALK, MOST_WALKS, StageTimes

pytestmark = pytest.mark.timed


def timed(times: StageTimes, kinds: list[str], noise: float, generator: random.Random) -> list[set[int]]:
    """Time stages as a measurer does; what was timed in each walk."""
    walks = []
    while wanted := times.wanted(kinds):
        walks.append(wanted)
        for position in wanted:
            seconds = (1 + ord(kinds[position])) * generator.uniform(1, 1 + noise)
            times.add(kinds[position], StageRun(((seconds, seconds),), (seconds, 2 * seconds)))
    return walks


@pytest.mark.parametrize("kinds", ["abc", "aaaaaaaa", "abbbbbbc", "a"])
def test_on_a_quiet_machine_few_walks_are_enough(kinds: str) -> None:
    times = StageTimes()
    walks = timed(times, list(kinds), 0.01, random.Random(0))
    assert len(walks) <= FEWEST_RUNS
    for kind in set(kinds):
        runs = sum(kinds[position] == kind for walk in walks for position in walk)
        assert FEWEST_RUNS <= runs <= FEWEST_RUNS + MOST_PER_WALK - 1
    assert times.spread(list(kinds)) < 0.01


def test_stages_of_one_kind_are_timed_in_turn() -> None:
    generator = random.Random(0)
    assert timed(StageTimes(), list("aaaaaaaa"), 0.0, generator) == [{0, 4}]
    assert timed(StageTimes(), list("aabca"), 0.0, generator) == [{0, 1, 2, 3}, {2, 3}]
    walks = timed(StageTimes(), list("aaaaaaaa"), 2.0, generator)
    assert walks[:3] == [{0, 4}, {1, 5}, {2, 6}]


def test_on_a_noisy_machine_stages_are_timed_more_often_but_not_for_ever() -> None:
    kinds = list("abbbc")
    found = {}
    for precision in (ALL_PLANS, CLOSELY):
        times = StageTimes(precision)
        walks = timed(times, kinds, 2.0, random.Random(1))
        runs = [sum(kinds[position] == kind for walk in walks for position in walk) for kind in "abc"]
        found[precision] = max(runs)
        assert FEWEST_RUNS < max(runs) <= precision.most + MOST_PER_WALK - 1
        assert times.spread(kinds) > 0.1
    assert found[CLOSELY] > found[ALL_PLANS]


def test_a_stage_of_little_time_may_be_noisy() -> None:
    times = StageTimes()
    for _ in range(FEWEST_RUNS):
        times.add("long", StageRun(((1.0, 2.0),), (1.0, 3.0)))
    for seconds in (0.001, 0.003, 0.009):
        times.add("short", StageRun(((seconds, seconds),), (seconds, 2 * seconds)))
    assert not times.wanted(["long", *["short"] * 16])
    assert times.wanted(["short"] * 16) == {1, 9}


@pytest.mark.parametrize("kinds", ["a" * 16, "abcdefghijklmnop"])
def test_errors_of_many_kinds_make_up_for_each_other_and_those_of_one_kind_do_not(kinds: str) -> None:
    times = StageTimes()
    for kind in set(kinds):
        for seconds in (1.0, 1.05, 1.1):
            times.add(kind, StageRun(((seconds, seconds),), (seconds, 2 * seconds)))
    assert bool(times.wanted(list(kinds))) == (len(set(kinds)) == 1)


def test_of_kinds_that_are_not_known_well_those_are_timed_again_that_matter() -> None:
    times = StageTimes(ONE_PLAN)
    for kind, seconds in (("large", 1.0), ("medium", 0.3), ("small", 0.01), ("tiny", 0.002)):
        for factor in (1.0, 1.5, 2.0):
            times.add(kind, StageRun(((factor * seconds, factor * seconds),), (seconds, 2 * seconds)))
    assert times.wanted(["small", "large", "tiny", "medium"] * 4) == {5, 7, 13, 15}


def test_runs_beyond_the_fewest_end_when_they_have_taken_as_long_as_a_step_or_two_for_curves() -> None:
    of_plan, of_curve = StageTimes(ONE_PLAN), StageTimes()

    def add(*seconds: float) -> None:
        for each in seconds:
            for times in (of_plan, of_curve):
                times.add("a", StageRun(((each, each), (each, each)), (each, 2 * each)))

    add(1.0, 3.0)  # 6 s for each second, of a step that takes 12 s
    assert of_plan.wanted(["a"] * 4)
    add(1.0, 1.0)
    assert not of_plan.wanted(["a"] * 4)
    assert of_plan.wanted(["a"] * 8)
    assert of_curve.wanted(["a"] * 4)
    assert not of_curve.wanted(["a"])


def test_there_are_few_walks_however_noisy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, walks = random.Random(0), [0]
    time_ways, time_stages = stage_measurer.time_ways, StageMeasurer._time_stages

    def noisy(runners: Any, *arguments: Any, **options: Any) -> Any:
        run, output = time_ways(runners, *arguments, **options)
        seconds = noise.uniform(1, 9)
        return StageRun(((seconds, seconds),) * len(run.ways), (seconds, 2 * seconds)), output

    def counting(measurer: StageMeasurer, wanted: set[int]) -> None:
        walks[0] += 1
        time_stages(measurer, wanted)

    monkeypatch.setattr(stage_measurer, "time_ways", noisy)
    monkeypatch.setattr(StageMeasurer, "_time_stages", counting)
    widths = [8, 16, 24, 32, 40, 48, 56, 64]
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in zip([4, *widths], widths, strict=False)))
    Checkpointable(layers, loss=torch.sum).measure(torch.randn(64, 4))
    # The gradient that the loss gives is laid out in another way: the last stage is timed once more.
    assert FEWEST_RUNS < walks[0] <= MOST_WALKS + FEWEST_RUNS


def test_runs_of_an_earlier_time_count_unless_the_machine_was_busy() -> None:
    def runs(*seconds: float) -> list[StageRun]:
        return [StageRun(((each, each),), (each, 2 * each)) for each in seconds]

    times = StageTimes()
    times.settle("quiet", runs(1.0, 1.02, 1.0))
    times.settle("busy", runs(1.0, 3.0, 2.0))
    assert times.wanted(["quiet", "busy"]) == {1}
    closely = StageTimes(CLOSELY)
    closely.settle("quiet", runs(1.0, 1.02, 1.0))
    assert closely.wanted(["quiet"]) == {0}


def test_stages_are_timed_walk_by_walk_and_not_several_times_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(runners: Any, *arguments: Any, **options: Any) -> Any:
            order.append(runners[0].function.weight.shape[0])
            return run(runners, *arguments, **options)

        return noting

    for name in ("measure_ways", "time_ways"):
        monkeypatch.setattr(stage_measurer, name, noted(getattr(stage_measurer, name)))
    widths = [8, 16, 24, 32]
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in zip([4, *widths], widths, strict=False)))
    Checkpointable(layers, loss=torch.sum).measure(torch.randn(64, 4))
    assert order[: FEWEST_RUNS * len(widths)] == widths * FEWEST_RUNS


def test_the_run_that_shows_bytes_is_the_first_of_the_fewest() -> None:
    times = StageTimes()
    times.add("a", StageRun(((1.0, 2.0),)))
    assert times.wanted(["a"] * 4) == {1}
    times.add("a", StageRun(((1.0, 2.0),), (1.0, 2.75)))
    assert not times.wanted(["a"] * 4)
    assert times.of("a")[0].skipped_output_seconds == 0.25


def test_a_stage_is_timed_again_where_other_ways_are_not_known_well() -> None:
    times = StageTimes()
    for longer in (0.1, 0.9):  # the stage stored whole takes the same in each run
        times.add("a", StageRun(((1.0, 2.0), (1.0 + longer, 2.0)), (1.0, 3.0)))
    assert times.wanted(["a"]) == {0}
    known = StageTimes()
    for longer in (0.5, 0.51):
        known.add("a", StageRun(((1.0, 2.0), (1.0 + longer, 2.0)), (1.0, 3.0)))
    assert not known.wanted(["a"])


def test_other_ways_are_timed_again_only_beyond_the_fewest_runs() -> None:
    first, second = StageRun(((1.0, 2.0), (1.5, 2.5))), StageRun(((1.0, 2.0),), (1.0, 2.75))
    assert StageTimes().all_ways_wanted("a")
    times = StageTimes()
    times.expect("a", 2)
    times.add("a", replace(first, ways=first.ways[:1]))
    assert times.all_ways_wanted("a")  # no run has shown them
    times = StageTimes()
    times.expect("a", 2)
    times.add("a", first)
    assert not times.all_ways_wanted("a")
    assert times.again_wanted("a")  # no run has shown it
    times.add("a", second)
    assert [each.forward_seconds for each in times.of("a")] == [1.0, 1.5]
    assert not times.wanted(["a"])
    times.add("a", replace(second, ways=((1.5, 2.5),), node=None))
    assert times.wanted(["a"]) == {0}
    assert times.all_ways_wanted("a")
    assert times.again_wanted("a")
    times.add("short", StageRun(((1e-3, 1e-3), (2e-3, 1e-3))))  # its first call shows in its time
    assert times.all_ways_wanted("short")


def test_beyond_the_fewest_runs_only_what_is_in_doubt_is_timed_again() -> None:
    """That a stage takes longer in one run than in another says nothing of how much longer a way takes, or a node."""
    for longer, later, ways, node in ((0.5, 0.5, False, False), (0.9, 0.5, True, False), (0.5, 0.9, False, True)):
        times = StageTimes()
        times.expect("a", 2)
        times.add("a", StageRun(((1.0, 2.0), (1.5, 2.0)), (1.0, 3.5)))
        times.add("a", StageRun(((1.0, 2.5), (1.0 + longer, 2.5)), (1.0, 3.5 + later)))
        assert times.wanted(["a"]) == {0}
        assert (times.all_ways_wanted("a"), times.again_wanted("a")) == (ways, node)


def test_beside_other_programs_ways_and_nodes_have_to_be_known_better() -> None:
    cases = (0.01, ALL_PLANS, False), (0.3, ALL_PLANS, True), (0.3, ONE_PLAN, False), (0.01, CLOSELY, True)
    for waiting, precision, again in cases:
        times = StageTimes(precision)
        times.expect("a", 2)
        times.add("a", StageRun(((1.0, 2.0), (1.5, 2.0)), (1.0, 3.5)))
        times.add("a", StageRun(((1.0, 2.5), (1.54, 2.5)), (1.0, 4.04)))
        times.note_waiting(waiting)
        assert times.all_ways_wanted("a") == times.again_wanted("a") == again


def test_what_a_run_takes_again_is_timed_once_among_the_fewest_runs() -> None:
    times = StageTimes()
    times.add("a", StageRun(((1.0, 2.0),), (1.0, 2.75)))
    assert times.wanted(["a"]) == {0}
    assert not times.again_wanted("a")


def test_beside_other_programs_times_have_to_agree_better() -> None:
    """Without a limit: a limit that is read off the curve moves with all times."""
    runs = [StageRun(((1.0, each),), (1.0, 1.0 + each)) for each in (2.0, 2.03)]
    cases = (0.01, ALL_PLANS, set()), (0.3, ALL_PLANS, {0}), (0.3, ONE_PLAN, set()), (0.01, CLOSELY, {0})
    for waiting, precision, wanted in cases:
        times = StageTimes(precision)
        for each in runs:
            times.add("a", each)
        times.note_waiting(waiting)
        times.note_waiting(0.0)
        assert times.wanted(["a"]) == wanted
        # What is kept for the next run is good for one plan alone where a curve would want more.
        assert times.short_for_curves(["a"]) == ({"a"} if waiting > 0.05 else set())


def test_beside_other_programs_a_limit_read_off_the_curve_rests_on_more_runs_still() -> None:
    """However many walks find the machine busy, and though runs agree."""
    cases = (ALL_PLANS, 0.3, CLOSELY.least), (CLOSELY, 0.01, CLOSELY.least), (CLOSELY, 0.3, CLOSEST.least)
    for precision, waiting, least in cases:
        times = StageTimes(precision)
        while times.wanted(["a"] * 6):
            times.add("a", StageRun(((1.0, 2.0),), (1.0, 3.0)))
            times.note_waiting(waiting)
        assert len(times.runs_of("a")) == least


def test_walks_note_how_long_the_thread_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    monkeypatch.setattr("rotor_profiling.timing._CpuStopwatch.waiting", 0.25)
    monkeypatch.setattr(StageTimes, "note_waiting", lambda _, share: noted.append(share))
    Checkpointable(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), loss=torch.sum).measure(torch.randn(8, 4))
    assert set(noted) == {0.25}


def test_where_a_walk_takes_little_times_have_to_agree_better() -> None:
    """Of many stages of one kind, two are timed in a walk."""
    for stages, precision, wanted in ((1, ALL_PLANS, 0), (12, ALL_PLANS, 2), (12, ONE_PLAN, 0)):
        times = StageTimes(precision)
        for backward in (2.0, 2.03):
            times.add("a", StageRun(((1.0, backward),), (1.0, 3.0)))
        assert len(times.wanted(["a"] * stages)) == wanted


@pytest.mark.parametrize(
    ("stages", "precision", "again"),
    [(12, ALL_PLANS, True), (12, ONE_PLAN, False), (1, ALL_PLANS, False)],
)
def test_what_one_run_alone_shows_is_timed_again_where_a_walk_takes_little(
    stages: int, precision: Precision, again: bool
) -> None:
    times = StageTimes(precision)
    times.expect("a", 2)
    times.add("a", StageRun(((1.0, 2.0), (1.0, 2.5))))
    times.add("a", StageRun(((1.0, 2.03),), (1.0, 3.0)))
    times.wanted(["a"] * stages)
    assert times.all_ways_wanted("a") == times.again_wanted("a") == again
    assert times.cold_wanted("a")
    times.add("a", StageRun(((1.0, 2.02), (1.0, 2.51)), (1.0, 3.01)))
    times.wanted(["a"] * stages)
    assert not times.all_ways_wanted("a")
    assert not times.again_wanted("a")


def test_closely_nobody_believes_few_runs_that_agree_by_chance() -> None:
    kinds = [*["a"] * 6, "small"]
    times = StageTimes(CLOSELY)
    run = StageRun(((1.0, 2.0), (1.1, 2.1)), (1.0, 3.0))
    little = StageRun(((0.01, 0.02),), (0.01, 0.03))
    for kind in ("a", "small"):
        times.expect(kind, len(run.ways) if kind == "a" else 1)
    for _ in range(FEWEST_RUNS):
        times.add("a", run)
        times.add("small", little)
    walks = 0
    while wanted := times.wanted(kinds):
        assert 6 not in wanted  # so small a part of the step need not be known
        assert times.all_ways_wanted("a")
        assert times.again_wanted("a")
        for _ in wanted:
            times.add("a", run)
        walks += 1
    assert len(times.runs_of("a")) == CLOSELY.least == FEWEST_RUNS + MOST_PER_WALK * walks


def test_what_a_run_takes_again_is_always_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.measure.walks.stage_times.FEWEST_RUNS", 1)
    times = StageTimes()
    times.add("a", StageRun(((1.0, 2.0),)))
    assert times.wanted(["a"]) == {0}


def test_a_stage_that_is_a_node_takes_more_than_its_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a millisecond, as in a step; on a device that works meanwhile, it takes its runs."""

    def waits(runner: Any) -> Callable[[Any], Any]:
        run = lone_node(runner)

        def running(value: Any) -> Any:
            time.sleep(0.05)
            return run(value)

        return running

    monkeypatch.setattr("rotor_py.plan.sources.running.lone_node", waits)
    model = Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss=torch.sum, cache=False)
    model.measure(torch.randn(2, 4))
    assert model.budget is not None
    assert all(0.05 <= stage.nograd_time < 0.1 for stage in model.budget.chain.stages)


class Branches(nn.Module):
    """No chain of layers, so it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return value


@pytest.mark.parametrize(("model", "as_one"), [(Branches(), True), (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), False)])
def test_stages_of_a_captured_graph_run_as_one_and_layers_do_not(model: nn.Module, as_one: bool) -> None:
    planned = Checkpointable(model, torch.randn(2, 4), "1GB", loss=torch.sum)
    pieces = [stage for stage in planned.functions if isinstance(stage, GraphStage)]
    assert (bool(pieces) and pieces[0].run_through(pieces[1:]) is not None) == as_one
