"""The best sequence in which checkpoints may be dropped before the backward of their stage: they float.

After Beaumont et al., "Optimal checkpointing for heterogeneous chains" (HAL hal-02352969). A problem is (s, t, l, M),
s ≤ t ≤ l: a_s and δ_{l+1} are in memory, the backwards of the stages l … t are to be done in M bytes, a_s counted, and
a_s is of no use after that. If s < t, the backwards of s … t-1 are another problem's, which has an earlier checkpoint,
so a_s can be dropped at any time. There are three ways to begin:

    Fe_s … B_s   if s = t: what is between is the problem (s+1, s+1, l), with a_{s+1} inside ā_{s+1}
    Fn_s         if s < t: then (s+1, t, l, M)
    CF_s         for a j with t < j ≤ l: then (s+1, j, l, M - |a_s|), and from a_s again (s, t, j-1, M)

It is enough to go forward by one stage: with s+1 < j the next problem may go on without a_{s+1}. Hence L⁴/24 choices in
all, for every M. The memory-persistent sequences are those where a_s is kept by CF_s for its own stage only, s = t.

The class: all sequences of this form. Every checkpoint in memory is dropped before those that were kept earlier, and
ā_{s+1} is kept only together with a_s. A search over all sequences was faster on 2 of 3606 random chains of three and
four stages: there, ā_{s+1} was kept while a_s was dropped and made again later. `lower_bound` is certified for the
class, which contains the memory-persistent sequences.

Memory is counted in slots, as in `persistent`: sizes are rounded down for the bound, and sequences are read off with
memory counted in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rotor_solver.arrays.costs import Costs, Ints, costs_of
from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.limits import InfeasibleError, check_slots
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation
from rotor_solver.persistent.program import Persistent
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_LARGEST_TABLE = 2**31
"""Bytes; a guess. A chain whose first table is larger is refused."""
_CLOSE = 0.004
"""Slots are made finer until the makespan is this near to the bound, as a ratio; a guess."""
_FINER_CHOICES = 1e9
"""They are not made finer if the next table would look at more pairs of slots than this; a guess."""
_FINER_TABLE = 2**29
"""Nor if it would have more bytes than this; a guess."""
_BLENDS = (0.5, 0.0, 1.0)
"""Ways to read between slots (`kernels.estimate`) when looking for a sequence; a guess."""


@dataclass(frozen=True, slots=True)
class Floating:
    """The program of this module, with memory divided into `slots` to begin with.

    Raises ValueError if `slots` is not at least one.
    """

    slots: int = 500

    name = "floating"

    def __post_init__(self) -> None:
        check_slots(self.slots)

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The best sequence found within `mem_limit` bytes, a_0 counted; never slower than that of `Persistent`.

        Its lower bound holds for all sequences of the class that the module describes. Raises InfeasibleError if there
        is none, with the least limit, which may be below that of memory-persistent sequences. Raises ValueError if the
        chain is so long that its first table is too large.
        """
        stored = store_all(chain)
        if simulate(chain, stored).peak <= mem_limit:
            return Sequence(stored, self.name, stored.lower_bound)
        _check_size(len(chain), min(self.slots, mem_limit) + 1)
        problem = _problem(chain, mem_limit)
        best = _Best(chain, mem_limit, stored.lower_bound or 0.0)
        # There may be no persistent sequence where there is a floating one.
        with suppress(InfeasibleError):
            best.offer(Persistent(self.slots).solve(chain, mem_limit))
        for number, unit in enumerate(_units(problem.costs, mem_limit, self.slots)):
            if number and (best.makespan <= best.bound * (1 + _CLOSE) or not _cheap(len(chain), mem_limit // unit + 1)):
                break
            _search(best, problem, unit)
        assert best.sequence is not None
        return Sequence(best.sequence, self.name, min(best.bound, best.makespan))


@dataclass(slots=True)
class _Best:
    """The fastest sequence so far, and the best lower bound; `stored` is the time of storing everything."""

    chain: Chain
    mem_limit: int
    stored: float
    makespan: float = math.inf
    bound: float = 0.0
    sequence: Sequence | None = None

    def offer(self, sequence: Sequence) -> None:
        result = simulate(self.chain, sequence)
        assert result.peak <= self.mem_limit
        if result.makespan < self.makespan:
            self.makespan, self.sequence = result.makespan, sequence


class _Problem(NamedTuple):
    costs: Costs
    start: Ints
    """[L+1, L+2] finds the row of a problem; see `kernels`"""
    least: Ints
    """[rows] the least M with which each problem can be solved"""
    root: int
    """The row of the whole chain."""


def _problem(chain: Chain, mem_limit: int) -> _Problem:
    from rotor_solver.floating import kernels

    costs = costs_of(chain)
    start = _start(len(chain))
    root = int(start[0, 0]) + len(chain)
    least = kernels.least_memory(costs, start, _row_count(len(chain)))
    needed = int(least[root])
    if mem_limit < needed:
        raise InfeasibleError(
            f"the chain needs at least {needed} bytes; the limit is {mem_limit}", min_bytes=needed, mem_limit=mem_limit
        )
    return _Problem(costs, start, least, root)


def _search(best: _Best, problem: _Problem, unit: int) -> None:
    """Improve the best sequence and the bound with slots of `unit` bytes."""
    from rotor_solver.floating import kernels

    costs, start, least, root = problem
    length, (width, offset) = len(best.chain), divmod(best.mem_limit, unit)
    table = kernels.fill(costs, start, least, unit, offset, width + 1)
    # Sums in another order differ in their last digits; the certificate has to hold for all of them.
    certain = 1 - (4 * length**2 + 8) * float(np.finfo(np.float64).eps)
    best.bound = max(best.bound, (best.stored + float(table[root, width])) * certain)
    cut = float(costs.run[-1]) + best.stored
    for blend in _BLENDS:
        choices = kernels.descend(table, least, costs, start, unit, offset, best.mem_limit, blend, cut)
        best.offer(Sequence(_operations(length, choices.tolist())))


def _row_count(length: int) -> int:
    return (length + 1) * (length + 2) * (length + 6) // 6


def _start(length: int) -> Ints:
    """[L+1, L+2] `start` of the kernels: the problems (s, t, l) and those with a_s inside ā_s, row after row."""
    start = np.zeros((length + 1, length + 2), np.int64)
    rows = 0
    for s in range(length + 1):
        for column in range(s, length + 2):
            first = column if column <= length else s
            start[s, column] = rows - first
            rows += length + 1 - first
    return start


def _units(costs: Costs, mem_limit: int, slots: int) -> Iterator[int]:
    """Bytes in a slot, finer and finer, down to where all sizes are whole numbers of slots."""
    sizes = [int(size) for size in (*costs.activation, *costs.taken.flat)]
    exact = math.gcd(*sizes) or max(1, mem_limit)
    while True:
        unit = max(exact, -(-mem_limit // slots))
        yield unit
        if unit == exact:
            return
        slots *= 4


def _table_bytes(length: int, width: int) -> int:
    return _row_count(length) * width * 8


def _check_size(length: int, width: int) -> None:
    nbytes = _table_bytes(length, width)
    if nbytes > _LARGEST_TABLE:
        raise ValueError(
            f"{length} stages with memory in {width} slots need a table of {nbytes / 2**30:.1f} GiB, and at most "
            f'{_LARGEST_TABLE / 2**30:.1f} GiB are allowed; use algorithm="persistent", or fewer slots'
        )


def _cheap(length: int, width: int) -> bool:
    return length**4 / 24 * width <= _FINER_CHOICES and _table_bytes(length, width) <= _FINER_TABLE


def _operations(length: int, choices: Iterable[int]) -> list[Operation]:
    """The operations, from the choices of `kernels.descend`."""
    operations: list[Operation] = []
    codes = iter(choices)
    pending: list[tuple[int, int, int] | Operation] = [(0, 0, length)]
    while pending:
        task = pending.pop()
        if not isinstance(task, tuple):
            operations.append(task)
            continue
        s, t, last = task
        if t > last:
            continue
        if s == length:
            operations.append(Loss())
            continue
        choice = next(codes)
        if choice >= 0:
            operations.append(ForwardEnable(s, choice))
            pending += [Backward(s), (s + 1, s + 1, last)]
        elif choice == -1:
            operations.append(ForwardNograd(s))
            pending.append((s + 1, t, last))
        else:
            j = -1 - choice
            operations.append(ForwardCheck(s))
            pending += [(s, t, j - 1), (s + 1, j, last)]
    return operations
