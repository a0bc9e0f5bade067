"""All compiled code. One file, because Numba's cache on disk is keyed on the file of a kernel, not on those it calls.

`costs` is an `arrays.Costs`, `grid` a `grid.Grid`; both are named tuples of arrays. The interval [i, l] has two states:
in state 0, a_i stands alone, or as good as that; in state 1 it lies in the ā_i of the stage before. A choice for an
interval is coded as an integer: k ≥ 0 is the stage's option k, j < 0 is the checkpoint at a_{-j}.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from rotor_solver.compiled import compiled

BLOCK = 24
"""Stages of a tile."""
STEP = 16
"""Slots of which one is looked at for a window."""
CHUNK = 32
"""Slots that are looked at as one while a table is filled. The first of a chunk is a multiple of it."""
LANES = 32
"""Slots that inner loops take at once."""
BEYOND = CHUNK + LANES
"""The last chunk of a row is followed by as many copies of its last value, so that inner loops may run past its end:
what they read there is true, and what they write there is not read before it is mended."""


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """The first slot m for which m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled()
def first_row(grid: Any, s: int, last: int) -> int:
    """The first row of node s that ends at stage `last` or later, or the one after all its rows."""
    i = grid.place[s]
    before = min(last, grid.band[i] + 1) - 1
    return int(grid.row[s, before] + 1 if before >= i else grid.start[s])


