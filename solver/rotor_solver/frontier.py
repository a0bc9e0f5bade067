"""The whole trade-off between memory and time at once: all limits from one table of the persistent program."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rotor_solver.chain import Chain
from rotor_solver.ends import store_all
from rotor_solver.errors import InfeasibleError
from rotor_solver.limits import bytes_of_limit
from rotor_solver.persistent import THOROUGH, check_slots, units
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate
from rotor_solver.table import Problem, Table


@dataclass(frozen=True, slots=True)
class Frontier:
    """A step function: limits[k] bytes, a_0 counted, are enough for sequences[k], which takes makespans[k] seconds.

    Limits increase, makespans do not. No persistent sequence within limits[k] bytes takes less than lower_bounds[k]
    seconds. `stored` is the makespan of storing everything.
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
        """The largest distance of a makespan to its bound, as a ratio."""
        pairs = zip(self.makespans, self.lower_bounds, strict=True)
        return max((made / least - 1 for made, least in pairs if least), default=0.0)

    def sequence(self, mem_limit: float) -> Sequence:
        """The fastest sequence known within `mem_limit` bytes; InfeasibleError below the first limit."""
        return self.sequences[self._position(mem_limit)]

    def makespan(self, mem_limit: float) -> float:
        """Seconds of `sequence(mem_limit)`."""
        return self.makespans[self._position(mem_limit)]

    def limit_for(self, overhead: float) -> int:
        """The first limit whose makespan is at most 1 + `overhead` times that of storing everything.

        ValueError if none of the limits is, or for an overhead that is not zero or more.
        """
        if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not overhead >= 0:
            raise ValueError(f"overhead is {overhead!r}; it has to be zero or more: 0.1 for a tenth more time")
        for limit, made in self:
            if made <= self.stored * (1 + overhead):
                return limit
        raise ValueError(f"none of the {len(self)} limits keeps the overhead at {overhead}")

    def _position(self, mem_limit: float) -> int:
        limit = bytes_of_limit(mem_limit)
        position = bisect.bisect_right(self.limits, limit) - 1
        if position < 0:
            least = self.limits[0] if self.limits else 0
            message = f"the least limit of the frontier is {least} bytes; the limit is {limit}"
            raise InfeasibleError(message, min_bytes=least, mem_limit=limit)
        return position


def frontier(chain: Chain, limits: Iterable[float] | None = None, *, slots: int = 500) -> Frontier:
    """What memory costs in time, from the least limit that works to that of storing everything.

    With `limits`, for those only; limits that are too small for any plan are left out. The whole range of memory is
    divided into `slots`, at least, and there are no more steps than that. ValueError for bad limits or slots.
    """
    check_slots(slots)
    problem, stored = Problem.of(chain), store_all(chain)
    best, whole = problem.least_sequence(), simulate(chain, stored)
    seconds = simulate(chain, best).makespan
    least = chain.input_bytes + problem.needed
    table = _table(problem, whole.peak - chain.input_bytes, seconds - problem.stored, slots)
    wanted = [least, *_steps(table, slots), whole.peak] if limits is None else map(bytes_of_limit, limits)
    found: list[_Step] = []
    for limit in sorted(set(wanted)):
        if limit < least:
            continue
        if limit >= whole.peak:
            best, seconds = stored, whole.makespan
        else:
            sequence, more = table.sequence(limit - chain.input_bytes, seconds - problem.stored)
            if sequence is not None:
                best, seconds = sequence, problem.stored + more
        found.append((limit, best))
    if limits is None:
        found = _steepest(chain, found)
    makespans = [simulate(chain, sequence).makespan for _, sequence in found]
    bounds = [problem.stored + table.lower_bound(limit - chain.input_bytes) for limit, _ in found]
    return Frontier(
        limits=tuple(limit for limit, _ in found),
        makespans=tuple(makespans),
        lower_bounds=tuple(map(min, bounds, makespans)),
        sequences=tuple(sequence for _, sequence in found),
        stored=whole.makespan,
    )


def limit_for(chain: Chain, overhead: float = 0.10, *, slots: int = 500) -> int:
    """The first limit on the frontier that costs at most `overhead` more time than storing everything."""
    return frontier(chain, slots=slots).limit_for(overhead)


_Step = tuple[int, Sequence]


def _table(problem: Problem, room: int, scale: float, slots: int) -> Table:
    unit, exact = next(units(problem.costs, room, slots))
    later = np.zeros(len(problem.chain) + 1)
    table = Table.of(problem, room, unit, scale or 1.0, later, exact=exact)
    excess = THOROUGH.excess(table, table.guess)
    if excess > 1:
        table = Table.of(problem, room, math.ceil(unit * excess), scale or 1.0, later)
    table.fill()
    return table


def _steps(table: Table, most: int) -> list[int]:
    """The limits at which the bound changes, or as many of them as are wanted."""
    known = table.problem.chain.input_bytes
    first, unit = known + int(table.grid.offset[0]), table.grid.unit
    limits = [first + slot * unit for slot in range(table.grid.width - 1)]
    bounds = [table.lower_bound(limit - known) for limit in limits]
    changes = [limit for limit, (before, after) in zip(limits[1:], pairwise(bounds), strict=True) if after < before]
    return changes[:: max(1, math.ceil(len(changes) / most))]


def _steepest(chain: Chain, steps: list[_Step]) -> list[_Step]:
    """The steps without those that others make useless, at the limits that they really need."""
    kept: list[_Step] = []
    for _, sequence in reversed(steps):
        peak = simulate(chain, sequence).peak
        if not kept or peak < kept[-1][0]:
            kept.append((peak, sequence))
    return kept[::-1]
