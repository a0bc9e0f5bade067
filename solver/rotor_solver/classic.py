"""Strategies of the literature, for comparison: Revolve, Revolve for unequal stages, and periodic checkpoints.

In plain Python and NumPy, which plans 300 stages in a second. A stage with a graph runs by its fastest option. The
interval [i, stop) has the stages i … stop-1, with stop ≤ L+1, where stage L is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rotor_solver.chain import Chain, check_chain
from rotor_solver.described_error import check_count, check_fits, check_type, is_number, whole_bytes
from rotor_solver.least_memory import Costs, Floats, Ints, costs_of, operations_of
from rotor_solver.segments import even_segments, fastest_forwards, recompute_segments, segments_from
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_NOTHING = -(2**60)  # Bytes that an empty interval needs: less than any other need, even if a size is added to it
# Upper bound of a table's 8-byte entries (1 GiB); slots grow to stay below. Not measured; too low slows schedules.
_LARGEST_TABLE = 2**27


@dataclass(frozen=True, slots=True)
class Revolve:
    """Binomial checkpointing with up to `snapshots` stored inputs; None takes the number that is fastest and fits.

    Griewank & Walther, "Algorithm 799: Revolve", ACM Transactions on Mathematical Software 26 (2000): fewest forwards
    for identical stages. A snapshot is a stage's stored input; a_0 is one of them. The last forward of every stage has
    a graph, and runs immediately before its backward or the loss. If all snapshots are taken then, the input of this
    forward is in memory in addition to them. Raises ValueError if `snapshots` < 1.
    """

    snapshots: int | None = None

    name = "revolve"

    def __post_init__(self) -> None:
        if self.snapshots is not None:
            check_count(self.snapshots, "snapshots")

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the fastest schedule within `mem_limit` bytes, input included. Raises InfeasibleError if none fits.

        Without `snapshots`, tries all numbers of them, since fewer may need more memory if stages differ.
        """
        check_chain(chain)
        most = max(1, len(chain) - 1)  # with so many snapshots, every stage's input is stored
        tried = range(1, most + 1) if self.snapshots is None else [min(self.snapshots, most)]
        schedules = [_input_sequence(chain, _revolve(len(chain), count), self.name) for count in tried]
        return _fastest_fitting(chain, mem_limit, schedules)


def forward_steps(steps: int, snapshots: int) -> int:
    """Return the number of forwards that Revolve runs, with and without a graph: (r + 1) n - β(s+1, r-1).

    n are the `steps`, s the `snapshots`, initial state included; β(s, r) = C(s+r, s), and r is the least with
    β(s, r) ≥ n. Returns 0 if `steps` ≤ 0. Raises ValueError if `snapshots` < 1.
    """
    check_count(snapshots, "snapshots")
    if is_number(steps) and steps <= 0:
        return 0
    check_count(steps, "steps")
    repeats = 0
    while math.comb(snapshots + repeats, repeats) < steps:
        repeats += 1
    return (repeats + 1) * steps - (math.comb(snapshots + repeats, repeats - 1) if repeats else 0)


