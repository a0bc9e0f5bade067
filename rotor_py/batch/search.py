"""The batch with the least seconds for each sample inside a limit, by branch and bound over ranges of batches.

Seconds for each sample have no simple shape: a larger batch shares what a step costs in any case (the optimizer,
weights that are read) among more samples, and has to recompute more. So ranges are halved, the most promising first,
until no range can hold a batch that is better by more than the tolerance: `relaxed` has the bound of a range.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rotor_py.batch.cost_law import CostLaw
from rotor_py.batch.relaxed import relaxed
from rotor_py.batch.step_costs import StepCosts
from rotor_solver import Chain, InfeasibleError, Persistent
from rotor_solver.moving.lagrangian import priced

TOLERANCE = 0.005
"""The share of time that another batch would have to save to be looked for: as much as the solver's gap may be."""
_MOST_BOUNDS = 300
"""Ranges that are bounded, at most: what is left open then is part of what is said. A guess."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a step is worth: `optimizer_seconds` are shared by its samples, or by those of an effective batch."""

    optimizer_seconds: float = 0.0
    effective_batch: int | None = None

    def per_sample(self, seconds: float, batch: int) -> float:
        """Seconds for each sample, if forward, loss and backward of a batch take `seconds`."""
        return seconds / batch + self.optimizer_seconds / (self.effective_batch or batch)


@dataclass(frozen=True, slots=True)
class Found:
    """The best batch, its seconds for each sample, and a lower bound for those of all batches that were asked about."""

    batch: int
    seconds_per_sample: float
    bound: float


@dataclass(slots=True)
class Search:
    """Plans for batches within `mem_limit`, each solved for once; `law` has their costs."""

    law: CostLaw
    mem_limit: int
    rate: Rate
    slots: int = 500
    planned: dict[int, float] = field(default_factory=dict)
    """Seconds of forward, loss and backward by the best plan, by batch; infinite where none fits."""

    def seconds(self, batch: int) -> float:
        """Seconds of forward, loss and backward of a batch by the fastest plan; infinite if none fits."""
        if batch not in self.planned:
            costs = self.law.of(batch)
            sequence = None if costs is None else costs.plan(self.mem_limit, self.slots)
            if costs is None or sequence is None:
                self.planned[batch] = math.inf
            else:
                self.planned[batch] = costs.seconds_of(sequence)
        return self.planned[batch]

    def per_sample(self, batch: int) -> float:
        """Seconds for each sample; infinite if no plan fits."""
        return self.rate.per_sample(self.seconds(batch), batch)

    def best(self, candidates: Sequence[int]) -> Found:
        """The best of `candidates`, which increase; the least one fits."""
        ends = {candidates[0], candidates[-1], *(batch for batch in self.law.batches if batch in candidates)}
        best = min(ends, key=self.per_sample)
        bounded = 0
        ranges = [(0.0, 0, len(candidates) - 1)]
        closed = math.inf
        """the least bound of the ranges that are done with"""
        while ranges and bounded < _MOST_BOUNDS:
            bound, first, last = heapq.heappop(ranges)
            if bound >= self.per_sample(best) * (1 - TOLERANCE):
                closed = min(closed, bound)
                continue
            middle = (first + last) // 2
            best = min(best, candidates[middle], key=self.per_sample)
            if first == last:
                closed = min(closed, bound)
                continue
            for low, high in ((first, middle), (middle + 1, last)):
                bounded += 1
                heapq.heappush(ranges, (max(bound, self.bound(candidates[low], candidates[high])), low, high))
        proven = min(closed, *(bound for bound, _, _ in ranges), self.per_sample(best))
        return Found(best, self.per_sample(best), proven)

    def bound(self, least: int, most: int) -> float:
        """Seconds for each sample that no batch from `least` to `most` goes below; infinite if none of them fits."""
        knots = self.law.knots(least, most)
        costs = [each for batch in knots if (each := self.law.of(batch)) is not None]
        if len(costs) < len(knots):
            return math.inf if least == most else 0.0
        chain = relaxed([_with_least(each) for each in costs], knots)
        if chain is None:
            return 0.0
        # A plan that computes nothing twice needs no snapshots, so none are taken off.
        room = max(self.mem_limit - each.budget.fixed.total for each in costs)
        try:
            found = Persistent(self.slots).solve(chain, room)
        except InfeasibleError:
            return math.inf
        assert found.lower_bound is not None
        before = min(each.before_chain_seconds * most / batch for each, batch in zip(costs, knots, strict=True))
        return self.rate.per_sample(costs[0].budget.forwards * (found.lower_bound + before), most)


def _with_least(costs: StepCosts) -> Chain:
    """A chain whose plans cost no more than those of a batch that may move something."""
    if costs.budget.link is not None:
        # As if the link took no time. What is away takes no memory but in its own operations.
        return priced(costs.chain, 0.0)
    return costs.chain
