"""How often stages are timed, and in which order."""

import random
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.stage.seconds import StageRun
from rotor_py import Checkpointable
from rotor_py.execute.tape import single_stage_node
from rotor_py.measure.rounds import FEWEST_ROUNDS, MOST_ROUNDS, STEPS, STEPS_CLOSELY, StageTimes

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


def test_stages_are_timed_round_by_round_and_not_several_times_in_a_row() -> None:
    order: list[int] = []

    class Noting(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append(self.out_features)
            return super().forward(value)

    widths = [8, 16, 24, 32]
    layers = nn.Sequential(*(Noting(width - 8 or 4, width) for width in widths))
    Checkpointable(layers, loss=torch.sum, cache=False).measure(torch.randn(64, 4))
    rounds = [width for width, _ in groupby(order)]
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
