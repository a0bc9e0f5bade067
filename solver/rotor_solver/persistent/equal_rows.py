"""Which rows of a table are made of the same numbers, so that one stands for all: a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.compiled import compiled


@compiled(makes_arrays=True)
def first_of_equals(grid: Any, starts: np.ndarray, kinds: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[rows] for every row, the first that is made of the same numbers: those of its start by node, and of all its
    stages and of its end by stage. Numbers count from zero.
    """
    owner = np.arange(len(grid.last))
    content, length = starts.copy(), len(grid.band)
    known = np.full((len(starts), max(kinds.max(), ends.max()) + 1, 2), -1, np.int64)
    for distance in range(length):
        count = 0
        for s in range(len(starts)):
            last = grid.place[s] + distance
            if last >= length or last > grid.band[grid.place[s]]:
                continue
            entry = known[content[s], kinds[last]]
            if entry[0] != 2 * distance:
                entry[0], entry[1] = 2 * distance, count
                count += 1
            content[s] = entry[1]
        for s in range(len(starts)):
            last = grid.place[s] + distance
            if last >= length or last > grid.band[grid.place[s]]:
                continue
            row = grid.row[s, last]
            if grid.last[row] == last:
                entry = known[content[s], ends[last]]
                if entry[0] != 2 * distance + 1:
                    entry[0], entry[1] = 2 * distance + 1, row
                owner[row] = entry[1]
    return owner
