"""The costs of a step for every batch, from those that were measured for some.

Bytes and seconds of a stage are affine in the batch: a part that is there for any batch (weights that are read,
launches), and one for every sample. That holds in parts. A peak is the largest of several sums, each affine, and
another one may be the largest from some batch on; a library may choose another kernel. So every number lies on the line
between the two measured batches around it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from rotor_py.batch.step_costs import StepCosts

Costs = TypeVar("Costs")


class CostLaw:
    """`measured` costs by batch, and through them those of other batches."""

    def __init__(self, measured: dict[int, StepCosts]) -> None:
        self.measured = measured
        self.batches = sorted(measured)

    def of(self, batch: int) -> StepCosts | None:
        """The costs of a step of `batch`; None where the measured batches around it say nothing about it.

        Beyond the measured batches, the line through the last two goes on. Batches whose models are cut into other
        stages are not on one line; the nearer one then decides which line is followed.
        """
        if batch in self.measured:
            return self.measured[batch]
        place = bisect_left(self.batches, batch)
        around = self.batches[max(0, place - 1) : place + 1]
        if len(around) == 2 and self._alike(around[0], around[1]):
            return self._on_line(around[0], around[1], batch)
        nearest = min(around, key=lambda each: abs(each - batch))
        alike = sorted((each for each in self.batches if self._alike(each, nearest)), key=lambda b: abs(b - batch))
        return self._on_line(min(alike[:2]), max(alike[:2]), batch) if len(alike) > 1 else None

    def knots(self, least: int, most: int) -> list[int]:
        """The ends of a range of batches, and the measured ones inside: between neighbours, costs are affine."""
        return sorted({least, most, *(batch for batch in self.batches if least < batch < most)})

    def _alike(self, one: int, other: int) -> bool:
        return self.measured[one].stages == self.measured[other].stages

    def _on_line(self, low: int, high: int, batch: int) -> StepCosts:
        return on_line(self.measured[low], self.measured[high], batch - low, high - low)


def on_line(low: Costs, high: Costs, part: int, whole: int) -> Costs:
    """What lies `part` of the way from `low` to `high`, whose length is `whole`, number by number; sizes rounded up.

    Numbers that are not below zero at both ends are not below zero anywhere. Of the ways to run a stage, those are left
    that both have.
    """
    found: Any
    if low == high or low is None or isinstance(low, str | bool):
        found = low
    elif is_dataclass(low) and not isinstance(low, type):
        found = replace(
            low, **{f.name: on_line(getattr(low, f.name), getattr(high, f.name), part, whole) for f in fields(low)}
        )
    elif isinstance(low, tuple):
        found = tuple(on_line(*pair, part, whole) for pair in zip(low, cast(Any, high), strict=False))
    else:
        found = _number(low, high, part, whole)
    return cast(Costs, found)


def _number(low: Any, high: Any, part: int, whole: int) -> Any:
    rise = (high - low) * part
    # In whole numbers, because sizes are exact: an affine size comes out as it would be measured.
    found = low - (-rise // whole) if isinstance(rise, int) else low + rise / whole
    return max(type(found)(0), found) if low >= 0 and high >= 0 else found
