"""The best memory-persistent sequence: it drops a checkpoint only at the backward that uses the checkpoint.

Begin with `optimum`, the recurrence in thirty lines. Such sequences are trees over intervals of stages (Beaumont et
al., "Optimal checkpointing for heterogeneous chains", HAL hal-02352969; the memory conditions are our own, see
docs/solver.md). [i, l] stands for a problem: run the backwards of stages l, …, i, with a_i and δ_{l+1} in memory, in m
bytes, a_i not counted. The loss is stage L. `table_kernels.fill` solves all problems for all numbers of slots, with
sizes rounded down, so that times are lower bounds. `interval_kernels.descend` builds sequences with memory in exact
bytes, so that they fit. Tables leave out times above that of the fastest sequence so far. So the first table is small,
if a sequence was planned for groups of stages before; the windows of each table make the next, finer one small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from rotor_solver.chain import Chain
from rotor_solver.described_error import (
    InfeasibleError,
    InvalidValueError,
    check_count,
    check_fits,
    check_type,
    is_number,
    whole_bytes,
    within_memory,
)
from rotor_solver.grouping import coarse_chain, fine_sequence, joined, stored_bound
from rotor_solver.least_memory import Costs, Ints, costs_of
from rotor_solver.persistent.layout import Problem, Spacing
from rotor_solver.persistent.table import Table
from rotor_solver.segments import even_segments, store_all
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


def optimum(chain: Chain, mem_limit: int) -> float:
    """Return the least seconds of a memory-persistent sequence in `mem_limit` bytes, a_0 counted; infinite if none."""
    costs, length = costs_of(chain), len(chain)

    @cache
    def longer(i: int, last: int, m: int, inside: int) -> float:
        """Return the seconds of [i, last] minus those of storing it. `inside`: 1 if a_i is in ā_i, 0 if by itself."""
        if i > last:
            return 0.0
        if i == length:
            return 0.0 if m >= costs.loss_need else math.inf
        best, recomputed = math.inf, 1 if last < length else 0  # whether Fe_i runs after the loss
        for k in range(costs.first[i], costs.first[i + 1]):  # Fe_i by each of its options
            forward_need = costs.base[last] + costs.forward_need[k]
            backward_need = costs.backward_need[recomputed, k] - costs.released[inside, i]
            if m >= max(forward_need, backward_need):
                best = min(best, costs.extra[k] + longer(i + 1, last, m - costs.taken[inside, k], 1))
        for j in range(i + 1, last + 1):  # CF_i, with a checkpoint at a_j
            if m >= costs.base[last] + costs.check_need[i, j]:
                parts = longer(j, last, m - costs.activation[j], 0) + longer(i, j - 1, m, inside)
                best = min(best, costs.split[j] - costs.run[i] + parts)
        return float(best)

    return simulate(chain, store_all(chain)).makespan + longer(0, length, mem_limit - chain.input_bytes, 0)


# Number of neighbouring stages that are merged into one for the sequence found first. Not measured; more slow it.
_GROUP = 4
# If a table is too large, its slots grow by the excess times this factor. Not measured; higher ones make worse plans.
_MARGIN = 1.1
# Number of stages up to which a chain's first table has a row for every interval. Not measured; more cost solve time.
_SHORT = 64
# If memory can store so many stages, one row per doubling of an interval's length is enough. Chosen by a measurement
# with 500 stages: at a limit a tenth of the way from the least one to that of storing everything, two rows per doubling
# lower the bound by less than 0.01 %; a hundredth of the way, by up to 8 %, and eight rows by up to 1.6 %.
_TIGHT = 128
# Number of slots that the first table has for a typical checkpoint: with 0, it would look free. Not measured.
_RESOLUTION = 2
_FINEST = 2**17  # Upper bound of the slots that `_RESOLUTION` leads to: with sizes from 1 B to 10 TB, more are useless


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a solve: a table has at most `numbers` 8-byte entries, and visits at most about `pairs` pairs of slots.

    A pair is the slots of the two parts into which a checkpoint splits an interval. Once the sequence is slower than
    the lower bound by at most the share `close`, `Persistent.work` also limits tables.
    """

    close: float
    pairs: float
    numbers: float

    def excess(self, table: Table) -> float:
        return max(table.guess / self.pairs, table.size / self.numbers)


