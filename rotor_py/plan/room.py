"""The room that a step leaves for a graph that is compiled whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rotor_py.measure.budget import Budget
from rotor_py.measure.measurement import Measurement
from rotor_solver import store_all

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import Partitioner
    from rotor_py.partition.partitioner import BudgetPartitioner


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The room beside the `budget` of a plain step within `limit`; gradients may be `fresh` in every step."""

    budget: Budget
    limit: int
    fresh: bool

    @property
    def fixed(self) -> int:
        return self.budget.fixed.total

    def peak(self, measurement: Measurement) -> int:
        budget = self.budget.with_found(measurement, 0, fresh_gradients=self.fresh)
        # Of the graph alone: what follows it, down to the loss, is that of the plain step.
        plain = self.budget.chain
        chain = replace(budget.chain, loss_time=plain.loss_time, loss_temp=plain.loss_temp)
        return replace(budget, chain=chain, snapshot_bytes=0).peak_bytes(store_all(chain))

    def partitioner(self, limit: int) -> Partitioner:
        from rotor_py.partition.partitioner import whole_partitioner

        return _Partitioner(whole_partitioner(limit, self.budget.chain))


@dataclass(frozen=True, slots=True)
class _Partitioner:
    function: BudgetPartitioner

    @property
    def peak(self) -> int:
        return 0 if self.function.weight is None else self.function.weight.peak

    def gain(self, limit: int) -> float:
        now, then = self.function.weight, self.function.weight_within(limit)
        return 0.0 if now is None or then is None else 1 - then.seconds / max(now.seconds, 1e-12)

    def rival(self) -> Partitioner | None:
        found = self.function.rival
        return None if found is None else _Partitioner(found)
