"""Solve for all limits at once: from a measured step to its curve of memory against time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rotor_py.report.facts import ReportFacts
from rotor_py.report.sweep import Point, Sweep
from rotor_solver import Persistent, Sequence, frontier, store_all
from rotor_solver.progress import watcher

_NONE: Mapping[str, Sequence] = {}
_LIMITS = 12
"""Limits for which plans that move are solved for: a point each, where others have hundreds. A guess."""
_CLOSE = 0.005
"""The share of all limits within which the least limit for an overhead is found: a guess."""


def sweep_of(
    facts: ReportFacts,
    slots: int = 500,
    strategies: Mapping[str, Sequence] = _NONE,
    overhead: float | None = None,
) -> Sweep:
    """All limits for the step that `facts` are about, and the sequences of `strategies` as points beside them.

    `slots` is how finely the solver divides memory. The solver is called once for all limits. Plans that move
    activations are found for some limits, one by one, and for the least whose plan costs at most `overhead` more time.
    """
    # The frontier rounds sizes to slots, so it may miss storing everything and the plan in use: both are added.
    found = [*frontier(facts.chain, slots=slots).sequences, store_all(facts.chain), facts.sequence]
    if facts.budget.link is not None and facts.budget.forwards == 1:
        found += _one_by_one(facts, slots, found, overhead)
    # For the chain, less memory always means more time. For the whole step it need not: a plan that computes something
    # twice needs a snapshot of the random state, and layers before the chain may peak higher than the chain itself.
    # What is neither leaner nor faster than another plan is dropped.
    return Sweep(
        fixed_bytes=facts.budget.fixed.total,
        store_all_bytes=facts.store_all_bytes,
        points=tuple(_curve(facts, found)),
        strategies=tuple(_point(facts, name, sequence) for name, sequence in strategies.items()),
    )


def _curve(facts: ReportFacts, found: Iterable[Sequence]) -> list[Point]:
    points: list[Point] = []
    for point in sorted((_point(facts, "", each) for each in found), key=lambda p: (p.mem_limit, p.step_seconds)):
        if not points or point.step_seconds < points[-1].step_seconds:
            points.append(point)
    return points


def _one_by_one(
    facts: ReportFacts, slots: int, others: Iterable[Sequence], overhead: float | None
) -> Iterator[Sequence]:
    """Plans for some limits, and where there is an `overhead`, the one with the least limit that stays under it."""
    budget, progress = facts.budget, watcher()
    least, most = budget.least_bytes(), facts.store_all_bytes

    def solved(limit: int) -> Sequence:
        return budget.solve(limit, Persistent(slots))

    known: dict[int, Sequence] = {}
    for number in range(_LIMITS):
        if progress is not None:
            progress(number, _LIMITS, "limits for plans that move")
        limit = least + number**2 * (most - least) // _LIMITS**2  # closer where limits are small, and cost much
        known[limit] = solved(limit)
        yield known[limit]
    if overhead is None:
        return

    def fast(sequence: Sequence) -> bool:
        return facts.seconds_of(sequence) <= (1 + overhead) * facts.store_all_seconds

    # A plan that is fast enough is so for all limits above its peak, whatever it does. The best one for a limit that
    # is not says so of all limits below; one of `others`, which is best without moves, says nothing.
    enough = min((budget.peak_bytes(each) for each in (*known.values(), *others) if fast(each)), default=most)
    short = max((limit for limit, each in known.items() if limit < enough and not fast(each)), default=least)
    while enough - short > _CLOSE * (most - least):
        middle = (short + enough) // 2
        sequence = solved(middle)
        yield sequence
        if fast(sequence):
            enough = min(middle, budget.peak_bytes(sequence))
        else:
            short = middle


def _point(facts: ReportFacts, name: str, sequence: Sequence) -> Point:
    seconds, plain = facts.seconds_of(sequence), facts.store_all_seconds
    return Point(name, facts.budget.peak_bytes(sequence), seconds, seconds / plain if plain else 1.0, sequence)