# Chosen, not measured: half a percent is below the error of measured stage times. At 2e9 pairs a second on one core
# (500 stages), a table takes up to 13 seconds if thorough, 1.5 if hasty, and 0.01 if brief.
THOROUGH = Effort(close=0.005, pairs=2.7e10, numbers=2**28)
# Default of `Persistent.work`, about a second of one core. Also the least number of pairs of slots that tables may
# visit while a wide gap hardly falls.
WORK = 2e9
_STUCK = 0.9  # The gap hardly falls if a table leaves more than this share of it. Not measured; lower saves seconds.
_NO_GAP = 1e-9  # A smaller gap counts as none, since bounds hold only up to rounding errors of sums
_HASTY = Effort(close=0.01, pairs=3e9, numbers=2**26)
BRIEF = Effort(close=0.01, pairs=2e7, numbers=2**25)


@dataclass(frozen=True, slots=True)
class Persistent:
    """Dynamic program over memory-persistent sequences: those that drop a checkpoint only at the backward that uses it.

    Divides memory into `slots`, then into more, as `effort` allows. Once the gap, makespan / lower bound - 1, is at
    most `effort.close`, visits up to `work` more pairs of slots (`Effort`) to close it. While a wider gap hardly falls,
    visits up to max(`work`, 2e9). Raises ValueError if `slots` < 1 or `work` < 0.
    """

    slots: int = 500
    effort: Effort = THOROUGH
    work: float = WORK

    name = "persistent"

    def __post_init__(self) -> None:
        check_count(self.slots, "slots")
        check_type(self.effort, Effort, "effort", "leave it out")
        if not is_number(self.work) or not self.work >= 0:  # it may be infinite
            raise InvalidValueError(f"work must be ≥ 0 pairs of slots, got {self.work!r}", kind="not_work", name="work")

    @within_memory
    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the fastest sequence found within `mem_limit` bytes, chain input included, with its `lower_bound`.

        Raises InfeasibleError if none fits, with the least limit (`min_bytes`).
        """
        stored, mem_limit = store_all(chain), whole_bytes(mem_limit)
        if simulate(chain, stored).peak <= mem_limit:
            return Sequence(stored, self.name, stored.lower_bound)
        if (groups := joined(chain)) is not None:
            hasty = replace(self, effort=BRIEF, work=0)
            found = fine_sequence(chain, groups, hasty.solve(coarse_chain(chain, groups), mem_limit))
            bound = stored_bound(chain, mem_limit, stored.lower_bound or 0.0)
            return Sequence(found, self.name, min(bound, simulate(chain, found).makespan))
        best = solved(chain, mem_limit, self.slots, self.effort, self.work)
        assert simulate(chain, best.sequence).peak <= mem_limit
        # The bound can exceed the time of a sequence only by rounding errors.
        return Sequence(best.sequence, self.name, min(best.bound, best.makespan))


class Best:
    """The fastest sequence so far, and the highest lower bounds so far, in seconds."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.bound = problem, problem.stored
        self.sequence, self.makespan = Sequence(()), math.inf
        self.later = np.zeros(len(problem.chain) + 1)  # By i, least seconds of stages from i on beyond storing them

    def offer(self, sequence: Sequence) -> None:
        makespan = simulate(self.problem.chain, sequence).makespan
        if makespan < self.makespan:
            self.makespan, self.sequence = makespan, sequence

    def improve(self, table: Table) -> None:
        self.bound = max(self.bound, self.problem.stored + table.lower_bound(table.room))
        if not table.windowed:  # with windows, the times hold only for plans inside them
            self.later = np.maximum(self.later, table.later())
        sequence, _ = table.sequence(table.room, self.overhead)
        if sequence is not None:
            self.offer(sequence)

    @property
    def overhead(self) -> float:
        return max(0.0, self.makespan - self.problem.stored)

    @property
    def gap(self) -> float:
        return self.makespan / self.bound - 1 if self.bound else (0.0 if self.makespan == 0 else math.inf)


