"""Memory against time: every limit that changes something, and where the strategies set by hand lie beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rotor_solver import Sequence, frontier, store_all

if TYPE_CHECKING:
    from rotor_py.report.report import Report

_NONE: Mapping[str, Sequence] = {}


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

    def lettered(self) -> list[tuple[str, Point]]:
        """The strategies with the letters that stand for them in a picture."""
        return list(zip(ascii_uppercase, self.strategies, strict=False))

    def as_json(self) -> dict[str, Any]:
        """The entry "sweep" of the report."""
        return {
            "points": [{**point.as_json(), "activations_saved": self.saved(point)} for point in self.points],
            "strategies": [point.as_json() for point in self.strategies],
        }


def sweep(report: Report, slots: int = 500, strategies: Mapping[str, Sequence] = _NONE) -> Sweep:
    """All limits for the step that `report` is about, and these sequences as points beside them."""
    found = [*frontier(report.chain, slots=slots).sequences, store_all(report.chain), report.sequence]
    points: list[Point] = []
    # A snapshot of the random state, or layers before the chain, can need more than the chain of a leaner plan saves.
    for point in sorted((_point(report, "", each) for each in found), key=lambda p: (p.mem_limit, p.step_seconds)):
        if not points or point.step_seconds < points[-1].step_seconds:
            points.append(point)
    return Sweep(
        fixed_bytes=report.budget.fixed.total,
        store_all_bytes=report.store_all_bytes,
        points=tuple(points),
        strategies=tuple(_point(report, name, sequence) for name, sequence in strategies.items()),
    )


def _point(report: Report, name: str, sequence: Sequence) -> Point:
    seconds, plain = report.seconds_of(sequence), report.store_all_seconds
    return Point(name, report.budget.peak_bytes(sequence), seconds, seconds / plain if plain else 1.0, sequence)
