"""Fill small tables without compiled kernels, in NumPy: the same numbers to the last bit.

`fill` replaces the kernels `fill`, `fill_shared` and `fill_tails`, one checkpoint of one row at a time; sums are in the
same order. `kernels` defines rows and slots, and has the recurrence in the docstring of `fill`. `plain_windows` is
`windows` as plain Python, with inner loops in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from rotor_solver.jit_policy import plain_python
from rotor_solver.least_memory import Costs, Floats, Ints
from rotor_solver.persistent.layout import Grid, Rows

_ROW, _CHECKPOINT, _PAIR = 1.2e-5, 4.5e-6, 1.5e-9
"""Seconds for a row, for a checkpoint of it, and for a pair of slots. Measured for chains of 20 to 100 stages."""


def seconds_for(rows: float, checkpoints: float, pairs: float) -> float:
    """Estimate the seconds to fill `rows` rows with `checkpoints` checkpoints and `pairs` pairs of slots."""
    return _ROW * rows + _CHECKPOINT * checkpoints + _PAIR * pairs


def fill(
    flat: Floats, rows: Rows, costs: Costs, grid: Grid, owner: Ints | None, portions: Iterable[tuple[int, int]]
) -> int:
    """Complete all rows, from short to long; return the number of pairs of slots visited.

    owner[row] is the row whose numbers a row shares; None if every row has its own. `portions` are those of
    `table.portions`, with blocks of one stage.
    """
    filler, length = RowFiller(flat, rows, costs, grid), len(grid.band)
    filler.finish(grid.tail + len(grid.place) - 1, np.empty(0))  # the loss: stored whole from the first slot on
    places, pairs = grid.place[:-1], 0
    for begin, end in portions:
        for distance in range(begin, end):
            lasts = places + distance
            nodes = np.flatnonzero((lasts < length) & (lasts <= grid.band[places]))
            found = grid.row[nodes, lasts[nodes]]
            nodes, found = nodes[ended := grid.last[found] == lasts[nodes]], found[ended]
            for s, row in zip(nodes.tolist(), found.tolist(), strict=True):
                if owner is None or owner[row] == row:
                    pairs += filler.complete(s, row, filler.place[s] + distance)
            if owner is not None:  # only `begin` and `final` changed: the rest was shared from the start
                for row in found.tolist():
                    filler.begin[row], filler.final[row] = filler.begin[owner[row]], filler.final[owner[row]]
    for s in range(len(places) - 1, -1, -1):
        filler.complete(s, grid.tail + s, length)
    rows.begin[:], rows.final[:] = filler.begin, filler.final
    return pairs


class RowFiller:
    """Completes rows one by one. All numbers but `flat` are in lists: Python reads them much faster than arrays."""

    def __init__(self, flat: Floats, rows: Rows, costs: Costs, grid: Grid) -> None:
        self.begin, self.high, self.position, self.limit, self.final, _ = (each.tolist() for each in rows)
        self.place, self.state, self.offset = grid.place.tolist(), grid.state.tolist(), grid.offset.tolist()
        self._flat, self._unit, self._width = flat, grid.unit, grid.width
        self._band, self._bases, self._node = grid.band.tolist(), grid.base.tolist(), grid.node.tolist()
        self._slots, self._remainder = grid.slots.tolist(), grid.remainder.tolist()
        self._row, self._after = grid.row.tolist(), grid.after.tolist()
        self._run, self._forwards, self._floor = (each.tolist() for each in (costs.run, costs.split, costs.split_floor))
        self._first, self._extra, self._taken = costs.first.tolist(), costs.extra.tolist(), costs.taken.tolist()
        self._forward_need, self._backward_need = costs.forward_need.tolist(), costs.backward_need.tolist()
        self._check_need, self._released = costs.check_need.tolist(), costs.released.tolist()
        kernels: Any = plain_python("rotor_solver.persistent.kernels")
        self._chunk, self._beyond = kernels.CHUNK, kernels.BEYOND

    def complete(self, s: int, row: int, last: int) -> int:
        """Complete the row (s, last), if it is of use; return the number of pairs of slots visited."""
        if self.limit[row] < 0:
            return 0
        times, i = np.full(max(0, self.high[row] - self.begin[row]), np.inf), self.place[s]
        for k in range(self._first[i], self._first[i + 1]):
            self._enable(times, s, row, last, k)
        pairs = self._checkpoints(times, s, row, last)
        self.finish(row, times)
        return pairs

    def finish(self, row: int, times: Floats) -> None:
        """Write `times`, which begin at rows.begin; continue them beyond their end, and find their useful part.

        Times never increase from slot to slot.
        """
        position, begin, high = self.position[row], self.begin[row], self.high[row]
        stored = self.final[row] == 0
        if not stored and len(times):
            self.final[row] = float(times[-1])
        end = -(-(position + high) // self._chunk) * self._chunk + self._beyond
        self._flat[position + begin : position + high] = times
        self._flat[position + high : end] = self.final[row]
        begin += int(np.count_nonzero(times > self.limit[row]))
        self.begin[row] = begin if stored or begin < high else self._width

    def _enable(self, times: Floats, s: int, row: int, last: int, k: int) -> None:
        """Run the stage with a graph by option k: Fe_i, [i+1, last], B_i."""
        i, state, begin, seconds = self.place[s], self.state[s], self.begin[row], self._extra[k]
        backward = self._backward_need[0 if last == len(self._band) else 1][k] - self._released[state][i]
        need = max(self._bases[last] + self._forward_need[k], backward)
        low = max(begin, -((self.offset[s] - need) // self._unit))
        stored = low  # first slot at which the next row is at its `final`
        if last > i:
            following = self._node[1][i + 1]
            follow = self._row[following][last]
            if self.begin[follow] >= self._width:
                return
            shift = (self._taken[state][k] + self.offset[following] - self.offset[s]) // self._unit
            low = max(low, shift + self.begin[follow])
            stored = max(low, min(self.high[row], self.high[follow] + shift))
            source = self.position[follow] - shift
            lower(times[low - begin : stored - begin], seconds + self._flat[source + low : source + stored])
            seconds += self.final[follow]
        lower(times[stored - begin :], seconds)

    def _checkpoints(self, times: Floats, s: int, row: int, last: int) -> int:
        """CF_i … to a checkpoint at a_j, [j, last] with a_j kept, then [i, j-1]; return the number of pairs visited."""
        i, offset, begin, high, pairs = self.place[s], self.offset[s], self.begin[row], self.high[row], 0
        lefts, rights, needs = self._row[s], self._after[last], self._check_need[i]
        for j in range(i + 1, min(last, self._band[i] + 1) + 1):
            floor = self._floor[j] - self._run[i]
            if floor > self.limit[row]:
                break  # later checkpoints take at least as long
            left, right = lefts[j - 1], rights[j]
            shift = self._slots[j] - (1 if self._remainder[j] < offset else 0)
            low = max(begin, self.begin[left], self.begin[right] + shift)
            low = max(low, -((offset - self._bases[last] - needs[j]) // self._unit))
            # Where forwards alone take no less than the known time, nothing is gained, there or later.
            known = self.begin[left] < self._width
            if known and low < high and floor < times[low - begin]:
                pairs += high - low
                self._split(times[low - begin :], left, right, shift, low, high, self._forwards[j] - self._run[i])
        return pairs

    def _split(self, times: Floats, left: int, right: int, shift: int, low: int, high: int, seconds: float) -> None:
        """`kernels.split`: both parts have numbers of their own; then one is at its `final`; then both."""
        left_high, right_high = self.high[left], self.high[right] + shift
        left_at, right_at = self.position[left], self.position[right] - shift
        both = max(low, min(high, left_high, right_high))
        one = max(both, min(high, max(left_high, right_high)))
        if low < both:
            sums = self._flat[right_at + low : right_at + both] + self._flat[left_at + low : left_at + both]
            lower(times[: both - low], seconds + sums)
        if both < one:
            at, final = (right_at, self.final[left]) if left_high < right_high else (left_at, self.final[right])
            lower(times[both - low : one - low], seconds + (final + self._flat[at + both : at + one]))
        if one < high:
            lower(times[one - low :], seconds + (self.final[left] + self.final[right]))


def lower(times: Floats, others: Floats | float) -> None:
    """Take the lesser of both, in place."""
    np.minimum(times, others, out=times)


@cache
def plain_windows() -> ModuleType:
    """Return a drop-in replacement for the module `windows`: the same numbers to the last bit."""
    module = plain_python("rotor_solver.persistent.windows")
    for loop in (slots_of_use, hand_on, hand_on_alone, least_of_both, least_of_three):
        setattr(module, loop.__name__, loop)
    return module


def slots_of_use(flat: Floats, out: Floats, at: int, begin: int, end: int, cut: float) -> tuple[int, int]:
    own = out[at + begin : at + end + 1]
    own[:] = np.minimum.accumulate(own[::-1])[::-1]
    useful = np.flatnonzero(own[:-1] + flat[at + begin : at + end] <= cut)
    return (begin + int(useful[0]), begin + int(useful[-1]) + 1) if len(useful) else (end, end)


def hand_on(out: Floats, flat: Floats, whole: int, part: int, other: int, count: int, time: float) -> None:
    target = out[part : part + count]
    np.minimum(target, out[whole : whole + count] + time + flat[other : other + count], out=target)


def hand_on_alone(out: Floats, whole: int, part: int, count: int, time: float) -> None:
    target = out[part : part + count]
    np.minimum(target, out[whole : whole + count] + time, out=target)


def least_of_both(out: Floats, flat: Floats, whole: int, other: int, count: int) -> float:
    starts, ends = _steps(count)
    return float((out[whole + starts] + flat[other + ends]).min(initial=np.inf))


def least_of_three(out: Floats, flat: Floats, whole: int, first: int, second: int, count: int) -> float:
    starts, ends = _steps(count)
    return float((out[whole + starts] + flat[first + ends] + flat[second + ends]).min(initial=np.inf))


@cache
def _steps(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last slot of every step of `count` slots."""
    starts = np.arange(0, count, plain_python("rotor_solver.persistent.windows").STEP)
    return starts, np.append(starts[1:], count) - 1 if len(starts) else starts
