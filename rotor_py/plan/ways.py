"""Which way to run the stages: plain or compiled, whichever has the faster plan inside the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from rotor_py.distributed.processes import anywhere, size_of
from rotor_py.measure.budget import Budget
from rotor_py.measure.stages import MeasuredCut
from rotor_py.plan.agreement import slowest
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_solver import InfeasibleError, Sequence

Way = TypeVar("Way")


def fastest_way(
    plan: StepPlan,
    solve: Callable[[Budget], Sequence],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Sequence:
    """The fastest sequence that `solve` finds for any way to run the stages; `plan` is turned to that way.

    So compiled stages never make a plan worse: the plain ones are among the ways. InfeasibleError if no way has a
    sequence: that of the way that needs least.
    """
    ways = _alike(plan.ways, group, device)
    if not ways:
        return solve(plan.budget)

    def seconds(budget: Budget, sequence: Sequence) -> float:
        found = budget.makespan(sequence)
        # With several processes, the slowest counts, so that all choose alike.
        return slowest(found, group, device) if group is not None and size_of(group) > 1 else found

    way, sequence = fastest(ways, plan.budget_of, solve, seconds)
    plan.turn_to(way)
    return sequence


def fastest_stored(ways: Iterable[MeasuredCut]) -> MeasuredCut:
    """The way that takes least time where nothing is computed twice: the one to begin with, before there is a limit."""
    return min(
        ways, key=lambda way: sum(each.forward_seconds + each.backward_seconds for each in way.measurement.stages)
    )


def fastest(
    ways: Iterable[Way],
    budget_of: Callable[[Way], Budget],
    solve: Callable[[Budget], Sequence],
    seconds: Callable[[Budget, Sequence], float],
) -> tuple[Way, Sequence]:
    """The way with the fastest sequence, and that sequence. InfeasibleError as from `fastest_way`."""
    found: list[tuple[float, Way, Sequence]] = []
    refused: list[InfeasibleError] = []
    for way in ways:
        budget = budget_of(way)
        try:
            sequence = solve(budget)
        except InfeasibleError as error:  # with several processes, it comes in all of them
            refused.append(error)
        else:
            found.append((seconds(budget, sequence), way, sequence))
    if not found:
        raise min(refused, key=lambda error: error.min_bytes)
    _, best, sequence = min(found, key=lambda each: each[0])
    return best, sequence


def _alike(
    ways: tuple[MeasuredCut, ...], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[MeasuredCut, ...]:
    """The ways that all processes have: which stages are faster compiled, each has measured for itself."""
    if group is None or size_of(group) == 1 or not ways:
        return ways
    if anywhere(len(ways) == 1, group, device):  # somewhere, nothing can be compiled
        return ways[-1:]
    return ways[-2:]
