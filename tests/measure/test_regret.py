"""Timing ends early where better times would save too little, and what that is judged by is a bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rotor_profiling import LossCost, StageCost
from rotor_profiling.stage.seconds import StageRun, StageSeconds, estimate, estimate_at
from rotor_py import Checkpointable
from rotor_py.measure import stage_measurer
from rotor_py.measure.budget import Budget
from rotor_py.measure.certified.possible_times import ends_of, possible_times
from rotor_py.measure.certified.regret import known_regret, most_regret
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import Ends, Measurement, Way
from rotor_py.measure.walks.stage_times import FEWEST_RUNS
from rotor_py.plan.sources import enough_times
from rotor_py.report.wording import lost_to_inexact_times
from rotor_solver import ForwardCheck, ForwardEnable, ForwardNograd, Persistent, Sequence, simulate, store_all
from tests.solver.naive import naive_optimum

BYTES = st.integers(0, 6)
SECONDS = st.integers(1, 9).map(float)


@st.composite
def measured_stages(draw: st.DrawFn, number: int) -> tuple[Measurement, list[list[StageRun]]]:
    """A chain whose stages may be stored in one other way each, and the runs by which it was timed."""
    costs, ways, runs = [], [], []
    for _ in range(number):
        activation = draw(BYTES)
        saved = activation + draw(BYTES)
        several = [
            StageRun(
                ((draw(SECONDS), draw(SECONDS)), (draw(SECONDS), draw(SECONDS))),
                (draw(SECONDS), draw(SECONDS) + draw(SECONDS)),
            )
            for _ in range(3)
        ]
        whole, other = (
            StageCost(
                way.forward_seconds,
                way.nograd_seconds,
                way.backward_seconds,
                activation,
                kept,
                *(0, 0, 0, 0, 0, 0),
                skipped_output_seconds=way.skipped_output_seconds,
            )
            for way, kept in zip(estimate(several), (saved, draw(st.integers(activation, saved))), strict=True)
        )
        costs.append(whole)
        ways.append((Way("other", other),))
        runs.append(several)
    names = tuple(map(str, range(number)))
    found = Measurement(names, tuple(costs), (0,) * number, draw(BYTES), LossCost(1.0, 0, 0), ways=tuple(ways))
    return found, runs


def drawn_truth(data: st.DataObject, runs: list[StageRun], stage: int, sequence: Sequence) -> list[StageSeconds]:
    """Seconds of a stage in both ways that its runs do not rule out, however long it takes as a whole.

    Most are at the end that is worse for the plan: long for what it does, and short for what it does not.
    """
    again = any(each.stage == stage for each in sequence if isinstance(each, ForwardNograd | ForwardCheck))
    enabled = [each for each in sequence if isinstance(each, ForwardEnable) and each.stage == stage]
    otherwise = any(each.option == 1 for each in enabled)

    def near(worse: bool) -> list[StageSeconds]:
        end = data.draw(st.sampled_from((1, 1, 1, 1, 0, -1)))
        return estimate_at(runs, end if worse else -end)

    run_again, (whole, other) = near(again)[0], near(otherwise)
    nograd, skipped = run_again.nograd_seconds, run_again.skipped_output_seconds
    forward, backward = skipped + data.draw(SECONDS), data.draw(SECONDS)
    longer, later = other.forward_seconds - whole.forward_seconds, other.backward_seconds - whole.backward_seconds
    return [
        StageSeconds(nograd, forward, backward, skipped),
        StageSeconds(nograd, forward + longer, backward + later, skipped),
    ]


def timed(cost: StageCost, seconds: StageSeconds) -> StageCost:
    return replace(
        cost,
        forward_seconds=seconds.forward_seconds,
        nograd_seconds=seconds.nograd_seconds,
        backward_seconds=seconds.backward_seconds,
        skipped_output_seconds=seconds.skipped_output_seconds,
    )


def ends_alone(runs: list[StageRun], *ways: str) -> Ends:
    return ends_of(runs, ways)


@settings(max_examples=75, deadline=None)
@given(st.data(), st.integers(2, 4).flatmap(measured_stages), st.floats(0, 1))
def test_no_plan_is_faster_by_more_than_the_bound_whatever_the_true_times_are(
    data: st.DataObject, chain: tuple[Measurement, list[list[StageRun]]], share: float
) -> None:
    found, runs = chain
    budget = Budget(FixedMemory(), found.chain(fresh_gradients=False))
    least, whole = budget.least_bytes(), budget.peak_bytes(store_all(budget.chain))
    limit = int(least + share * (whole - least))
    known = replace(found, intervals=tuple(ends_alone(each, "other") for each in runs))
    sequence = budget.solve(limit, Persistent())
    regret = most_regret(possible_times(known), budget, limit, Persistent())
    assert known_regret(sequence, known, budget, limit) == regret  # what the report says
    bound = regret * budget.makespan(sequence)

    truth = [drawn_truth(data, each, number, sequence) for number, each in enumerate(runs)]
    true = replace(
        found,
        stages=tuple(timed(cost, seconds[0]) for cost, seconds in zip(found.stages, truth, strict=True)),
        ways=tuple(
            (replace(way, cost=timed(way.cost, seconds[1])),) for (way,), seconds in zip(found.ways, truth, strict=True)
        ),
    ).chain(fresh_gradients=False)
    assert simulate(true, sequence).makespan - naive_optimum(true, limit) <= bound + 1e-9


def test_without_any_doubt_the_bound_is_the_gap_of_the_solver_and_where_nothing_fits_times_do_not_matter() -> None:
    runs = [StageRun(((float(i), 2.0 * i),), (float(i), 3.0 * i)) for i in (1, 2, 3, 4)]
    costs = [StageCost(run.ways[0][0], run.ways[0][0], run.ways[0][1], 4, 9, *(0, 0, 0, 0, 0, 0)) for run in runs]
    found = Measurement(tuple("abcd"), tuple(costs), (0,) * 4, 4, LossCost(0.0, 0, 0))
    budget = Budget(FixedMemory(), found.chain(fresh_gradients=False))
    times = possible_times(replace(found, intervals=tuple(ends_alone([run] * 3) for run in runs)))
    for limit in range(budget.least_bytes(), budget.peak_bytes(store_all(budget.chain)) + 1):
        assert most_regret(times, budget, limit, Persistent()) < 1e-9
    assert most_regret(times, budget, budget.least_bytes() - 1, Persistent()) == 0


def test_nothing_is_said_of_times_whose_intervals_are_not_those_of_the_plan() -> None:
    run = StageRun(((1.0, 2.0),), (1.0, 3.0))
    cost = StageCost(1.0, 1.0, 2.0, 4, 9, *(0, 0, 0, 0, 0, 0))
    found = Measurement(
        tuple("ab"), (cost,) * 2, (0,) * 2, 4, LossCost(0.0, 0, 0), intervals=(ends_alone([run] * 3),) * 2
    )
    budget = Budget(FixedMemory(), found.chain(fresh_gradients=False))
    limit, sequence = budget.peak_bytes(store_all(budget.chain)), store_all(budget.chain)
    assert known_regret(sequence, found, budget, limit) == 0
    assert known_regret(sequence, replace(found, intervals=()), budget, limit) is None
    assert known_regret(sequence, found, replace(budget, forwards=2), limit) is None
    slower = replace(found, stages=(replace(cost, nograd_seconds=2.0), cost))  # as another process may have it
    assert known_regret(sequence, found, replace(budget, chain=slower.chain(fresh_gradients=False)), limit) is None


def layers() -> nn.Module:
    widths = [8, 24, 40, 16, 32, 48, 8]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


BATCH = torch.randn(512, 8)


def times_vary(monkeypatch: pytest.MonkeyPatch, *, much: bool) -> dict[int, int]:
    """Have times vary a little or `much`, and with them what is known of a node, which one run shows.

    What is returned says how often the layer of each output width was timed.
    """
    often: dict[int, int] = {}
    measure_ways, time_ways = stage_measurer.measure_ways, stage_measurer.time_ways

    def measured_by_the_hour(runners: Any, *arguments: Any) -> Any:
        found = measure_ways(runners, *arguments)
        return found._replace(run=replace(by_the_hour(runners, found.run), node=None))

    def timed_by_the_hour(runners: Any, *arguments: Any, **options: Any) -> Any:
        run, output = time_ways(runners, *arguments, **options)
        return by_the_hour(runners, run), output

    def by_the_hour(runners: Any, run: StageRun) -> StageRun:
        width = runners[0].function.weight.shape[0]
        often[width] = often.get(width, 0) + 1
        longer = often[width] * 7 % 5
        # So that the times are kept for the next run, but are not good enough for all plans.
        factor = 1 + longer / (9 if much else 20)
        forward, backward = width * factor, 2 * width * factor
        return StageRun(((forward, backward),) * len(run.ways), (float(width), forward + backward))

    monkeypatch.setattr(stage_measurer, "measure_ways", measured_by_the_hour)
    monkeypatch.setattr(stage_measurer, "time_ways", timed_by_the_hour)
    return often


def limits() -> tuple[int, int]:
    """One halfway from the least to that of storing everything, and that one."""
    model = Checkpointable(layers(), loss=squares, cache=False)
    model.measure(BATCH)
    assert model.budget is not None
    least, whole = model.budget.least_bytes(), model.budget.peak_bytes(store_all(model.budget.chain))
    return (least + whole) // 2, whole


def train(limit: int | None) -> Checkpointable:
    model = Checkpointable(layers(), mem_limit=limit, loss=squares)
    squares(model(BATCH)).backward()
    return model


@pytest.mark.timed
def test_timing_ends_early_where_everything_is_stored_and_goes_on_for_another_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half, whole = limits()
    often = times_vary(monkeypatch, much=True)
    train(whole)
    assert set(often.values()) == {FEWEST_RUNS}
    train(whole)  # all of it was kept, and is as good for that
    assert set(often.values()) == {FEWEST_RUNS}
    train(half)  # for which it is not good enough
    assert max(often.values()) > FEWEST_RUNS


def test_the_report_says_what_inexact_times_may_have_cost_and_a_plan_from_a_file_does_not(tmp_path: Path) -> None:
    half, _ = limits()
    model = train(half)
    regret = model.report().regret
    assert regret is not None
    assert regret >= 0
    assert f"at most {regret:.1%}" in dict(lost_to_inexact_times(regret)).values()
    model.save_plan(tmp_path / "plan.json")
    again = Checkpointable(layers(), mem_limit=half, loss=squares, plan=tmp_path / "plan.json")
    assert again.report().regret is None
    assert lost_to_inexact_times(None) == []


@pytest.mark.timed
def test_timing_ends_early_where_no_other_plan_would_be_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    half, whole = limits()
    often = times_vary(monkeypatch, much=False)
    little_less = whole - (whole - half) // 10
    train(little_less)
    assert set(often.values()) == {FEWEST_RUNS}
    Checkpointable(layers(), mem_limit=little_less, loss=squares).measure(BATCH)  # for curves, and all other limits
    assert max(often.values()) > FEWEST_RUNS


@pytest.mark.timed
def test_without_a_limit_times_are_good_for_any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    often = times_vary(monkeypatch, much=False)
    train(None)
    assert max(often.values()) > FEWEST_RUNS


@pytest.mark.timed
def test_a_captured_graph_is_timed_until_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loss, which is measured after the stages."""
    asked: list[int] = []

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                value = value + part(value).tanh()
            return value

    most = most_regret

    def noting(times: Any, budget: Budget, *arguments: Any) -> float:
        asked.append(times.found.loss.kept_bytes)
        return most(times, budget, *arguments)

    monkeypatch.setattr(enough_times, "most_regret", noting)
    runs, time_ways, numbers = [0], stage_measurer.time_ways, count()

    def varying(runners: Any, *arguments: Any, **options: Any) -> Any:
        run, output = time_ways(runners, *arguments, **options)
        runs[0] += 1
        seconds = 1.0 + next(numbers) % 5
        return StageRun(((seconds, seconds),) * len(run.ways), (seconds, 2 * seconds)), output

    monkeypatch.setattr(stage_measurer, "time_ways", varying)
    model = Checkpointable(Residual(), mem_limit="1GB", loss=squares, cache=False)
    squares(model(BATCH)).backward()
    assert asked
    assert len(asked) == 1
    assert asked[0] > 0
    early, runs[0] = runs[0], 0
    Checkpointable(Residual(), mem_limit="1GB", cache=False).measure(BATCH)
    assert runs[0] > early
