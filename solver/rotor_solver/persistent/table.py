"""One table of the persistent program: laid out, filled, and read.

Times in a table are those beyond storing everything, in units of `scale` seconds. So all useful times are between 0 and
1, and one `_CUT` serves all tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiling_pays, kernels_for, prepare
from rotor_solver.least_memory import Costs, Floats, Ints, operations_of
from rotor_solver.persistent import plain
from rotor_solver.persistent.layout import (
    ANYTHING,
    Grid,
    Problem,
    Rows,
    Spacing,
    Windows,
    fitting_unit,
    grid_of,
    nodes_of,
    owners,
    rows_of,
)
from rotor_solver.persistent.plain import plain_windows
from rotor_solver.progress import watcher
from rotor_solver.sequence import Sequence

_PORTIONS = 32
"""Portions of the work between progress reports. Not measured; more only report more often."""


def count_work(grid: Grid, rows: Rows) -> tuple[float, float]:
    """Checkpoints of all rows that have slots, and pairs of slots, if every checkpoint is of use to every row."""
    useful = np.cumsum((grid.row >= 0) & (rows.begin[grid.row] < grid.width), axis=1)
    numbers, checkpoints = np.maximum(0, rows.high - rows.begin), useful[nodes_of(grid), grid.last] - 1
    return float(np.sum(checkpoints[numbers > 0])), float(np.sum(numbers * checkpoints))


def portions(grid: Grid, rows: Rows, owner: Ints | None, block: int) -> Iterator[tuple[int, int]]:
    """Yield the distances between blocks of `block` stages, from the shortest on: all at once, unless watched.

    Then they come in portions of about the same work, with a progress report between them. The work for intervals to
    the loss is not counted.
    """
    progress, blocks = watcher(), -(-len(grid.band) // block)
    if progress is None:
        yield 0, blocks
        return
    work = _work(grid, rows, owner, block)
    total, what = int(work.sum()), f"{len(grid.band)} stages, {grid.width} slots"
    progress(0, total, what)
    begin = done = told = 0
    for end, pairs in enumerate(work.tolist(), 1):
        done += pairs
        if (done - told) * _PORTIONS >= total or end == blocks:
            yield begin, end
            begin, told = end, done
            progress(done, total, what)


def _work(grid: Grid, rows: Rows, owner: Ints | None, block: int) -> Ints:
    """Pairs of slots at every distance, if every checkpoint is of use to every row."""
    numbers = np.maximum(0, rows.high - rows.begin)[: grid.tail]
    if owner is not None:  # a row that shares another's numbers is no work
        numbers = np.where(owner[: len(numbers)] == np.arange(len(numbers)), numbers, 0)
    first, last = grid.place[nodes_of(grid)[: grid.tail]], grid.last[: grid.tail]
    distance, blocks = last // block - first // block, -(-len(grid.band) // block)
    return np.bincount(distance, numbers * (last - first + 1.0), minlength=blocks).astype(np.int64)[:blocks]


_CUT = 1.001
"""Times up to this multiple of the scale are of use. 1 would leave no room for rounding; the margin is not measured,
and a larger one only costs time."""
_DOUBLE = 1e9
"""A table is in double precision if its numbers times the chain's stages are at most this. Not measured. In larger
tables, single precision halves the memory traffic, which dominates their time. Only compiled kernels fill these: with a
lower value, the first plan of 300 stages on a machine waited for two sets of kernels; now it takes a second."""
_SERIAL = 2e7
"""Pairs of slots up to which one core fills a table, in a hundredth of a second. Not measured. Several cores wait for
each other, and long if other programs keep them busy."""
_BLENDS = (0.5, 0.0, 1.0)
"""Ways to read between slots (`descend.estimate`) when reading off a sequence, the best on average first. Not measured;
each costs one descent."""
_WINDOWS = "rotor_solver.persistent.windows"
_FEW = 0.25
"""Rows are shared if at most this part of them differ. Not measured; shared rows are filled without tiles, on one core.
"""
_LOOKED_AT = 0.25
"""The part of all pairs of slots that a table visits, roughly. Not measured; steers table sizes and core counts."""


@dataclass(slots=True)
class Table:
    """The table for `room` bytes, of all plans that take up to `scale` seconds longer than storing everything.

    It is laid out when it is made, so that its size is known before its memory is allocated. Empty until `fill`.
    """

    problem: Problem
    room: int
    scale: float
    costs: Costs
    grid: Grid
    rows: Rows
    size: int
    """Count of its numbers."""
    owner: Ints | None
    """[rows] the row whose numbers a row shares; None if every row has its own."""
    guess: float
    """Estimate of the pairs of slots to visit."""
    plain_seconds: float
    """Estimated seconds to fill it without compiled kernels."""
    windowed: bool = False
    """Whether only windows of it were filled: it then says less about the parts of the chain."""
    values: Any = None
    """[size] the numbers: `flat` of the kernels."""
    pairs: int = 0
    """Pairs of slots visited."""

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
        different = len(np.unique(owner)) / len(owner) if problem.period else 1.0
        shared = different <= _FEW
        windowed, everywhere = windows is not None, Windows.everything(len(grid.place), len(kinds))
        windows = (windows or everywhere)._replace(outside=(windows or everywhere).outside / scale)
        # Measured: as plain Python, an interval takes 10 microseconds.
        kernels = kernels_for("rotor_solver.persistent.table_kernels", 5e-6 * grid.row.size)
        bounds = kernels.bounds(problem.least, problem.full, scaled, grid, later / scale, windows, _CUT)
        rows, size = rows_of(bounds, owner if shared else everyone, grid.width)
        part = different if shared else 1.0
        checkpoints, pairs = count_work(grid, rows)
        guess = _LOOKED_AT * pairs * part
        seconds = plain.seconds_for(part * len(grid.last), part * checkpoints, guess)
        return cls(problem, room, scale, scaled, grid, rows, size, owner if shared else None, guess, seconds, windowed)

    def fill(self) -> None:
        """Compute all numbers, on all cores if they are many and no rows are shared."""
        double = self.size * len(self.grid.band) <= _DOUBLE
        if double and not compiling_pays("rotor_solver.persistent.kernels", self.plain_seconds):
            self.values = np.empty(self.size, np.float64)
            steps = portions(self.grid, self.rows, self.owner, 1)
            self.pairs = plain.fill(self.values, self.rows, self.costs, self.grid, self.owner, steps)
            return
        from rotor_solver.persistent import kernels

        self.values = np.empty(self.size, np.float64 if double else np.float32)
        marks = np.empty(self.size // kernels.CHUNK, self.values.dtype)
        self.rows = self.rows._replace(final=self.rows.final.astype(self.values.dtype), marks=marks)
        arguments: tuple[Any, ...] = (self.values, self.rows, self.costs, self.grid)
        serial, given, block = self.guess < _SERIAL, arguments, kernels.BLOCK
        fill: Any = kernels.fill if serial else kernels.fill_in_parallel
        fill_tails = kernels.fill_tails if serial else kernels.fill_tails_in_parallel
        if self.owner is not None:
            fill, given, block = kernels.fill_shared, (*arguments, self.owner), 1
        prepare(fill, *given, 0, 0)
        prepare(fill_tails, *arguments)
        self.pairs = 0
        for begin, end in portions(self.grid, self.rows, self.owner, block):
            self.pairs += int(fill(*given, begin, end))
        fill_tails(*arguments)

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
        last = self.rows.final[row] if slot >= self.rows.high[row] else self.values[self.rows.position[row] + slot]
        found = float(last)
        # Sums in another order differ in their last digits; the bound must hold for all orders.
        epsilon = 2.0**-52 if self.values.dtype == np.float64 else 2.0**-23
        length = len(self.grid.band)
        return min(1.0, found) * self.scale * (1 - (2 * length + 8) * epsilon - 1e-12 * length)

    def windows(self, overhead: float) -> Windows:
        """Return the windows of plans that take up to `overhead` seconds longer than storing everything."""
        grid = self.grid
        plainly = self.values.dtype == np.float64 and not compiling_pays(_WINDOWS, self.plain_seconds)
        kernels = plain_windows() if plainly else import_module(_WINDOWS)
        owner = np.arange(len(self.rows.begin)) if self.owner is None else self.owner
        cut = _CUT * min(1.0, overhead / self.scale)
        low, high, outside = kernels.windows_of(self.values, self.rows, owner, self.costs, grid, cut)
        whole = (high > self.rows.high) & np.isfinite(outside)
        offset = grid.offset[nodes_of(grid)]
        # A slot stands for all memory above the slot before: that memory was rounded up to it.
        least = np.maximum(0, (low - 1) * grid.unit + offset + 1)
        most = np.where(whole, ANYTHING, (high - 1) * grid.unit + offset)
        return Windows(*kernels.spread(grid, least, most, outside * self.scale))

    def sequence(self, room: int, enough: float) -> tuple[Sequence | None, float]:
        """Return a good sequence within `room` bytes, and its seconds beyond storing everything.

        None and `enough` if that is not less than `enough` seconds. `room` must be at least `problem.needed`.
        """
        # Measured: plain Python takes 2.5 microseconds times the square of the stages.
        descend = kernels_for("rotor_solver.persistent.descend", 2.5e-6 * len(self.grid.band) ** 2)
        best, found = enough / self.scale, None
        tables = (self.values, self.rows, self.problem.least, self.problem.full, self.costs, self.grid)
        for blend in _BLENDS:
            choices, seconds = descend.descend(*tables, _CUT, room, blend, best)
            if seconds < best:
                best, found = seconds, choices
        if found is None:
            return None, enough
        codes = iter(found.tolist())
        return Sequence(operations_of(len(self.grid.band), lambda *_: next(codes))), best * self.scale
