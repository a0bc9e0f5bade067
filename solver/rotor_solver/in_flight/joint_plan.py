"""A plan for several forwards in flight, and how plans are joined."""

from __future__ import annotations

from bisect import bisect_right
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


def fastest_join(candidates: Iterable[Candidate], forwards: int, mem_limit: int) -> list[Candidate] | None:
    """The fastest `forwards` of these, of at most two kinds, that fit in any order; None if none do. The fastest first.

    Two kinds are enough where time falls ever slower with memory, as it does but for the roundness of stages: a mixture
    of three is no faster than one of the two beside each other.
    """
    best: tuple[float, list[Candidate]] | None = None
    by_working = sorted(candidates, key=lambda each: each[0].working)
    for stop, (last, _) in enumerate(by_working, 1):
        if stop < len(by_working) and by_working[stop][0].working == last.working:
            continue
        # Those that need no more than `last` while they run: what they keep has to fit into the rest.
        steps = _pareto(by_working[:stop])
        found = _fastest_mixture(steps, forwards, mem_limit - last.working)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    # A step with fewer forwards follows those that come first. They also keep most: as some are over and others begin,
    # none that waits keeps more than one of its place was planned to.
    return None if best is None else sorted(best[1], key=lambda each: each[0].makespan)


def _pareto(candidates: Many[Candidate]) -> list[Candidate]:
    """Those that no other beats in both what they keep and their time; they keep more and more."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each[0].waiting, each[0].makespan)):
        if not kept or each[0].makespan < kept[-1][0].makespan:
            kept.append(each)
    return kept


def _fastest_mixture(steps: list[Candidate], forwards: int, room: int) -> tuple[float, list[Candidate]] | None:
    sizes = [each[0].waiting for each in steps]
    best: tuple[float, list[Candidate]] | None = None
    for fewer in range(forwards // 2 + 1):
        for one in steps if fewer else steps[:1]:
            rest = (room - fewer * one[0].waiting) // (forwards - fewer)
            at = bisect_right(sizes, rest) - 1
            if at < 0:
                continue
            seconds = fewer * one[0].makespan + (forwards - fewer) * steps[at][0].makespan
            if best is None or seconds < best[0]:
                best = seconds, [one] * fewer + [steps[at]] * (forwards - fewer)
    return best
