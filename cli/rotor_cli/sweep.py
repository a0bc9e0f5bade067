"""Memory against time: every limit that changes something, and where the strategies set by hand lie beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rotor_cli.facts import Facts
from rotor_solver import Sequence, frontier, store_all


@dataclass(frozen=True, slots=True)
class Point:
    """A plan: the whole step within `mem_limit` bytes, and its predicted time as a ratio to the plain one."""

    name: str
    mem_limit: int
    step_seconds: float
    overhead: float
    sequence: Sequence

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        named = {"strategy": self.name} if self.name else {}
        return {
            **named,
            "mem_limit": self.mem_limit,
            "step_seconds": self.step_seconds,
            "overhead": self.overhead,
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """A step function: limits of the whole step increase, times decrease down to that of storing everything.

    `fixed_bytes` is what every plan has to live with, and what is above it is activation memory; `store_all_bytes` is
    the peak of plain training. `strategies` are other ways to plan, at the least memory that each of them needs.
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

    def as_json(self) -> dict[str, Any]:
        """The entry "sweep" of the report."""
        return {
            "points": [{**point.as_json(), "activations_saved": self.saved(point)} for point in self.points],
            "strategies": [point.as_json() for point in self.strategies],
        }


def sweep(facts: Facts, slots: int, strategies: dict[str, Sequence]) -> Sweep:
    """All limits for the step that `facts` are about, and these sequences as points beside them."""
    found = [*frontier(facts.chain, slots=slots).sequences, store_all(facts.chain)]
    points: list[Point] = []
    # A snapshot of the random state, or layers before the chain, can need more than the chain of a leaner plan saves.
    for point in sorted((_point(facts, "", each) for each in found), key=lambda p: (p.mem_limit, p.step_seconds)):
        if not points or point.step_seconds < points[-1].step_seconds:
            points.append(point)
    return Sweep(
        fixed_bytes=facts.budget.fixed.total,
        store_all_bytes=facts.store_all_bytes,
        points=tuple(points),
        strategies=tuple(_point(facts, name, sequence) for name, sequence in strategies.items()),
    )


def _point(facts: Facts, name: str, sequence: Sequence) -> Point:
    seconds, plain = facts.seconds_of(sequence), facts.store_all_seconds
    return Point(name, facts.budget.peak_bytes(sequence), seconds, seconds / plain if plain else 1.0, sequence)
