"""One table of the dynamic program `Persistent`: laid out, filled, and read.

A time in a table is seconds minus those of storing everything, divided by `scale`, the longest useful such difference.
So all useful times are between 0 and 1, and all tables have the same `_CUT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rotor_solver.jit_policy import kernels_for
from rotor_solver.least_memory import Floats, operations_of
from rotor_solver.persistent.layout import (
    ANYTHING,
    Problem,
    Spacing,
    Windows,
    fitting_unit,
    grid_of,
    nodes_of,
    owners,
    rows_of,
)
from rotor_solver.sequence import Sequence
from rotor_solver.watching import watcher

_KERNELS = "rotor_solver.persistent.table_kernels"
_DESCENT = "rotor_solver.persistent.interval_kernels"
_PORTIONS = 32  # Number of progress reports while a table is filled. Not measured; more only report more often.
# Longest useful time: 1, and a margin for rounding errors. Not measured; a larger one costs time.
_CUT = 1.001
# Values of `blend` in `interval_kernels.estimate`, each for one sequence; the fastest is used. Not measured.
_BLENDS = (0.5, 0.0, 1.0)
_FEW = 0.25  # Rows share times if at most this share of them differ. Not measured; a wrong value only costs time.
_VISITED = 0.25  # Rough share of all pairs of slots that a table visits. Not measured; too high makes slots too coarse.
# Pairs of slots visited in the time of laying out a row, and of allocating an entry. Measured roughly, 200-500 stages.
_PER_ROW, _PER_NUMBER = 4e3, 100.0
# Seconds of plain Python for a row, for each of its checkpoints, and for a pair of slots. Measured, 20 to 100 stages.
_ROW, _CHECKPOINT, _PAIR = 1.2e-5, 4.5e-6, 1.5e-9


class Table:
    """Times of plans in `room` bytes or less, up to `scale` seconds longer than storing all. `fill` computes them."""

    def __init__(
        self,
        problem: Problem,
        room: int,
        unit: int,
        scale: float,
        later: Floats,
        *,
        exact: bool = False,
        spacing: Spacing | None = None,
        windows: Windows | None = None,
    ) -> None:
        """Lay out a table in slots of about `unit` bytes.

        `exact` says that all sizes are whole numbers of units. If not, the unit may shrink to fit the chain's period.
        Stages from i on take at least later[i] seconds longer than if stored. `spacing` selects the intervals that have
        rows; by default, all. `windows` must come from a table with at least the same `scale`.
        """
        costs, kinds = problem.costs, problem.kinds
        # With this unit, rows have the same offsets in every period, so that equal ones can share their times.
        if problem.period and not exact:
            unit = fitting_unit(kinds, problem.period, costs.taken[1, problem.fastest], unit)
        times = {name: getattr(costs, name) / scale for name in ("run", "split", "split_floor", "extra")}
        scaled = costs._replace(**times)
        spacing = spacing or Spacing(max(1, len(kinds)))
        grid = grid_of(scaled, problem.fastest, kinds, room, unit, spacing, later / scale, _CUT)
        everyone = np.arange(len(grid.last))
        owner = owners(kinds, costs, grid) if problem.period else everyone
        part = len(np.unique(owner)) / len(owner)
        if part > _FEW:
            owner, part = everyone, 1.0
        shape = grid.row.shape
        chosen = windows or Windows(np.zeros(shape, np.int64), np.full(shape, ANYTHING), np.zeros(shape))
        chosen = chosen._replace(outside=chosen.outside / scale)
        rows, size = rows_of(problem.least, problem.full, scaled, grid, later / scale, chosen, _CUT, owner)
        useful = np.cumsum((grid.row >= 0) & (rows.begin[grid.row] < grid.width), axis=1)
        numbers, checkpoints = np.maximum(0, rows.high - rows.begin), useful[nodes_of(grid), grid.last] - 1
        # [rows] pairs of slots if every row visited all its checkpoints, times the share of rows with their own times.
        self.most = part * numbers * checkpoints
        self.guess = _VISITED * float(np.sum(self.most))  # Pairs of slots to visit
        self.work = self.guess + _PER_ROW * len(owner) + _PER_NUMBER * size  # Time of layout and fill, in such pairs
        checkpoints_in_all = float(np.sum(checkpoints[numbers > 0]))
        self.plain_seconds = part * (_ROW * len(owner) + _CHECKPOINT * checkpoints_in_all) + _PAIR * self.guess
        self.problem, self.room, self.scale = problem, room, scale
        self.costs, self.grid, self.rows, self.size = scaled, grid, rows, size
        self.owner = owner  # [rows] the row whose times a row shares; itself if it has its own
        self.windowed = windows is not None  # If so, times are lower bounds only for plans inside the windows
        self.values: Any = None  # [size] the times of all rows: `flat` of the kernels

    def fill(self) -> None:
        self.values = np.empty(self.size, np.float64)
        tables = self.rows, self.costs, self.grid, self.owner
        kernels, (rows, costs, grid, owner) = kernels_for(_KERNELS, self.plain_seconds, *tables)
        kernels.fill(self.values, rows, costs, grid, owner, 0, 0)  # fills nothing: only compiles
        for begin, end in self._portions():
            kernels.fill(self.values, rows, costs, grid, owner, begin, end)
        kernels.fill_tails(self.values, rows, costs, grid)
        self.rows = self.rows._replace(begin=np.asarray(rows.begin), final=np.asarray(rows.final))

    def _portions(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of interval lengths, from the shortest on: one range of all lengths, unless progress is watched.

        With progress, each range takes about the same work, and is followed by a report, which does not count the work
        for intervals that end at the loss.
        """
        progress, grid, length = watcher(), self.grid, len(self.grid.band)
        if progress is None or not length:
            yield 0, length
            return
        distance = grid.last - grid.stage[nodes_of(grid)]
        work = np.bincount(distance[: grid.tail], self.most[: grid.tail], minlength=length).astype(np.int64)
        total, what = int(work.sum()), f"{length} stages, {grid.width} slots"
        progress(0, total, what)
        begin = done = told = 0
        for end, pairs in enumerate(work.tolist(), 1):
            done += pairs
            if (done - told) * _PORTIONS >= total or end == length:
                yield begin, end
                begin, told = end, done
                progress(done, total, what)

    def lower_bound(self, room: int) -> float:
        """Return a lower bound of the seconds that plans in `room` bytes take beyond storing all, at most `scale`."""
        return self._read(0, -(-(room - int(self.grid.offset[0])) // self.grid.unit))

    def later(self) -> Floats:
        """Return, by i, [L+1], the least seconds that stages from i on take beyond storing them, in all the memory."""
        return np.array([self._read(node, self.grid.width - 1) for node in self.grid.node[0].tolist()])

    def _read(self, node: int, slot: int) -> float:
        row = self.grid.tail + node
        if slot < self.rows.begin[row]:
            return self.scale
        found = float(self.values[self.rows.position[row] + min(slot, int(self.rows.high[row]))])
        # Sums in another order differ in their last digits; the bound must hold for all orders.
        length = len(self.grid.band)
        return min(1.0, found) * self.scale * (1 - (2 * length + 8) * 2.0**-52 - 1e-12 * length)

    def windows(self, overhead: float) -> Windows:
        """Return every interval's memory in plans that take up to `overhead` seconds longer than storing everything."""
        tables = self.rows, self.costs, self.grid
        kernels, (rows, costs, grid) = kernels_for(_KERNELS, self.plain_seconds, *tables)
        cut = _CUT * min(1.0, overhead / self.scale)
        low, high, outside = kernels.windows_of(self.values, rows, self.owner, costs, grid, cut)
        whole = (high > self.rows.high) & np.isfinite(outside)
        offset, unit = self.grid.offset[nodes_of(self.grid)], self.grid.unit
        # Memory was rounded up to the next slot, so a slot stands for all bytes above the previous slot.
        least = np.maximum(0, (low - 1) * unit + offset + 1)
        most = np.where(whole, ANYTHING, (high - 1) * unit + offset)
        return Windows(*kernels.spread(grid, least, most, outside * self.scale))

    def sequence(self, room: int, enough: float) -> tuple[Sequence | None, float]:
        """Return the fastest sequence found for `room` bytes, and how many seconds longer it takes than storing all.

        Returns None and `enough` if none takes less than `enough` seconds longer. `room` must be ≥ `problem.needed`.
        """
        # Measured: in plain Python, `descend` takes 2.5 microseconds times the square of the number of stages.
        problem = self.problem
        arrays = self.rows, problem.least, problem.full, self.costs, self.grid
        kernels, tables = kernels_for(_DESCENT, 2.5e-6 * len(self.grid.band) ** 2, *arrays)
        best, found = float(enough / self.scale), None
        for blend in _BLENDS:
            choices, seconds = kernels.descend((self.values, *tables), _CUT, room, blend, best)
            if seconds < best:
                best, found = seconds, choices
        if found is None:
            return None, enough
        codes = iter(found)
        return Sequence(operations_of(len(self.grid.band), lambda *_: next(codes))), best * self.scale
