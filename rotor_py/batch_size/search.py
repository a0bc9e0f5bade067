"""Search for the largest batch within a limit, or the batch with the most samples a second, by few measurements.

Bytes and seconds of a stage are roughly a constant part (weights, kernel launches) plus a part per sample. But a step's
peak is a maximum of sums over stages, and libraries change kernels with the batch, so a line predicts well only between
near batches: each cost is interpolated between the two nearest measured batches.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import rotor_solver
from rotor_py.distributed.processes import gather_objects, refuse_other_ranks
from rotor_py.measure.budget import Budget
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import costliest
from rotor_py.report.sweep import BatchPoint
from rotor_solver import InfeasibleError, Option, Persistent, store_all
from rotor_solver.offload import Link

# Upper bound of the next batch to measure, as a multiple of the largest so far. A guess: more might not fit the device.
_GROWTH = 4
# Number of batches chosen by lines, which mislead if bytes are not convex, before bisection. A guess; more cost time.
_PATIENCE = 8
_POINTS = 24  # Number of batches, at equal ratios, with which the search begins. A guess: too few miss the fastest.
_CLOSER = 8  # Number of batches planned between the neighbours of the fastest one so far
_FINE = 0.01  # The search ends when the fastest batch's neighbours differ by at most this share of it


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step: the planned chain's `budget`, and seconds of a forward through the layers before the chain."""

    budget: Budget
    before_chain_seconds: float = 0.0

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages. Costs are interpolated only between batches with the same stages."""
        return tuple(stage.name for stage in self.budget.chain)

    @property
    def least_bytes(self) -> int:
        return self.budget.least_bytes()

    @property
    def stored_bytes(self) -> int:
        return self.budget.peak_bytes(store_all(self.budget.chain))

    @property
    def stored_seconds(self) -> float:
        return self.seconds_of(store_all(self.budget.chain))

    def seconds_of(self, sequence: rotor_solver.Sequence) -> float:
        """Seconds of forward, loss and backward if all forwards in flight follow `sequence`."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    def seconds_within(self, mem_limit: int, slots: int) -> float:
        """Seconds of the fastest sequence found whose step needs at most `mem_limit` bytes; infinite if none fits."""
        try:
            return self.seconds_of(self.budget.solve(mem_limit, Persistent(slots)))
        except InfeasibleError:
            return math.inf


def agreed_costs(costs: StepCosts, group: dist.ProcessGroup | None, device: torch.device) -> StepCosts:
    """Return the maximum of each cost over the processes of `group`. All raise PlanMismatchError if stages differ."""
    if group is None:
        return costs
    found = gather_objects(costs, group, device)
    refuse_other_ranks("the stages of the model", [each.stages for each in found])
    budgets = [each.budget for each in found]
    sizes = {"before_bytes", "snapshot_bytes", "stepping_bytes", "held_beside"}
    links = [budget.link for budget in budgets if budget.link is not None]
    steps = [budget.step_bytes for budget in budgets if budget.step_bytes is not None]
    budget = replace(
        budgets[0],
        chain=costliest([each.chain for each in budgets]),
        fixed=FixedMemory(
            **{each.name: max(getattr(budget.fixed, each.name) for budget in budgets) for each in fields(FixedMemory)}
        ),
        step_bytes=max(steps, default=None),
        link=Link.slowest(links) if len(links) == len(budgets) else None,
        **{name: max(getattr(budget, name) for budget in budgets) for name in sizes},
    )
    return StepCosts(budget, max(each.before_chain_seconds for each in found))


