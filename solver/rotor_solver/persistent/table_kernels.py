"""Around the filling of a table: which slots are of use, which rows are equal, and reading sequences off: kernels.

`flat`, `rows`, `grid` and `costs` are those of `kernels`. Times are those that a plan takes longer than storing
everything, in the unit of the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled


@compiled(makes_arrays=True)
def full_memory(costs: Any, fastest: np.ndarray) -> np.ndarray:
    """[2, L+1, L+1] the m, in bytes, from which the interval [i, l] can be stored whole, by (state, i, l).

    Every stage is stored by its fastest option; no plan is faster than that, so rows end there. From the last stage of
    an interval to the first: what one more stage needs is its own, or that of the rest beside what it keeps.
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
    """(low, high, full, limit), [rows] each: the slots that are of use, and the longest time that is.

    What is of use lies in slots low … high-1, and in those from `full` on, where everything is stored, if high = full.
    `limit` is negative where no time is of use. `least` and `full` are [2, L+1, L+1], in bytes; `later` is [L+1], and
    like `outside` of the `layout.Windows` in the unit of `cut`. A row takes the most generous of all the intervals that
    it stands for.
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
                # An interval that ends before the loss is worked on after the loss. Its stages were run without a graph
                # before, and the stages after it took at least `later` longer than stored: both are gone from the cut.
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
    """The first slot m for which m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


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


@compiled()
def value_of(flat: np.ndarray, rows: Any, row: int, m: int) -> float:
    """Slot m ≥ begin of a row."""
    return float(rows.final[row]) if m >= rows.high[row] else float(flat[rows.position[row] + m])


@compiled()
def estimate(
    flat: np.ndarray, rows: Any, full: np.ndarray, grid: Any, s: int, last: int, memory: int, blend: float, cut: float
) -> float:
    """Opt for exactly `memory` bytes, read between two slots and two ends: the bound itself for blend 0.

    The bound is that of the next slot above, and of a row that may end earlier, and so too low; the slot below and the
    next row are too high. `blend` says how far to go from the one to the other.
    """
    i, length = grid.place[s], len(grid.band)
    if memory >= full[grid.state[s], i, last]:
        return 0.0
    if length > last > grid.band[i]:
        return 2 * cut  # more than any time in the table: the last thing to choose
    row = grid.row[s, last]
    value, start = between_slots(flat, rows, grid, s, row, memory, blend, cut), grid.last[row]
    if start < last < length and blend > 0.0 and value < cut and row + 1 < grid.start[s + 1]:
        longer = min(cut, between_slots(flat, rows, grid, s, row + 1, memory, blend, cut))
        value += (last - start) / (grid.last[row + 1] - start) * max(0.0, longer - value)
    return value


@compiled()
def between_slots(
    flat: np.ndarray, rows: Any, grid: Any, s: int, row: int, memory: int, blend: float, cut: float
) -> float:
    """A row for exactly `memory` bytes, which is at least rows.begin of it: the slot above for blend 0."""
    beyond = memory - grid.offset[s]
    m = min(max(0, -(-beyond // grid.unit)), grid.width - 1)
    if m < rows.begin[row]:
        return 2 * cut
    value = value_of(flat, rows, row, m)
    rest = m * grid.unit - beyond
    if rest > 0 and blend > 0.0:
        worse = value_of(flat, rows, row, m - 1) if m > rows.begin[row] else cut
        value += blend * rest / grid.unit * (worse - value)
    return value


@compiled(makes_arrays=True)
def descend(
    flat: np.ndarray,
    rows: Any,
    least: np.ndarray,
    full: np.ndarray,
    costs: Any,
    grid: Any,
    cut: float,
    memory: int,
    blend: float,
    enough: float,
) -> tuple[np.ndarray, float]:
    """The choices of a sequence for `memory` bytes, which is at least least[0, 0, L], and what it takes longer.

    Memory is counted in bytes on the way, so that the sequence fits; the table only says where to go. A choice is open
    only if the exact least memory of its parts allows it, so the way never ends in something that does not fit. Choices
    are coded as in `least_memory`, and stand in the order in which `operations_of` asks for them. Given up, with an
    infinite time, beyond `enough`.
    """
    length = len(grid.band)
    choices = np.empty(4 * length + 16, np.int64)  # grows below: how often intervals are split is not known
    # [pending, 4] intervals that wait: state, i, l, and the bytes that they have. They are disjoint, so there are never
    # more than stages, and a few empty ones.
    stack = np.empty((2 * length + 16, 4), np.int64)
    count, depth, seconds = 0, 1, 0.0
    stack[0] = np.array([0, 0, length, memory])
    while depth > 0:
        depth -= 1
        state, i, last, m = stack[depth]
        if i > last or i == length:
            continue
        row = 0 if last == length else 1
        s = grid.node[state, i]
        best, choice = np.inf, 0
        for k in range(costs.first[i], costs.first[i + 1]):
            need = max(costs.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i])
            if m < need:
                continue
            whole = costs.extra[k]
            if last > i:
                rest = m - costs.taken[state, k]
                if rest < least[1, i + 1, last]:
                    continue
                whole += estimate(flat, rows, full, grid, grid.node[1, i + 1], last, rest, blend, cut)
            if whole < best:
                best, choice = whole, k - costs.first[i]
        for j in range(i + 1, last + 1):
            if costs.split_floor[j] - costs.run[i] >= best:
                break  # `split_floor` never decreases: later checkpoints take at least as long
            forward = costs.split[j] - costs.run[i]
            rest = m - costs.activation[j]
            if m < costs.base[last] + costs.check_need[i, j] or rest < least[0, j, last] or m < least[state, i, j - 1]:
                continue
            whole = forward + estimate(flat, rows, full, grid, grid.node[0, j], last, rest, blend, cut)
            if whole < best:
                whole += estimate(flat, rows, full, grid, s, j - 1, m, blend, cut)
            if whole < best:
                best, choice = whole, -j
        if count == len(choices):
            choices = np.concatenate((choices, np.empty_like(choices)))
        choices[count] = choice
        count += 1
        if choice >= 0:
            seconds += costs.extra[costs.first[i] + choice]
            if last > i:
                stack[depth] = np.array([1, i + 1, last, m - costs.taken[state, costs.first[i] + choice]])
                depth += 1
        else:
            seconds += costs.split[-choice] - costs.run[i]
            stack[depth] = np.array([state, i, -choice - 1, m])
            stack[depth + 1] = np.array([0, -choice, last, m - costs.activation[-choice]])
            depth += 2
        if seconds > enough:
            return choices[:0], np.inf
    return choices[:count], seconds
