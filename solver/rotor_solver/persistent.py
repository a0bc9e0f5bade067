"""The best memory-persistent sequence: a checkpoint is dropped only at the backward that uses it.

The recurrence (design of Beaumont et al., HAL hal-02352969, with memory conditions of our own) is in `kernels.fill`.
It counts memory in slots, and that would cost something, so:

* sizes are rounded down: what the table says is a lower bound for all persistent sequences, the certificate;
* slots are laid out so that only checkpoints are rounded at all (`grid`), and needs are compared in bytes;
* sequences are read off with memory counted in bytes (`kernels.descend`): they fit, whatever the slots are;
* what is slower than the best sequence known so far is never computed, so that a coarse table makes a finer one cheap.
  Slots are made finer as long as the result is not within `_CLOSE` of the bound and that is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from rotor_solver.arrays import Costs, Floats, Ints, costs_of
from rotor_solver.backtrack import operations_of
from rotor_solver.chain import Chain
from rotor_solver.coarse import coarse_chain, even_groups, fine_sequence
from rotor_solver.ends import least_sequence, store_all
from rotor_solver.errors import InfeasibleError
from rotor_solver.grid import Grid, Rows, fastest_options, grid_of
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_CUT = 1.001
"""Times up to this multiple of the best overhead known are told apart; 1 would leave no room for rounding."""
_DOUBLE = 2e8
"""Comparisons up to which the table is computed in double precision."""
_BLENDS = (0.5, 0.0, 1.0)
_GROUPS = 50


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long to go on: until the gap is `close`, or the next table would need more than this."""

    close: float
    updates: float
    nbytes: float


_THOROUGH = _Effort(close=0.004, updates=3e9, nbytes=2**31)
_HASTY = _Effort(close=0.02, updates=3e7, nbytes=2**27)


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
        best = _solved(chain, mem_limit, self.slots, _THOROUGH)
        assert best.sequence is not None and simulate(chain, best.sequence).peak <= mem_limit
        return Sequence(best.sequence, self.name, min(best.bound, best.makespan))


@dataclass(slots=True)
class _Best:
    """The fastest sequence so far, and the best lower bounds. `stored` is the time of storing everything."""

    chain: Chain
    stored: float
    makespan: float = math.inf
    bound: float = 0.0
    sequence: Sequence | None = None
    later: Floats = field(init=False)
    """[L+1] what the stages from i on take longer, at least, than stored."""

    def __post_init__(self) -> None:
        self.bound = self.stored
        self.later = np.zeros(len(self.chain) + 1)

    def offer(self, sequence: Sequence) -> None:
        makespan = simulate(self.chain, sequence).makespan
        if makespan < self.makespan:
            self.makespan, self.sequence = makespan, sequence

    @property
    def overhead(self) -> float:
        return max(0.0, self.makespan - self.stored)

    @property
    def gap(self) -> float:
        return self.makespan / self.bound - 1 if self.bound else (0.0 if self.makespan == 0 else math.inf)


def _solved(chain: Chain, mem_limit: int, slots: int, effort: _Effort) -> _Best:
    from rotor_solver import kernels

    costs = costs_of(chain)
    least = kernels.least_memory(costs)
    room, needed = mem_limit - chain.input_bytes, int(least[0, 0, len(chain)])
    if room < needed:
        raise InfeasibleError(
            f"the chain needs at least {chain.input_bytes + needed} bytes; the limit is {mem_limit}",
            min_bytes=chain.input_bytes + needed,
            mem_limit=mem_limit,
        )
    stored = store_all(chain).lower_bound
    assert stored is not None
    best = _Best(chain, stored)
    _begin(best, mem_limit)
    if best.sequence is None:
        best.offer(least_sequence(chain, costs, least))
    fastest = fastest_options(costs)
    full = kernels.full_memory(costs, fastest)
    updates = 0.0
    for unit in _units(costs, room, slots):
        overhead = best.overhead
        if best.gap <= effort.close or overhead == 0:
            break
        later = best.later / overhead
        scaled = costs._replace(run=costs.run / overhead, extra=costs.extra / overhead)
        grid = grid_of(scaled, fastest, room, unit, later, _CUT)
        *found, size = kernels.layout(least, full, scaled, grid, later, _CUT)
        if updates * grid.width > effort.updates or size * 4 > effort.nbytes:
            break
        updates = _search(best, scaled, least, grid, Rows(*found), size, room) / grid.width
    return best


def _begin(best: _Best, mem_limit: int) -> None:
    """Offer what the same program finds for groups of stages: small groups if large ones do not fit."""
    length, groups = len(best.chain), _GROUPS
    while best.sequence is None and 2 * groups < length:
        parts = even_groups(length, groups)
        try:
            coarse = _solved(coarse_chain(best.chain, parts), mem_limit, 500, _HASTY)
            assert coarse.sequence is not None
            best.offer(fine_sequence(best.chain, parts, coarse.sequence))
        except InfeasibleError:
            groups *= 2


def _units(costs: Costs, room: int, slots: int) -> Iterator[int]:
    """Bytes in a slot, finer and finer, and not finer than is exact."""
    sizes = [int(size) for size in (*costs.activation[1:], *costs.taken.flat) if size]
    exact = reduce(math.gcd, sizes, 0) or max(1, room)
    if len(costs.activation) > _GROUPS and room // exact > slots:
        yield max(exact, -(-room // max(1, slots // 8)))
    while True:
        unit = max(exact, -(-room // slots))
        yield unit
        if unit == exact:
            return
        slots *= 4


def _search(best: _Best, costs: Costs, least: Ints, grid: Grid, rows: Rows, size: int, room: int) -> int:
    """Improve the best sequence and the bounds with this grid; times in `costs` are relative to the best overhead.

    Returns how many comparisons it took.
    """
    from rotor_solver import kernels

    overhead = best.overhead
    table = np.empty(size, np.float64 if size * len(grid.band) <= _DOUBLE else np.float32)
    updates = int(kernels.fill(table, rows, costs, grid))

    def bound(node: int, slot: int) -> float:
        row = grid.tail + node
        return kernels.value_of(table, rows, grid.width, row, slot) if slot >= rows.begin[row] else 1.0

    # Sums in another order differ in their last digits; the certificate has to hold for all of them.
    certain = overhead * (1 - (2 * len(grid.band) + 8) * float(np.finfo(table.dtype).eps))
    best.bound = max(best.bound, best.stored + min(1.0, bound(0, grid.width - 2)) * certain)
    later = [min(1.0, bound(node, grid.width - 1)) * certain for node in grid.node[0]]
    best.later = np.maximum(best.later, later)
    for blend in _BLENDS:
        enough = best.overhead / overhead
        choices, seconds = kernels.descend(table, rows, least, costs, grid, _CUT, room, blend, enough)
        if seconds < enough:
            codes = iter(choices.tolist())
            best.offer(Sequence(operations_of(len(grid.band), lambda *_: next(codes))))
    return updates