def interpolated(measured: dict[int, StepCosts], batch: int) -> StepCosts | None:
    """Interpolate the costs of a step of `batch`; None if too few measured batches have the stages of the nearest one.

    Outside the measured batches, bytes follow the line through the two nearest. Seconds there are proportional to the
    batch, since a line through noisy times may be far off.
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
    try:
        found: StepCosts = _on_line(measured[low], measured[high], batch, low, high)
        return found
    except ValueError:
        # `Chain` refuses impossible sizes; extrapolation may give some, interpolation between valid chains does not.
        if low <= batch <= high:
            raise
        return None


def _on_line(one: Any, other: Any, batch: int, low: int, high: int) -> Any:
    """Compute the costs of `batch`, field by field, from `one`, those of the batch `low`, and `other`, of `high`.

    Rounds bytes up, to at least 0 unless negative in `one` or `other`. Outside `low` to `high`, seconds are
    proportional to the batch. A stage keeps only the options that both batches have.
    """
    if one is None or other is None or isinstance(one, str | bool | Link):  # a link does not depend on the batch
        return None if other is None else one
    if is_dataclass(one) and not isinstance(one, type):
        values = {each.name: (getattr(one, each.name), getattr(other, each.name)) for each in fields(one)}
        return replace(one, **{name: _on_line(*pair, batch, low, high) for name, pair in values.items()})
    if isinstance(one, tuple):
        pairs: Iterable[tuple[Any, Any]] = zip(one, other, strict=False)
        if all(isinstance(each, Option) for each in (*one, *other)):
            by_name = {option.name: option for option in other}
            pairs = ((option, by_name[option.name]) for option in one if option.name in by_name)
        return tuple(_on_line(*pair, batch, low, high) for pair in pairs)
    if isinstance(one, float):
        nearest = min(max(low, batch), high)
        return batch / nearest * (one + (other - one) * (nearest - low) / (high - low))
    # In integers, the result is exact for bytes that are a constant plus a multiple of the batch.
    found = one - (-(other - one) * (batch - low) // (high - low))
    return max(0, found) if one >= 0 and other >= 0 else found


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits; `needs` is the bytes of its step, computed from its measured stages.

    `beyond` is the next larger candidate, whose step needs at least `beyond_bytes` and does not fit; None if there is
    none. Unless `beyond_measured`, a line through smaller batches predicts these bytes.
    """

    batch: int
    needs: int
    beyond: int | None = None
    beyond_bytes: int = 0
    beyond_measured: bool = False


def largest(
    candidates: Sequence[int], needs: Callable[[int], int], known: dict[int, int], mem_limit: int, slack: int = 0
) -> Largest | None:
    """Find the largest of the increasing `candidates` whose step fits into `mem_limit` bytes; None if none does.

    `needs(batch)` measures the bytes of a step. `known` maps at least two batches to these bytes; this adds the batches
    that it measures. A step's bytes are assumed to be convex in the batch, so the line through two batches is a lower
    bound outside them and an upper bound between. A batch with a lower bound over `mem_limit + slack` is not measured.
    """
    begun = len(known)
    while True:
        fits = max((batch for batch in known if batch in candidates and known[batch] <= mem_limit), default=None)
        place = -1 if fits is None else bisect_left(candidates, fits)
        if fits is not None and place + 1 == len(candidates):
            return Largest(fits, known[fits])
        following = candidates[place + 1]
        # Draw the line through smaller batches only: bytes may jump where a library changes kernels, and a line through
        # batches after the jump overestimates batches before it.
        smaller = {batch: known[batch] for batch in known if fits is None or batch < following}
        bound = known[following] if following in known else _bound(smaller, following)
        if following in known or bound > mem_limit + slack:
            return None if fits is None else Largest(fits, known[fits], following, bound, following in known)
        # A batch that does not fit may be no candidate, so let `end` be at least the index after that of `following`.
        above = [batch for batch in known if batch > (fits or 0) and known[batch] > mem_limit]
        end = max(bisect_left(candidates, min(above)), place + 2) if above else len(candidates)
        if fits is None:
            at = 0
        elif len(known) - begun >= _PATIENCE:
            at = (place + end) // 2 if above else 2 * place + 1
        else:
            at = bisect_right(candidates, _reached(known, min(above, default=None), mem_limit)) - 1
        guess = candidates[min(max(at, place + 1), end - 1)]
        known[guess] = needs(guess)


def _reached(known: dict[int, int], above: int | None, mem_limit: int) -> float:
    """Return the batch at which a line reaches the limit: the line from the last batch that fits to `above`, if any."""
    below = sorted(batch for batch in known if above is None or batch < above)
    low, high = below[-2:] if above is None else (below[-1], above)
    rise = known[high] - known[low]
    reached = low + (mem_limit - known[low]) * (high - low) // rise if rise > 0 else math.inf
    return min(reached, _GROWTH * max(known))


