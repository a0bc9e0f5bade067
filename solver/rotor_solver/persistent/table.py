"""One table of the persistent program: what the kernels fill, and what is read off it.

Times in a table are what a plan takes longer than storing everything, in units of `scale` seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rotor_solver.arrays import Costs, Floats, Ints, costs_of
from rotor_solver.backtrack import operations_of
from rotor_solver.chain import Chain
from rotor_solver.ends import least_sequence, store_all
from rotor_solver.persistent.grid import ANYTHING, Grid, Rows, Windows, fastest_options, grid_of, nodes_of, rows_of
from rotor_solver.persistent.repeats import fitting_unit, kinds_of, owners, period_of
from rotor_solver.persistent.spacing import Spacing
from rotor_solver.progress import watcher
from rotor_solver.sequence import Sequence

_CUT = 1.001
"""Times up to this multiple of the scale are told apart; 1 would leave no room for rounding."""
_DOUBLE = 2e8
"""Pairs of slots up to which the table is computed in double precision."""
_SERIAL = 2e7
"""Pairs of slots up to which one core does it: cores wait for each other, and long, where others are busy."""
_BLENDS = (0.5, 0.0, 1.0)
_FEW = 0.25
"""Rows are shared where at most this part of them is different."""
_PORTIONS = 32
"""Into which the work is divided for somebody who watches."""
_LOOKED_AT = 0.25
"""Part of all pairs of slots that a table looks at, roughly."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What all tables of a chain have in common. `stored` is the time of storing everything."""

    chain: Chain
    stored: float
    costs: Costs
    least: Ints
    full: Ints
    fastest: Ints
    kinds: Ints
    period: int
    """After how many stages most of the chain repeats itself; 0 if it does not."""

    @classmethod
    def of(cls, chain: Chain) -> Problem:
        from rotor_solver import least_memory
        from rotor_solver.persistent import layout

        stored = store_all(chain).lower_bound
        assert stored is not None
        costs = costs_of(chain)
        fastest = fastest_options(costs)
        least, full = least_memory.least_memory(costs), layout.full_memory(costs, fastest)
        kinds = kinds_of(chain)
        return cls(chain, stored, costs, least, full, fastest, kinds, period_of(kinds))

    @property
    def needed(self) -> int:
        """The least memory for which there is a plan, in bytes, a_0 not counted."""
        return int(self.least[0, 0, len(self.chain)])

    def least_sequence(self) -> Sequence:
        """A sequence for that memory."""
        return least_sequence(self.chain, self.costs, self.least)


