"""Which way to run the stages: plain or compiled, whichever has the faster plan inside the limit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from rotor_py.capture.session import MeasuredCut
from rotor_py.distributed.processes import anywhere, size_of
from rotor_py.measure.budget import Budget
from rotor_py.plan.agreement import slowest
from rotor_py.plan.step_plan import StepPlan
from rotor_solver import InfeasibleError, Sequence, simulate


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
    if len(ways) < 2:
        if ways:  # the way in use may be one that other processes do not have
            plan.turn_to(ways[0])
        return solve(plan.budget)
    found: list[tuple[float, MeasuredCut, Sequence]] = []
    refused: list[InfeasibleError] = []
    for way in ways:
        budget = plan.budget_of(way)
        try:
            sequence = solve(budget)
        except InfeasibleError as error:  # with several processes, it comes in all of them
            refused.append(error)
            continue
        seconds = simulate(budget.chain, sequence).makespan
        if group is not None and size_of(group) > 1:
            seconds = slowest(seconds, group, device)  # so that all choose alike
        found.append((seconds, way, sequence))
    if not found:
        raise min(refused, key=lambda error: error.min_bytes)
    _, way, sequence = min(found, key=lambda each: each[0])
    plan.turn_to(way)
    return sequence


def _alike(
    ways: tuple[MeasuredCut, ...], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[MeasuredCut, ...]:
    """The ways that all processes have: which stages are faster compiled, each has measured for itself."""
    if group is None or size_of(group) == 1 or not ways:
        return ways
    if anywhere(len(ways) == 1, group, device):  # somewhere, nothing can be compiled
        return ways[-1:]
    return ways[-2:]
