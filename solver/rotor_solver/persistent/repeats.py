"""Chains of repeated blocks: which stages are of one kind, and which rows of a table are therefore the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from rotor_solver.arrays.costs import Costs, Ints
from rotor_solver.arrays.pace import kernels_for
from rotor_solver.chain import Chain
from rotor_solver.persistent.grid import Grid

_LONGEST_PERIOD = 64
"""Stages; a guess. A longer period repeats too few times in a chain for shared rows to save much."""
_REPEATED = 0.87
"""The part of a chain that has to repeat itself without a break; a guess. Its square, three quarters, is the part of
all intervals that then lie inside."""


def kinds_of(chain: Chain) -> Ints:
    """[L] a number for every stage; stages that cost the same have the same."""
    numbers: dict[object, int] = {}
    bare = (
        replace(stage, name="", options=tuple(replace(option, name="") for option in stage.options))
        for stage in chain.stages
    )
    return np.array([numbers.setdefault(stage, len(numbers)) for stage in bare], np.int64)


def period_of(kinds: Ints) -> int:
    """After how many stages most of the chain repeats itself; 0 if it does not."""
    # From the shortest on: every multiple of a period is one, too.
    length = len(kinds)
    for period in range(1, min(_LONGEST_PERIOD, length // 8) + 1):
        breaks = np.flatnonzero(np.append(np.concatenate([[True], kinds[:-period] != kinds[period:]]), True))
        if np.diff(breaks).max() - 1 + period >= _REPEATED * length:
            return period
    return 0


def fitting_unit(kinds: Ints, period: int, taken: Ints, unit: int) -> int:
    """A slot of at most `unit` bytes that divides what a period of the chain keeps, as nearly as possible.

    `taken` is [L], the bytes that every stage keeps. Rows of later periods then have the slots of earlier ones.
    """
    same = kinds[:-period] == kinds[period:]
    sums = np.convolve(taken, np.ones(period, np.int64), "valid")[: len(same)][same]
    size = Counter(sums.tolist()).most_common(1)[0][0]
    if size >= unit:
        least = -(-size // unit)
        # Up to an eighth more slots, a guess, if the rest is smaller with them.
        fitting = size // np.arange(least, min(size, least + least // 8) + 1)
        return int(fitting[np.argmin(size % fitting)])
    return int(unit // size * size) if size > 0 else unit


def owners(kinds: Ints, costs: Costs, grid: Grid) -> Ints:
    """[rows] for every row, the first with the same content: its stages, its slots, and what later stages leave."""
    nodes = np.flatnonzero(grid.place < len(kinds))
    places = grid.place[nodes]
    starts = np.stack([kinds[places], costs.activation[places], grid.offset[nodes], grid.state[nodes]])
    # Measured: as plain Python, an interval takes 2 microseconds.
    found: Ints = kernels_for("rotor_solver.persistent.equal_rows", 1e-6 * grid.row.size).first_of_equals(
        grid,
        np.unique(starts, axis=1, return_inverse=True)[1].reshape(-1),
        np.unique(kinds, return_inverse=True)[1],
        np.unique(grid.base[: len(kinds)], return_inverse=True)[1],
    )
    return found