def solved(chain: Chain, mem_limit: int, slots: int, effort: Effort, work: float = 0.0) -> Best:
    """Return the fastest sequence found with at most `effort` and `work` (`Persistent`), and its lower bound.

    Raises InfeasibleError if none fits within `mem_limit`.
    """
    problem, room = Problem(chain), mem_limit - chain.input_bytes
    check_fits("the chain needs", chain.input_bytes + problem.needed, mem_limit)
    best = Best(problem)
    _begin(best, mem_limit)
    if best.makespan == math.inf:  # a table needs the time of some sequence as its scale, and this one always fits
        best.offer(problem.least_sequence())
    windows, last, stuck = None, 0, False
    left = {False: max(work, WORK), True: work}  # pairs of slots left to visit, by whether the gap is small
    for unit, exact, spacing in levels(problem, room, slots):
        if best.gap <= _NO_GAP or best.overhead == 0:
            break
        make = partial(Table, problem, room, scale=best.overhead, later=best.later, windows=windows, spacing=spacing)
        table, before = make(unit=unit, exact=exact), best.gap
        excess, close = effort.excess(table), before <= effort.close
        if close or stuck:
            excess = max(excess, table.work / max(1.0, left[close]))
        if excess > 1:
            # Windows make a finer table small; one with larger slots than the windows' table would add nothing.
            coarser = math.ceil(unit * excess * _MARGIN)
            if close or (windows is not None and coarser > last):
                break
            table = make(unit=coarser)
        left[close] -= table.work
        table.fill()
        best.improve(table)
        last, stuck = table.grid.unit, best.gap > _STUCK * before
        if best.gap > _NO_GAP:
            windows = table.windows(best.overhead)
    return best


def _begin(best: Best, mem_limit: int) -> None:
    """Offer `best` a sequence planned for groups of stages, so that the first table can leave out longer times."""
    chain, size = best.problem.chain, _GROUP
    while best.makespan == math.inf and len(chain) > max(4, size) * size and size > 1:
        groups = even_segments(len(chain), -(-len(chain) // size))
        try:
            coarse = solved(coarse_chain(chain, groups), mem_limit, 500, _HASTY)
            best.offer(fine_sequence(chain, groups, coarse.sequence))
        except InfeasibleError:
            size //= 2


def levels(problem: Problem, room: int, slots: int) -> Iterator[tuple[int, bool, Spacing]]:
    """Yield, from coarse to exact: bytes of a slot, whether all sizes are whole slots, and what intervals have rows."""
    costs, length = problem.costs, len(problem.chain)
    sizes = units(costs, room, slots, common_divisor(costs.activation[1:], costs.taken))
    unit, exact = next(sizes)
    parts = parts_of(problem, room)
    while True:
        spacing = Spacing(parts, max(1, problem.period))
        yield unit, exact, spacing
        if exact and spacing.dense(length):
            return
        unit, exact = next(sizes, (unit, exact))
        parts *= 4


def parts_of(problem: Problem, room: int) -> int:
    """Return `Spacing.parts` of the first table: the fewer stages `room` can store, the more rows per doubling."""
    length = len(problem.chain)
    if length <= _SHORT:
        return max(1, length)
    stored = room / max(1.0, float(np.median(problem.costs.taken[1, problem.fastest])))
    return max(2, min(length, int(_TIGHT / max(1.0, stored))))


def common_divisor(*sizes: Ints) -> int:
    """Return the greatest common divisor of all nonzero sizes; 0 if there are none."""
    return int(np.gcd.reduce([np.gcd.reduce(each, axis=None) for each in sizes]))


def units(costs: Costs, room: int, slots: int, divisor: int) -> Iterator[tuple[int, bool]]:
    """Yield (bytes of a slot, whether they are exact), from coarse to `divisor`, which divides all sizes exactly."""
    exact = divisor or max(1, room)
    typical = float(np.median(costs.activation))
    slots = max(slots, min(_FINEST, int(_RESOLUTION * room / typical)) if typical else 0)
    while True:
        unit = max(exact, -(-room // slots))
        yield unit, unit == exact
        if unit == exact:
            return
        slots *= 4  # Not measured; a larger factor makes the next table slower, a smaller one takes more tables
