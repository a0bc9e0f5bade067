"""How much work a table is, in pairs of slots, and how it is divided for somebody who watches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rotor_solver.arrays.costs import Ints
from rotor_solver.persistent.grid import Grid, Rows, nodes_of
from rotor_solver.progress import watcher

_PORTIONS = 32
"""Portions into which the work is divided for somebody who watches; a guess."""


def count_work(grid: Grid, rows: Rows) -> tuple[float, float]:
    """Checkpoints of all rows that have slots, and pairs of slots, if every checkpoint is of use to every row."""
    useful = np.cumsum((grid.row >= 0) & (rows.begin[grid.row] < grid.width), axis=1)
    numbers, checkpoints = np.maximum(0, rows.high - rows.begin), useful[nodes_of(grid), grid.last] - 1
    return float(np.sum(checkpoints[numbers > 0])), float(np.sum(numbers * checkpoints))


def portions(grid: Grid, rows: Rows, owner: Ints | None, block: int) -> Iterator[tuple[int, int]]:
    """The distances between blocks of `block` stages, from the shortest on: all at once, unless somebody watches.

    Then they come in portions of about the same work, and the watcher is told between them. The work for intervals to
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