@compiled(makes_arrays=True)
def full_memory(costs: Any, fastest: np.ndarray) -> np.ndarray:
    """The m, in bytes, from which the interval [i, l] can be stored whole, by (state, i, l)."""
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
    """(low, high, full, limit) by row: what is of use lies in slots low … high-1, and in those from `full` on, where
    everything is stored, if high = full.

    `limit` is the longest time that is of use, see `fill`; negative where none is. `later` and `windows.outside` are
    in the unit of `cut`. A row takes the best of all the intervals that it
    stands for.
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
def whole_lanes(count: int) -> int:
    """`count` rounded up, so that a vectorised loop leaves nothing over."""
    return (count + LANES - 1) // LANES * LANES


@compiled()
def chunks(count: int) -> int:
    """Chunks that it takes for `count` slots."""
    return (count + CHUNK - 1) // CHUNK


@compiled()
def lower_by_both(
    flat: np.ndarray, marks: np.ndarray, out: int, left: int, right: int, begin: int, low: int, high: int, seconds: Any
) -> None:
    """flat[out + m] = min(flat[out + m], seconds + (flat[left + m] + flat[right + m])) for low ≤ m < high, and beyond.

    Rows decrease: nothing in a chunk becomes less if what its last slot would get is no less than what its first has,
    and `marks` knows both. Chunks of the row `right` begin elsewhere; there, a slot further on stands for the last.
    The row `out` begins at `begin`.
    """
    chunk = low // CHUNK
    count = chunks(high) - chunk
    own, first, second = out // CHUNK + chunk, left // CHUNK + chunk, chunks(right) + chunk
    if not any_lower_by_both(marks, own, first, second, count, seconds):
        return
    c = 0
    while c < count:
        while c < count and not seconds + (marks[first + c] + marks[second + c]) < marks[own + c]:
            c += 1
        start = c
        while c < count and seconds + (marks[first + c] + marks[second + c]) < marks[own + c]:
            c += 1
        if start < c:
            at = max(low, (chunk + start) * CHUNK)
            lower_slots_by_both(flat, out + at, left + at, right + at, (chunk + c) * CHUNK - at, seconds)
            set_marks(flat, marks, out + begin, own + start, own + c)


@compiled()
def any_lower_by_both(marks: np.ndarray, own: int, first: int, second: int, count: int, seconds: Any) -> bool:
    """Whether any chunk of `count` has something to gain."""
    target, left, right, found = np.uintp(own), np.uintp(first), np.uintp(second), 0
    for each in range(count):
        c = np.uintp(each)
        found |= seconds + (marks[left + c] + marks[right + c]) < marks[target + c]
    return found != 0


@compiled()
def lower_slots_by_both(flat: np.ndarray, out: int, left: int, right: int, count: int, seconds: Any) -> None:
    """Slots 0 ≤ m < count of `lower_by_both`, and a few more."""
    target, first, second = np.uintp(out), np.uintp(left), np.uintp(right)
    for each in range(whole_lanes(count)):
        m = np.uintp(each)
        value = seconds + (flat[second + m] + flat[first + m])
        if value < flat[target + m]:
            flat[target + m] = value


@compiled()
def lower_by(
    flat: np.ndarray,
    marks: np.ndarray,
    out: int,
    source: int,
    begin: int,
    low: int,
    high: int,
    final: Any,
    seconds: Any,
) -> None:
    """flat[out + m] = min(flat[out + m], seconds + (final + flat[source + m])) for low ≤ m < high, and beyond.

    As in `lower_by_both`, where there is something to gain; chunks of `source` begin elsewhere.
    """
    chunk = low // CHUNK
    count = chunks(high) - chunk
    own, other = out // CHUNK + chunk, chunks(source) + chunk
    c = 0
    while c < count:
        while c < count and not seconds + (final + marks[other + c]) < marks[own + c]:
            c += 1
        start = c
        while c < count and seconds + (final + marks[other + c]) < marks[own + c]:
            c += 1
        if start < c:
            at = max(low, (chunk + start) * CHUNK)
            lower_slots_by(flat, out + at, source + at, (chunk + c) * CHUNK - at, final, seconds)
            set_marks(flat, marks, out + begin, own + start, own + c)


@compiled()
def lower_slots_by(flat: np.ndarray, out: int, source: int, count: int, final: Any, seconds: Any) -> None:
    """Slots 0 ≤ m < count of `lower_by`, and a few more."""
    target, origin = np.uintp(out), np.uintp(source)
    for each in range(whole_lanes(count)):
        m = np.uintp(each)
        value = seconds + (final + flat[origin + m])
        if value < flat[target + m]:
            flat[target + m] = value


@compiled()
def set_marks(flat: np.ndarray, marks: np.ndarray, begin: int, first: int, stop: int) -> None:
    """Note the first number of chunks first … stop-1 of a row that begins at flat[begin], and is not complete."""
    marks[first] = flat[max(begin, first * CHUNK)]
    for chunk in range(first + 1, stop):
        marks[chunk] = flat[chunk * CHUNK]


@compiled()
def lower_to(flat: np.ndarray, marks: np.ndarray, out: int, low: int, high: int, value: Any) -> None:
    """flat[out + m] = min(flat[out + m], value) for low ≤ m < high."""
    for m in range(low, high):
        flat[out + m] = min(flat[out + m], value)
    for chunk in range(chunks(out + low), chunks(out + high)):
        marks[chunk] = min(marks[chunk], value)


@compiled()
def begin_row(flat: np.ndarray, rows: Any, row: int) -> None:
    """Nothing is known yet."""
    out, begin, high = rows.position[row], rows.begin[row], rows.high[row]
    flat[out + begin : out + high] = np.inf
    rows.marks[(out + begin) // CHUNK : chunks(out + high)] = np.inf


@compiled()
def continue_row(flat: np.ndarray, rows: Any, width: int, row: int) -> None:
    """The row is complete."""
    out, begin, high = rows.position[row], rows.begin[row], rows.high[row]
    stored = rows.final[row] == 0
    if not stored and begin < high:
        rows.final[row] = flat[out + high - 1]
    end = chunks(out + high) * CHUNK + BEYOND
    flat[out + high : end] = rows.final[row]
    for chunk in range((out + begin) // CHUNK, end // CHUNK):
        rows.marks[chunk] = flat[chunk * CHUNK + CHUNK - 1]
    begin = first_at_most(flat, out, begin, high, rows.limit[row])
    rows.begin[row] = begin if stored or begin < high else width


@compiled()
def first_at_most(flat: np.ndarray, out: int, low: int, high: int, value: float) -> int:
    """The first m in [low, high) with flat[out + m] ≤ value, else high; flat[out:] does not increase."""
    while low < high:
        middle = (low + high) // 2
        if flat[out + middle] <= value:
            high = middle
        else:
            low = middle + 1
    return low


@compiled()
def split(
    flat: np.ndarray, rows: Any, row: int, left: int, right: int, shift: int, low: int, high: int, time: Any
) -> None:
    """Let slots low … high-1 of `row` profit from a checkpoint, at whose row `right` there are `shift` slots less.

    The part before the checkpoint is the row `left`.
    """
    out, left_at, right_at = rows.position[row], rows.position[left], rows.position[right] - shift
    begin = rows.begin[row]
    left_high, right_high = rows.high[left], rows.high[right] + shift
    both = max(low, min(high, left_high, right_high))
    one = max(both, min(high, max(left_high, right_high)))
    if low < both:
        lower_by_both(flat, rows.marks, out, left_at, right_at, begin, low, both, time)
    if both < one:
        if left_high < right_high:
            lower_by(flat, rows.marks, out, right_at, begin, both, one, rows.final[left], time)
        else:
            lower_by(flat, rows.marks, out, left_at, begin, both, one, rows.final[right], time)
    if one < high:
        lower_to(flat, rows.marks, out, one, high, time + (rows.final[left] + rows.final[right]))


@compiled()
def need_of(costs: Any, grid: Any, state: int, i: int, last: int, k: int) -> int:
    """Bytes that a run of stage i with a graph and its backward need themselves, in the row of [i, last]."""
    row = 0 if last == len(costs.run) - 1 else 1
    return int(max(grid.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i]))


@compiled()
def enable(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, k: int) -> None:
    """Let the row (s, last) profit from running its stage with a graph by option k."""
    i, state, width = grid.place[s], grid.state[s], grid.width
    low = max(rows.begin[row], slot_of(need_of(costs, grid, state, i, last, k), grid.unit, grid.offset[s]))
    high, out, seconds = rows.high[row], rows.position[row], flat.dtype.type(costs.extra[k])
    stored = low
    if last > i:
        following = grid.node[1, i + 1]
        follow = grid.row[following, last]
        shift = (costs.taken[state, k] + grid.offset[following] - grid.offset[s]) // grid.unit
        if rows.begin[follow] >= width:
            return
        low = max(low, shift + rows.begin[follow])
        stored = max(low, min(high, rows.high[follow] + shift))
        nothing, source = flat.dtype.type(0), rows.position[follow] - shift
        if low < stored:
            lower_by(flat, rows.marks, out, source, rows.begin[row], low, stored, nothing, seconds)
        seconds += rows.final[follow]
    lower_to(flat, rows.marks, out, stored, high, seconds)


@compiled()
def store_up_to(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, stop: int) -> None:
    """Let the row (s, last) profit from storing all stages before `stop`, from where on rows are complete."""
    low, total, node = rows.begin[row], 0, s
    while grid.place[node] < stop:
        i, state = grid.place[node], grid.state[node]
        k, following = grid.fastest[i], grid.node[1, i + 1]
        low = max(low, total + slot_of(need_of(costs, grid, state, i, last, k), grid.unit, grid.offset[node]))
        shift = (costs.taken[state, k] + grid.offset[following] - grid.offset[node]) // grid.unit
        if shift < 0:  # there would be more memory than in the last slot
            return
        total += shift
        node = following
    follow = grid.row[node, last]
    if rows.begin[follow] >= grid.width:
        return
    low, out, nothing = max(low, total + rows.begin[follow]), rows.position[row], flat.dtype.type(0)
    high = max(low, min(rows.high[row], total + rows.high[follow]))
    if low < high:
        source = rows.position[follow] - total
        lower_by(flat, rows.marks, out, source, rows.begin[row], low, high, nothing, nothing)
    lower_to(flat, rows.marks, out, high, rows.high[row], rows.final[follow])


@compiled()
def tile(flat: np.ndarray, rows: Any, costs: Any, grid: Any, top: int, side: int) -> int:
    """All rows (s, l) with i in the block from stage `top` on, and l in the block from `side` on, l < L.

    First the checkpoints at a_j between the two blocks, for which all is complete, a block of them at a time, so that
    rows stay in cache; then the rest in order. Returns how many pairs of slots were looked at.
    """
    length = len(grid.band)
    bottom, end = min(top + BLOCK, length), min(side + BLOCK, length)
    s0, s1 = grid.node[0, top], grid.node[0, bottom]
    pairs = 0
    for s in range(s1 - 1, s0 - 1, -1):
        i = grid.place[s]
        for row in range(first_row(grid, s, side), first_row(grid, s, end)):
            last = grid.last[row]
            if rows.limit[row] < 0:
                continue
            begin_row(flat, rows, row)
            if side > top and i + 1 < bottom:  # a bound to begin with
                store_up_to(flat, rows, costs, grid, s, row, last, bottom)
    for first in range(bottom, side + 1, BLOCK):
        for s in range(s0, s1):
            for row in range(first_row(grid, s, side), first_row(grid, s, end)):
                if rows.limit[row] >= 0:
                    last = grid.last[row]
                    pairs += checkpoints(flat, rows, costs, grid, s, row, last, first, min(first + BLOCK - 1, side))
    for s in range(s1 - 1, s0 - 1, -1):
        i = grid.place[s]
        for row in range(first_row(grid, s, side), first_row(grid, s, end)):
            last = grid.last[row]
            if rows.limit[row] < 0:
                continue
            if side > top:
                pairs += checkpoints(flat, rows, costs, grid, s, row, last, side + 1, last)
            pairs += complete_row(flat, rows, costs, grid, s, row, last, min(bottom, last + 1))
    return pairs


@compiled()
def checkpoints(
    flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, first: int, stop: int
) -> int:
    """Let the row (s, last) profit from checkpoints at a_j for first ≤ j ≤ stop; how many pairs were looked at."""
    i, offset, width, begin = grid.place[s], grid.offset[s], grid.width, rows.begin
    out, pairs, most, lefts, rights = rows.position[row], 0, rows.high[row], grid.row[s], grid.after[last]
    for j in range(first, min(stop, grid.band[i] + 1) + 1):
        floor = costs.split_floor[j] - costs.run[i]
        if floor > rows.limit[row]:
            break
        seconds, fewest = flat.dtype.type(costs.split[j] - costs.run[i]), flat.dtype.type(floor)
        left, right = lefts[j - 1], rights[j]
        shift = grid.slots[j] - (1 if grid.remainder[j] < offset else 0)
        low = max(begin[row], begin[left], begin[right] + shift)
        need = grid.base[last] + costs.check_need[i, j]
        if low * grid.unit + offset < need:
            low = slot_of(need, grid.unit, offset)
        if begin[left] >= width or begin[right] >= width:
            low = most
        while most > low and rows.marks[(out + most - 1) // CHUNK] <= fewest:
            most = (most - 1) // CHUNK * CHUNK
        if low < most:
            pairs += most - low
            split(flat, rows, row, left, right, shift, low, most, seconds)
    return pairs


@compiled()
def fill(flat: np.ndarray, rows: Any, costs: Any, grid: Any, begin: int, end: int) -> int:
    """Opt(i, l, m), less the time of storing everything, for all intervals and m in slots:

        Opt(L, L, m) = 0                                                if m ≥ loss_need
        Opt(i, l, m) = the least of
          extra_k + Opt'(i+1, l, m - taken_k)                           if m ≥ base_l + forward_need_k
            for every option k; Opt'(i+1, i, ·) is 0                    and m ≥ backward_need_k - released_i
          split_j - run_i + Opt(j, l, m - |a_j|) + Opt(i, j-1, m)        if m ≥ base_l + check_need_ij, for i < j ≤ l

    Opt' is Opt in state 1. Sizes taken from m are rounded down, so that the table is a lower bound.

    Times above rows.limit count as infinite: `bounds` has taken from the cut what is certain about the context. Where
    l < L, the stages of [i, l] have run forward without a graph before, and those after l take at least later[l+1]
    longer than stored.

    This fills the tiles whose blocks of stages are `begin` to `end` - 1 apart, for which those that are less far apart
    are needed; at last, `fill_tails` does the rest. Returns how many pairs of slots were looked at.
    """
    blocks, pairs = (len(grid.band) + BLOCK - 1) // BLOCK, 0
    for distance in range(begin, end):
        for block in range(blocks - distance):
            pairs += tile(flat, rows, costs, grid, block * BLOCK, (block + distance) * BLOCK)
    return pairs


@compiled(parallel=True)
def fill_in_parallel(flat: np.ndarray, rows: Any, costs: Any, grid: Any, begin: int, end: int) -> int:
    """What `fill` does, on all cores."""
    blocks, pairs = (len(grid.band) + BLOCK - 1) // BLOCK, 0
    for distance in range(begin, end):
        for block in prange(blocks - distance):
            pairs += tile(flat, rows, costs, grid, block * BLOCK, (block + distance) * BLOCK)
    return pairs


@compiled()
def fill_shared(flat: np.ndarray, rows: Any, costs: Any, grid: Any, owner: np.ndarray, begin: int, end: int) -> int:
    """What `fill` does, where few rows are different: each row has the values of the row owner[row].

    Rows are computed in the order of their lengths, here those of intervals [i, l] with begin ≤ l - i < end.
    """
    length, pairs = len(grid.band), 0
    for distance in range(begin, end):
        for s in range(len(grid.place) - 1):
            i = grid.place[s]
            last = i + distance
            row = grid.row[s, last] if i < length and last <= grid.band[i] else -1
            if row >= 0 and grid.last[row] == last and owner[row] == row and rows.limit[row] >= 0:
                pairs += fill_row(flat, rows, costs, grid, s, row, last)
        for s in range(len(grid.place) - 1):
            i = grid.place[s]
            last = i + distance
            row = grid.row[s, last] if i < length and last <= grid.band[i] else -1
            if row >= 0 and grid.last[row] == last:
                rows.begin[row], rows.final[row] = rows.begin[owner[row]], rows.final[owner[row]]
    return pairs


@compiled()
def fill_row(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int) -> int:
    """The whole row (s, last), where all that it needs is complete."""
    begin_row(flat, rows, row)
    return complete_row(flat, rows, costs, grid, s, row, last, last + 1)


@compiled()
def complete_row(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, stop: int) -> int:
    """What is left of the row (s, last) where checkpoints from `stop` on have been looked at."""
    i = grid.place[s]
    for k in range(costs.first[i], costs.first[i + 1]):
        enable(flat, rows, costs, grid, s, row, last, k)
    pairs = checkpoints(flat, rows, costs, grid, s, row, last, i + 1, stop - 1)
    continue_row(flat, rows, grid.width, row)
    return pairs


@compiled()
def fill_tails(flat: np.ndarray, rows: Any, costs: Any, grid: Any) -> None:
    """The rows that end at the loss, from the last to the first."""
    length, nodes = len(grid.band), len(grid.place)
    continue_row(flat, rows, grid.width, grid.tail + nodes - 1)  # the loss: stored whole from the first slot on
    for s in range(nodes - 2, -1, -1):
        if rows.limit[grid.tail + s] >= 0:
            fill_row(flat, rows, costs, grid, s, grid.tail + s, length)


@compiled(parallel=True)
def fill_tails_in_parallel(flat: np.ndarray, rows: Any, costs: Any, grid: Any) -> None:
    """What `fill_tails` does, on all cores.

    A block of stages at a time: first the checkpoints after it, for which all is complete; then, on one core, the rest.
    """
    length, nodes = len(grid.band), len(grid.place)
    continue_row(flat, rows, grid.width, grid.tail + nodes - 1)
    for bottom in range(length, 0, -BLOCK):
        s0, s1 = grid.node[0, max(0, bottom - BLOCK)], grid.node[0, bottom]
        for s in prange(s0, s1):
            if rows.limit[grid.tail + s] >= 0:
                begin_row(flat, rows, grid.tail + s)
                checkpoints(flat, rows, costs, grid, s, grid.tail + s, length, bottom, length)
        for s in range(s1 - 1, s0 - 1, -1):
            if rows.limit[grid.tail + s] >= 0:
                complete_row(flat, rows, costs, grid, s, grid.tail + s, length, bottom)


@compiled(makes_arrays=True)
def windows_of(flat: np.ndarray, rows: Any, owner: np.ndarray, costs: Any, grid: Any, cut: float) -> Any:
    """(low, high, outside) by row: the slots in which a plan that takes at most `cut` may have its interval.

    They are low … high-1, and those from rows.high on where high > rows.high; none where `outside` is infinite.
    `outside` is the least time that all of such a plan takes outside the interval.

    From the whole to the parts: with out(i, l, m) for the least time outside [i, l] if [i, l] has at least m,

        out(0, L, all) = 0
        out(i+1, l, m - taken_k) ≤ out(i, l, m) + extra_k
        out(j, l, m - |a_j|)     ≤ out(i, l, m) + run_j - run_i + Opt(i, j-1, m)
        out(i, j-1, m)           ≤ out(i, l, m) + run_j - run_i + Opt(j, l, m - |a_j|)

    under the conditions of `fill`. Slot rows.high of a row stands for all slots from there on.
    """
    length, tail = len(grid.band), grid.tail
    out = np.empty_like(flat)  # a row's part is set when it is first needed
    low, high = np.zeros(len(rows.begin), np.int64), np.zeros(len(rows.begin), np.int64)
    least = np.full(len(rows.begin), np.inf, np.float64)
    loss = tail + len(grid.place) - 1
    low[loss], high[loss], least[loss] = rows.begin[loss], rows.high[loss] + 1, 0
    needed = np.zeros(len(rows.begin), np.bool_)
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
    """Complete out(s, last, ·), note what is of use, and let the parts of the interval profit."""
    i, state = grid.place[s], grid.state[s]
    begin, end, at = rows.begin[row], rows.high[row], rows.position[row]
    if begin >= grid.width:
        return
    low, high = end, end
    whole = end < grid.width and rows.final[row] == 0 and out[at + end] <= cut
    for m in range(end - 1, begin - 1, -1):
        out[at + m] = min(out[at + m], out[at + m + 1])
        if out[at + m] + flat[at + m] <= cut:
            if low == end and not whole:
                high = m + 1
            low = m
    if low == end and not whole:
        return
    high += whole  # the first slot in which all is stored also stands for less memory, in which it is not
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
            for m in range(first, stop):
                there = rows.position[part] + m - shift
                out[there] = min(out[there], out[at + m] + costs.extra[k])
            if stop < high:
                there = rows.position[part] + rows.high[part]
                out[there] = min(out[there], out[at + stop] + costs.extra[k])
    for j in range(i + 1, min(last, grid.band[i] + 1) + 1):
        floor = costs.split_floor[j] - costs.run[i]
        if floor + out[at + low] > cut or floor > rows.limit[row]:
            break
        node = grid.node[0, j]
        left, right = grid.row[s, j - 1], grid.row[node, last]
        shift = grid.slots[j] - (1 if grid.remainder[j] < grid.offset[s] else 0)
        if rows.begin[left] < grid.width and rows.begin[right] < grid.width:
            first = max(low, rows.begin[left], rows.begin[right] + shift)
            first = max(first, slot_of(grid.base[last] + costs.check_need[i, j], grid.unit, grid.offset[s]))
            seconds = flat.dtype.type(costs.split[j] - costs.run[i])
            hand_to_both(flat, out, rows, owner, needed, at, left, right, shift, first, high, seconds, cut)


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
    """At most the least out[whole + m] + flat[other + m] for 0 ≤ m < count."""
    least = flat.dtype.type(np.inf)
    for m in range(0, count, STEP):  # `out` increases, `flat` decreases
        least = min(least, out[whole + m] + flat[other + min(m + STEP, count) - 1])
    return least


@compiled()
def need_row(out: np.ndarray, rows: Any, needed: np.ndarray, row: int) -> None:
    """Nothing is known about the row so far."""
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
    """Let both parts of an interval profit from its slots low … high-1; its row of `out` begins at `at`."""
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
def least_of_three(out: np.ndarray, flat: np.ndarray, whole: int, first: int, second: int, count: int) -> Any:
    """At most the least out[whole + m] + flat[first + m] + flat[second + m] for 0 ≤ m < count."""
    least = flat.dtype.type(np.inf)
    for m in range(0, count, STEP):  # `out` increases, `flat` decreases
        end = min(m + STEP, count) - 1
        least = min(least, out[whole + m] + flat[first + end] + flat[second + end])
    return least
