"""The best schedule that stores only inputs, for stages of different sizes and times: a heterogeneous Revolve.

No ā is kept: a stage runs with a graph immediately before its own backward, the last one before the loss. Beaumont et
al. (HAL hal-02352969) compare with it. With δ_{l+1} in memory and a_i not counted in m,

    Opt(i, i, m) = uf_i + ub_i
    Opt(i, l, m) = the least of Σ_{k=i}^{j-1} uf_k + Opt(j, l, m - |a_j|) + Opt(i, j-1, m) for i < j ≤ l

under the memory conditions of the persistent program, of which this is a special case; stage L is the loss, and
Opt(L-1, L, m) may also be Fe_{L-1}, L, B_{L-1}. Its exact form is in `kernels.fill`.

`attached` keeps every checkpoint together with what its stage saves: a_j and ā_{j+1}, so that Fe_j is run on the way
forward, and stage j never again. A checkpoint at a_j then leads to Fe_j, [j+1, l], B_j, and Fe_i may begin every
interval. Only a_0 and a_L are ever kept alone.

Memory is divided into slots, and what is kept is rounded up, so that all times in the table can be had. Schedules are
read off with memory counted in bytes; where slots are too coarse to say anything, the one with least memory is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import NamedTuple

import numpy as np

from rotor_solver.arrays.costs import Costs, Floats, Ints, costs_of
from rotor_solver.chain import Chain
from rotor_solver.inputs_only.checkpoints import fastest_fitting, input_sequence, with_fastest_options
from rotor_solver.limits import check_slots
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_LARGEST_TABLE = 2**27
"""Numbers in a table: a GiB; a guess. Where there would be more, slots are made coarser."""
_SERIAL = 2e7
"""Pairs of numbers up to which one core does the work, in a hundredth of a second; a guess. Several cores wait for each
other after every size of interval, and long if other programs keep them busy."""


class Known(NamedTuple):
    """What is known of every interval [i, stop) before its row is filled: [L+2, L+2] arrays by (i, stop).

    `least` is the least memory in bytes, and `least_seconds` the time there; from `full` bytes on it cannot be faster
    than `full_seconds`.
    """

    least: Ints
    least_seconds: Floats
    full: Ints
    full_seconds: Floats


class Rows(NamedTuple):
    """Slot m of row (i, stop) is number position + m of the table, for begin ≤ m < end; from there on it is `beyond`.

    All are [L+2, L+2], by (i, stop); `beyond` is in seconds. No row has more than `width` slots, the table's largest.
    Empty intervals, and the loss, have no numbers: they begin where they end.
    """

    begin: Ints
    end: Ints
    position: Ints
    beyond: Floats
    width: int


@dataclass(frozen=True, slots=True)
class GriewankHeterogeneous:
    """The program of this module, with memory divided into `slots`, or fewer where that is exact.

    Raises ValueError if `slots` is not at least one, or if `attached` is not True or False.
    """

    slots: int = 500
    attached: bool = False

    def __post_init__(self) -> None:
        check_slots(self.slots)
        if not isinstance(self.attached, bool):
            raise ValueError(f"attached is {self.attached!r}; it has to be True or False")

    @property
    def name(self) -> str:
        return "griewank-heterogeneous-attached" if self.attached else "griewank-heterogeneous"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The fastest schedule of its kind within `mem_limit` bytes, a_0 counted, up to rounding to slots.

        It is exact if all sizes are multiples of a slot. Raises InfeasibleError if there is none, with the exact least
        limit.
        """
        from rotor_solver.inputs_only import kernels

        costs = costs_of(with_fastest_options(chain))
        serial = len(chain) ** 3 < _SERIAL
        least_memory = kernels.least_memory if serial else kernels.least_memory_in_parallel
        known = Known(*least_memory(costs, self.attached), *kernels.full_memory(costs, self.attached))
        fastest_fitting(self.name, mem_limit, [(0.0, chain.input_bytes + int(known.least[0, -1]))])
        room = min(mem_limit - chain.input_bytes, int(known.full[0, -1]))
        sequence = input_sequence(chain, self._checkpoints(costs, known, room), self.name)
        assert simulate(chain, sequence).peak <= mem_limit
        return sequence

    def _checkpoints(self, costs: Costs, known: Known, room: int) -> dict[tuple[int, int], int]:
        """The checkpoint of every interval that has one, by (i, l), for `room` bytes."""
        from rotor_solver.inputs_only import kernels

        unit, rows, size = self._layout(costs, known, room)
        table = np.empty(size)
        fill = kernels.fill if size * len(known.least) < _SERIAL else kernels.fill_in_parallel
        fill(table, rows, known.least_seconds, costs, self.attached, unit, room % unit)
        splits = kernels.descend(table, rows, known, costs, self.attached, unit, room % unit, room)
        return {(i, last): j for i, last, j in splits.tolist()}

    def _layout(self, costs: Costs, known: Known, room: int) -> tuple[int, Rows, int]:
        """Bytes in a slot, where the rows lie, and how many numbers that makes."""
        from rotor_solver.inputs_only import kernels

        taken = [*costs.activation[1:], *(costs.taken.flat if self.attached else [])]
        unit = max(1, reduce(gcd, map(int, taken), 0), -(-room // self.slots))
        stages = np.arange(len(known.least))
        empty = stages[:, None] >= stages
        while True:
            width, offset = room // unit + 1, room % unit
            begin, whole = (np.maximum(0, -((offset - need) // unit)) for need in (known.least, known.full))
            end = np.maximum(begin, np.minimum(whole, width))
            begin[empty] = end[empty] = kernels.NOTHING
            size = int((end - begin).sum())
            if size <= _LARGEST_TABLE or unit >= room:
                break
            unit *= 2
        position = np.cumsum((end - begin).ravel()).reshape(end.shape) - end
        # If all numbers are out of reach, memory that an operation frees may still lead there.
        beyond = np.where(begin < whole, known.least_seconds, known.full_seconds)
        beyond = np.where((end == whole) | empty, known.full_seconds, beyond)
        return unit, Rows(begin, end, position, beyond, width), size
