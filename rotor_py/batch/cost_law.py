"""The costs of a step for every batch, from those that were measured for some.

Bytes and seconds of a stage are affine in the batch: a part that is there for any batch (weights that are read,
launches), and one for every sample. That holds in parts. A peak is the largest of several sums, each affine, and
another one may be the largest from some batch on; a library may choose another kernel. So every number lies on the line
between the two measured batches around it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

from rotor_py.batch.step_costs import StepCosts
from rotor_solver import Option
from rotor_solver.moving import Link

Costs = TypeVar("Costs")


class CostLaw:
    """`measured` costs by batch, and through them those of other batches."""

    def __init__(self, measured: dict[int, StepCosts]) -> None:
        self.measured = measured
        self.batches = sorted(measured)

    def of(self, batch: int) -> StepCosts | None:
        """The costs of a step of `batch`; None where the measured batches around it say nothing about it.

        Beyond the measured batches, the line through the last two goes on for bytes, and seconds are in proportion to
        the batch: lines through times that vary would soon be nowhere. Batches whose models are cut into other stages
        are not on one line; the nearer one then decides which line is followed.
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

    def _on_line(self, low: int, high: int, batch: int) -> StepCosts | None:
        way = _Way(batch - low, high - low, batch / low if batch < low else batch / high if batch > high else 1.0)
        try:
            return on_line(self.measured[low], self.measured[high], way)
        except ValueError:
            # Between measured costs there are costs. Beyond them, lines may cross, and no chain has such numbers.
            if low <= batch <= high:
                raise
            return None


class _Way(NamedTuple):
    """How far along a line: `part` of its length, which is `whole`. Beyond it, seconds are those of its end, scaled."""

    part: int
    whole: int
    scale: float


def on_line(low: Costs, high: Costs, way: _Way) -> Costs:
    """What lies so far on the way from `low` to `high`, number by number; sizes are rounded up.

    Numbers that are not below zero at both ends are not below zero anywhere. Of the ways to run a stage, those are left
    that both have.
    """
    found: Any
    if low is None or high is None:
        found = None
    elif isinstance(low, str | bool | Link):  # a link is as fast for any batch
        found = low
    elif is_dataclass(low) and not isinstance(low, type):
        found = replace(
            low, **{each.name: on_line(getattr(low, each.name), getattr(high, each.name), way) for each in fields(low)}
        )
    elif isinstance(low, tuple):
        found = tuple(on_line(one, other, way) for one, other in _pairs(low, cast(Any, high)))
    else:
        number: Any = _seconds if isinstance(low, float) else _bytes
        found = number(low, high, way)
    return cast(Costs, found)


def _pairs(low: tuple[Any, ...], high: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """The items of both that are about the same."""
    if not all(isinstance(each, Option) for each in (*low, *high)):
        return list(zip(low, high, strict=False))
    by_name = {option.name: option for option in high}
    return [(option, by_name[option.name]) for option in low if option.name in by_name]


def _seconds(low: float, high: float, way: _Way) -> float:
    return way.scale * (low + (high - low) * min(max(0, way.part), way.whole) / way.whole)


def _bytes(low: int, high: int, way: _Way) -> int:
    # In whole numbers, because sizes are exact: an affine size comes out as it would be measured.
    found = low - (-(high - low) * way.part // way.whole)
    return max(0, found) if low >= 0 and high >= 0 else found
