"""Kernels that fill a table of the persistent program, and find the windows for the next, finer one.

`recurrence.optimum` states the recurrence in thirty lines. Arguments of the kernels:

    flat   [size] the times of all rows, one row after the other
    rows   a `layout.Rows`: where each row's times lie in `flat`, its slots, and the time beyond its last slot
    costs  a `least_memory.Costs`, its times in the unit of the table
    grid   a `layout.Grid`: the intervals that have rows, and the bytes that their slots stand for
    owner  [rows] the row whose times a row shares: itself, unless blocks of the chain repeat
    s      a node: a stage i = grid.stage[s], and the state grid.state[s] of its input
    row    the index of a row in `rows`; `last` is the stage l at which its interval [i, l] ends
    m      a slot of a row

The interval [i, l] has two states: in state 0, a_i is stored by itself, or costs the same as if it were; in state 1, it
is part of the ā_i that the previous stage saved. A time is that of a plan minus that of storing everything. In plain
Python, the arrays of `rows`, `costs` and `grid` are lists, which Python reads faster: hence `grid.row[s][last]`.

# Note [Rows and windows]

Example: a chain of five stages, whose forwards take 1, 2, 3, 2, 1 seconds and save 24, 40, 16, 32, 24 bytes. Backwards
take twice as long. Every a_i has 8 bytes. The limit is 96 bytes without a_0, in slots of 4 bytes.
tests/solver/persistent/test_table.py checks the values below.

 1. Slot m of a row stands for m · unit + offset bytes. Every node has its own offset, such that the fastest option
    takes a whole number of slots from its row to the next. Here all sizes are multiples of 4, and all offsets 0. If
    stage 0 saved 25 bytes, the offsets of later stages would be 3: with 4 m bytes for [0, l], Fe_0 leaves 4 m - 25 = 4
    (m - 7) + 3 for [1, l], its slot m - 7. All other sizes are rounded down to whole slots. So the table never assumes
    less memory than there is, and its times are lower bounds.
 2. A row has times for few slots. Below `begin`, the interval cannot run, or no better plan can have it. From `high` on
    the time is `final`: 0 where everything is stored, else the time of the last useful slot. Times never increase from
    slot to slot. Seven of the 21 rows of the example:

        [i, l]  begin  high  final  seconds, from slot
        [0, 0]     10    10      0  none
        [0, 1]     16    20      0  1 from 16
        [0, 2]     16    24      0  3 from 16, 1 from 20
        [2, 5]     14    22      0  5 from 14, 2 from 16
        [3, 5]     12    18      0  2 from 12
        [4, 5]     10    10      0  none
        [0, 5]     16    26      3  9 from 16, 6 from 18, 5 from 20, 3 from 24

    [0, 5] in slot 24, all 96 bytes, takes 3 seconds longer than storing everything: forwards of 1 + 2 seconds up to a
    checkpoint at a_2; then [2, 5] with 8 bytes less, in slot 22, and [0, 1] in slot 24, both at no extra time. To store
    [0, 5] whole would take 152 bytes.
 3. The time of slot m is flat[position + m] for begin ≤ m < high, and flat[position + high] is `final`.
 4. A window is the range of slots that an interval can have in a plan no slower than the best known one. The table has
    the time inside the interval; `windows_of` passes the time outside from the whole to its parts. If their sum
    exceeds that of the known plan, no better plan has that interval in that slot, and the next, finer table may count
    its time as infinite. With the plan above known, 7 of the 21 rows have a window: [0, 1] from 77 bytes on, [1, 1]
    from 53, [2, 5] from 85, [3, 5] from 69, [4, 5] from 37, the loss from 5, and [0, 5] from 93 to 100. [0, 2] has
    none: wherever it occurs, stages 0 to 2 are recomputed, which takes 6 seconds. The next table, with slots of 1
    byte, has 14 entries; without windows it would have 172.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled

INFINITE = np.int64(2**62)  # Bytes; more than the lower end of any window
STEP = 16  # Number of slots that share a bound in `least_of_both`. Not measured; a wrong value only costs time.


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """Return the first slot m with m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled()
def need_of(costs: Any, grid: Any, state: int, i: int, last: int, k: int) -> int:
    """Return the bytes, not rounded to slots, that Fe_i by option k and B_i need in [i, last], with a_i in `state`."""
    row = 0 if last == len(costs.run) - 1 else 1
    return int(max(grid.base[last] + costs.forward_need[k], costs.backward_need[row][k] - costs.released[state][i]))


