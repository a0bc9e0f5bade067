"""Solve for all limits at once: from a measured step to its curve of memory against time."""

from __future__ import annotations

from collections.abc import Mapping

from rotor_py.report.facts import ReportFacts
from rotor_py.report.sweep import Point, Sweep
from rotor_solver import Sequence, frontier, store_all

_NONE: Mapping[str, Sequence] = {}


def sweep_of(facts: ReportFacts, slots: int = 500, strategies: Mapping[str, Sequence] = _NONE) -> Sweep:
    """All limits for the step that `facts` are about, and the sequences of `strategies` as points beside them.

    `slots` is how finely the solver divides memory. The solver is called once for all limits.
    """
    # The frontier rounds sizes to slots, so it may miss storing everything and the plan in use: both are added.
    found = [*frontier(facts.chain, slots=slots).sequences, store_all(facts.chain), facts.sequence]
    points: list[Point] = []
    # For the chain, less memory always means more time. For the whole step it need not: a plan that computes something
    # twice needs a snapshot of the random state, and layers before the chain may peak higher than the chain itself.
    # What is neither leaner nor faster than another plan is dropped.
    for point in sorted((_point(facts, "", each) for each in found), key=lambda p: (p.mem_limit, p.step_seconds)):
        if not points or point.step_seconds < points[-1].step_seconds:
            points.append(point)
    return Sweep(
        fixed_bytes=facts.budget.fixed.total,
        store_all_bytes=facts.store_all_bytes,
        points=tuple(points),
        strategies=tuple(_point(facts, name, sequence) for name, sequence in strategies.items()),
    )


def _point(facts: ReportFacts, name: str, sequence: Sequence) -> Point:
    seconds, plain = facts.seconds_of(sequence), facts.store_all_seconds
    return Point(name, facts.budget.peak_bytes(sequence), seconds, seconds / plain if plain else 1.0, sequence)
