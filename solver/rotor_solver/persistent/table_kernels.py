"""Kernels that prepare a table: its useful slots, and its rows with equal numbers.

The arguments are those of `kernels`; times are in the unit of the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled


@compiled(makes_arrays=True)
def full_memory(costs: Any, fastest: np.ndarray) -> np.ndarray:
    """[2, L+1, L+1] the m, in bytes, from which the interval [i, l] can be stored whole, by (state, i, l).

    Every stage is stored by its fastest option; no plan is faster, so rows end there. Runs from the last stage of an
    interval to the first: one more stage needs its own memory, or the need of the rest plus the memory it keeps.
    """
    length = len(fastest)
    full = np.full((2, length + 1, length + 1), costs.loss_need, np.int64)
    for last in range(length + 1):
        row = 0 if last == length else 1
        for i in range(min(last, length - 1), -1, -1):
            k = fastest[i]
            for state in range(2):
                need = costs.backward_need[row, k] - costs.released[state, i]
                need = max(costs.base[last] + costs.forward_need[k], need)
                if last > i:
                    need = max(need, costs.taken[state, k] + full[1, i + 1, last])
                full[state, i, last] = need
    return full


@compiled(makes_arrays=True)
def bounds(
    least: np.ndarray, full: np.ndarray, costs: Any, grid: Any, later: np.ndarray, windows: Any, cut: float
) -> Any:
    """(low, high, full, limit), [rows] each: the useful slots, and the longest useful time.

    Useful are slots low … high-1, and those from `full` on, where everything is stored, if high = full. `limit` is
    negative where no time is of use. `least` and `full` are [2, L+1, L+1], in bytes; `later` is [L+1], and like
    `outside` of the `layout.Windows` in the unit of `cut`. A row takes the most generous values of all the intervals
    that it stands for.
    """
    length, width = len(grid.band), grid.width
    rows = grid.tail + len(grid.place)
    low, high, whole = np.full(rows, width, np.int64), np.zeros(rows, np.int64), np.full(rows, width, np.int64)
    limit = np.full(rows, -1.0, np.float64)
    for s in range(len(grid.place)):
        i, state = grid.place[s], grid.state[s]
        for e in range(i, length + 1):
            row = grid.row[s, e]
            if row < 0 or grid.last[row] != e:
                continue
            for last in range(e, grid.stop[e]):
                if length > last > grid.band[i]:
                    break
                time = cut
                # An interval that ends before the loss runs after the loss. Its stages ran without a graph before, and
                # the stages after it took at least `later` longer than stored: both are subtracted from the cut.
                if last < length:
                    time = cut - later[last + 1] - (costs.split[last + 1] - costs.run[i])
                limit[row] = max(limit[row], min(time, cut - windows.outside[s, last]))
                whole[row] = min(whole[row], slot_of(full[state, i, last], grid.unit, grid.offset[s]))
                high[row] = max(high[row], min(width, slot_of(windows.high[s, last], grid.unit, grid.offset[s]) + 1))
                needed = max(least[state, i, last], windows.low[s, last])
                low[row] = min(low[row], slot_of(needed, grid.unit, grid.offset[s]))
    high = np.minimum(high, whole)
    low = np.minimum(low, high)
    return low, high, whole, limit


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """The first slot m with m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled(makes_arrays=True)
def first_of_equals(grid: Any, starts: np.ndarray, kinds: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[rows] for every row, the first with the same numbers.

    `starts` is [nodes], a number for the content of a row at its start; `kinds` is [L], for each stage; `ends` is [L],
    for the content after its end. Numbers count from zero. Two rows are equal if their starts, their ends and the kinds
    of all their stages are.

    Intervals grow by one stage at a time: the content of [i, l] gets a number from that of [i, l-1] and the kind of l.
    """
    owner = np.arange(len(grid.last))
    content, length = starts.copy(), len(grid.band)  # [nodes] the content number of [i, i + distance]
    # [nodes, kinds or ends, 2] by (content, kind): the round of the entry, and its number: of contents in even rounds,
    # of rows in odd ones. The round stands in the entry, so that the array is not cleared for every distance.
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