# Inner loops over `count` slots from the given positions on; some have a twin in NumPy for plain Python


def _lower_by_both(
    out: np.ndarray, at: int, one: np.ndarray, first: int, other: np.ndarray, second: int, count: int, seconds: float
) -> None:
    part = out[at : at + count]
    np.minimum(part, seconds + (one[first : first + count] + other[second : second + count]), out=part)


@compiled(plain=_lower_by_both)
def lower_by_both(
    out: np.ndarray, at: int, one: np.ndarray, first: int, other: np.ndarray, second: int, count: int, seconds: float
) -> None:
    """out[at + m] = min(out[at + m], seconds + (one[first + m] + other[second + m]))."""
    # Indices are unsigned, since Numba checks signed ones for being negative, and then does not vectorize the loop.
    target, left, right = np.uintp(at), np.uintp(first), np.uintp(second)
    for each in range(count):
        m = np.uintp(each)
        value = seconds + (one[left + m] + other[right + m])
        if value < out[target + m]:
            out[target + m] = value


@compiled()
def lower_by(out: np.ndarray, at: int, source: np.ndarray, first: int, count: int, seconds: float) -> None:
    """out[at + m] = min(out[at + m], seconds + source[first + m])."""
    if count > 0:
        out[at : at + count] = np.minimum(out[at : at + count], seconds + source[first : first + count])


@compiled()
def least_of_both(out: np.ndarray, at: int, flat: np.ndarray, first: int, count: int) -> float:
    """Return a lower bound of out[at + m] + flat[first + m] for 0 ≤ m < count; infinite if `count` < 1.

    `out` never decreases and `flat` never increases: of STEP slots, the first `out` plus the last `flat` is a bound.
    """
    least = np.inf
    for m in range(0, count, STEP):
        least = min(least, out[at + m] + flat[first + min(m + STEP, count) - 1])
    return least


@compiled()
def least_of_three(out: np.ndarray, at: int, flat: np.ndarray, first: int, second: int, count: int) -> float:
    """Return a lower bound of out[at + m] + flat[first + m] + flat[second + m], as in `least_of_both`."""
    least = np.inf
    for m in range(0, count, STEP):
        end = min(m + STEP, count) - 1
        least = min(least, out[at + m] + flat[first + end] + flat[second + end])
    return least


def _slots_of_use(flat: np.ndarray, out: np.ndarray, at: int, begin: int, end: int, cut: float) -> tuple[int, int]:
    own = out[at + begin : at + end + 1]
    own[:] = np.minimum.accumulate(own[::-1])[::-1]
    useful = np.flatnonzero(own[:-1] + flat[at + begin : at + end] <= cut)
    return (begin + int(useful[0]), begin + int(useful[-1]) + 1) if len(useful) else (end, end)


@compiled(plain=_slots_of_use)
def slots_of_use(flat: np.ndarray, out: np.ndarray, at: int, begin: int, end: int, cut: float) -> tuple[int, int]:
    """Complete a row of `out`; return (low, high): slots low … high-1 have plans within `cut`; (end, end) if none."""
    low, high = end, end
    for m in range(end - 1, begin - 1, -1):
        # `out` is the least time of plans that give the interval at least m slots, so those with m + 1 count, too.
        out[at + m] = min(out[at + m], out[at + m + 1])
        if out[at + m] + flat[at + m] <= cut:
            if low == end:
                high = m + 1
            low = m
    return low, high


