"""Which way to run the stages: plain, compiled as a whole or one by one, whichever has the faster plan in the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from rotor_py.compiled.compiled_stage import is_compiled
from rotor_py.distributed.processes import size_of
from rotor_py.measure.budget import Budget
from rotor_py.measure.stages import MeasuredCut
from rotor_py.plan.agreement import gather_objects, slowest
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

    # What was compiled as a whole was compiled for the room that there was then.
    wholes = [budget for way in ways if way.cut.members is not None for budget in [plan.budget_of(way)]]
    plan.outgrown = False

    def solved(budget: Budget) -> Sequence:
        try:
            return solve(budget)
        except InfeasibleError:
            plan.outgrown |= budget in wholes
            raise

    # A whole graph is there only if it is not slower than plain. Its time cannot be compared with that of stages, which
    # were measured one by one.
    groups = [[way for way in ways if (way.cut.members is not None) == whole] for whole in (True, False)]
    try:
        way, sequence = fastest(groups[0] or ways, plan.budget_of, solved, seconds)
    except InfeasibleError:
        if not groups[0]:
            raise
        way, sequence = fastest(groups[1], plan.budget_of, solved, seconds)
    plan.turn_to(way)
    return sequence


def fastest_stored(ways: Iterable[MeasuredCut]) -> MeasuredCut:
    """The way that takes least time where nothing is computed twice: the one to begin with, before there is a limit."""
    found = list(ways)
    return min(
        [way for way in found if way.cut.members is not None] or found,
        key=lambda way: sum(each.forward_seconds + each.backward_seconds for each in way.measurement.stages),
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
    """The ways that all processes have, in one order: which is faster or fits, each has measured for itself."""
    if group is None or size_of(group) == 1 or not ways:
        return ways
    by_kind = {_kind(way): way for way in ways}
    first, *others = gather_objects(list(by_kind), group, device)
    return tuple(by_kind[kind] for kind in first if all(kind in other for other in others))


def _kind(way: MeasuredCut) -> tuple[tuple[str, bool], ...]:
    """What tells ways apart, in any process: the stages, and which of them are compiled."""
    return tuple((name, is_compiled(stage)) for name, stage in way.cut.stages)
