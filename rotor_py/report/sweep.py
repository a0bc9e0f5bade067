"""Memory against time, as data: every limit that changes something, and strategies set by hand beside them."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase

from rotor_solver import Sequence


@dataclass(frozen=True, slots=True)
class Point:
    """A plan: the whole step within `mem_limit` bytes, and its predicted time as a ratio to the plain one.

    `name` is that of a strategy set by hand, and empty on the curve itself.
    """

    name: str
    mem_limit: int
    step_seconds: float
    overhead: float
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Sweep:
    """A step function: limits of the whole step increase, times decrease down to that of storing everything.

    `fixed_bytes` is in memory under every plan; what is above it is activation memory. `store_all_bytes` is the peak of
    plain training. `strategies` are other ways to plan, each at the least memory that it needs.
    """

    fixed_bytes: int
    store_all_bytes: int
    points: tuple[Point, ...]
    strategies: tuple[Point, ...] = ()

    def least_for(self, overhead: float) -> Point:
        """The least limit that costs at most `overhead` more time than storing everything: 0.1 for a tenth."""
        return next((point for point in self.points if point.overhead <= 1 + overhead), self.points[-1])

    def saved(self, point: Point) -> float:
        """The share of the activation memory of plain training that `point` does without."""
        activations = self.store_all_bytes - self.fixed_bytes
        return (self.store_all_bytes - point.mem_limit) / activations if activations > 0 else 0.0

    def lettered(self) -> list[tuple[str, Point]]:
        """The strategies with the letters that stand for them in a picture."""
        return list(zip(ascii_uppercase, self.strategies, strict=False))
