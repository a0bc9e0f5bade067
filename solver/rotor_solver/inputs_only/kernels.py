"""Schedules that store inputs, Revolve's and the best for stages that differ: kernels.

Intervals are half open here: [i, stop) with stop ≤ L+1, where the loss is stage L. That makes the empty interval [i, i)
one like the others: it costs nothing. What the kernels are given, for a chain of L stages:

    costs     an `arrays.Costs` of a chain with one option per stage
    attached  whether every checkpoint is kept together with what its stage saves
    flat      [size] seconds: the numbers of all rows, one row after the other
    rows      a `heterogeneous.Rows`, known a `heterogeneous.Known`: [L+2, L+2] arrays by (i, stop)

Seconds are those of forwards without a graph: all others are the same for all schedules. Slot m stands for
m · unit + offset bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from rotor_solver.compiled import compiled

INFINITE = np.int64(2**62)
"""More than any need, and small enough that a size can be added to it."""
NOTHING = np.int64(-(2**60))
"""The need of an empty interval: less than any other, even with something taken from the memory before it."""


@compiled()
def stage_need(costs: Any, state: int, i: int, stop: int) -> int:
    """What running stage i with a graph, and its backward, need in the interval [i, stop), apart from what is between.

    `state` is 1 where a_i lies in the ā_i of the stage before, 0 where it stands alone.
    """
    row = 0 if stop == len(costs.activation) else 1
    during, after = costs.base[stop - 1] + costs.forward_need[i], costs.backward_need[row, i] - costs.released[state, i]
    return int(max(during, after))


@compiled()
def may_enable(costs: Any, attached: bool, i: int, stop: int) -> bool:
    """Whether [i, stop) may begin with Fe_i: attached, or with no more than the loss before its backward."""
    length = len(costs.activation) - 1
    return i < length and (attached or stop == i + 1 or (i == length - 1 and stop == length + 1))


@compiled()
def after_checkpoint(costs: Any, attached: bool, j: int, stop: int) -> tuple[int, int, int]:
    """Where a checkpoint at a_j leads: to the interval [first, stop), with `taken` bytes less, if there are `need`."""
    if not attached or j == len(costs.activation) - 1:
        return j, int(costs.activation[j]), 0
    return j + 1, int(costs.activation[j] + costs.taken[0, j]), int(costs.activation[j] + stage_need(costs, 0, j, stop))


@compiled(makes_arrays=True)
def least_memory(costs: Any, attached: bool) -> tuple[np.ndarray, np.ndarray]:
    """([L+2, L+2], [L+2, L+2]): the least m for which Opt(i, stop, m) is finite, in bytes, and the seconds with it.

    The seconds are those of the fastest schedule that the recurrence finds with no more than that.

    The recurrence is that of `fill`, with "least m" for "least time". O(L³) time, O(L²) memory.
    """
    least, seconds = begun(costs)
    length = len(costs.activation) - 1
    for size in range(1, length + 2):
        for i in range(min(length, length + 2 - size)):
            least_of_interval(least, seconds, costs, attached, i, i + size)
    return least, seconds


@compiled(makes_arrays=True)
def least_memory_in_parallel(costs: Any, attached: bool) -> tuple[np.ndarray, np.ndarray]:
    """What `least_memory` does, on all cores: intervals of one size do not need each other."""
    least, seconds = begun(costs)
    fill_least_in_parallel(least, seconds, costs, attached)
    return least, seconds


@compiled(parallel=True)
def fill_least_in_parallel(least: np.ndarray, seconds: np.ndarray, costs: Any, attached: bool) -> None:
    """The loops of `least_memory`. Arrays are made and looked into elsewhere: Numba's parallel pass mistakes shapes."""
    length = len(costs.activation) - 1
    for size in range(1, length + 2):
        for i in prange(min(length, length + 2 - size)):
            least_of_interval(least, seconds, costs, attached, i, i + size)


@compiled(makes_arrays=True)
def begun(costs: Any) -> tuple[np.ndarray, np.ndarray]:
    """What `least_memory` returns, while nothing is known but the loss."""
    length = len(costs.activation) - 1
    least = np.full((length + 2, length + 2), NOTHING, np.int64)
    least[length, length + 1] = costs.loss_need
    return least, np.zeros((length + 2, length + 2), np.float64)