def _advance(steps: int, snapshots: int) -> int:
    """Return the number of steps to Revolve's next snapshot, for steps > 1: min(β(s, r-1), n - β(s-1, r-1))."""
    below, reached, repeats = 0, 1, 0
    while reached < steps:
        repeats += 1
        below, reached = reached, reached * (snapshots + repeats) // repeats
    return min(below, steps - below * snapshots // (snapshots + repeats - 1))


def _revolve(length: int, snapshots: int) -> dict[tuple[int, int], int]:
    """Return, by (i, l), the stage j at whose input a checkpoint splits the interval of stages i … l."""
    checkpoints = {}
    pending = [(0, length + 1, snapshots)]
    while pending:
        i, stop, free = pending.pop()
        steps = min(stop, length) - i
        if steps > 1:
            j = i + (steps - 1 if free <= 1 else _advance(steps, free))
            checkpoints[i, stop - 1] = j
            pending += [(i, j, free), (j, stop, free - 1)]
    return checkpoints


@dataclass(frozen=True, slots=True)
class Periodic:
    """Checkpoints are the inputs of stages 0, n, 2n, … for n = `every`, but at most `max_checkpoints` of them.

    The stages from one checkpoint to the next are a segment. The last segment is stored, all others are recomputed.
    `every` defaults to the fastest n that fits. Raises ValueError if `every` or `max_checkpoints` < 1.
    """

    every: int | None = None
    max_checkpoints: int | None = None

    name = "periodic"

    def __post_init__(self) -> None:
        for name in ("every", "max_checkpoints"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the fastest schedule within `mem_limit` bytes, input included. Raises InfeasibleError if none fits."""
        check_chain(chain)
        length = len(chain)
        distances = range(1, max(2, length + 1)) if self.every is None else [self.every]
        segments = [segments_from(range(0, length, n)[: self.max_checkpoints], length) for n in distances]
        forwards = fastest_forwards(chain)
        schedules = [recompute_segments(forwards, each[:-1], self.name) for each in segments]
        return _fastest_fitting(chain, mem_limit, schedules)


@dataclass(frozen=True, slots=True)
class Sqrt:
    """Recomputes all but the last of k = round(√L) segments of stages: O(√L) memory for identical stages.

    Chen et al. 2016, arXiv:1604.06174. Segment p begins at stage ⌊p L / k⌋, for p = 0 … k-1.
    """

    name = "sqrt"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the schedule. Raises InfeasibleError if it needs more than `mem_limit` bytes, input included."""
        check_chain(chain)
        segments = even_segments(len(chain), max(1, round(math.sqrt(len(chain)))))
        schedule = recompute_segments(fastest_forwards(chain), segments[:-1], self.name)
        return _fastest_fitting(chain, mem_limit, [schedule])


def _fastest_fitting(chain: Chain, mem_limit: int, schedules: list[Sequence]) -> Sequence:
    results, mem_limit = [simulate(chain, each) for each in schedules], whole_bytes(mem_limit)
    fitting = [number for number, result in enumerate(results) if result.peak <= mem_limit]
    check_fits(f"{schedules[0].algorithm} needs", min(result.peak for result in results), mem_limit)
    return schedules[min(fitting, key=lambda number: (results[number].makespan, results[number].peak))]


@dataclass(frozen=True, slots=True)
class GriewankHeterogeneous:
    """The fastest schedule that stores only stages' inputs: a Revolve for stages of different sizes and times.

    Beaumont et al. (HAL hal-02352969) compare their program with it. Every stage runs with a graph immediately before
    its own backward or the loss, so that no ā is stored. With `attached`, every checkpoint a_j is stored together with
    ā_{j+1}, and so Fe_j runs right when a_j is made; only a_0 and a_L are stored by themselves.

    Memory is divided into `slots`, or into fewer that divide all sizes exactly. Raises ValueError if `slots` < 1.
    """

    slots: int = 500
    attached: bool = False

    def __post_init__(self) -> None:
        check_count(self.slots, "slots")
        check_type(self.attached, bool, "attached", "pass True or False")

    @property
    def name(self) -> str:
        return "griewank-heterogeneous-attached" if self.attached else "griewank-heterogeneous"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the fastest such schedule within `mem_limit` bytes, chain input included, up to rounding to slots.

        Rounds nothing if a slot divides all sizes. Raises InfeasibleError, with the exact least limit, if none fits.
        """
        check_chain(chain)
        mem_limit = whole_bytes(mem_limit)
        fastest = (
            replace(
                stage,
                options=(stage.options[stage.fastest_option],),
                nograd_time=stage.seconds_without_graph,
                nograd_temp=stage.temp_without_graph,
            )
            for stage in chain
        )
        program = _Heterogeneous(costs_of(replace(chain, stages=tuple(fastest))), self.attached)
        check_fits(f"{self.name} needs", chain.input_bytes + int(program.least[0, -1]), mem_limit)
        room = min(mem_limit - chain.input_bytes, int(program.full[0, -1]))
        program.fill(room, self.slots)
        sequence = _input_sequence(chain, program.checkpoints(room), self.name)
        assert simulate(chain, sequence).peak <= mem_limit
        return sequence


class _Heterogeneous:
    """Recurrence: Opt(i, stop, m) is the least seconds of [i, stop) in m bytes, minus the seconds of storing it.

        Opt(L, L+1, m) = 0                                                if m ≥ loss_need
        Opt(i, stop, m) = the least of
          Opt(i+1, stop, m - taken_i)                                     if m ≥ stage_need(i, stop)
            attached, for [i, i+1), or for [L-1, L+1); of an empty interval it is 0
          split_j - run_i + Opt(j, stop, m - |a_j|) + Opt(i, j, m)        if m ≥ base + check_need_ij, for i < j < stop
            attached, for j < L: with Opt(j+1, stop, m - |a_j| - taken_j) if m ≥ |a_j| + stage_need(j, stop)

    Sizes taken from m are rounded up to slots, so that every time in the table is attainable; schedules are built with
    memory in exact bytes. Three more arrays are exact, [L+2, L+2] by (i, stop): `least`, the least bytes that fit a
    schedule, which takes `least_seconds`; and `full`, the bytes from which on no schedule beats `full_seconds`.
    """

    def __init__(self, costs: Costs, attached: bool) -> None:
        self.costs, self.attached, self.state = costs, attached, int(attached)
        self.length = length = len(costs.activation) - 1
        # [2, L, L+2] bytes that Fe_i and B_i need in [i, stop), by (1 if a_i is part of ā_i, else 0; i; stop)
        backward = np.repeat(costs.backward_need[[1], :, None], length + 2, axis=2)
        backward[0, :, -1] = costs.backward_need[0]
        base = np.concatenate([[0], costs.base])  # by stop; no interval stops at 0
        forward = base + costs.forward_need[None, :, None]
        self.needs: Ints = np.maximum(forward, backward - costs.released[:, :, None])
        # For each checkpoint a_j: `first`, the first stage whose forward follows it; `taken`, the bytes that it takes;
        # and `kept[j, stop]`, with `attached` the bytes that a_j, Fe_j and B_j need in an interval that ends at `stop`.
        self.first, self.taken = np.arange(length + 1), costs.activation.copy()
        self.kept = np.zeros((length + 1, length + 2), np.int64)
        if attached:
            self.first[:length] += 1
            self.kept[:length] = self.taken[:length, None] + self.needs[0]
            self.taken[:length] += costs.taken[0]
        self._find_full()
        self.least = np.full((length + 2, length + 2), _NOTHING)
        self.least[length, length + 1] = costs.loss_need
        self.least_seconds = np.zeros((length + 2, length + 2))
        for i, stop in _intervals(length):
            self.least[i, stop], self.least_seconds[i, stop] = self._least_of(i, stop)

    def _find_full(self) -> None:
        """Find the bytes from which on [i, stop) can store every checkpoint, and its seconds then: [L+2, L+2] each."""
        costs, length = self.costs, self.length
        self.full, self.full_seconds = np.full((length + 2, length + 2), _NOTHING), np.zeros((length + 2, length + 2))
        self.full[length, length + 1] = costs.loss_need
        for i, stop in _intervals(length):
            if _may_enable(length, self.attached, i, stop):
                need, rest, seconds = self.needs[self.state, i, stop], costs.taken[self.state, i], 0.0
            else:
                need = max(costs.base[stop - 1] + costs.check_need[i, i + 1], self.needs[0, i, i + 1])
                rest, seconds = costs.activation[i + 1], costs.split[i + 1] - costs.run[i]
            self.full[i, stop] = max(need, rest + self.full[i + 1, stop])
            self.full_seconds[i, stop] = seconds + self.full_seconds[i + 1, stop]

    def _least_of(self, i: int, stop: int) -> tuple[int, float]:
        """Return the least m for [i, stop), and the least seconds in it if the parts have their own least, too."""
        costs, js, first = self.costs, slice(i + 1, stop), self.first[i + 1 : stop]
        parts = np.maximum(self.taken[js] + self.least[first, stop], self.least[i, js])
        needs = np.maximum(self._checkpoint_need(i, js, stop), parts)
        seconds = costs.split[js] - costs.run[i] + self.least_seconds[first, stop] + self.least_seconds[i, js]
        if _may_enable(self.length, self.attached, i, stop):
            following = costs.taken[self.state, i] + self.least[i + 1, stop]
            needs = np.append(needs, max(self.needs[self.state, i, stop], following))
            seconds = np.append(seconds, self.least_seconds[i + 1, stop])
        best = needs.min()
        return int(best), float(seconds[needs == best].min())

    def _checkpoint_need(self, i: int, j: int | slice, stop: int) -> Any:
        """Return the bytes of the forwards of [i, stop) up to the checkpoint a_j, and of Fe_j and B_j if `attached`."""
        return np.maximum(self.costs.base[stop - 1] + self.costs.check_need[i, j], self.kept[j, stop])

    def fill(self, room: int, slots: int) -> None:
        """Fill `rows`, seconds rows[i][stop - i, m], for all memory that an interval can have in `room`."""
        costs, length = self.costs, self.length
        taken = [*costs.activation[1:], *(costs.taken.flat if self.attached else [])]
        unit = max(1, math.gcd(*map(int, taken)), -(-room // slots))
        while (length + 3) ** 2 // 2 * (room // unit + 1) > _LARGEST_TABLE and unit < room:
            unit *= 2
        # An operation may free more bytes than it keeps, so a later interval may have more memory than `room`.
        freed = int(np.maximum(0, -costs.taken[self.state]).sum())
        self.unit, self.offset, self.width = unit, room % unit, room // unit + 1 + -(-freed // unit)
        self.begin, self.end = self._slot_of(self.least), self._slot_of(self.full)
        self.rows = [np.full((length + 2 - i, self.width), np.inf) for i in range(length + 1)]
        for row in self.rows:
            row[0] = 0.0
        self.rows[length][1, self.begin[length, length + 1] :] = 0.0
        for stop in range(1, length + 2):
            # [j, m] seconds of the part after the checkpoint a_j, up to `stop`.
            after = np.full((length + 2, self.width), np.inf)
            for i in reversed(range(min(stop, length + 1))):
                if i < length:
                    self._fill_row(i, stop, after)
                after[i] = self._shifted(int(self.first[i]), stop, int(self.taken[i]))

    def _fill_row(self, i: int, stop: int, after: Floats) -> None:
        costs, row = self.costs, self.rows[i][stop - i]
        low, high = int(self.begin[i, stop]), int(min(self.end[i, stop], self.width))
        row[low:] = self.least_seconds[i, stop]
        row[max(low, int(self.end[i, stop])) :] = self.full_seconds[i, stop]
        if low >= high:
            return
        if _may_enable(self.length, self.attached, i, stop):
            enough = int(self._slot_of(self.needs[self.state, i, stop]))
            following = self._shifted(i + 1, stop, int(costs.taken[self.state, i]))
            row[max(low, enough) : high] = np.minimum(row, following)[max(low, enough) : high]
        if stop > i + 1:
            forward = costs.split[i + 1 : stop] - costs.run[i]
            times = forward[:, None] + self.rows[i][1 : stop - i, low:high] + after[i + 1 : stop, low:high]
            enough = self._slot_of(self._checkpoint_need(i, slice(i + 1, stop), stop))
            if enough.max() > low:
                times[np.arange(low, high) < enough[:, None]] = np.inf
            row[low:high] = np.minimum(row[low:high], times.min(axis=0))

    def _shifted(self, i: int, stop: int, taken: int) -> Floats:
        """Return, by slot m, the seconds of [i, stop) in `taken` bytes less than m; zeros for an empty interval."""
        if i == stop:
            return np.zeros(self.width)
        slots = np.arange(self.width) - -(-taken // self.unit)
        values: Floats = self.rows[i][stop - i, np.clip(slots, 0, self.width - 1)]
        values[slots < 0] = np.inf
        return values

    def _slot_of(self, need: Any) -> Any:
        """Return the first slot m with m · unit + offset ≥ need."""
        return np.maximum(0, -((self.offset - need) // self.unit))

    def checkpoints(self, room: int) -> dict[tuple[int, int], int]:
        """Return, by (i, l), the checkpoints of the schedule for exactly `room` bytes, at least `least`."""
        found = {}
        pending = [(0, self.length + 1, room)]
        while pending:
            i, stop, memory = pending.pop()
            if i in (stop, self.length):
                continue
            j = self._best_checkpoint(i, stop, memory)
            if j == i:
                pending.append((i + 1, stop, memory - int(self.costs.taken[self.state, i])))
                continue
            found[i, stop - 1] = j
            pending += [(i, j, memory), (int(self.first[j]), stop, memory - int(self.taken[j]))]
        return found

    def _best_checkpoint(self, i: int, stop: int, memory: int) -> int:
        """Return j, if [i, stop) is fastest with the checkpoint a_j in exactly `memory` bytes, or i, if with Fe_i."""
        costs, best, choice = self.costs, math.inf, -1
        if _may_enable(self.length, self.attached, i, stop) and memory >= self.needs[self.state, i, stop]:
            best = self._seconds(i + 1, stop, memory - int(costs.taken[self.state, i]))
            choice = i if best < math.inf else -1
        for j in range(i + 1, stop):
            seconds = float(costs.split[j] - costs.run[i])
            if seconds >= best or memory < self._checkpoint_need(i, j, stop):
                continue
            seconds += self._seconds(int(self.first[j]), stop, memory - int(self.taken[j]))
            seconds += self._seconds(i, j, memory)
            if seconds < best:
                best, choice = seconds, j
        assert choice >= 0
        return choice

    def _seconds(self, i: int, stop: int, memory: int) -> float:
        """Return seconds that a schedule for [i, stop) can attain in exactly `memory` bytes; infinite if none fits."""
        if memory < self.least[i, stop]:
            return math.inf
        if memory >= self.full[i, stop]:
            return float(self.full_seconds[i, stop])
        m = (memory - self.offset) // self.unit
        return float(self.least_seconds[i, stop] if m < self.begin[i, stop] else self.rows[i][stop - i, m])


def _intervals(length: int) -> Iterator[tuple[int, int]]:
    """Return all intervals [i, stop) with a stage other than the loss, each after the intervals inside it."""
    return ((i, stop) for stop in range(1, length + 2) for i in reversed(range(min(stop, length))))


def _may_enable(length: int, attached: bool, i: int, stop: int) -> bool:
    """Whether [i, stop) may begin with Fe_i: if `attached`, or if nothing but the loss runs between Fe_i and B_i."""
    return attached or stop == i + 1 or (i == length - 1 and stop == length + 1)


def _input_sequence(chain: Chain, checkpoints: dict[tuple[int, int], int], name: str) -> Sequence:
    """Return the sequence that splits [i, l] at the checkpoint checkpoints[i, l], or begins it with Fe_i if missing."""
    options = [stage.fastest_option for stage in chain.stages]

    def choose(_state: int, i: int, last: int) -> int:
        return -checkpoints[i, last] if (i, last) in checkpoints else options[i]

    return Sequence(operations_of(len(chain), choose), name)
