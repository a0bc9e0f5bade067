"""From windows by row to windows by interval, for the next table, whose rows are others: a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.compiled import compiled

INFINITE = np.int64(2**62)
"""Bytes; more than any window begins with."""


@compiled(makes_arrays=True)
def spread(grid: Any, low: np.ndarray, high: np.ndarray, outside: np.ndarray) -> Any:
    """(low, high, outside) by node and last stage, where they are given by row: those of all the rows that stand for
    an interval, taken together.

    What a row leaves away at its end may be divided further; of these intervals it is only known that they have no more
    memory than the whole, and that as much is outside.
    """
    length, shape = len(grid.band), grid.row.shape
    lows, highs, least = np.full(shape, INFINITE), np.zeros(shape, np.int64), np.full(shape, np.inf, np.float64)
    memory, time = np.zeros(length + 1, np.int64), np.full(length + 1, np.inf, np.float64)
    for s in range(len(grid.place)):
        for last in range(grid.place[s], length + 1):
            row = grid.row[s, last]
            if row < 0 or grid.last[row] != last or outside[row] == np.inf:
                continue
            memory[last], time[last] = max(memory[last], high[row]), min(time[last], outside[row])
            for stage in range(last, grid.stop[last]):
                lows[s, stage], highs[s, stage] = min(lows[s, stage], low[row]), max(highs[s, stage], high[row])
                least[s, stage] = min(least[s, stage], outside[row])
    for end in range(length):
        for s in range(grid.node[0, end + 1], grid.node[0, grid.stop[end]] if time[end] < np.inf else 0):
            for stage in range(grid.place[s], grid.stop[end]):
                lows[s, stage], highs[s, stage] = 0, max(highs[s, stage], memory[end])
                least[s, stage] = min(least[s, stage], time[end])
    return lows, highs, least
