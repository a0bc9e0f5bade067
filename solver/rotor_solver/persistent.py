"""The best memory-persistent sequence: a checkpoint is dropped only at the backward that uses it.

The recurrence (design of Beaumont et al., HAL hal-02352969, with memory conditions of our own) is in `kernels.fill`.
It counts memory in slots, and that would cost something, so:

* needs are compared in bytes; only what is taken away from m is rounded to slots;
* rounded up, every sequence in the table fits. Rounded down, the table's time is a lower bound for all persistent
  sequences: that is the certificate;
* in both tables, sequences are also read off for other amounts of memory than the limit, and simulated in bytes: the
  fastest that really fits is taken;
* slots are made finer as long as the result is not within `_CLOSE` of the bound and that is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from rotor_solver.arrays import ChainArrays, Floats, Ints
from rotor_solver.backtrack import operations_of
from rotor_solver.chain import Chain
from rotor_solver.ends import min_bytes, recompute_all, store_all
from rotor_solver.errors import InfeasibleError
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_CLOSE = 0.002
_CHEAP_UPDATES = 1.5e9
_CHEAP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Persistent:
    """The program of this module, with memory divided into `slots` to begin with."""

    slots: int = 500

    name = "persistent"

    def __post_init__(self) -> None:
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 1:
            raise ValueError(f"slots is {self.slots!r}; memory has to be divided into at least one slot")

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The best sequence found within `mem_limit` bytes, a_0 counted, with a lower bound for all of them.

        InfeasibleError if there is none.
        """
        stored = store_all(chain)
        if simulate(chain, stored).peak <= mem_limit:
            return Sequence(stored, self.name, stored.lower_bound)
        least = min_bytes(chain)
        if mem_limit < least:
            raise InfeasibleError(
                f"the chain needs at least {least} bytes; the limit is {mem_limit}",
                min_bytes=least,
                mem_limit=mem_limit,
            )
        best = _Best(chain, mem_limit)
        best.offer(recompute_all(chain))
        assert stored.lower_bound is not None
        best.raise_bound(stored.lower_bound)
        arrays, room = ChainArrays.of(chain), mem_limit - chain.input_bytes
        for unit in _units(arrays, room, self.slots):
            _search(best, arrays, room, unit)
            if best.gap <= _CLOSE:
                break
        return best.sequence(self.name)


@dataclass(slots=True)
class _Best:
    """The fastest sequence so far that fits in bytes, and the best lower bound."""

    chain: Chain
    mem_limit: int
    makespan: float = math.inf
    bound: float = 0.0
    operations: Sequence | None = None

    def offer(self, sequence: Sequence) -> bool:
        """Take the sequence if it fits and is faster; say whether it fits."""
        result = simulate(self.chain, sequence)
        if result.peak > self.mem_limit:
            return False
        if result.makespan < self.makespan:
            self.makespan, self.operations = result.makespan, sequence
        return True

    def raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    @property
    def gap(self) -> float:
        return self.makespan / self.bound - 1 if self.bound else (0.0 if self.makespan == 0 else math.inf)

    def sequence(self, name: str) -> Sequence:
        assert self.operations is not None
        return Sequence(self.operations, name, min(self.bound, self.makespan))


def _units(arrays: ChainArrays, room: int, slots: int) -> Iterator[int]:
    """Bytes in a slot, finer and finer: while that is cheap, and not finer than is exact."""
    sizes = [int(size) for size in (*arrays.activation[1:], *arrays.saved, *arrays.released.flat) if size]
    exact = reduce(math.gcd, sizes, 0) or max(1, room)
    length = len(arrays.activation)
    while True:
        unit = max(exact, -(-room // slots))
        yield unit
        slots *= 4
        updates, table = slots * length**3 / 6, slots * length**2 * 4
        if unit == exact or updates > _CHEAP_UPDATES or table > _CHEAP_BYTES:
            return


def _search(best: _Best, arrays: ChainArrays, room: int, unit: int) -> None:
    """Offer what both tables of this unit have."""
    top = room // unit
    rest = room - top * unit
    down = _Table.filled(arrays, unit, rest, top, up=False)
    bound = down.makespan(top)
    # Sums in another order differ in their last digits; the certificate has to hold for all of them.
    best.raise_bound(bound * (1 - 1e-12 * len(arrays.activation)))
    if best.offer(down.sequence(top)):
        return
    _bisect(best, down, 0, top)
    extra = max(1, top // 4)
    _bisect(best, _Table.filled(arrays, unit, rest, top + extra, up=True), top, top + extra)


def _bisect(best: _Best, table: _Table, low: int, high: int) -> None:
    """Look between `low` and `high` slots for the most whose sequence fits the limit."""
    while low < high and math.isinf(table.makespan(low)):
        low = table.first_feasible()
    if low < high:
        best.offer(table.sequence(low))
    while low + 1 < high:
        middle = (low + high) // 2
        if best.offer(table.sequence(middle)):
            low = middle
        else:
            high = middle


@dataclass(frozen=True, slots=True)
class _Table:
    values: Floats
    arrays: ChainArrays
    start: Ints
    activation: Ints
    taken: Ints
    unit: int
    rest: int

    @classmethod
    def filled(cls, arrays: ChainArrays, unit: int, rest: int, top: int, *, up: bool) -> _Table:
        """The table for 0 … `top` slots of `unit` bytes, sizes rounded up or down."""
        from rotor_solver import kernels

        rounding = unit - 1 if up else 0
        stage_of = np.repeat(np.arange(len(arrays.activation) - 1), np.diff(arrays.first))
        taken = (arrays.saved - arrays.released[:, stage_of] + rounding) // unit
        start, rows = kernels.rows(arrays.released)
        values = np.empty((rows, top + 1), np.float64)
        table = cls(values, arrays, start, (arrays.activation + rounding) // unit, taken, unit, rest)
        begin = np.empty(rows, np.int64)
        kernels.fill(*(values, begin, *table._costs(), arrays.loss_time, arrays.loss_need, unit, rest))
        return table

    def _costs(self) -> tuple[Any, ...]:
        arrays = self.arrays
        return (
            self.start,
            self.activation,
            arrays.run,
            arrays.check_need,
            arrays.base,
            arrays.first,
            arrays.seconds,
            self.taken,
            arrays.forward_need,
            arrays.backward_need,
            arrays.released,
        )

    def makespan(self, slots: int) -> float:
        """Opt(0, L) with that many slots."""
        return float(self.values[len(self.activation) - 1, slots])

    def first_feasible(self) -> int:
        finite = np.flatnonzero(np.isfinite(self.values[len(self.activation) - 1]))
        return int(finite[0]) if len(finite) else self.values.shape[1]

    def sequence(self, slots: int) -> Sequence:
        """The sequence behind `makespan(slots)`, which is finite."""
        from rotor_solver import kernels

        costs = self._costs()

        def choose(state: int, i: int, last: int, m: int) -> int:
            return int(kernels.best_choice(*(self.values, state, i, last, m, *costs, self.unit, self.rest)))

        length, most = len(self.activation) - 1, self.values.shape[1] - 1
        return Sequence(operations_of(length, slots, choose, self.taken, self.activation, self.arrays.first, most=most))
