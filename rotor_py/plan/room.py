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
        return replace(budget, snapshot_bytes=0).peak_bytes(store_all(budget.chain))

    def partitioner(self, limit: int) -> Partitioner:
        from rotor_py.partition.partitioner import BudgetPartitioner

        return _Partitioner(BudgetPartitioner(limit, fused=True, estimated=True))


@dataclass(frozen=True, slots=True)
class _Partitioner:
    function: BudgetPartitioner

    @property
    def peak(self) -> int:
        return 0 if self.function.weight is None else self.function.weight.peak

    def gain(self, limit: int) -> float:
        now, then = self.function.weight, self.function.weight_within(limit)
        return 0.0 if now is None or then is None else 1 - then.seconds / max(now.seconds, 1e-12)
