"""The report of a plan, for a terminal, a notebook, or an HTML page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rotor_py.report.numbers import ReportFacts
from rotor_py.report.page import frame, page
from rotor_py.report.sweep import Point, Sweep
from rotor_solver import Persistent, Sequence, frontier, store_all
from rotor_solver.watching import watcher

_NONE: Mapping[str, Sequence] = {}
_LIMITS = 12
"""Limits that are solved one by one for plans with offload. A guess: fewer make a coarser curve, more a longer wait."""
_CLOSE = 0.005
"""Precision of the least limit for an overhead, as a share of all limits. A guess: a coarser one wastes memory."""


def sweep_of(
    facts: ReportFacts,
    slots: int = 500,
    strategies: Mapping[str, Sequence] = _NONE,
    overhead: float | None = None,
) -> Sweep:
    """Solve the step of `facts` for all limits, with the sequences of `strategies` as points.

    `slots` is the solver's memory resolution. One solver call covers all limits. Plans with offload are solved one
    limit at a time, and for the least limit that costs at most `overhead` more time.
    """
    # The frontier rounds sizes to slots, so it may miss storing everything and the plan in use: add both.
    found = [*frontier(facts.chain, slots=slots).sequences, store_all(facts.chain), facts.sequence]
    if facts.budget.link is not None and facts.budget.forwards == 1:
        found += _one_by_one(facts, slots, found, overhead)
    points: list[Point] = []
    # Less memory always costs time in the chain, but not always in the whole step: a recomputing plan snapshots the
    # random state, and layers before the chain may peak higher. Drop dominated plans.
    for point in sorted((_point(facts, "", each) for each in found), key=lambda p: (p.mem_limit, p.step_seconds)):
        if not points or point.step_seconds < points[-1].step_seconds:
            points.append(point)
    return Sweep(
        fixed_bytes=facts.budget.fixed.total,
        store_all_bytes=facts.store_all_bytes,
        points=tuple(points),
        strategies=tuple(_point(facts, name, sequence) for name, sequence in strategies.items()),
    )


def _one_by_one(
    facts: ReportFacts, slots: int, others: Iterable[Sequence], overhead: float | None
) -> Iterator[Sequence]:
    """Plans for some limits, and with an `overhead` the one with the least limit within it."""
    budget, progress = facts.budget, watcher()
    least, most = budget.least_bytes(), facts.store_all_bytes

    def solved(limit: int) -> Sequence:
        return budget.solve(limit, Persistent(slots))

    known: dict[int, Sequence] = {}
    for number in range(_LIMITS):
        if progress is not None:
            progress(number, _LIMITS, "limits for plans that move")
        limit = least + number**2 * (most - least) // _LIMITS**2  # denser at small limits, where overheads are large
        known[limit] = solved(limit)
        yield known[limit]
    if overhead is None:
        return

    def fast(sequence: Sequence) -> bool:
        return facts.seconds_of(sequence) <= (1 + overhead) * facts.store_all_seconds

    # A plan that is fast enough is so for all limits above its peak. If the best plan of a limit is not, no smaller
    # limit is either; this does not hold for `others`, which are optimal only without offload.
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
    """A measured model, its budget and its plan. `mem_limit`, in bytes, is None if none was set.

    `str` gives the terminal report; a notebook and a file get a page. Numbers are those of `ReportFacts`, in bytes and
    seconds.
    """

    def __str__(self) -> str:
        # Import rich on use: it is slow, and most training never prints a report.
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
        """Write one self-contained page: no external script, style, font or image.

        Args:
            path: file to write. Raises OSError if that fails.
            remarks: lines under the verdict.
            usage: Python that follows the plan.
            made: date of the page, now by default.
        """
        Path(path).write_text(page(self, self._swept(), remarks, usage, made), encoding="utf-8")

    def _swept(self) -> Sweep:
        """The curve, solved on demand if unknown: only pages show it, and it takes time."""
        return sweep_of(self) if self.sweep is None else self.sweep