def _bound(known: dict[int, int], batch: int) -> int:
    """Return a lower bound of an unmeasured batch's bytes, assuming that bytes are convex and never decrease."""
    below = sorted(each for each in known if each < batch)
    above = sorted(each for each in known if each > batch)
    bounds = [known[each] for each in below[-1:]]
    for pair in (below[-2:], above[:2]):
        if len(pair) == 2:
            low, high = pair
            bounds.append(known[low] + (known[high] - known[low]) * (batch - low) // (high - low))
    return max(bounds, default=0)


@dataclass(slots=True)
class Curve:
    """Seconds of a step by the fastest plan within `mem_limit`, by batch; costs of unmeasured ones are interpolated."""

    measured: dict[int, StepCosts]
    mem_limit: int
    optimizer_seconds: float = 0.0
    effective_batch: int | None = None
    slots: int = 500
    # Seconds of forward, loss and backward by the fastest plan, by batch; infinite if none fits.
    planned: dict[int, float] = field(default_factory=dict)

    def seconds(self, batch: int) -> float:
        if batch not in self.planned:
            costs = interpolated(self.measured, batch)
            self.planned[batch] = math.inf if costs is None else costs.seconds_within(self.mem_limit, self.slots)
        return self.planned[batch]

    def with_optimizer(self, seconds: float, batch: int) -> float:
        """Convert `seconds` of forward, loss and backward to seconds per sample, the optimizer step included."""
        return seconds / batch + self.optimizer_seconds / (self.effective_batch or batch)

    def per_sample(self, batch: int) -> float:
        return self.with_optimizer(self.seconds(batch), batch)

    def best(self, candidates: Sequence[int]) -> int:
        """Return the candidate with the least seconds per sample: try a few, then more and more around the best so far.

        Larger batches share fixed costs among more samples, but recompute more, so the best is often in between.
        """
        looked = sorted({*_spread(candidates, _POINTS), *(batch for batch in self.measured if batch in candidates)})
        while True:
            best = min(looked, key=self.per_sample)
            at = looked.index(best)
            low, high = looked[max(0, at - 1)], looked[min(len(looked) - 1, at + 1)]
            around = candidates[bisect_left(candidates, low) : bisect_right(candidates, high)]
            more = {*_spread(around, _CLOSER), low, best, high}
            if more <= {*looked} or high - low <= _FINE * best:
                return best
            looked = sorted({*looked, *more})

    def points(self, candidates: Sequence[int], most: int, included: Iterable[int]) -> tuple[BatchPoint, ...]:
        """Return points up to the batch `most`: at measured candidates, at `included`, and at some of equal ratios."""
        inside = [batch for batch in candidates if batch <= most]
        batches = {*_spread(inside, _POINTS), *included, *(batch for batch in self.measured if batch in inside)}
        found = (self._point(batch) for batch in sorted(batches))
        return tuple(point for point in found if point is not None)

    def _point(self, batch: int) -> BatchPoint | None:
        costs = interpolated(self.measured, batch)
        if costs is None or self.per_sample(batch) in (0.0, math.inf):
            return None
        fits = costs.stored_bytes <= self.mem_limit and costs.stored_seconds > 0
        stored = 1 / self.with_optimizer(costs.stored_seconds, batch) if fits else None
        return BatchPoint(batch, 1 / self.per_sample(batch), stored, batch in self.measured)


def _spread(candidates: Sequence[int], points: int) -> set[int]:
    """Choose about `points` candidates from the first to the last, each larger than the last by about one factor."""
    ratio = candidates[-1] / candidates[0]
    found = set()
    for at in range(points + 1):
        target = candidates[0] * ratio ** (at / points)
        place = min(bisect_left(candidates, target), len(candidates) - 1)
        found.add(min(candidates[max(0, place - 1) : place + 1], key=lambda batch: abs(batch - target)))
    return found
