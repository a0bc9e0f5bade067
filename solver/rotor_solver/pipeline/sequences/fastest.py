"""The fastest sequence of a part with several microbatches in flight, within a limit: `recurrence`, in slots."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from rotor_solver.arrays.choices import operations_of
from rotor_solver.arrays.costs import Costs, costs_of
from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.limits import InfeasibleError
from rotor_solver.persistent import Persistent
from rotor_solver.pipeline.sequences.least import least_in_flight
from rotor_solver.pipeline.sequences.microbatch import Microbatch, bytes_in_flight
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_NUMBERS = 2e7
"""Numbers in the largest table, 160 MB; a guess. Slots are made larger for longer parts."""
_PAIRS = 3e8
"""Pairs of slots to look at in one table, about half a second; a guess."""


def bound_in_flight(chain: Chain, mem_limit: int, count: int, slots: int) -> float:
    """Seconds: no memory-persistent sequence with (count - 1) · kept + peak ≤ `mem_limit` bytes is faster.

    Infinite if there is none. With few slots, it takes little time.
    """
    stored = store_all(chain)
    assert stored.lower_bound is not None
    if fits(chain, stored, mem_limit, count):
        return stored.lower_bound
    if mem_limit < least_in_flight(chain, count).nbytes:
        return math.inf
    costs = costs_of(chain)
    unit, _ = _unit(costs, mem_limit, count, slots)
    return stored.lower_bound + _bound(costs, mem_limit, count, unit)


def fastest_in_flight(chain: Chain, mem_limit: int, count: int, slots: int) -> Sequence:
    """The fastest sequence found with (count - 1) · kept + peak ≤ `mem_limit` bytes, a_0 counted.

    What is kept is divided into about `slots`. `lower_bound` holds for all memory-persistent sequences. Raises
    InfeasibleError if there is none, with the exact least limit.
    """
    stored = store_all(chain)
    if fits(chain, stored, mem_limit, count):
        return stored
    if count == 1:
        return Persistent().solve(chain, mem_limit)
    least = least_in_flight(chain, count)
    if mem_limit < least.nbytes:
        message = f"{count} microbatches in flight need at least {least.nbytes} bytes; the limit is {mem_limit}"
        raise InfeasibleError(message, min_bytes=least.nbytes, mem_limit=mem_limit)
    assert stored.lower_bound is not None
    costs = costs_of(chain)
    unit, exact = _unit(costs, mem_limit, count, slots)
    table = _Table(costs, mem_limit, count, unit, up=True)
    # With too few slots, there may be none where there is a sequence.
    sequence = table.sequence() or least.sequence
    assert fits(chain, sequence, mem_limit, count)
    made = simulate(chain, sequence).makespan
    extra = table.extra if exact else _bound(costs, mem_limit, count, unit)
    return Sequence(sequence, "in-flight", min(made, stored.lower_bound + extra))


def _bound(costs: Costs, mem_limit: int, count: int, unit: int) -> float:
    """Seconds beyond storing everything, at least."""
    # What a stage frees may round to more than there is, and the table then says nothing.
    return _Table(costs, mem_limit, count, unit, up=False).extra if costs.taken.min(initial=0) >= 0 else 0.0


def _unit(costs: Costs, mem_limit: int, count: int, slots: int) -> tuple[int, bool]:
    """Bytes in a slot, and whether all that operations leave in memory is a whole number of slots."""
    length = len(costs.activation) - 1
    width = min(slots * count, _NUMBERS / (2 * length**2), _PAIRS / (length**3 / 3))
    divisor = int(np.gcd(np.gcd.reduce(costs.activation), np.gcd.reduce(costs.taken, axis=None)))
    unit = max(1, divisor, math.ceil(mem_limit / max(1.0, width)))
    return unit, unit == divisor


def fits(chain: Chain, sequence: Sequence, mem_limit: int, count: int) -> bool:
    """Whether `count` microbatches in flight that follow `sequence` stay within `mem_limit` bytes."""
    one = Microbatch.of(chain, sequence)
    return bytes_in_flight(one.kept_bytes, one.peak_bytes, count) <= mem_limit


class _Table:
    """The numbers of `kernels` for a limit, with what operations leave in memory rounded up to slots, or down.

    `extra` are the least seconds beyond storing everything; infinite if nothing fits.
    """

    def __init__(self, costs: Costs, mem_limit: int, count: int, unit: int, *, up: bool) -> None:
        from rotor_solver.pipeline.sequences import kernels

        self.costs, self.count, self.unit = costs, count, unit
        self.limit, self.offset = divmod(mem_limit, unit)
        self.taken, self.activation = (
            -(-each // unit) if up else each // unit for each in (costs.taken, costs.activation)
        )
        length = len(costs.activation) - 1
        self.again = np.full((2, length, length, self.limit + 1), np.inf)
        self._arguments = (self.again, costs, self.taken, self.activation, unit, self.offset)
        kernels.fill(*self._arguments)
        # What stages may free more than they save, by the option that frees most.
        self._below = sum(int(max(0, -self.taken[:, low:high].min())) for low, high in pairwise(costs.first.tolist()))
        extra, kept = kernels.best_kept(*self._arguments, count, self._below)
        self.extra, self._kept = float(extra), int(kept)

    def sequence(self) -> Sequence | None:
        """A sequence that takes `extra` seconds more than storing everything; None if nothing fits."""
        from rotor_solver.pipeline.sequences import kernels

        if self._kept < 0:
            return None
        length = len(self.costs.activation) - 1
        most = self._kept + self._below
        kept = np.empty((2, length + 1, most + 1))
        beyond = self.limit - self.count * self._kept - self._below
        kernels.fill_kept(kept, *self._arguments, beyond, self._below, most)
        free = {(0, length): most - int(self.activation[0])}

        def choose(state: int, i: int, last: int) -> int:
            slots = free[i, last]
            choice = int(kernels.choice(kept, *self._arguments, beyond, state, i, last, slots))
            if choice >= 0:
                free[i + 1, last] = slots - int(self.taken[state, self.costs.first[i] + choice])
            else:
                free[-choice, last] = slots - int(self.activation[-choice])
                free[i, -choice - 1] = slots + (beyond if last == length else 0)
            return choice

        return Sequence(operations_of(length, choose), "in-flight")
