"""Find the fastest sequence at every memory limit; the times form a step function, which can be drawn.

One table of the dynamic program (`Persistent`) has the times for all limits up to its own. For small limits its slots
are too coarse, so further tables cover a quarter of the memory, a sixteenth, and so on.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np

from rotor_solver.chain import Chain, check_chain
from rotor_solver.described_error import (
    InfeasibleError,
    InvalidValueError,
    bytes_of_limit,
    check_count,
    is_number,
    listed,
    within_memory,
)
from rotor_solver.grouping import coarse_chain, fine_sequence, joined, stored_bound
from rotor_solver.persistent.layout import Problem, Spacing
from rotor_solver.persistent.recurrence import BRIEF, Effort, Persistent, common_divisor, parts_of, solved, units
from rotor_solver.persistent.table import Table
from rotor_solver.segments import store_all
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate
from rotor_solver.watching import watcher


@dataclass(frozen=True, slots=True)
class Frontier:
    """A step function: sequences[k] takes makespans[k] seconds and fits in limits[k] bytes, chain input included.

    Limits increase, makespans never increase. No memory-persistent sequence (`Persistent`) within limits[k] bytes takes
    less than lower_bounds[k] seconds. `stored` is the seconds of a step that stores everything.
    """

    limits: tuple[int, ...]
    makespans: tuple[float, ...]
    lower_bounds: tuple[float, ...]
    sequences: tuple[Sequence, ...]
    stored: float

    def __len__(self) -> int:
        return len(self.limits)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.limits, self.makespans, strict=True))

    @property
    def gap(self) -> float:
        """Upper bound of how much slower any sequence is than the best one at its limit: 0.01 is one percent."""
        pairs = zip(self.makespans, self.lower_bounds, strict=True)
        return max((made / least - 1 for made, least in pairs if least), default=0.0)

    def sequence(self, mem_limit: float) -> Sequence:
        """Return the fastest known sequence within `mem_limit` bytes.

        Raises InfeasibleError below the first limit, and ValueError if `mem_limit` is not a number of bytes.
        """
        return self.sequences[self._position(mem_limit)]

    def makespan(self, mem_limit: float) -> float:
        """Return the seconds of `sequence(mem_limit)`. Raises the same errors as `sequence`."""
        return self.makespans[self._position(mem_limit)]

    def limit_for(self, overhead: float) -> int:
        """Return the least limit at which a step takes at most 1 + `overhead` times as long as storing everything.

        Raises ValueError if `overhead` < 0, or if none of the frontier's limits allows a step that fast.
        """
        if not is_number(overhead) or not overhead >= 0:
            raise InvalidValueError(f"overhead must be ≥ 0, got {overhead!r}", kind="not_an_overhead", name="overhead")
        for limit, made in self:
            if made <= self.stored * (1 + overhead):
                return limit
        message = f"overhead must be higher: none of the {len(self)} limits has a plan with at most {overhead}"
        raise InvalidValueError(message, kind="overhead_too_low", name="overhead", got=overhead)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the overhead (extra time, as a share of that of storing everything) by limit into a .svg, .png or .pdf.

        Raises ImportError if matplotlib is missing, and ValueError for a file format that matplotlib does not know.
        """
        draw(path, self.limits, [made / self.stored - 1 if self.stored else 0.0 for made in self.makespans])

    def _position(self, mem_limit: float) -> int:
        limit = bytes_of_limit(mem_limit)
        position = bisect.bisect_right(self.limits, limit) - 1
        if position < 0:
            least = self.limits[0] if self.limits else 0
            message = f"mem_limit must be at least {least} bytes, the first limit of the frontier, got {limit}"
            raise InfeasibleError(message, min_bytes=least, mem_limit=limit)
        return position


