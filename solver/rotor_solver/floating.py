"""Find the fastest sequence with floating checkpoints, which may be dropped before the backward of their stage.

After Beaumont et al., "Optimal checkpointing for heterogeneous chains" (HAL hal-02352969). A problem is (s, t, l, M), s
≤ t ≤ l: with a_s and δ_{l+1} in memory, run the backwards of stages l … t in M bytes, a_s counted, and free a_s. The
first operation is Fe_s, Fn_s, or CF_s, which keeps a_s until the backwards of stages l … j have run. Opt is the least
seconds of a problem minus those of storing its stages; the other names are fields of `Costs`:

    Opt(L, L, L, M) = 0                                             if M ≥ |a_L| + loss_need
    Opt(s, t, l, M) = the least of
      extra_k + Opt'(s+1, l, M - |a_s| - taken_k)                   if s = t and M - |a_s| ≥ base_l + forward_need_k
        for every option k; Opt'(s+1, s, ·) is split_{s+1} - run_{s+1}  and M - |a_s| ≥ backward_need_k - released_s
      run_{s+1} - run_s + Opt(s+1, t, l, M)                         if s < t
      run_{s+1} - run_s + Opt(s+1, j, l, M - |a_s|) + Opt(s, t, j-1, M)     for t < j ≤ l
        both                                                        if M ≥ base_l + |a_s| + check_need_{s,s+1}

Opt'(s, l, m) is Opt(s, s, l, m) with a_s inside ā_s: m does not count it, so |a_s| is 0 in its formula. Slot m stands
for m · unit + offset bytes. Sizes taken from M are rounded down, so that times in the table are lower bounds; sequences
are built with memory in exact bytes. In plain Python and NumPy, 50 stages take seconds, 100 a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rotor_solver.chain import Chain
from rotor_solver.described_error import InfeasibleError, InvalidValueError, check_count, check_fits, whole_bytes
from rotor_solver.least_memory import Costs, Floats, costs_of, unfolded
from rotor_solver.persistent.recurrence import Persistent
from rotor_solver.segments import store_all
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence
from rotor_solver.simulate import simulate

# Upper bound of the first table's bytes. Not measured; too low refuses chains that can be solved.
_LARGEST_TABLE = 2**31
# Gap between makespan and lower bound, as a share, up to which slots are not refined. Not measured.
_CLOSE = 0.004
# Upper bound of the pairs of slots that a refined table visits. Not measured; too high costs solve time.
_FINER_CHOICES = 1e9
_FINER_TABLE = 2**29  # Upper bound of a refined table's bytes. Not measured.
# Weights of the lower slot in `_Problem._read`: one sequence is built with each, the fastest is used. Not measured.
_BLENDS = (0.5, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Floating:
    """Dynamic program over sequences with floating checkpoints: they may be dropped before the backward of their stage.

    Memory is divided into `slots`, then into more while that promises a faster one. Raises ValueError if `slots` < 1.
    """

    slots: int = 500

    name = "floating"

    def __post_init__(self) -> None:
        check_count(self.slots, "slots")

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the fastest sequence found in `mem_limit` bytes, input included: no slower than that of `Persistent`.

        Its lower bound holds for all sequences with floating checkpoints. Raises InfeasibleError if none fits, with the
        least limit, which may be lower than that of `Persistent`; ValueError if its first table would exceed 2 GiB.
        """
        stored, length, mem_limit = store_all(chain), len(chain), whole_bytes(mem_limit)
        if simulate(chain, stored).peak <= mem_limit:
            return Sequence(stored, self.name, stored.lower_bound)
        width = min(self.slots, mem_limit) + 1
        nbytes = _table_bytes(length, width)
        if nbytes > _LARGEST_TABLE:
            message = (
                f'use algorithm="persistent", or fewer slots: the table for {length} stages in {width} slots takes '
                f"{nbytes / 2**30:.1f} GiB, more than {_LARGEST_TABLE / 2**30:.1f} GiB"
            )
            raise InvalidValueError(message, kind="table_too_large", nbytes=nbytes)
        problem = _Problem(costs_of(chain), mem_limit)
        stored_seconds = stored.lower_bound or 0.0
        candidates, best, makespan, bound = [], None, math.inf, 0.0
        # A floating sequence may exist where no persistent one does.
        with suppress(InfeasibleError):
            candidates.append(Persistent(self.slots).solve(chain, mem_limit))
        for number, unit in enumerate(problem.units(self.slots)):
            width = mem_limit // unit + 1
            cheap = length**4 / 24 * width <= _FINER_CHOICES and _table_bytes(length, width) <= _FINER_TABLE
            if number and (makespan <= bound * (1 + _CLOSE) or not cheap):
                break
            problem.fill(unit)
            # Floating-point sums in another order differ in their last digits; the bound must hold for all orders.
            certain = 1 - (4 * length**2 + 8) * float(np.finfo(np.float64).eps)
            bound = max(bound, (stored_seconds + float(problem.table[problem.root, -1])) * certain)
            cut = float(problem.costs.run[-1]) + stored_seconds
            candidates += [Sequence(problem.descend(blend, cut)) for blend in _BLENDS]
            for sequence in candidates:
                result = simulate(chain, sequence)
                assert result.peak <= mem_limit
                if result.makespan < makespan:
                    best, makespan = sequence, result.makespan
            candidates.clear()
        assert best is not None
        return Sequence(best, self.name, min(bound, makespan))