@dataclass(slots=True)
class Table:
    """The table for `room` bytes, in slots of `unit` bytes, of all plans that take up to `scale` seconds longer.

    Stages from i on are known to take at least later[i] seconds longer. Empty until `fill`.
    """

    problem: Problem
    room: int
    scale: float
    costs: Costs
    grid: Grid
    rows: Rows
    size: int
    owner: Ints | None
    guess: float
    """Pairs of slots that will be looked at, roughly."""
    windowed: bool = False
    """Whether only windows of it were filled: it then says less about the parts of the chain."""
    values: Any = None
    pairs: int = 0

    @classmethod
    def of(
        cls,
        problem: Problem,
        room: int,
        unit: int,
        scale: float,
        later: Floats,
        *,
        exact: bool = False,
        spacing: Spacing | None = None,
        windows: Windows | None = None,
    ) -> Table:
        """`exact` says that all sizes are whole numbers of units; else the unit may be made to fit them better.

        All intervals have rows unless `spacing` says which. `windows` are those of a table of plans that take longer,
        or as long.
        """
        from rotor_solver.persistent import layout

        costs, kinds = problem.costs, problem.kinds
        if problem.period and not exact:
            unit = fitting_unit(kinds, problem.period, costs.taken[1, problem.fastest], unit)
        times = {name: getattr(costs, name) / scale for name in ("run", "split", "split_floor", "extra")}
        scaled = costs._replace(**times)
        spacing = spacing or Spacing(max(1, len(kinds)))
        grid = grid_of(scaled, problem.fastest, kinds, room, unit, spacing, later / scale, _CUT)
        everyone = np.arange(len(grid.last))
        owner = owners(kinds, costs, grid) if problem.period else everyone
        different = len(np.unique(owner)) / len(owner) if problem.period else 1.0
        shared = different <= _FEW
        windowed, everywhere = windows is not None, Windows.everything(len(grid.place), len(kinds))
        windows = (windows or everywhere)._replace(outside=(windows or everywhere).outside / scale)
        bounds = layout.bounds(problem.least, problem.full, scaled, grid, later / scale, windows, _CUT)
        rows, size = rows_of(bounds, owner if shared else everyone, grid.width)
        guess = _LOOKED_AT * _pairs(grid, rows) * (different if shared else 1.0)
        return cls(problem, room, scale, scaled, grid, rows, size, owner if shared else None, guess, windowed)

    def fill(self) -> None:
        from rotor_solver.persistent import kernels

        double = self.size * len(self.grid.band) <= _DOUBLE
        self.values = np.empty(self.size, np.float64 if double else np.float32)
        marks = np.empty(self.size // kernels.CHUNK, self.values.dtype)
        self.rows = self.rows._replace(final=self.rows.final.astype(self.values.dtype), marks=marks)
        arguments = (self.values, self.rows, self.costs, self.grid)
        self.pairs = 0
        for begin, end in self._portions(kernels.BLOCK if self.owner is None else 1):
            if self.owner is not None:
                self.pairs += int(kernels.fill_shared(*arguments, self.owner, begin, end))
            elif self.guess < _SERIAL:
                self.pairs += int(kernels.fill(*arguments, begin, end))
            else:
                self.pairs += int(kernels.fill_in_parallel(*arguments, begin, end))
        if self.guess < _SERIAL:
            kernels.fill_tails(*arguments)
        else:
            kernels.fill_tails_in_parallel(*arguments)

    def _portions(self, block: int) -> Iterator[tuple[int, int]]:
        """The distances of stages in blocks, in portions of about the same work if somebody watches; else all at once.

        What the rows of intervals to the loss need is not counted.
        """
        progress, blocks = watcher(), -(-len(self.grid.band) // block)
        if progress is None:
            yield 0, blocks
            return
        work = self._work(block)
        total, what = int(work.sum()), f"{len(self.grid.band)} stages, {self.grid.width} slots"
        progress(0, total, what)
        begin = done = told = 0
        for end, pairs in enumerate(work.tolist(), 1):
            done += pairs
            if (done - told) * _PORTIONS >= total or end == blocks:
                yield begin, end
                begin, told = end, done
                progress(done, total, what)

    def _work(self, block: int) -> Ints:
        """Pairs of slots at every distance, if every checkpoint is of use to every row."""
        numbers = np.maximum(0, self.rows.high - self.rows.begin)[: self.grid.tail]
        if self.owner is not None:
            numbers = np.where(self.owner[: len(numbers)] == np.arange(len(numbers)), numbers, 0)
        first, last = self.grid.place[nodes_of(self.grid)[: self.grid.tail]], self.grid.last[: self.grid.tail]
        distance, blocks = last // block - first // block, -(-len(self.grid.band) // block)
        return np.bincount(distance, numbers * (last - first + 1.0), minlength=blocks).astype(np.int64)[:blocks]

    def lower_bound(self, room: int) -> float:
        """No persistent plan within `room` bytes takes less than this longer; at most `scale`. Seconds."""
        return self._read(0, -(-(room - int(self.grid.offset[0])) // self.grid.unit))

    def later(self) -> Floats:
        """[L+1] what the stages from i on take longer, at least, whatever the others do. Seconds."""
        return np.array([self._read(node, self.grid.width - 1) for node in self.grid.node[0].tolist()])

    def _read(self, node: int, slot: int) -> float:
        from rotor_solver.persistent import reading

        row = self.grid.tail + node
        if slot < self.rows.begin[row]:
            return self.scale
        found = float(reading.value_of(self.values, self.rows, row, slot))
        # Sums in another order differ in their last digits; the bound has to hold for all of them.
        epsilon = 2.0**-52 if self.values.dtype == np.float64 else 2.0**-23
        length = len(self.grid.band)
        return min(1.0, found) * self.scale * (1 - (2 * length + 8) * epsilon - 1e-12 * length)

    def windows(self, overhead: float) -> Windows:
        """Where the intervals of plans lie that take up to `overhead` seconds longer than storing everything."""
        from rotor_solver.persistent.windows import spread, windows_of

        grid = self.grid
        owner = np.arange(len(self.rows.begin)) if self.owner is None else self.owner
        cut = _CUT * min(1.0, overhead / self.scale)
        low, high, outside = windows_of(self.values, self.rows, owner, self.costs, grid, cut)
        whole = (high > self.rows.high) & np.isfinite(outside)
        offset = grid.offset[nodes_of(grid)]
        least = np.maximum(0, (low - 1) * grid.unit + offset + 1)
        most = np.where(whole, ANYTHING, (high - 1) * grid.unit + offset)
        return Windows(*spread(grid, least, most, outside * self.scale))

    def sequence(self, room: int, enough: float) -> tuple[Sequence | None, float]:
        """A good sequence within `room` bytes, and the seconds that it takes longer; None if not less than `enough`.

        `room` is at least `problem.needed`.
        """
        from rotor_solver.persistent import reading

        best, found = enough / self.scale, None
        tables = (self.values, self.rows, self.problem.least, self.problem.full, self.costs, self.grid)
        for blend in _BLENDS:
            choices, seconds = reading.descend(*tables, _CUT, room, blend, best)
            if seconds < best:
                best, found = seconds, choices
        if found is None:
            return None, enough
        codes = iter(found.tolist())
        return Sequence(operations_of(len(self.grid.band), lambda *_: next(codes))), best * self.scale


def _pairs(grid: Grid, rows: Rows) -> float:
    """Pairs of slots that there are if every checkpoint is of use to every row."""
    useful = np.cumsum((grid.row >= 0) & (rows.begin[grid.row] < grid.width), axis=1)
    numbers, checkpoints = np.maximum(0, rows.high - rows.begin), useful[nodes_of(grid), grid.last] - 1
    return float(np.sum(numbers * checkpoints))
