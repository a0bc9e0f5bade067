"""One table of the persistent program: what the kernels fill, and what is read off it.

Times in a table are what a plan takes longer than storing everything, in units of `scale` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rotor_solver.arrays import Costs, Floats, Ints, costs_of
from rotor_solver.backtrack import operations_of
from rotor_solver.chain import Chain
from rotor_solver.ends import least_sequence, store_all
from rotor_solver.grid import Grid, Rows, fastest_options, grid_of, rows_of
from rotor_solver.repeats import fitting_unit, kinds_of, owners
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
_LOOKED_AT = 0.05
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

    @classmethod
    def of(cls, chain: Chain) -> Problem:
        from rotor_solver import kernels

        stored = store_all(chain).lower_bound
        assert stored is not None
        costs = costs_of(chain)
        fastest = fastest_options(costs)
        least, full = kernels.least_memory(costs), kernels.full_memory(costs, fastest)
        return cls(chain, stored, costs, least, full, fastest, kinds_of(chain))

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
    values: Any = None
    pairs: int = 0

    @classmethod
    def of(cls, problem: Problem, room: int, unit: int, scale: float, later: Floats, *, exact: bool = False) -> Table:
        """`exact` says that all sizes are whole numbers of units; else the unit may be made to fit them better."""
        from rotor_solver import kernels

        costs, kinds = problem.costs, problem.kinds
        repeats = bool(kinds.max(initial=0) + 1 <= _FEW * len(kinds))
        if repeats and not exact:
            unit = fitting_unit(kinds, costs.taken[1, problem.fastest], unit)
        scaled = costs._replace(run=costs.run / scale, extra=costs.extra / scale)
        grid = grid_of(scaled, problem.fastest, kinds, room, unit, later / scale, _CUT)
        everyone = np.arange(grid.tail + len(grid.place))
        owner = owners(kinds, costs, grid) if repeats else everyone
        different = len(np.unique(owner)) / len(owner)
        shared = different <= _FEW
        bounds = kernels.bounds(problem.least, problem.full, scaled, grid, later / scale, _CUT)
        rows, size = rows_of(bounds, owner if shared else everyone)
        widths = grid.band - np.arange(len(grid.band)) + 1.0
        guess = _LOOKED_AT * float(np.sum(widths**2)) * grid.width * (different if shared else 1.0)
        return cls(problem, room, scale, scaled, grid, rows, size, owner if shared else None, guess)

    def fill(self) -> None:
        from rotor_solver import kernels

        double = self.size * len(self.grid.band) <= _DOUBLE
        self.values = np.empty(self.size, np.float64 if double else np.float32)
        arguments = (self.values, self.rows, self.costs, self.grid)
        if self.owner is not None:
            self.pairs = int(kernels.fill_shared(*arguments, self.owner))
        elif self.guess < _SERIAL:
            self.pairs = int(kernels.fill(*arguments))
        else:
            self.pairs = int(kernels.fill_in_parallel(*arguments))

    def lower_bound(self, room: int) -> float:
        """No persistent plan within `room` bytes takes less than this longer; at most `scale`. Seconds."""
        return self._read(0, -(-(room - int(self.grid.offset[0])) // self.grid.unit))

    def later(self) -> Floats:
        """[L+1] what the stages from i on take longer, at least, whatever the others do. Seconds."""
        return np.array([self._read(node, self.grid.width - 1) for node in self.grid.node[0].tolist()])

    def _read(self, node: int, slot: int) -> float:
        from rotor_solver import kernels

        row = self.grid.tail + node
        if slot < self.rows.begin[row]:
            return self.scale
        found = float(kernels.value_of(self.values, self.rows, self.grid.width, row, slot))
        # Sums in another order differ in their last digits; the bound has to hold for all of them.
        epsilon = 2.0**-52 if self.values.dtype == np.float64 else 2.0**-23
        length = len(self.grid.band)
        return min(1.0, found) * self.scale * (1 - (2 * length + 8) * epsilon - 1e-12 * length)

    def sequence(self, room: int, enough: float) -> tuple[Sequence | None, float]:
        """A good sequence within `room` bytes, and the seconds that it takes longer; None if not less than `enough`.

        `room` is at least `problem.needed`.
        """
        from rotor_solver import kernels

        best, found = enough / self.scale, None
        tables = (self.values, self.rows, self.problem.least, self.costs, self.grid)
        for blend in _BLENDS:
            choices, seconds = kernels.descend(*tables, _CUT, room, blend, best)
            if seconds < best:
                best, found = seconds, choices
        if found is None:
            return None, enough
        codes = iter(found.tolist())
        return Sequence(operations_of(len(self.grid.band), lambda *_: next(codes))), best * self.scale