@within_memory
def frontier(chain: Chain, limits: Iterable[float] | None = None, *, slots: int = 500) -> Frontier:
    """Find the fastest sequence at every limit, from the least limit with a sequence to that of storing everything.

    With `limits` in bytes, plans for these only, and leaves out those too small for any sequence. Memory is divided
    into about `slots`; without `limits`, tries about as many limits. Raises ValueError if a limit is not a number of
    bytes, or if `slots` < 1.
    """
    check_chain(chain)
    check_count(slots, "slots")
    asked = None if limits is None else sorted({*map(bytes_of_limit, listed(limits, "limits"))})
    groups = joined(chain)
    if groups is None:
        return _frontier(chain, asked, slots, Persistent(slots))
    few = min(slots, _FEW)
    coarse = _frontier(coarse_chain(chain, groups), asked, few, Persistent(few, _EACH, work=0))
    stored = store_all(chain).lower_bound or 0.0
    bounds = [stored_bound(chain, limit, stored) for limit in coarse.limits]
    bounds = list(map(min, bounds, coarse.makespans))
    fine = [
        Sequence(fine_sequence(chain, groups, each), "persistent", bound)
        for each, bound in zip(coarse.sequences, bounds, strict=True)
    ]
    return replace(coarse, sequences=tuple(fine), lower_bounds=tuple(bounds))


def _frontier(chain: Chain, asked: list[int] | None, slots: int, at_least: Persistent) -> Frontier:
    """Compute `frontier` without merging stages. `asked`: limits, None for all; `at_least` solves the least limit."""
    problem, stored = Problem(chain), store_all(chain)
    best, whole = problem.least_sequence(), simulate(chain, stored)
    seconds = simulate(chain, best).makespan
    least = chain.input_bytes + problem.needed
    costs = problem.costs
    needs = (costs.forward_need, costs.backward_need, costs.check_need, costs.base, np.array([costs.loss_need]))
    divisor = common_divisor(costs.activation, costs.taken, costs.released, *needs)
    tables = _tables(problem, whole.peak - chain.input_bytes, seconds - problem.stored, slots, divisor)
    tried = sorted({least, *_steps(tables, slots), whole.peak}) if asked is None else asked
    found: list[_Step] = []
    proven: dict[int, float] = {}
    progress = watcher()
    for position, limit in enumerate(tried):
        if progress is not None:
            progress(position, len(tried), "limits")
        if limit < least:
            continue
        if limit >= whole.peak:
            best, seconds = stored, whole.makespan
        elif limit == least:  # few choices fit this limit, so rounding to slots would rule out most of them
            best = at_least.solve(chain, least)
            seconds = simulate(chain, best).makespan
        else:
            room = limit - chain.input_bytes
            sequence, more = _table_for(tables, room).sequence(room, seconds - problem.stored)
            # None if the table has no faster plan: then keep the plan of the previous, lower limit.
            if sequence is not None:
                best, seconds = sequence, problem.stored + more
        found.append((limit, best))

    def bound(limit: int) -> float:
        # All plans need the chain's input and a multiple of `divisor` bytes, so rounding down to one excludes no plan.
        room = (limit - chain.input_bytes) // max(1, divisor) * max(1, divisor)
        read = problem.stored + _table_for(tables, room).lower_bound(room)
        return max(read, *(other for above, other in proven.items() if above >= limit), 0.0)

    if asked is None:
        most = min(_SINGLE, int(_PAIRS / max(1, sum(table.guess for table in tables))))
        found = _closer(chain, _steepest(chain, [each for _, each in found]), slots, most, bound, proven)
    bounds = [bound(limit) for limit, _ in found]
    if found and found[0][0] == least:
        # `at_least`, which solved the least limit by itself, may have proven a higher bound.
        bounds[0] = max(bounds[0], found[0][1].lower_bound or 0.0)
    makespans = [simulate(chain, sequence).makespan for _, sequence in found]
    bounds = list(map(min, bounds, makespans))
    return Frontier(
        limits=tuple(limit for limit, _ in found),
        makespans=tuple(makespans),
        lower_bounds=tuple(bounds),
        sequences=tuple(Sequence(each, "persistent", bound) for (_, each), bound in zip(found, bounds, strict=True)),
        stored=whole.makespan,
    )


def limit_for(chain: Chain, overhead: float = 0.10, *, slots: int = 500) -> int:
    """Return the least limit in bytes at which a step takes at most 1 + `overhead` times as long as storing everything.

    Raises ValueError if `overhead` < 0 or `slots` < 1.
    """
    return frontier(chain, slots=slots).limit_for(overhead)


_FEW = 40  # Number of slots for merged stages: few, since every sequence has tens of thousands of operations
_Step = tuple[int, Sequence]  # A limit in bytes, and a sequence within it
_FAR = 0.02  # Gap of a limit's plan to its bound, as a share, above which the limit gets its own solve. Not measured.
_SINGLE = 40  # Upper bound of the number of limits with their own solve. Not measured; too many cost time.
# Upper bound of that number times the pairs of slots that all tables visit. Not measured; too high costs solve time.
_PAIRS = 5e5
# All tables of a frontier are in memory at once, so each takes up to 256 MiB, and a second. With `THOROUGH` tables,
# chains of 400 stages took up to 8 GiB and three minutes.
_EACH = Effort(close=0.01, pairs=2e9, numbers=2**25)
# A table here has this many times the rows of a solve's first table, as no finer one follows. Not measured; costs time.
_CLOSER = 4