# Filling rows


@compiled()
def ends_of_parts(rows: Any, left: int, right: int, shift: int, low: int, high: int) -> tuple[int, int]:
    """Return (both, one): from `low` on, both rows have times before slot `both`, then one row before slot `one`."""
    left_high, right_high = rows.high[left], rows.high[right] + shift
    both = max(low, min(high, left_high, right_high))
    return both, max(both, min(high, max(left_high, right_high)))


@compiled()
def split(
    flat: np.ndarray, rows: Any, row: int, left: int, right: int, shift: int, low: int, high: int, seconds: float
) -> None:
    """Lower the times of `row` in slots low … high-1 to those of `left` and `right`, which has `shift` slots less."""
    out, left_at, right_at = rows.position[row], rows.position[left], rows.position[right] - shift
    left_final, right_final = rows.final[left], rows.final[right]
    both, one = ends_of_parts(rows, left, right, shift, low, high)
    lower_by_both(flat, out + low, flat, right_at + low, flat, left_at + low, both - low, seconds)
    if both < one:
        at, final = (right_at, left_final) if rows.high[left] < rows.high[right] + shift else (left_at, right_final)
        part = flat[out + both : out + one]
        part[:] = np.minimum(part, seconds + (final + flat[at + both : at + one]))
    if one < high:
        flat[out + one : out + high] = np.minimum(flat[out + one : out + high], seconds + (left_final + right_final))


@compiled()
def enable(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, k: int) -> None:
    """Lower the times of the row (s, last) to those of beginning with Fe_i by option k: Fe_i, [i+1, last], B_i."""
    i, state, seconds = grid.stage[s], grid.state[s], costs.extra[k]
    out, high = rows.position[row], rows.high[row]
    low = max(rows.begin[row], slot_of(need_of(costs, grid, state, i, last, k), grid.unit, grid.offset[s]))
    stored = low  # first slot in which the row of [i+1, last] has its `final` time
    if last > i:
        following = grid.node[1][i + 1]
        follow = grid.row[following][last]
        if rows.begin[follow] >= grid.width:
            return
        shift = (costs.taken[state][k] + grid.offset[following] - grid.offset[s]) // grid.unit
        low = max(low, shift + rows.begin[follow])
        stored = max(low, min(high, rows.high[follow] + shift))
        lower_by(flat, out + low, flat, rows.position[follow] - shift + low, stored - low, seconds)
        seconds += rows.final[follow]
    if stored < high:
        flat[out + stored : out + high] = np.minimum(flat[out + stored : out + high], seconds)


@compiled()
def checkpoints(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int) -> None:
    """Lower the times of the row (s, last) to those with a checkpoint."""
    i, offset, begin, high = grid.stage[s], grid.offset[s], rows.begin[row], rows.high[row]
    lefts, rights, needs = grid.row[s], grid.after[last], costs.check_need[i]
    for j in range(i + 1, min(last, grid.band[i] + 1) + 1):
        # The forwards up to a_j take split[j] - run[i]. With a later j they may take less, as stage j-1 skips its
        # output. So compare `split_floor`, the least for all later j, before the loop ends.
        floor = costs.split_floor[j] - costs.run[i]
        if floor > rows.limit[row]:
            break
        left, right = lefts[j - 1], rights[j]
        if rows.begin[left] >= grid.width or rows.begin[right] >= grid.width:
            continue
        # ⌊(|a_j| + the offset of j's rows - offset) / unit⌋, without a division.
        shift = grid.slots[j] - (1 if grid.remainder[j] < offset else 0)
        low = max(begin, rows.begin[left], rows.begin[right] + shift)
        low = max(low, slot_of(grid.base[last] + needs[j], grid.unit, offset))
        # Slot `low` has the longest time: if the forwards alone take as long, the checkpoint lowers no time.
        if low < high and floor < flat[rows.position[row] + low]:
            split(flat, rows, row, left, right, shift, low, high, costs.split[j] - costs.run[i])


