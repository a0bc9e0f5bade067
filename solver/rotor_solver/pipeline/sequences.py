"""The fastest sequence of a part with several microbatches in flight.

If each microbatch keeps at most K bytes from forward to backward, a_0 included, the running one of k in flight has M =
limit - (k - 1) · K bytes. All values of K are tried, from least to most. For each K, a recurrence like that of
`persistent.recurrence` has two kinds of intervals:

    [i, L]         with the loss. Everything kept before stage i runs is kept to the loss, so the unused bytes of K also
                   determine the free bytes of M, which are M - K more. Each choice takes bytes from both.
    [i, l], l < L  after the loss. No bytes are kept for it any more, so the interval may use all free bytes of M.

`least_in_flight` has the exact least limit, from `least_kept`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rotor_solver.chain import Chain
from rotor_solver.described_error import check_fits
from rotor_solver.in_flight import with_room_at_loss
from rotor_solver.least_memory import Costs, Label, costs_of, least_choice, least_kept, least_memory, operations_of
from rotor_solver.persistent import Persistent
from rotor_solver.segments import min_bytes, store_all
from rotor_solver.sequence import Backward, Loss, Sequence
from rotor_solver.simulate import Machine, simulate


def bytes_in_flight(kept: int, peak: int, count: int) -> int:
    """Return the peak of `count` microbatches in flight: one takes up to `peak` bytes, the others each hold `kept`."""
    return (count - 1) * kept + peak


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Bytes and seconds of one microbatch through a chain, the chain's input counted.

    `kept_bytes` is in memory when the loss begins, input and output included: a microbatch in flight that does not run
    has these bytes in memory. The loss counts as the first operation of the backward.
    """

    kept_bytes: int
    forward_peak: int
    backward_peak: int
    forward_seconds: float
    backward_seconds: float
    stored_backward_seconds: float  # Seconds of the backward without recomputations, the loss included

    @classmethod
    def of(cls, chain: Chain, sequence: Sequence) -> Microbatch:
        machine = Machine(chain, sequence)
        kept, stored = chain.input_bytes, 0.0
        peaks, seconds = {False: kept, True: 0}, {False: 0.0, True: 0.0}  # by whether the loss has begun
        for position, operation in enumerate(sequence):
            if isinstance(operation, Loss):
                kept = machine.held
            before = machine.seconds
            most = machine.run(position)
            peaks[machine.loss_done] = max(peaks[machine.loss_done], most)
            seconds[machine.loss_done] += machine.seconds - before
            if isinstance(operation, Backward | Loss):
                stored += machine.seconds - before
        return cls(kept, peaks[False], peaks[True], seconds[False], seconds[True], stored)

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def least_in_flight(chain: Chain, count: int) -> tuple[int, Sequence]:
    """Return the least limit in bytes that fits `count` microbatches in flight, and a sequence that attains it."""
    costs = costs_of(chain)
    least = least_memory(costs)
    start, length = chain.input_bytes, len(chain)

    def total(label: Label) -> int:
        kept, need, *_ = label
        return bytes_in_flight(start + kept, start + need, count)

    label = best = min(least_kept(costs, least), key=total)
    choices, stage = {}, 0  # Codes of choices for the intervals that end at the loss, by their first stage
    while label[3]:
        choices[stage] = label[2]
        stage = stage + 1 if label[2] >= 0 else -label[2]
        label = label[3]

    def choose(state: int, i: int, last: int) -> int:
        return choices[i] if last == length else least_choice(costs, least, state, i, last)

    return total(best), Sequence(operations_of(length, choose), "recompute-all")


# Upper bound of a table's 8-byte entries (160 MB); slots grow to stay below. Not measured; too low slows sequences.
_NUMBERS = 2e7
# Upper bound of the pairs of slots that a table visits, in half a second. Not measured; too low slows sequences.
_PAIRS = 3e8


def bound_in_flight(chain: Chain, mem_limit: int, count: int, slots: int) -> float:
    """Return a lower bound, in seconds, for `fastest_in_flight`; quick with few slots, infinite if no sequence fits."""
    stored = store_all(chain)
    if fits(chain, stored, mem_limit, count):
        return stored.lower_bound or 0.0
    if mem_limit < least_in_flight(chain, count)[0]:
        return math.inf
    costs = costs_of(chain)
    unit, _ = _unit(costs, mem_limit, count, slots)
    return (stored.lower_bound or 0.0) + _bound(costs, mem_limit, count, unit)


