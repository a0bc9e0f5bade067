"""A plan for several forwards in flight, and how plans are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from rotor_solver.in_flight.footprint import Footprint, peak_in_any_order
from rotor_solver.sequence import Sequence

Candidate = tuple[Footprint, Sequence]


@dataclass(frozen=True, slots=True)
class JointPlan:
    """One sequence for each forward, in the order in which the forwards run. Seconds and bytes.

    `makespan` and `peak` are those of all forwards together. No persistent sequences with such a peak take less than
    `lower_bound` together.
    """

    sequences: tuple[Sequence, ...]
    makespan: float
    peak: int
    lower_bound: float

    @property
    def gap(self) -> float:
        """How far the plan can be from the best one, as a share of time."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def sequence(self) -> Sequence:
        """The sequence of the first forward, with those of the others beside it if they are not all the same."""
        first, bound = self.sequences[0], self.lower_bound / len(self.sequences)
        others = self.sequences[1:] if any(each != first for each in self.sequences) else ()
        beside = (Sequence(each, "persistent", bound) for each in others)
        return Sequence(first, "persistent", bound, beside)


def joined(found: list[Candidate], peak: Callable[[Many[Footprint]], int], bound: float) -> JointPlan:
    """The plan of these forwards, in their order; `peak` is what they hold together in the worst case."""
    footprints = [each for each, _ in found]
    makespan = sum(each.makespan for each in footprints)
    return JointPlan(tuple(each for _, each in found), makespan, peak(footprints), min(bound, makespan))


def fastest_alike(candidates: Iterable[Candidate], forwards: int, mem_limit: int) -> list[Candidate] | None:
    """The fastest of these that all `forwards` forwards can follow, in any order; None if there is none."""
    same = [each for each in candidates if peak_in_any_order([each[0]] * forwards) <= mem_limit]
    return [min(same, key=lambda each: each[0].makespan)] * forwards if same else None
