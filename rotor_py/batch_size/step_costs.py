"""Costs of a step for any batch, interpolated between measured batches.

Bytes and seconds of a stage are affine in the batch: a constant part (weights, launches) and one per sample. This holds
piecewise: a peak is a maximum of affine sums, and a library may change kernels. So each number is interpolated between
the two nearest measured batches.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from rotor_py.distributed.processes import gather_objects, size_of
from rotor_py.errors import PlanMismatchError
from rotor_py.measure.budget import Budget
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import costliest
from rotor_solver import Chain, InfeasibleError, Option, Persistent, Sequence, store_all
from rotor_solver.moving import Link

Costs = TypeVar("Costs")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Memory and chain of a step, and the seconds of the layers before the chain, which are not planned."""

    budget: Budget
    before_chain_seconds: float = 0.0

    @property
    def chain(self) -> Chain:
        return self.budget.chain

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages. Batches with different stages cannot be interpolated."""
        return tuple(stage.name for stage in self.chain)

    @property
    def least_bytes(self) -> int:
        return self.budget.least_bytes()

    @property
    def stored_bytes(self) -> int:
        return self.budget.peak_bytes(store_all(self.chain))

    @property
    def stored_seconds(self) -> float:
        return self.seconds_of(store_all(self.chain))

    def seconds_of(self, sequence: Sequence) -> float:
        """Seconds of forward, loss and backward by `sequence`, all forwards in flight."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    def plan(self, mem_limit: int, slots: int) -> Sequence | None:
        """The fastest sequence found within `mem_limit` bytes for the whole step; None if nothing fits."""
        try:
            return self.budget.solve(mem_limit, Persistent(slots))
        except InfeasibleError:
            return None


def agreed_costs(costs: StepCosts, group: dist.ProcessGroup | None, device: torch.device) -> StepCosts:
    """Take the maximum of each number over all processes of `group`, which all have to call this.

    Raises PlanMismatchError in all of them if their stages differ.
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


def interpolated(measured: dict[int, StepCosts], batch: int) -> StepCosts | None:
    """Interpolate the costs of a step of `batch`; None if the measured batches around it do not determine them.

    Beyond the measured batches, bytes follow the line through the last two, and seconds are proportional to the batch,
    since noise would ruin an extrapolated line. Batches with different stages share no line; the nearer one decides
    which line applies.
    """
    if batch in measured:
        return measured[batch]
    batches = sorted(measured)
    place = bisect_left(batches, batch)
    around = batches[max(0, place - 1) : place + 1]
    nearest = min(around, key=lambda each: abs(each - batch))
    alike = sorted((b for b in batches if measured[b].stages == measured[nearest].stages), key=lambda b: abs(b - batch))
    ends = around if set(around) <= set(alike) and len(around) == 2 else sorted(alike[:2])
    if len(ends) < 2:
        return None
    low, high = ends
    way = _Way(batch - low, high - low, batch / low if batch < low else batch / high if batch > high else 1.0)
    try:
        return _on_line(measured[low], measured[high], way)
    except ValueError:
        # Interpolated costs are valid. Extrapolated lines may cross, which no chain has.
        if low <= batch <= high:
            raise
        return None


class _Way(NamedTuple):
    """Position on a line: `part` of its length `whole`. Beyond its end, seconds are those of the end, scaled."""

    part: int
    whole: int
    scale: float


def _on_line(low: Costs, high: Costs, way: _Way) -> Costs:
    """Interpolate from `low` to `high`, number by number; sizes are rounded up.

    Numbers that are nonnegative at both ends stay nonnegative. Only options of a stage that both have remain.
    """
    found: Any
    if low is None or high is None:
        found = None
    elif isinstance(low, str | bool | Link):  # a link does not depend on the batch
        found = low
    elif is_dataclass(low) and not isinstance(low, type):
        found = replace(
            low, **{each.name: _on_line(getattr(low, each.name), getattr(high, each.name), way) for each in fields(low)}
        )
    elif isinstance(low, tuple):
        found = tuple(_on_line(one, other, way) for one, other in _pairs(low, cast(Any, high)))
    else:
        number: Any = _seconds if isinstance(low, float) else _bytes
        found = number(low, high, way)
    return cast(Costs, found)


def _pairs(low: tuple[Any, ...], high: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    if not all(isinstance(each, Option) for each in (*low, *high)):
        return list(zip(low, high, strict=False))
    by_name = {option.name: option for option in high}
    return [(option, by_name[option.name]) for option in low if option.name in by_name]


def _seconds(low: float, high: float, way: _Way) -> float:
    return way.scale * (low + (high - low) * min(max(0, way.part), way.whole) / way.whole)


def _bytes(low: int, high: int, way: _Way) -> int:
    # In integers, because sizes are exact: an affine size equals its measurement.
    found = low - (-(high - low) * way.part // way.whole)
    return max(0, found) if low >= 0 and high >= 0 else found
