"""The report of a plan: printed, shown in a notebook, or written as a page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rotor_py.report.facts import ReportFacts
from rotor_py.report.page import frame, page
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


@dataclass(frozen=True, slots=True)
class Report(ReportFacts):
    """A measured model, its budget and its plan. `mem_limit`, in bytes, is None where none was set.

    `str` is the report for a terminal; in a notebook, and as a file, it is a page. The numbers are those of
    `ReportFacts`: bytes and seconds.
    """

    def __str__(self) -> str:
        # Imported here because the import of rich takes time, and most who train never print a report.
        from rotor_py.report.terminal import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        return frame(page(self, self._swept()))

    def to_html(
        self,
        path: str | os.PathLike[str],
        remarks: tuple[str, ...] = (),
        *,
        usage: str = "",
        made: datetime | None = None,
    ) -> None:
        """Write one self-contained page, which loads nothing: no script, style, font or image from elsewhere.

        `remarks` are shown as lines under the verdict, `usage` as the Python that follows the plan; `made` is the date
        of the page, if that is not now. OSError if the file cannot be written.
        """
        Path(path).write_text(page(self, self._swept(), remarks, usage, made), encoding="utf-8")

    def _swept(self) -> Sweep:
        """The curve, solved for now if it is not known: only pages show it, and it takes time."""
        return sweep_of(self) if self.sweep is None else self.sweep
