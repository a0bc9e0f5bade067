"""Kernels for the slots that a plan no slower than the best known one may use, for the next, finer table.

Rule 5 of Note [Rows, chunks and windows] in `kernels` defines them. The arguments are those of `kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled

INFINITE = np.int64(2**62)
"""Bytes; more than any window begins with."""
STEP = 16
"""Slots of which one is tested before anything is passed down. Not measured; a wrong value only costs time."""


@compiled(makes_arrays=True)
def windows_of(flat: np.ndarray, rows: Any, owner: np.ndarray, costs: Any, grid: Any, cut: float) -> Any:
    """(low, high, outside), [rows] each: the slots in which a plan that takes at most `cut` may have its interval.

    They are low … high-1, and those from rows.high on where high > rows.high; none where `outside` is infinite.
    `outside` is the least time of such a plan outside the interval. `flat` and `rows` are complete; owner[row] is the
    row whose numbers a row shares.

    From the whole to the parts: with out(i, l, m) for the least time outside [i, l] if [i, l] has at least m,

        out(0, L, all) = 0
        out(i+1, l, m - taken_k) ≤ out(i, l, m) + extra_k
        out(j, l, m - |a_j|)     ≤ out(i, l, m) + run_j - run_i + Opt(i, j-1, m)
        out(i, j-1, m)           ≤ out(i, l, m) + run_j - run_i + Opt(j, l, m - |a_j|)

    under the conditions of `kernels.fill`. Slot rows.high of a row stands for all slots from there on.
    """
    length, tail = len(grid.band), grid.tail
    # [size] out(i, l, m), where `flat` has Opt(i, l, m), and one number more for slot rows.high, which lies in the
    # copies that `flat` has beyond a row's end. Most rows are never reached, so a row's part is initialized on first
    # use.
    out = np.empty_like(flat)
    low, high = np.zeros(len(rows.begin), np.int64), np.zeros(len(rows.begin), np.int64)
    least = np.full(len(rows.begin), np.inf, np.float64)
    loss = tail + len(grid.place) - 1
    low[loss], high[loss], least[loss] = rows.begin[loss], rows.high[loss] + 1, 0
    needed = np.zeros(len(rows.begin), np.bool_)  # [rows] whether a plan can have the row's interval at all
    need_row(out, rows, needed, tail)
    out[rows.position[tail] + min(grid.width - 1, rows.high[tail])] = 0
    for s in range(len(grid.place) - 1):
        if grid.place[s] < length and needed[tail + s]:
            hand_down(flat, out, rows, owner, needed, costs, grid, s, tail + s, length, cut, low, high, least)
    for last in range(length - 1, -1, -1):
        for s in range(grid.node[1, last] + 1):
            row = grid.row[s, last]
            if row >= 0 and grid.last[row] == last and needed[row]:
                hand_down(flat, out, rows, owner, needed, costs, grid, s, row, last, cut, low, high, least)
    return low[owner], high[owner], least[owner]


@compiled()
def hand_down(
    flat: np.ndarray,
    out: np.ndarray,
    rows: Any,
    owner: np.ndarray,
    needed: np.ndarray,
    costs: Any,
    grid: Any,
    s: int,
    row: int,
    last: int,
    cut: float,
    lows: np.ndarray,
    highs: np.ndarray,
    outside: np.ndarray,
) -> None:
    """Complete out(s, last, ·), record its useful slots, and lower the parts of the interval.

    `lows`, `highs` and `outside` are the results of `windows_of`.
    """
    i, state = grid.place[s], grid.state[s]
    begin, end, at = rows.begin[row], rows.high[row], rows.position[row]
    if begin >= grid.width:
        return
    low, high = slots_of_use(flat, out, at, begin, end, cut)
    if end < grid.width and rows.final[row] == 0 and out[at + end] <= cut:
        high = end + 1  # the first slot in which all is stored also stands for less memory, in which it is not
    elif low == end:
        return
    lows[row], highs[row], outside[row] = low, high, out[at + low]
    for k in range(costs.first[i], costs.first[i + 1] if last > i else costs.first[i]):
        node = grid.node[1, i + 1]
        part = grid.row[node, last]
        shift = (costs.taken[state, k] + grid.offset[node] - grid.offset[s]) // grid.unit
        first = max(low, slot_of(need_of(costs, grid, state, i, last, k), grid.unit, grid.offset[s]))
        if rows.begin[part] < grid.width:
            first = max(first, shift + rows.begin[part])
            stop = max(first, min(high, rows.high[part] + shift))
            need_row(out, rows, needed, owner[part])
            hand_on_alone(out, at + first, rows.position[part] + first - shift, stop - first, costs.extra[k])
            if stop < high:
                there = rows.position[part] + rows.high[part]
                out[there] = min(out[there], out[at + stop] + costs.extra[k])
    for j in range(i + 1, min(last, grid.band[i] + 1) + 1):
        floor = costs.split_floor[j] - costs.run[i]
        if floor + out[at + low] > cut or floor > rows.limit[row]:
            break  # `split_floor` never decreases, and `out` is least in slot `low`
        node = grid.node[0, j]
        left, right = grid.row[s, j - 1], grid.row[node, last]
        shift = grid.slots[j] - (1 if grid.remainder[j] < grid.offset[s] else 0)
        if rows.begin[left] < grid.width and rows.begin[right] < grid.width:
            first = max(low, rows.begin[left], rows.begin[right] + shift)
            first = max(first, slot_of(grid.base[last] + costs.check_need[i, j], grid.unit, grid.offset[s]))
            seconds = flat.dtype.type(costs.split[j] - costs.run[i])
            hand_to_both(flat, out, rows, owner, needed, at, left, right, shift, first, high, seconds, cut)


@compiled()
def slots_of_use(flat: np.ndarray, out: np.ndarray, at: int, begin: int, end: int, cut: float) -> tuple[int, int]:
    """Complete a row of `out`; return its useful slots low … high-1 of begin … end-1, or `end` twice."""
    low, high = end, end
    for m in range(end - 1, begin - 1, -1):
        # Memory that an interval "has at least": with m + 1 slots it also has m.
        out[at + m] = min(out[at + m], out[at + m + 1])
        if out[at + m] + flat[at + m] <= cut:
            if low == end:
                high = m + 1
            low = m
    return low, high


@compiled()
def need_row(out: np.ndarray, rows: Any, needed: np.ndarray, row: int) -> None:
    """Initialize a row of `out` when it is first reached: all of its slots are infinite."""
    if not needed[row]:
        needed[row] = True
        out[rows.position[row] + rows.begin[row] : rows.position[row] + rows.high[row] + 1] = np.inf


@compiled()
def hand_to_both(
    flat: np.ndarray,
    out: np.ndarray,
    rows: Any,
    owner: np.ndarray,
    needed: np.ndarray,
    at: int,
    left: int,
    right: int,
    shift: int,
    low: int,
    high: int,
    time: Any,
    cut: float,
) -> None:
    """Lower both parts of an interval from its slots low … high-1; slot 0 of its row of `out` would lie at `at`.

    In three parts, as in `kernels.split`. A coarse bound tests whether each can matter: nearly all do not.
    """
    left_high, right_high = rows.high[left], rows.high[right] + shift
    left_at, right_at = rows.position[left], rows.position[right] - shift
    left_end, right_end = left_at + left_high, right_at + right_high
    both = max(low, min(high, left_high, right_high))
    one = max(both, min(high, max(left_high, right_high)))
    if least_of_three(out, flat, at + low, left_at + low, right_at + low, both - low) + time <= cut:
        need_row(out, rows, needed, owner[left])
        need_row(out, rows, needed, owner[right])
        hand_on(out, flat, at + low, left_at + low, right_at + low, both - low, time)
        hand_on(out, flat, at + low, right_at + low, left_at + low, both - low, time)
    part_at, end, final = left_at, right_end, rows.final[right]
    if left_high < right_high:
        part_at, end, final = right_at, left_end, rows.final[left]
    least = least_of_both(out, flat, at + both, part_at + both, one - both)
    if least + time + final <= cut:
        need_row(out, rows, needed, owner[left])
        need_row(out, rows, needed, owner[right])
        hand_on_alone(out, at + both, part_at + both, one - both, time + final)
        out[end] = min(out[end], time + least)
    if one < high and out[at + one] + time + rows.final[left] + rows.final[right] <= cut:
        need_row(out, rows, needed, owner[left])
        need_row(out, rows, needed, owner[right])
        out[left_end] = min(out[left_end], out[at + one] + time + rows.final[right])
        out[right_end] = min(out[right_end], out[at + one] + time + rows.final[left])


@compiled()
def hand_on(out: np.ndarray, flat: np.ndarray, whole: int, part: int, other: int, count: int, time: Any) -> None:
    """out[part + m] = min(out[part + m], out[whole + m] + time + flat[other + m]) for 0 ≤ m < count."""
    source, target, beside = np.uintp(whole), np.uintp(part), np.uintp(other)
    for each in range(count):
        m = np.uintp(each)
        value = out[source + m] + time + flat[beside + m]
        if value < out[target + m]:
            out[target + m] = value


@compiled()
def hand_on_alone(out: np.ndarray, whole: int, part: int, count: int, time: Any) -> None:
    """out[part + m] = min(out[part + m], out[whole + m] + time) for 0 ≤ m < count."""
    source, target = np.uintp(whole), np.uintp(part)
    for each in range(count):
        m = np.uintp(each)
        value = out[source + m] + time
        if value < out[target + m]:
            out[target + m] = value


@compiled()
def least_of_both(out: np.ndarray, flat: np.ndarray, whole: int, other: int, count: int) -> Any:
    """A lower bound of out[whole + m] + flat[other + m] for 0 ≤ m < count.

    `out` increases and `flat` decreases: of STEP slots, the first of the one and the last of the other are a bound.
    """
    least = flat.dtype.type(np.inf)
    for m in range(0, count, STEP):
        least = min(least, out[whole + m] + flat[other + min(m + STEP, count) - 1])
    return least


@compiled()
def least_of_three(out: np.ndarray, flat: np.ndarray, whole: int, first: int, second: int, count: int) -> Any:
    """A lower bound of out[whole + m] + flat[first + m] + flat[second + m] for 0 ≤ m < count; see `least_of_both`."""
    least = flat.dtype.type(np.inf)
    for m in range(0, count, STEP):
        end = min(m + STEP, count) - 1
        least = min(least, out[whole + m] + flat[first + end] + flat[second + end])
    return least


@compiled(makes_arrays=True)
def spread(grid: Any, low: np.ndarray, high: np.ndarray, outside: np.ndarray) -> Any:
    """Windows by interval, (low, high, outside), [nodes, L+1] each, from windows by row, in bytes and seconds.

    The next table has other rows, so each interval takes the most generous values of all rows that stand for it. The
    stages that a row omits at its end may be divided further; these intervals are only known to have no more memory
    than the whole, and as much time outside.
    """
    length, shape = len(grid.band), grid.row.shape
    lows, highs, least = np.full(shape, INFINITE), np.zeros(shape, np.int64), np.full(shape, np.inf, np.float64)
    # [L+1] by the stage at which a row ends: the most memory of such a row, and the least time outside it.
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


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """The first slot m with m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled()
def need_of(costs: Any, grid: Any, state: int, i: int, last: int, k: int) -> int:
    """Bytes that a run of stage i with a graph and its backward need, in the row of [i, last].

    Needs are compared in bytes, never rounded: only memory that an operation leaves is rounded.
    """
    row = 0 if last == len(costs.run) - 1 else 1
    return int(max(grid.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i]))