@compiled()
def finish_row(flat: np.ndarray, rows: Any, width: int, row: int) -> None:
    """Set a row's `final` time; move `begin` past slots with times above `limit`, to `width` if nothing is possible."""
    out, begin, high = rows.position[row], rows.begin[row], rows.high[row]
    stored = rows.final[row] == 0
    if begin < high and not stored:
        rows.final[row] = float(flat[out + high - 1])
    flat[out + high] = rows.final[row]
    useless = np.count_nonzero(flat[out + begin : out + high] > rows.limit[row])  # times never increase
    rows.begin[row] = begin + useless if stored or begin < high else width


@compiled()
def fill_row(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int) -> None:
    """Fill the row (s, last); all rows that it reads must be complete."""
    if rows.limit[row] < 0:
        return
    i, out = grid.stage[s], rows.position[row]
    flat[out + rows.begin[row] : out + rows.high[row]] = np.inf
    for k in range(costs.first[i], costs.first[i + 1]):
        enable(flat, rows, costs, grid, s, row, last, k)
    checkpoints(flat, rows, costs, grid, s, row, last)
    finish_row(flat, rows, grid.width, row)


@compiled()
def row_of_length(grid: Any, s: int, distance: int) -> int:
    """Return the own row of the interval from node s to the stage `distance` later, before the loss; -1 if none."""
    i = grid.stage[s]
    last = i + distance
    if last >= len(grid.band) or last > grid.band[i]:
        return -1
    row = grid.row[s][last]
    return int(row) if grid.last[row] == last else -1


@compiled()
def fill(flat: np.ndarray, rows: Any, costs: Any, grid: Any, owner: Any, begin: int, end: int) -> None:
    """Fill Opt(i, l, m), the seconds of [i, l] in m slots minus those of storing it, in the unit of the table:

        Opt(L, L, m) = 0                                                if m ≥ loss_need
        Opt(i, l, m) = the least of
          extra_k + Opt'(i+1, l, m - taken_k)                           if m ≥ base_l + forward_need_k
            for every option k; Opt'(i+1, i, ·) is 0                    and m ≥ backward_need_k - released_i
          split_j - run_i + Opt(j, l, m - |a_j|) + Opt(i, j-1, m)        if m ≥ base_l + check_need_ij, for i < j ≤ l

    Opt' is Opt in state 1. Sizes taken from m are rounded down, so that times are lower bounds: every plan that fits
    with exact sizes fits with these, too. Times above rows.limit count as infinite (`layout.rows_of`).

    Fills the rows of intervals with begin ≤ l - i < end, l < L; the rows of all shorter intervals must be complete.
    `fill_tails` fills the rows that end at the loss.
    """
    for distance in range(begin, end):
        for s in range(len(grid.stage) - 1):
            row = row_of_length(grid, s, distance)
            if row >= 0 and owner[row] == row:
                fill_row(flat, rows, costs, grid, s, row, grid.last[row])
        for s in range(len(grid.stage) - 1):  # rows with another owner share its times; copy its `begin` and `final`
            row = row_of_length(grid, s, distance)
            if row >= 0:
                rows.begin[row], rows.final[row] = rows.begin[owner[row]], rows.final[owner[row]]


@compiled()
def fill_tails(flat: np.ndarray, rows: Any, costs: Any, grid: Any) -> None:
    """Fill the rows that end at the loss, from the last to the first; all other rows must be complete."""
    nodes = len(grid.stage)
    finish_row(flat, rows, grid.width, grid.tail + nodes - 1)  # the row of the loss alone: time 0 in all of its slots
    for s in range(nodes - 2, -1, -1):
        fill_row(flat, rows, costs, grid, s, grid.tail + s, len(grid.band))


# Windows (Rule 4)


