"""Kernels that fill a table of the persistent program. `program.optimum` states the recurrence in thirty lines.

Arguments of the kernels:

    flat   [size] the numbers of all rows, one row after the other, in float64 or float32
    rows   a `layout.Rows`: where each row lies in `flat`, its slots, and the time beyond its last slot
    costs  a `least_memory.Costs`, its times in the unit of the table
    grid   a `layout.Grid`: the intervals that have rows, and the bytes that their slots stand for
    s      a node: a stage i = grid.place[s], and the state grid.state[s] of its input
    row    the number of a row; `last` is the stage l at which its interval [i, l] ends
    m      a slot of a row

The interval [i, l] has two states: in state 0, a_i stands alone, or costs the same as alone; in state 1, it lies in the
ā_i of the stage before. Times are those beyond storing everything.

# Note [Rows, chunks and windows]

Example: a chain of five stages with forwards of 1, 2, 3, 2, 1 seconds and backwards twice as long, which save 24, 40,
16, 32, 24 bytes. Every a_i has 8 bytes. In addition to a_0 there are 96 bytes, in slots of 4.
tests/solver/persistent/test_table.py checks the numbers.

 1. Slot m of a row stands for m · unit + offset bytes. Every node has its own offset, such that the fastest option
    takes a whole number of slots from its row to the next. Here all sizes are multiples of 4, and all offsets 0. If
    stage 0 saved 25 bytes, the offsets of later stages would be 3: with 4 m bytes for [0, l], Fe_0 leaves 4 m - 25 = 4
    (m - 7) + 3 for [1, l], its slot m - 7. All other sizes taken are rounded down to slots. So the table never has less
    memory than there is, and its times are lower bounds.
 2. A row holds few slots. Below `begin`, the interval cannot run, or takes too long to be of use. From `high` on the
    time is `final`: 0 where everything is stored, else the time of the last useful slot. Times never increase from slot
    to slot. Of the 21 rows of the example:

        [i, l]  begin  high  final  seconds, from slot
        [0, 0]     10    10      0  none
        [0, 1]     16    20      0  1 from 16
        [0, 2]     16    24      0  3 from 16, 1 from 20
        [2, 5]     14    22      0  5 from 14, 2 from 16
        [3, 5]     12    18      0  2 from 12
        [4, 5]     10    10      0  none
        [0, 5]     16    26      3  9 from 16, 6 from 18, 5 from 20, 3 from 24

    [0, 5] in slot 24, all 96 bytes: a checkpoint at a_2, after 1 + 2 seconds; then [2, 5] with 8 bytes less, in slot
    22, and [0, 1] in slot 24, both at no extra time. Stored whole, [0, 5] would take 152 bytes, more than there are.
 3. Slot m of a row is flat[position + m]. Positions are multiples of CHUNK, and the last chunk of a row is followed by
    BEYOND copies of `final`. Each row of the example lies in one chunk, and has 32 + 64 numbers; [0, 1] is at position
    96, and its four slots are flat[112] to flat[115].
 4. `marks` has a number for every chunk of `flat`. While a row is filled, it is at least the first number of the chunk,
    the largest; once the row is complete, it is the last one, the least. A checkpoint at a_j would give the last slot
    of a chunk forwards + right + left, by the marks of the complete rows [j, l] and [i, j-1], and no slot of the chunk
    less. If that is at least the chunk's first number so far, no slot can gain: one comparison for 32 slots. With slots
    of 1 byte, [0, 5] has the slots 64 to 97, in two chunks. Once the checkpoints at a_1 and a_2 have been tried, the
    marks of these chunks are 9 and 3, and the other checkpoints change nothing:

        a_3  chunk 64: 6 + 0 + 1 = 7 < 9, computed      chunk 96: the forwards alone take 6 ≥ 3, not even compared
        a_4  chunk 64: 8 + 0 + 3 = 11 ≥ 9, skipped      chunk 96: 8 ≥ 3, not compared
        a_5  chunk 64: 9 ≥ 9, not compared              chunk 96: 9 ≥ 3, not compared

    [i, j-1] has the slots of [i, l], and so its chunks. The slots of [j, l] are shifted, and chunks begin elsewhere;
    the mark of the chunk that ends after ours belongs to a later slot, which is no greater: still a bound.
 5. A window is the range of slots in which a plan that is no slower than the best known one can have an interval. The
    table has the time inside. The time outside is passed down from the whole to the parts (`windows.windows_of`). If
    both together exceed the known plan, no better plan has that interval in that slot, and the next, finer table may
    count it as infinite. If the plan that takes 3 seconds longer is known, 7 of the 21 rows have a window: [0, 1] from
    77 bytes on, [1, 1] from 53, [2, 5] from 85, [3, 5] from 69, [4, 5] from 37, the loss from 5, and [0, 5] from 93 to
    100. [0, 2] has none: wherever it occurs, stages 0 to 2 are recomputed, which takes 6 seconds. The next table, with
    slots of 1 byte, has 14 numbers; without windows it would have 172.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled, prange

BLOCK = 24
"""Stages of a tile. Measured on one core, for 500 different stages a tenth of the way from the least limit to storing
all, and for 1000 a twentieth of the way: 0.25 and 0.87 seconds with 16, 0.24 and 0.83 with 24, 0.25 and 0.87 with 32.
Least of several runs on a busy machine: a few percent mean nothing."""
CHUNK = 32
"""Slots to a mark; a chunk begins at a multiple of it. Measured like BLOCK, with as many LANES: 0.24 and 0.90 seconds
with 16, 0.24 and 0.83 with 32, 0.23 and 0.87 with 64: it hardly matters."""
LANES = 32
"""Inner loops run a multiple of this many times, so that vector instructions have no remainder. It must be a multiple
of CHUNK, or rows would not begin where chunks do. With 64, and chunks of 32: 0.24 and 0.86 seconds."""
BEYOND = CHUNK + LANES
"""Copies of `final` after the last chunk of a row, so that inner loops may run past its end. They read correct values
there. They write values that are overwritten before they are read: `continue_row` completes the row."""


# Costs of one operation


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


# Filling rows


@compiled()
def lower_by_both(
    flat: np.ndarray, marks: np.ndarray, out: int, left: int, right: int, begin: int, low: int, high: int, seconds: Any
) -> None:
    """flat[out + m] = min(flat[out + m], seconds + (flat[left + m] + flat[right + m])) for low ≤ m < high, and beyond.

    `out`, `left` and `right` are the positions of slot 0 of three rows in `flat`, `right` as seen from `out`: less the
    slots that the checkpoint takes. The row `out` begins at slot `begin`; it is being filled, the others are complete.
    """
    chunk = low // CHUNK  # Rule 4
    count = chunks(high) - chunk
    own, first, second = out // CHUNK + chunk, left // CHUNK + chunk, chunks(right) + chunk
    # More than half of all checkpoints end here (1000 different stages), so a loop without branches first tests all
    # chunks at once.
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
    """Whether any chunk of `count` can gain, from the marks at `own`, `left` and `right` on.

    Sums are in the order of `lower_slots_by_both`. Rounding is monotone: a claim about the last slot of a chunk holds
    for the others also after rounding.
    """
    # Unsigned indices: with signed ones, Numba checks at every access whether to count from the end of the array, and
    # the loop does not vectorize. The same in all inner loops.
    target, left, right, found = np.uintp(own), np.uintp(first), np.uintp(second), 0
    for each in range(count):
        c = np.uintp(each)
        found |= seconds + (marks[left + c] + marks[right + c]) < marks[target + c]
    return found != 0


@compiled()
def lower_slots_by_both(flat: np.ndarray, out: int, left: int, right: int, count: int, seconds: Any) -> None:
    """Slots 0 ≤ m < count of `lower_by_both`, and up to LANES - 1 more, with equally correct values.

    Their marks stay unchanged: still at least the first number of a chunk.
    """
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

    For slots in which one of two parts is at its `final`, or in which there is only one part, with `final` = 0. As
    `source` may be a shifted row, its marks are those of chunks that end no earlier than ours.
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
def lower_to(flat: np.ndarray, marks: np.ndarray, out: int, low: int, high: int, value: Any) -> None:
    """flat[out + m] = min(flat[out + m], value) for low ≤ m < high: both parts are at their `final`."""
    for m in range(low, high):
        flat[out + m] = min(flat[out + m], value)
    # A chunk that begins before `low` keeps its mark, since its first number is unchanged.
    for chunk in range(chunks(out + low), chunks(out + high)):
        marks[chunk] = min(marks[chunk], value)


@compiled()
def split(
    flat: np.ndarray, rows: Any, row: int, left: int, right: int, shift: int, low: int, high: int, time: Any
) -> None:
    """Lower slots low … high-1 of `row` by a checkpoint, at whose row `right` there are `shift` slots less.

    `left` is the row of the part before the checkpoint. Slots come in three parts: in the first, both rows have numbers
    of their own; in the second, one of them is at its `final`; in the last, both are.
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
def enable(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, k: int) -> None:
    """Lower the row (s, last) by running its stage with a graph by option k: Fe_i, [i+1, last], B_i."""
    i, state, width = grid.place[s], grid.state[s], grid.width
    low = max(rows.begin[row], slot_of(need_of(costs, grid, state, i, last, k), grid.unit, grid.offset[s]))
    high, out, seconds = rows.high[row], rows.position[row], flat.dtype.type(costs.extra[k])
    stored = low  # first slot at which the next row is at its `final`
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
    """Lower the row (s, last) by storing all stages before `stop`; rows from `stop` on are complete.

    With enough memory, this is nearly the best, and known before anything else of the row: checkpoints then gain
    little, and marks rule out most of them.
    """
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
def checkpoints(
    flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, first: int, stop: int
) -> int:
    """Lower the row (s, last) by checkpoints at a_j for first ≤ j ≤ stop; return the number of pairs visited.

    `most` is the first slot from which on no checkpoint gains anything: it starts at the end of the row and only falls.
    """
    i, offset, width, begin = grid.place[s], grid.offset[s], grid.width, rows.begin
    out, pairs, most, lefts, rights = rows.position[row], 0, rows.high[row], grid.row[s], grid.after[last]
    for j in range(first, min(stop, grid.band[i] + 1) + 1):
        # The forwards up to a_j take split[j] - run[i]. A later j may take less, as its stage j-1 skips its output;
        # `split_floor` is the least of all that follow, so that later checkpoints take at least as long.
        floor = costs.split_floor[j] - costs.run[i]
        if floor > rows.limit[row]:
            break
        # In the type of the table: a float64 would widen the inner loops on a table in single precision.
        seconds, fewest = flat.dtype.type(costs.split[j] - costs.run[i]), flat.dtype.type(floor)
        left, right = lefts[j - 1], rights[j]
        # ⌊(|a_j| + the offset of j's rows - offset) / unit⌋, without a division.
        shift = grid.slots[j] - (1 if grid.remainder[j] < offset else 0)
        low = max(begin[row], begin[left], begin[right] + shift)
        need = grid.base[last] + costs.check_need[i, j]
        if low * grid.unit + offset < need:  # a multiplication in the common case, a division in the other one
            low = slot_of(need, grid.unit, offset)
        if begin[left] >= width or begin[right] >= width:
            low = most
        # Chunks that are already as fast as the forwards alone: neither this checkpoint nor a later one helps there.
        while most > low and rows.marks[(out + most - 1) // CHUNK] <= fewest:
            most = (most - 1) // CHUNK * CHUNK
        if low < most:
            pairs += most - low
            split(flat, rows, row, left, right, shift, low, most, seconds)
    return pairs


@compiled()
def fill_row(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int) -> int:
    """Fill the whole row (s, last), once all rows that it needs are complete."""
    begin_row(flat, rows, row)
    return complete_row(flat, rows, costs, grid, s, row, last, last + 1)


@compiled()
def complete_row(flat: np.ndarray, rows: Any, costs: Any, grid: Any, s: int, row: int, last: int, stop: int) -> int:
    """Complete the row (s, last) after its checkpoints from `stop` on."""
    i = grid.place[s]
    for k in range(costs.first[i], costs.first[i + 1]):
        enable(flat, rows, costs, grid, s, row, last, k)
    pairs = checkpoints(flat, rows, costs, grid, s, row, last, i + 1, stop - 1)
    continue_row(flat, rows, grid.width, row)
    return pairs


# Beginning and completing rows, and their marks


@compiled()
def whole_lanes(count: int) -> int:
    """Round `count` up, so that a vectorized loop has no remainder."""
    return (count + LANES - 1) // LANES * LANES


@compiled()
def chunks(count: int) -> int:
    """`count` slots in chunks, rounded up."""
    return (count + CHUNK - 1) // CHUNK


@compiled()
def begin_row(flat: np.ndarray, rows: Any, row: int) -> None:
    """Set all numbers of a row and their marks to infinity."""
    out, begin, high = rows.position[row], rows.begin[row], rows.high[row]
    flat[out + begin : out + high] = np.inf
    rows.marks[(out + begin) // CHUNK : chunks(out + high)] = np.inf


@compiled()
def continue_row(flat: np.ndarray, rows: Any, width: int, row: int) -> None:
    """Complete a row: continue it beyond its end, mark its chunks by their last numbers, and find its begin.

    Times above rows.limit are of no use. A row with no useful time begins at `width`: it has no slots.
    """
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
def set_marks(flat: np.ndarray, marks: np.ndarray, begin: int, first: int, stop: int) -> None:
    """Mark chunks first … stop-1 by their first number, in a row that begins at flat[begin] and is not complete."""
    marks[first] = flat[max(begin, first * CHUNK)]
    for chunk in range(first + 1, stop):
        marks[chunk] = flat[chunk * CHUNK]


# Tiles: all rows in order


@compiled()
def fill(flat: np.ndarray, rows: Any, costs: Any, grid: Any, begin: int, end: int) -> int:
    """Fill Opt(i, l, m), less the time of storing everything, for all intervals and m in slots:

        Opt(L, L, m) = 0                                                if m ≥ loss_need
        Opt(i, l, m) = the least of
          extra_k + Opt'(i+1, l, m - taken_k)                           if m ≥ base_l + forward_need_k
            for every option k; Opt'(i+1, i, ·) is 0                    and m ≥ backward_need_k - released_i
          split_j - run_i + Opt(j, l, m - |a_j|) + Opt(i, j-1, m)        if m ≥ base_l + check_need_ij, for i < j ≤ l

    Opt' is Opt in state 1. Sizes taken from m are rounded down, so that the table is a lower bound: a plan of real
    sizes is still a plan with a little more memory at every step.

    Only the excess over storing everything is tabulated: stored intervals need no numbers, and single precision tells
    plans apart. Its rounding errors are subtracted from the bound (`table.Table.lower_bound`), and the simulator
    recomputes the time of the resulting sequence.

    Times above rows.limit count as infinite: `table_kernels.bounds` has subtracted the certain time of the context from
    the cut. Where l < L, the stages of [i, l] have run forward without a graph before, and those after l take at least
    later[l+1] longer than stored.

    Fills the tiles whose blocks of stages are `begin` to `end` - 1 apart, which need those less far apart; `fill_tails`
    does the rest. Returns the number of pairs of slots visited.
    """
    blocks, pairs = (len(grid.band) + BLOCK - 1) // BLOCK, 0
    for distance in range(begin, end):
        for block in range(blocks - distance):
            pairs += tile(flat, rows, costs, grid, block * BLOCK, (block + distance) * BLOCK)
    return pairs


@compiled(parallel=True)
def fill_in_parallel(flat: np.ndarray, rows: Any, costs: Any, grid: Any, begin: int, end: int) -> int:
    """`fill` on all cores: tiles of one distance do not need each other."""
    blocks, pairs = (len(grid.band) + BLOCK - 1) // BLOCK, 0
    for distance in range(begin, end):
        for block in prange(blocks - distance):
            pairs += tile(flat, rows, costs, grid, block * BLOCK, (block + distance) * BLOCK)
    return pairs


@compiled()
def tile(flat: np.ndarray, rows: Any, costs: Any, grid: Any, top: int, side: int) -> int:
    """Fill all rows (s, l) with i in the block from stage `top` on, and l in the block from `side` on, l < L.

    As in a matrix product by blocks. First the checkpoints at a_j between the two blocks: [i, j-1] and [j, l] lie in
    complete tiles. They come a block at a time, for all rows of the tile: its rows stay in cache, and all rows of the
    tile use each row of a block. Then the checkpoints inside the blocks, which need rows of this tile: [j, l] for a
    later j, hence stages from the last to the first; [i, j-1] for an earlier end, hence rows from the shortest to the
    longest. Returns the number of pairs of slots visited.
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
            if side > top and i + 1 < bottom:
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
def first_row(grid: Any, s: int, last: int) -> int:
    """The first row of node s that ends at stage `last` or later, or the one after all its rows."""
    i = grid.place[s]
    before = min(last, grid.band[i] + 1) - 1
    return int(grid.row[s, before] + 1 if before >= i else grid.start[s])


@compiled()
def fill_shared(flat: np.ndarray, rows: Any, costs: Any, grid: Any, owner: np.ndarray, begin: int, end: int) -> int:
    """`fill` where few rows are different: each row has the values of the row owner[row].

    Rows are computed in the order of their lengths, here for intervals [i, l] with begin ≤ l - i < end. Not by tiles:
    an owner may lie anywhere in the chain, and must be complete before a row that shares its numbers is used.
    """
    length, pairs = len(grid.band), 0
    for distance in range(begin, end):
        for s in range(len(grid.place) - 1):
            i = grid.place[s]
            last = i + distance
            row = grid.row[s, last] if i < length and last <= grid.band[i] else -1
            if row >= 0 and grid.last[row] == last and owner[row] == row and rows.limit[row] >= 0:
                pairs += fill_row(flat, rows, costs, grid, s, row, last)
        for s in range(len(grid.place) - 1):  # only `begin` and `final` changed: the rest was shared from the start
            i = grid.place[s]
            last = i + distance
            row = grid.row[s, last] if i < length and last <= grid.band[i] else -1
            if row >= 0 and grid.last[row] == last:
                rows.begin[row], rows.final[row] = rows.begin[owner[row]], rows.final[owner[row]]
    return pairs


# Tails: the rows that end at the loss


@compiled()
def fill_tails(flat: np.ndarray, rows: Any, costs: Any, grid: Any) -> None:
    """Fill the rows that end at the loss, from the last to the first: each needs those of all later stages.

    They need all other rows too, and only they need each other: so they come last, and not in tiles.
    """
    length, nodes = len(grid.band), len(grid.place)
    continue_row(flat, rows, grid.width, grid.tail + nodes - 1)  # the loss: stored whole from the first slot on
    for s in range(nodes - 2, -1, -1):
        if rows.limit[grid.tail + s] >= 0:
            fill_row(flat, rows, costs, grid, s, grid.tail + s, length)


@compiled(parallel=True)
def fill_tails_in_parallel(flat: np.ndarray, rows: Any, costs: Any, grid: Any) -> None:
    """`fill_tails` on all cores.

    A block of stages at a time: first the checkpoints after it, whose rows are complete; then the rest, on one core.
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