@compiled()
def least_of_interval(least: np.ndarray, seconds: np.ndarray, costs: Any, attached: bool, i: int, stop: int) -> None:
    """One entry of `least_memory`, once those of all shorter intervals are there."""
    best, fastest = int(INFINITE), np.inf
    if may_enable(costs, attached, i, stop):
        state = 1 if attached else 0
        best = max(stage_need(costs, state, i, stop), costs.taken[state, i] + least[i + 1, stop])
        fastest = seconds[i + 1, stop]
    for j in range(i + 1, stop):
        first, taken, need = after_checkpoint(costs, attached, j, stop)
        need = max(need, costs.base[stop - 1] + costs.check_need[i, j])
        need = max(need, max(taken + least[first, stop], least[i, j]))
        if need <= best:
            time = costs.split[j] - costs.run[i] + seconds[first, stop] + seconds[i, j]
            if need < best or time < fastest:
                best, fastest = need, time
    least[i, stop], seconds[i, stop] = best, fastest


@compiled(makes_arrays=True)
def full_memory(costs: Any, attached: bool) -> tuple[np.ndarray, np.ndarray]:
    """([L+2, L+2], [L+2, L+2]): the m from which all checkpoints of [i, stop) can be stored, and the seconds with it.

    Every stage is then run once, or twice if it has to be: nothing is faster. Rows of a table end there.
    """
    length = len(costs.activation) - 1
    full = np.full((length + 2, length + 2), NOTHING, np.int64)
    seconds = np.zeros((length + 2, length + 2), np.float64)
    full[length, length + 1] = costs.loss_need
    for stop in range(1, length + 2):
        for i in range(min(stop, length) - 1, -1, -1):
            if may_enable(costs, attached, i, stop):
                state = 1 if attached else 0
                full[i, stop] = max(stage_need(costs, state, i, stop), costs.taken[state, i] + full[i + 1, stop])
                seconds[i, stop] = seconds[i + 1, stop]
            else:
                kept = costs.activation[i + 1] + full[i + 1, stop]
                need = max(costs.base[stop - 1] + costs.check_need[i, i + 1], stage_need(costs, 0, i, i + 1))
                full[i, stop] = max(need, kept)
                seconds[i, stop] = costs.split[i + 1] - costs.run[i] + seconds[i + 1, stop]
    return full, seconds


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """The first slot m for which m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled()
def lower_by_both(flat: np.ndarray, out: int, left: int, right: int, low: int, high: int, seconds: float) -> None:
    """flat[out + m] = min(flat[out + m], seconds + flat[left + m] + flat[right + m]) for low ≤ m < high."""
    # Unsigned indices: with signed ones, Numba asks at every access whether to count from the end of the array, and the
    # loop is not vectorised.
    target, first, second = np.uintp(out + low), np.uintp(left + low), np.uintp(right + low)
    for each in range(high - low):
        m = np.uintp(each)
        flat[target + m] = min(flat[target + m], seconds + flat[first + m] + flat[second + m])


@compiled()
def lower_by(flat: np.ndarray, out: int, source: int, low: int, high: int, seconds: float) -> None:
    """flat[out + m] = min(flat[out + m], seconds + flat[source + m]) for low ≤ m < high."""
    target, origin = np.uintp(out + low), np.uintp(source + low)
    for each in range(high - low):
        m = np.uintp(each)
        flat[target + m] = min(flat[target + m], seconds + flat[origin + m])


@compiled()
def lower(flat: np.ndarray, rows: Any, out: Any, left: Any, right: Any, shift: int, low: int, seconds: float) -> None:
    """out[m] = min(out[m], seconds + left[m] + right[m - shift]) for all slots m ≥ low for which there is all that.

    `out`, `left` and `right` are rows, as (i, stop). Slots come in parts: both rows have numbers of their own, only one
    of them has, or both are `beyond` their ends.
    """
    begin, end, position, beyond = rows.begin, rows.end, rows.position, rows.beyond
    low = max(max(low, begin[out]), max(begin[left], begin[right] + shift))
    high, target = end[out], position[out]
    least = seconds + beyond[left] + beyond[right]
    # Rows decrease: slots that are already as fast as this can ever be are at the end.
    while high > low and flat[target + high - 1] <= least:
        high -= 1
    left_end, right_end = min(end[left], high), min(end[right] + shift, high)
    first, second = position[left], position[right] - shift
    lower_by_both(flat, target, first, second, low, min(left_end, right_end), seconds)
    lower_by(flat, target, first, max(low, right_end), left_end, seconds + beyond[right])
    lower_by(flat, target, second, max(low, left_end), right_end, seconds + beyond[left])
    for m in range(max(low, max(left_end, right_end)), high):
        flat[target + m] = min(flat[target + m], least)


@compiled()
def fill(flat: np.ndarray, rows: Any, seconds: np.ndarray, costs: Any, attached: bool, unit: int, offset: int) -> None:
    """Opt(i, stop, m), less the time of what every schedule runs once, for all intervals and slots m:

        Opt(L, L+1, m) = 0                                                if m ≥ loss_need
        Opt(i, stop, m) = the least of
          Opt(i+1, stop, m - taken_i)                                     if m ≥ stage_need(i, stop)
            attached, for [i, i+1), or for [L-1, L+1); of an empty interval it is 0
          split_j - run_i + Opt(j, stop, m - |a_j|) + Opt(i, j, m)        if m ≥ base + check_need_ij, for i < j < stop
            attached, for j < L: with Opt(j+1, stop, m - |a_j| - taken_j) if m ≥ |a_j| + stage_need(j, stop)

    Sizes taken from m are rounded up: the times are those of schedules that fit. Rows begin with the time of the
    schedule that needs least, which is `seconds`. `rows.beyond` is the least possible, or what there is in the last
    slot where that is out of reach.
    """
    length = len(costs.activation) - 1
    for size in range(1, length + 2):
        for i in range(min(length, length + 2 - size)):
            fill_row(flat, rows, seconds, costs, attached, unit, offset, i, i + size)


@compiled(parallel=True)
def fill_in_parallel(
    flat: np.ndarray, rows: Any, seconds: np.ndarray, costs: Any, attached: bool, unit: int, offset: int
) -> None:
    """What `fill` does, on all cores: rows of one size do not need each other."""
    length = len(costs.activation) - 1
    for size in range(1, length + 2):
        for i in prange(min(length, length + 2 - size)):
            fill_row(flat, rows, seconds, costs, attached, unit, offset, i, i + size)


@compiled()
def fill_row(
    flat: np.ndarray,
    rows: Any,
    seconds: np.ndarray,
    costs: Any,
    attached: bool,
    unit: int,
    offset: int,
    i: int,
    stop: int,
) -> None:
    """One row of `fill`, once those of all shorter intervals are there."""
    row, out, low, high = (i, stop), rows.position[i, stop], rows.begin[i, stop], rows.end[i, stop]
    if low >= high:
        return
    flat[out + low : out + high] = seconds[i, stop]
    base = costs.base[stop - 1]
    if may_enable(costs, attached, i, stop):
        state = 1 if attached else 0
        enough = slot_of(stage_need(costs, state, i, stop), unit, offset)
        shift = -((-costs.taken[state, i]) // unit)
        lower(flat, rows, row, (i, i), (i + 1, stop), shift, enough, 0.0)
    for j in range(i + 1, stop):
        if costs.split_floor[j] - costs.run[i] >= flat[out + low]:
            break  # `split_floor` never decreases, and the first number of a row is its largest
        forward = costs.split[j] - costs.run[i]
        first, taken, need = after_checkpoint(costs, attached, j, stop)
        enough = slot_of(max(need, base + costs.check_need[i, j]), unit, offset)
        lower(flat, rows, row, (i, j), (first, stop), -((-taken) // unit), enough, forward)
    if high == rows.width:
        rows.beyond[i, stop] = flat[out + high - 1]


@compiled()
def value_of(flat: np.ndarray, rows: Any, known: Any, i: int, stop: int, memory: int, unit: int, offset: int) -> float:
    """The seconds of a schedule for [i, stop) that fits in exactly `memory` bytes; infinite if none does."""
    if memory < known.least[i, stop]:
        return np.inf
    if memory >= known.full[i, stop]:
        return float(known.full_seconds[i, stop])
    m = (memory - offset) // unit
    if m < rows.begin[i, stop]:
        return float(known.least_seconds[i, stop])
    return float(rows.beyond[i, stop] if m >= rows.end[i, stop] else flat[rows.position[i, stop] + m])


@compiled()
def best_checkpoint(
    flat: np.ndarray,
    rows: Any,
    known: Any,
    costs: Any,
    attached: bool,
    unit: int,
    offset: int,
    i: int,
    stop: int,
    memory: int,
) -> int:
    """The checkpoint j with which [i, stop) is fastest in exactly `memory` bytes, or i for Fe_i; -1 if nothing fits."""
    best, choice = np.inf, -1
    if may_enable(costs, attached, i, stop):
        state = 1 if attached else 0
        if memory >= stage_need(costs, state, i, stop):
            best = value_of(flat, rows, known, i + 1, stop, memory - costs.taken[state, i], unit, offset)
            choice = i if best < np.inf else -1
    for j in range(i + 1, stop):
        seconds = costs.split[j] - costs.run[i]
        first, taken, need = after_checkpoint(costs, attached, j, stop)
        if seconds >= best or memory < max(need, costs.base[stop - 1] + costs.check_need[i, j]):
            continue
        seconds += value_of(flat, rows, known, first, stop, memory - taken, unit, offset)
        seconds += value_of(flat, rows, known, i, j, memory, unit, offset)
        if seconds < best:
            best, choice = seconds, j
    return choice


@compiled(makes_arrays=True)
def descend(
    flat: np.ndarray, rows: Any, known: Any, costs: Any, attached: bool, unit: int, offset: int, room: int
) -> np.ndarray:
    """[splits, 3] (i, l, checkpoint) of a schedule in exactly `room` bytes, which are at least the least.

    Memory is counted in bytes on the way, so that the schedule fits; the table only says where to go.
    """
    length = len(costs.activation) - 1
    splits, count = np.empty((length, 3), np.int64), 0
    pending: list[tuple[Any, Any, Any]] = [(0, length + 1, room)]
    while len(pending) > 0:
        i, stop, memory = pending.pop()
        if i == stop or i == length:  # noqa: SIM109, Numba has no other form of it
            continue
        j = best_checkpoint(flat, rows, known, costs, attached, unit, offset, i, stop, memory)
        assert j >= 0
        if j == i:
            pending.append((i + 1, stop, memory - costs.taken[1 if attached else 0, i]))
            continue
        splits[count] = np.array([i, stop - 1, j])
        count += 1
        first, taken, _ = after_checkpoint(costs, attached, j, stop)
        pending.append((i, j, memory))
        pending.append((first, stop, memory - taken))
    return splits[:count]


@compiled()
def advance(steps: int, snapshots: int) -> int:
    """How far Revolve goes on before its next snapshot, for steps > 1; see `revolve`.

    With β(s, r) = C(s+r, s) and r the least with β(s, r) ≥ steps: the most that leaves both parts their share, the
    first ≤ β(s, r-1) steps for s snapshots, and the second ≥ β(s-1, r-1) steps for s-1.
    """
    below, reached, repeats = 0, 1, 0
    while reached < steps:
        repeats += 1
        below = reached
        reached = below * (snapshots + repeats) // repeats
    return min(below, steps - below * snapshots // (snapshots + repeats - 1))


@compiled(makes_arrays=True)
def revolve(costs: Any, snapshots: int) -> tuple[int, float, np.ndarray]:
    """The bytes that Revolve needs with so many snapshots, its seconds, and [splits, 3] (i, l, checkpoint)."""
    length = len(costs.activation) - 1
    splits = np.empty((max(0, length - 1), 3), np.int64)
    if length == 0:
        return costs.loss_need, 0.0, splits
    need, seconds, count = int(NOTHING), 0.0, 0
    pending: list[tuple[Any, Any, Any, Any]] = [(0, length + 1, snapshots, 0)]
    while len(pending) > 0:
        i, stop, free, held = pending.pop()
        steps = min(stop, length) - i
        if steps == 1:
            need = max(need, held + stage_need(costs, 0, i, stop))
            if stop > length:
                need = max(need, held + costs.taken[0, i] + costs.loss_need)
            continue
        j = i + (steps - 1 if free <= 1 else advance(steps, free))
        need = max(need, held + costs.base[stop - 1] + costs.check_need[i, j])
        seconds += costs.split[j] - costs.run[i]
        splits[count] = np.array([i, stop - 1, j])
        count += 1
        pending.append((i, j, free, held))
        pending.append((j, stop, free - 1, held + costs.activation[j]))
    return need, seconds, splits


@compiled(makes_arrays=True)
def revolve_costs(costs: Any, most: int) -> tuple[np.ndarray, np.ndarray]:
    """([most], [most]): the bytes that Revolve needs, and its seconds, for 1 … `most` snapshots."""
    needs, seconds = np.empty(most, np.int64), np.empty(most, np.float64)
    for index in range(most):
        needs[index], seconds[index], _ = revolve(costs, index + 1)
    return needs, seconds


@compiled(makes_arrays=True)
def store_segments(costs: Any) -> np.ndarray:
    """[L+2, L+2] the bytes that storing the stages i … stop-1 needs, by (i, stop), where a_i stands alone."""
    length = len(costs.activation) - 1
    need = full_memory(costs, True)[0]
    stored = need.copy()
    for i in range(length):
        for stop in range(i + 1, length + 2):
            need[i, stop] = max(stage_need(costs, 0, i, stop), costs.taken[0, i] + stored[i + 1, stop])
    return need
