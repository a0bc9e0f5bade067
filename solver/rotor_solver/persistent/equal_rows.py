"""Which rows of a table are made of the same numbers, so that one stands for all: a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.compiled import compiled


@compiled(makes_arrays=True)
def first_of_equals(grid: Any, starts: np.ndarray, kinds: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[rows] for every row, the first that is made of the same numbers.

    `starts` is [nodes], a number for what a row is at its start; `kinds` is [L], for what each of its stages is; `ends`
    is [L], for what follows where it ends. Numbers count from zero. Two rows are equal if their starts, their ends and
    the kinds of all their stages are.

    Intervals grow by one stage at a time: what [i, l] is made of gets a number from that of [i, l-1] and the kind of l.
    """
    owner = np.arange(len(grid.last))
    content, length = starts.copy(), len(grid.band)  # [nodes] the number of what [i, i + distance] is made of
    # [nodes, kinds or ends, 2] by (content, kind): when it was noted, and what: numbers of contents in even rounds, of
    # rows in odd ones. The round stands in the entry, so that the array is not cleared for every distance.
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