def _tables(problem: Problem, room: int, scale: float, slots: int, divisor: int) -> list[Table]:
    """Return filled tables for `room` bytes, a quarter of it, and so on while plans fit, from the smallest `room`."""
    tables = []
    while True:
        unit, exact = next(units(problem.costs, room, slots, divisor))
        later = np.zeros(len(problem.chain) + 1)
        spacing = Spacing(_CLOSER * parts_of(problem, room), max(1, problem.period))
        table = Table(problem, room, unit, scale or 1.0, later, exact=exact, spacing=spacing)
        excess = _EACH.excess(table)
        if excess > 1:
            table = Table(problem, room, math.ceil(unit * excess), scale or 1.0, later, spacing=spacing)
        table.fill()
        tables.append(table)
        if exact or room // 4 <= problem.needed:
            return tables[::-1]
        room //= 4


def _table_for(tables: list[Table], room: int) -> Table:
    return next((table for table in tables if table.room >= room), tables[-1])


def _steps(tables: list[Table], most: int) -> list[int]:
    """Return the limits in bytes at which the tables' lower bound falls; every n-th only, if more than `most`."""
    changes, known, below = [], tables[0].problem.chain.input_bytes, 0
    for table in tables:
        rooms = range(int(table.grid.offset[0]), table.room + 1, table.grid.unit)
        pairs = zip(rooms[1:], pairwise(map(table.lower_bound, rooms)), strict=True)
        changes += [known + room for room, (before, after) in pairs if after < before and room > below]
        below = table.room
    return changes[:: max(1, math.ceil(len(changes) / most))]


def _steepest(chain: Chain, sequences: Iterable[Sequence]) -> list[_Step]:
    """Return (peak bytes, sequence) of each sequence that is faster than all those with a lower peak."""
    kept: list[_Step] = []
    fastest = math.inf
    costs = [(simulate(chain, sequence), sequence) for sequence in sequences]
    for result, sequence in sorted(costs, key=lambda pair: (pair[0].peak, pair[0].makespan)):
        if result.makespan < fastest:
            kept.append((result.peak, sequence))
            fastest = result.makespan
    return kept


def _closer(
    chain: Chain, steps: list[_Step], slots: int, most: int, bound: Callable[[int], float], proven: dict[int, float]
) -> list[_Step]:
    """Improve `steps` by solving up to `most` limits whose time is far from its bound; add new bounds to `proven`."""
    for _ in range(most):
        far = [
            (simulate(chain, slower).makespan / max(bound(limit - 1), math.ulp(0.0)), limit - 1)
            for (_, slower), (limit, _) in pairwise(steps)
            if limit - 1 not in proven
        ]
        gap, limit = max(far, default=(1.0, 0))
        if gap - 1 <= _FAR:
            break
        best = solved(chain, limit, slots, BRIEF)
        proven[limit] = best.bound
        steps = _steepest(chain, [*(each for _, each in steps), best.sequence])
    return steps


LINE, POINT = "#1f77b4", "#d62728"


def require_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        message = "drawing needs matplotlib, which is not installed: pip install 'rotor-plan[plot]'"
        raise ImportError(message, name="matplotlib") from error
    return matplotlib


def draw(
    path: str | PathLike[str],
    limits: Iterable[int],
    overheads: Iterable[float],
    *,
    points: Iterable[tuple[str, int, float]] = (),
    title: str = "",
) -> None:
    """Draw `overheads` by `limits` in bytes, as steps. `points` are other plans: (name, limit in bytes, overhead)."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.step([*limits], [*overheads], where="post", color=LINE, linewidth=1.6, label="optimal")
        for name, size, overhead in points:
            axes.plot([size], [overhead], marker="o", markersize=4, linestyle="", color=POINT, clip_on=False)
            axes.annotate(name, (size, overhead), xytext=(4, 3), textcoords="offset points", fontsize=7)
        axes.set(xlabel="limit", ylabel="more time than storing everything", title=title)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