_Task = tuple[int, int, int, int]  # A pending problem: s, its column of `start`, l, and the bytes M that it may use
# A way to begin a problem: seconds that it is estimated to take, and its operations and smaller problems in order
_Start = tuple[float, list[_Task | Operation]]


class _Problem:
    """Table of Opt. Problem (s, t, l) has row start[s, t] + l, and Opt'(s, l) has row start[s, L+1] + l."""

    table: Floats
    unit: int
    offset: int

    def __init__(self, costs: Costs, mem_limit: int) -> None:
        self.costs, self.mem_limit = costs, mem_limit
        self.length = length = len(costs.run) - 1
        columns = [(s, column) for s in range(length + 1) for column in range(s, length + 2)]
        firsts = [s if column > length else column for s, column in columns]
        ends = np.cumsum([length + 1 - first for first in firsts])
        self.start = np.zeros((length + 1, length + 2), np.int64)
        self.start[tuple(np.transpose(columns))] = ends - (length + 1)
        self.root = length
        self.least = np.zeros(ends[-1], np.int64)
        for s, column, last in self._problems():
            self.least[self.start[s, column] + last] = self._least_of(s, column, last)
        check_fits("the chain needs", int(self.least[self.root]), mem_limit)

    def units(self, slots: int) -> Iterator[int]:
        """Yield slot sizes in bytes, from coarse to fine, until all sizes are whole numbers of slots."""
        exact = math.gcd(*map(int, (*self.costs.activation, *self.costs.taken.flat))) or max(1, self.mem_limit)
        while True:
            unit = max(exact, -(-self.mem_limit // slots))
            yield unit
            if unit == exact:
                return
            slots *= 4

    def _problems(self) -> Iterator[tuple[int, int, int]]:
        """Yield (s, column of `start`, l) of every problem after its subproblems, which begin later or end earlier."""
        for s in reversed(range(self.length + 1)):
            for column in range(s, self.length + 2):
                for last in range(self._until(s, column), self.length + 1):
                    yield s, column, last

    def _until(self, s: int, column: int) -> int:
        """Return t, the stage whose backward is the last of a problem with this column of `start`."""
        return s if column > self.length else column

    def _own(self, s: int, column: int) -> int:
        return 0 if column > self.length else int(self.costs.activation[s])

    def _options(self, s: int, column: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each option of stage s: number, index into `costs`, bytes that Fe_s and B_s need, bytes that stay."""
        costs, inside = self.costs, int(column > self.length)
        own, row = self._own(s, column), int(last < self.length)
        for k in range(int(costs.first[s]), int(costs.first[s + 1])):
            during = int(costs.backward_need[row, k] - costs.released[inside, s])
            need = max(int(costs.base[last] + costs.forward_need[k]), during)
            yield k - int(costs.first[s]), k, own + need, own + int(costs.taken[inside, k])

    def _check_need(self, s: int, column: int, last: int) -> int:
        return self._own(s, column) + int(self.costs.base[last] + self.costs.check_need[s, s + 1])

    def _least_of(self, s: int, column: int, last: int) -> int:
        """Return the least M with which a problem can be solved, by the module's recurrence for bytes, not seconds."""
        start, least, t, own = self.start, self.least, self._until(s, column), self._own(s, column)
        if s == self.length:
            return own + self.costs.loss_need
        found = [int(least[start[s + 1, t] + last])] if s < t else []
        if t < last:
            later = own + least[start[s + 1, t + 1 : last + 1] + last]
            found.append(int(np.maximum(later, least[start[s, column] + np.arange(t, last)]).min()))
        check_need = self._check_need(s, column, last)
        found = [max(each, check_need) for each in found]
        if s == t:
            for _, _, need, taken in self._options(s, column, last):
                rest = int(least[start[s + 1, self.length + 1] + last]) if last > s else 0
                found.append(max(need, taken + rest) if last > s else need)
        return min(found)

    def fill(self, unit: int) -> None:
        costs, start, length = self.costs, self.start, self.length
        width, self.offset = divmod(self.mem_limit, unit)
        self.unit, self.table = unit, np.full((len(self.least), width + 1), np.inf)
        for s, column, last in self._problems():
            t, own, row = self._until(s, column), self._own(s, column), start[s, column] + last
            out, low = self.table[row], self._slot_of(int(self.least[row]))
            if s == length:
                out[low:] = 0.0
                continue
            if s == t:
                for _, k, need, taken in self._options(s, column, last):
                    begin = max(low, self._slot_of(need))
                    if last == s:
                        # Fe_s skips its output, which no operation reads: B_s follows at once.
                        seconds = costs.extra[k] - (costs.run[s + 1] - costs.split[s + 1])
                        out[begin:] = np.minimum(out[begin:], seconds)
                        continue
                    # If Fe_s frees more than it saves, the following problem may have more memory than the last slot.
                    slots = np.arange(max(begin, taken // unit), width + 1)
                    source = self.table[start[s + 1, length + 1] + last, np.minimum(slots - taken // unit, width)]
                    out[slots] = np.minimum(out[slots], costs.extra[k] + source)
            seconds = costs.run[s + 1] - costs.run[s]
            low = max(low, self._slot_of(self._check_need(s, column, last)))
            if s < t:
                out[low:] = np.minimum(out[low:], seconds + self.table[start[s + 1, t] + last, low:])
            shift = own // unit
            low = max(low, shift)
            if t < last and low <= width:
                later = self.table[start[s + 1, t + 1 : last + 1] + last, low - shift : width + 1 - shift]
                later += seconds
                later += self.table[start[s, column] + t : start[s, column] + last, low:]
                out[low:] = np.minimum(out[low:], later.min(axis=0))

    def _slot_of(self, need: int) -> int:
        return max(0, -((self.offset - need) // self.unit))

    def _read(self, row: int, memory: int, blend: float, cut: float) -> float:
        """Interpolate Opt at `memory` bytes. `blend`: weight of the slot below; with 0, the result is a lower bound."""
        m = min(self._slot_of(memory), self.table.shape[1] - 1)
        value = float(self.table[row, m])
        rest = m * self.unit + self.offset - memory
        if rest > 0 and blend > 0.0:
            worse = min(cut, float(self.table[row, m - 1])) if m > 0 else cut
            value += blend * rest / self.unit * max(0.0, worse - value)
        return value

    def descend(self, blend: float, cut: float) -> list[Operation]:
        """Build a sequence for `mem_limit`: of the operations that fit in exact bytes, take the table's fastest."""

        def begun(s: int, column: int, last: int, memory: int) -> list[_Task | Operation]:
            if self._until(s, column) > last:
                return []
            if s == self.length:
                return [Loss()]
            return min(self._starts(s, column, last, memory, blend, cut), key=lambda each: each[0])[1]

        return unfolded((0, 0, self.length, self.mem_limit), begun)

    def _starts(self, s: int, column: int, last: int, memory: int, blend: float, cut: float) -> Iterator[_Start]:
        costs, start, least, t = self.costs, self.start, self.least, self._until(s, column)
        for number, k, need, taken in self._options(s, column, last) if s == t else ():
            seconds, row = float(costs.extra[k]), start[s + 1, self.length + 1] + last if last > s else -1
            if memory < need or (last > s and memory - taken < least[row]):
                continue
            if last > s:
                seconds += self._read(row, memory - taken, blend, cut)
            else:
                seconds += float(costs.split[s + 1] - costs.run[s + 1])
            yield seconds, [ForwardEnable(s, number), (s + 1, self.length + 1, last, memory - taken), Backward(s)]
        if memory < self._check_need(s, column, last):
            return
        seconds, rest = float(costs.run[s + 1] - costs.run[s]), memory - self._own(s, column)
        if s < t and memory >= least[start[s + 1, t] + last]:
            value = self._read(start[s + 1, t] + last, memory, blend, cut)
            yield seconds + value, [ForwardNograd(s), (s + 1, t, last, memory)]
        for j in range(t + 1, last + 1):
            after, before = start[s + 1, j] + last, start[s, column] + j - 1
            if rest >= least[after] and memory >= least[before]:
                value = seconds + self._read(after, rest, blend, cut) + self._read(before, memory, blend, cut)
                yield value, [ForwardCheck(s), (s + 1, j, last, rest), (s, column, j - 1, memory)]


def _table_bytes(length: int, width: int) -> int:
    return (length + 1) * (length + 2) * (length + 6) // 6 * width * 8
