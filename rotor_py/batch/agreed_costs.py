"""Costs that all processes of a training see alike, so that all of them choose the same batch."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
import torch.distributed as dist

from rotor_py.batch.step_costs import StepCosts
from rotor_py.distributed.processes import size_of
from rotor_py.errors import PlanMismatchError
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import costliest
from rotor_py.plan.agreement import gather_objects, slowest
from rotor_solver.moving import Link


def agreed_costs(costs: StepCosts, group: dist.ProcessGroup | None, device: torch.device) -> StepCosts:
    """Of every number the most that any process of `group` has measured. All have to call this.

    PlanMismatchError, in all of them, if their stages are different.
    """
    if group is None or size_of(group) == 1:
        return costs
    found: list[StepCosts] = gather_objects(costs, group, device)
    for rank, other in enumerate(found):
        if other.stages != found[0].stages:
            raise PlanMismatchError("the stages of the model", found[0].stages, f"{other.stages} on rank {rank}")
    budgets = [each.budget for each in found]
    sizes = {"before_bytes", "snapshot_bytes", "stepping_bytes", "held_beside"}
    links = [budget.link for budget in budgets if budget.link is not None]
    steps = [budget.step_bytes for budget in budgets if budget.step_bytes is not None]
    budget = replace(
        budgets[0],
        chain=costliest([each.chain for each in found]),
        fixed=FixedMemory(
            **{each.name: max(getattr(budget.fixed, each.name) for budget in budgets) for each in fields(FixedMemory)}
        ),
        step_bytes=max(steps, default=None),
        link=Link.slowest(links) if len(links) == len(budgets) else None,
        **{name: max(getattr(budget, name) for budget in budgets) for name in sizes},
    )
    return StepCosts(budget, max(each.before_chain_seconds for each in found))


def agreed_number(number: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The most that any process of `group` says. All have to call this."""
    return number if group is None or size_of(group) == 1 else slowest(number, group, device)