@compiled()
def windows_of(flat: np.ndarray, rows: Any, owner: np.ndarray, costs: Any, grid: Any, cut: float) -> Any:
    """Return (low, high, outside), [rows] each: the slots low … high-1 of an interval in plans of time at most `cut`.

    high > rows.high stands for all slots from rows.high on. `outside` is the least time of such a plan outside of the
    interval, infinite if there is no such plan. `flat` and `rows` must be complete.

    Passes times from the whole down to its parts. out(i, l, m) is the least time outside [i, l] if it has m or more:

        out(0, L, all) = 0
        out(i+1, l, m - taken_k) ≤ out(i, l, m) + extra_k
        out(j, l, m - |a_j|)     ≤ out(i, l, m) + split_j - run_i + Opt(i, j-1, m)
        out(i, j-1, m)           ≤ out(i, l, m) + split_j - run_i + Opt(j, l, m - |a_j|)

    under the conditions of `fill`. Slot rows.high of a row stands for all slots from rows.high on.
    """
    length, tail, count = len(grid.band), grid.tail, len(rows.begin)
    # [size] Laid out like `flat`: out(i, l, m) has the index that Opt(i, l, m) has there.
    out = np.full_like(flat, np.inf)
    low, high, outside = np.zeros(count, np.int64), np.zeros(count, np.int64), np.full(count, np.inf)
    loss = count - 1
    low[loss], high[loss], outside[loss] = rows.begin[loss], rows.high[loss] + 1, 0
    needed = np.zeros(count, np.bool_)  # [rows] whether a plan within `cut` can have the row's interval
    needed[tail] = True
    out[rows.position[tail] + min(grid.width - 1, rows.high[tail])] = 0
    table, found = (flat, rows, owner, costs, grid), (out, needed, low, high, outside)
    for s in range(len(grid.stage) - 1):
        if needed[tail + s]:
            hand_down(table, found, s, tail + s, cut)
    for last in range(length - 1, -1, -1):
        for s in range(grid.node[1][last] + 1):
            row = grid.row[s][last]
            if row >= 0 and grid.last[row] == last and needed[row]:
                hand_down(table, found, s, row, cut)
    return low[owner], high[owner], outside[owner]


@compiled()
def hand_down(table: Any, found: Any, s: int, row: int, cut: float) -> None:
    """Complete a row of `out`, record its useful slots, and pass its times down to the parts of its interval."""
    (flat, rows, owner, costs, grid), (out, needed, lows, highs, outside) = table, found
    i, state, last = grid.stage[s], grid.state[s], grid.last[row]
    begin, end, at = rows.begin[row], rows.high[row], rows.position[row]
    if begin >= grid.width:
        return
    low, high = slots_of_use(flat, out, at, begin, end, cut)
    if end < grid.width and rows.final[row] == 0 and out[at + end] <= cut:
        high = end + 1  # slot `end` stores [i, last] whole; a finer table may have that with slightly less memory
    elif low == end:
        return
    lows[row], highs[row], outside[row] = low, high, out[at + low]
    for k in range(costs.first[i], costs.first[i + 1] if last > i else costs.first[i]):
        node = grid.node[1][i + 1]
        part, seconds = grid.row[node][last], costs.extra[k]
        if rows.begin[part] < grid.width:
            shift = (costs.taken[state][k] + grid.offset[node] - grid.offset[s]) // grid.unit
            first = slot_of(need_of(costs, grid, state, i, last, k), grid.unit, grid.offset[s])
            first = max(low, first, shift + rows.begin[part])
            stop = max(first, min(high, rows.high[part] + shift))
            needed[owner[part]] = True
            lower_by(out, rows.position[part] + first - shift, out, at + first, stop - first, seconds)
            if stop < high:
                there = rows.position[part] + rows.high[part]
                out[there] = min(out[there], out[at + stop] + seconds)
    for j in range(i + 1, min(last, grid.band[i] + 1) + 1):
        floor = costs.split_floor[j] - costs.run[i]
        if floor + out[at + low] > cut or floor > rows.limit[row]:
            break  # `split_floor` never decreases, and `out` is least in slot `low`
        left, right = grid.row[s][j - 1], grid.row[grid.node[0][j]][last]
        if rows.begin[left] < grid.width and rows.begin[right] < grid.width:
            shift = grid.slots[j] - (1 if grid.remainder[j] < grid.offset[s] else 0)
            first = max(low, rows.begin[left], rows.begin[right] + shift)
            first = max(first, slot_of(grid.base[last] + costs.check_need[i][j], grid.unit, grid.offset[s]))
            seconds = costs.split[j] - costs.run[i]
            if hand_to_both(flat, out, rows, at, (left, right, shift), first, high, seconds, cut):
                needed[owner[left]] = needed[owner[right]] = True


