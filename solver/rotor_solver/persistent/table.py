"""One table of the persistent program: laid out, filled, and read.

Times in a table are those beyond storing everything, in units of `scale` seconds. So all useful times are between 0 and
1, and one `_CUT` serves all tables.
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
_PORTIONS = 32  # Portions of the work between progress reports. Not measured; more only report more often.
# Times up to this multiple of the scale are of use: a margin for rounding, not measured; a larger one costs time.
_CUT = 1.001
# Ways to read between slots (`interval_kernels.estimate`), the best first. Not measured; each costs one descent.
_BLENDS = (0.5, 0.0, 1.0)
_FEW = 0.25  # Rows are shared if at most this part of them differ. Not measured; a wrong value only costs time.
_LOOKED_AT = 0.25  # The part of all pairs of slots that a table visits, roughly. Not measured; steers table sizes.
# The work of laying out a row and of allocating a number, in pairs of slots. Measured roughly, 200 to 500 stages.
_PER_ROW, _PER_NUMBER = 4e3, 100.0
# Seconds of plain Python for a row, for a checkpoint of it, and for a pair of slots. Measured, 20 to 100 stages.
_ROW, _CHECKPOINT, _PAIR = 1.2e-5, 4.5e-6, 1.5e-9


class Table:
    """The table for `room` bytes, of plans up to `scale` seconds longer than storing everything. Empty until `fill`."""

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

        `exact` says that all sizes are whole numbers of units. If not, the unit may be adjusted to fit them better.
        Stages from i on are known to take at least later[i] seconds longer than stored. `spacing` selects the intervals
        that have rows; all without it. `windows` come from a table of plans that take as long, or longer.
        """
        costs, kinds = problem.costs, problem.kinds
        # So that the rows of a period have the slots of the period before, and can be shared.
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
        # [rows] pairs of slots, if every checkpoint is of use to every row; less where rows are shared.
        self.most = part * numbers * checkpoints
        self.guess = _LOOKED_AT * float(np.sum(self.most))  # Pairs of slots to visit
        self.work = self.guess + _PER_ROW * len(owner) + _PER_NUMBER * size  # The whole table, in pairs of slots
        checkpoints_in_all = float(np.sum(checkpoints[numbers > 0]))
        self.plain_seconds = part * (_ROW * len(owner) + _CHECKPOINT * checkpoints_in_all) + _PAIR * self.guess
        self.problem, self.room, self.scale = problem, room, scale
        self.costs, self.grid, self.rows, self.size = scaled, grid, rows, size
        self.owner = owner  # [rows] the row whose numbers a row shares; itself if it has its own
        self.windowed = windows is not None  # Then it says less about the parts of the chain
        self.values: Any = None  # [size] the numbers: `flat` of the kernels
        self.pairs = 0  # Of slots, visited

    def fill(self) -> None:
        self.values = np.empty(self.size, np.float64)
        tables = self.rows, self.costs, self.grid, self.owner
        kernels, (rows, costs, grid, owner) = kernels_for(_KERNELS, self.plain_seconds, *tables)
        self.pairs = int(kernels.fill(self.values, rows, costs, grid, owner, 0, 0))  # compiles before work is counted
        for begin, end in self._portions():
            self.pairs += int(kernels.fill(self.values, rows, costs, grid, owner, begin, end))
        kernels.fill_tails(self.values, rows, costs, grid)
        self.rows = self.rows._replace(begin=np.asarray(rows.begin), final=np.asarray(rows.final))

    def _portions(self) -> Iterator[tuple[int, int]]:
        """Yield the lengths of intervals, from the shortest on: all at once, unless watched.

        Then they come in portions of about the same work, with a progress report between them. The work for intervals
        to the loss is not counted.
        """
        progress, grid, length = watcher(), self.grid, len(self.grid.band)
        if progress is None or not length:
            yield 0, length
            return
        distance = grid.last - grid.place[nodes_of(grid)]
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
        """Seconds, at most `scale`, by which every persistent plan within `room` bytes is slower than storing all."""
        return self._read(0, -(-(room - int(self.grid.offset[0])) // self.grid.unit))

    def later(self) -> Floats:
        """[L+1] seconds by which the stages from i on take longer than stored, at least, whatever the others do."""
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
        """Return the windows of plans that take up to `overhead` seconds longer than storing everything."""
        tables = self.rows, self.costs, self.grid
        kernels, (rows, costs, grid) = kernels_for(_KERNELS, self.plain_seconds, *tables)
        cut = _CUT * min(1.0, overhead / self.scale)
        low, high, outside = kernels.windows_of(self.values, rows, self.owner, costs, grid, cut)
        whole = (high > self.rows.high) & np.isfinite(outside)
        offset, unit = self.grid.offset[nodes_of(self.grid)], self.grid.unit
        # A slot stands for all memory above the slot before: that memory was rounded up to it.
        least = np.maximum(0, (low - 1) * unit + offset + 1)
        most = np.where(whole, ANYTHING, (high - 1) * unit + offset)
        return Windows(*kernels.spread(grid, least, most, outside * self.scale))

    def sequence(self, room: int, enough: float) -> tuple[Sequence | None, float]:
        """Return a good sequence within `room` bytes, and its seconds beyond storing everything.

        None and `enough` if that is not less than `enough` seconds. `room` must be at least `problem.needed`.
        """
        # Measured: plain Python takes 2.5 microseconds times the square of the stages.
        problem = self.problem
        arrays = self.rows, problem.least, problem.full, self.costs, self.grid
        kernels, tables = kernels_for(_DESCENT, 2.5e-6 * len(self.grid.band) ** 2, *arrays)
        best, found = float(enough / self.scale), None
        for blend in _BLENDS:
            choices, seconds = kernels.descend(self.values, *tables, _CUT, room, blend, best)
            if seconds < best:
                best, found = seconds, choices
        if found is None:
            return None, enough
        codes = iter(found.tolist())
        return Sequence(operations_of(len(self.grid.band), lambda *_: next(codes))), best * self.scale