def fastest_in_flight(chain: Chain, mem_limit: int, count: int, slots: int) -> Sequence:
    """Return the fastest sequence found with which `count` microbatches in flight need at most `mem_limit` bytes.

    Kept memory is divided into about `slots`. `lower_bound` holds for all memory-persistent sequences. Raises
    InfeasibleError if none fits, with the exact least limit.
    """
    stored = store_all(chain)
    if fits(chain, stored, mem_limit, count):
        return stored
    if count == 1:
        return Persistent().solve(chain, mem_limit)
    least, fallback = least_in_flight(chain, count)
    check_fits(f"{count} microbatches in flight need", least, mem_limit)
    costs = costs_of(chain)
    unit, exact = _unit(costs, mem_limit, count, slots)
    table = _Table(costs, mem_limit, count, unit, up=True)
    # With few slots, rounding may exclude every sequence that fits: then take the one with the least limit.
    sequence = table.sequence() or fallback
    assert fits(chain, sequence, mem_limit, count)
    made = simulate(chain, sequence).makespan
    extra = table.extra if exact else _bound(costs, mem_limit, count, unit)
    return Sequence(sequence, "in-flight", min(made, (stored.lower_bound or 0.0) + extra))


def _bound(costs: Costs, mem_limit: int, count: int, unit: int) -> float:
    # With a negative `taken` (more freed than saved), memory may exceed the table's last slot, so times are no bounds.
    return _Table(costs, mem_limit, count, unit, up=False).extra if costs.taken.min(initial=0) >= 0 else 0.0


def _unit(costs: Costs, mem_limit: int, count: int, slots: int) -> tuple[int, bool]:
    """Return the bytes of a slot, and whether all sizes that operations keep are multiples of them."""
    length = len(costs.activation) - 1
    width = min(slots * count, _NUMBERS / (2 * length**2), _PAIRS / (length**3 / 3))
    divisor = int(np.gcd(np.gcd.reduce(costs.activation), np.gcd.reduce(costs.taken, axis=None)))
    unit = max(1, divisor, math.ceil(mem_limit / max(1.0, width)))
    return unit, unit == divisor


def fits(chain: Chain, sequence: Sequence, mem_limit: int, count: int) -> bool:
    one = Microbatch.of(chain, sequence)
    return bytes_in_flight(one.kept_bytes, one.peak_bytes, count) <= mem_limit


class _Table:
    """Table of `in_flight_kernels`, sizes rounded `up` or down. `extra`: least seconds beyond storing everything."""

    def __init__(self, costs: Costs, mem_limit: int, count: int, unit: int, *, up: bool) -> None:
        from rotor_solver.pipeline import in_flight_kernels as kernels

        self._kernels: Any = kernels
        self.costs, self.count, self.unit = costs, count, unit
        self.limit, self.offset = divmod(mem_limit, unit)
        self.taken, self.activation = (
            -(-each // unit) if up else each // unit for each in (costs.taken, costs.activation)
        )
        length = len(costs.activation) - 1
        self.again = np.full((2, length, length, self.limit + 1), np.inf)
        self._arguments = (self.again, costs, self.taken, self.activation, unit, self.offset)
        kernels.fill(self._arguments)
        # Number of slots by which all stages may free more than they save, each by the option that frees most
        self._below = sum(int(max(0, -self.taken[:, low:high].min())) for low, high in pairwise(costs.first.tolist()))
        extra, kept = kernels.best_kept(self._arguments, count, self._below)
        self.extra, self._kept = float(extra), int(kept)

    def sequence(self) -> Sequence | None:
        """Return a sequence that takes `extra` seconds more than storing everything; None if no sequence fits."""
        if self._kept < 0:
            return None
        length = len(self.costs.activation) - 1
        most = self._kept + self._below
        kept = np.empty((2, length + 1, most + 1))
        beyond = self.limit - self.count * self._kept - self._below
        self._kernels.fill_kept(kept, self._arguments, beyond, self._below, most)
        free = {(0, length): most - int(self.activation[0])}

        def choose(state: int, i: int, last: int) -> int:
            slots = free[i, last]
            choice = int(self._kernels.choice(kept, self._arguments, beyond, state, i, last, slots))
            if choice >= 0:
                free[i + 1, last] = slots - int(self.taken[state, self.costs.first[i] + choice])
            else:
                free[-choice, last] = slots - int(self.activation[-choice])
                free[i, -choice - 1] = slots + (beyond if last == length else 0)
            return choice

        return Sequence(operations_of(length, choose), "in-flight")


def fastest_with_room(chain: Chain, kept: int, room: int) -> Sequence:
    """Return the fastest sequence with `kept` bytes or fewer when the loss begins, and a peak within `kept + room`."""
    stored = store_all(chain)
    one = Microbatch.of(chain, stored)
    if one.kept_bytes <= kept and one.peak_bytes <= kept + room:
        return stored
    return Persistent().solve(with_room_at_loss(chain, room - chain.activation[-1]), kept + room)


def has_room(chain: Chain, kept: int, room: int) -> bool:
    # At the loss, a plan counts the gradient of the output besides the loss's scratch: subtract it from `room`.
    return kept >= 0 and min_bytes(with_room_at_loss(chain, room - chain.activation[-1])) <= kept + room