@compiled()
def hand_to_both(
    flat: np.ndarray, out: np.ndarray, rows: Any, at: int, parts: Any, low: int, high: int, seconds: float, cut: float
) -> bool:
    """Pass times of slots low … high-1 to both parts of an interval; return whether such a plan takes at most `cut`."""
    left, right, shift = parts
    left_at, right_at = rows.position[left], rows.position[right] - shift
    left_end, right_end = left_at + rows.high[left], right_at + rows.high[right] + shift
    left_final, right_final = rows.final[left], rows.final[right]
    both, one = ends_of_parts(rows, left, right, shift, low, high)
    matters = False
    if least_of_three(out, at + low, flat, left_at + low, right_at + low, both - low) + seconds <= cut:
        matters = True
        lower_by_both(out, left_at + low, out, at + low, flat, right_at + low, both - low, seconds)
        lower_by_both(out, right_at + low, out, at + low, flat, left_at + low, both - low, seconds)
    part_at, end, final = left_at, right_end, right_final
    if rows.high[left] < rows.high[right] + shift:
        part_at, end, final = right_at, left_end, left_final
    least = least_of_both(out, at + both, flat, part_at + both, one - both)
    if least + seconds + final <= cut:
        matters = True
        lower_by(out, part_at + both, out, at + both, one - both, seconds + final)
        out[end] = min(out[end], seconds + least)
    if one < high and out[at + one] + seconds + left_final + right_final <= cut:
        matters = True
        out[left_end] = min(out[left_end], out[at + one] + seconds + right_final)
        out[right_end] = min(out[right_end], out[at + one] + seconds + left_final)
    return matters


@compiled()
def spread(grid: Any, low: np.ndarray, high: np.ndarray, outside: np.ndarray) -> Any:
    """Return windows by interval, [nodes, L+1], in bytes and seconds: the widest of all rows that stand for it."""
    # Intervals within the last stages that a row omits have at most the row's memory, and at least its time outside.
    length, shape = len(grid.band), (len(grid.stage), len(grid.band) + 1)
    lows, highs, least = np.full(shape, INFINITE), np.zeros(shape, np.int64), np.full(shape, np.inf)
    # [L+1] by the stage at which a row ends: the most memory of such a row, and the least time outside it.
    memory, time = np.zeros(length + 1, np.int64), np.full(length + 1, np.inf)
    for s in range(len(grid.stage)):
        for last in range(grid.stage[s], length + 1):
            row = grid.row[s][last]
            if row < 0 or grid.last[row] != last or outside[row] == np.inf:
                continue
            memory[last], time[last] = max(memory[last], high[row]), min(time[last], outside[row])
            for stage in range(last, grid.stop[last]):
                lows[s, stage], highs[s, stage] = min(lows[s, stage], low[row]), max(highs[s, stage], high[row])
                least[s, stage] = min(least[s, stage], outside[row])
    for end in range(length):
        for s in range(grid.node[0][end + 1], grid.node[0][grid.stop[end]] if time[end] < np.inf else 0):
            for stage in range(grid.stage[s], grid.stop[end]):
                lows[s, stage], highs[s, stage] = 0, max(highs[s, stage], memory[end])
                least[s, stage] = min(least[s, stage], time[end])
    return lows, highs, least
