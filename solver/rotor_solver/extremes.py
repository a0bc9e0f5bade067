"""The two ends of the scale: everything stored, and the least memory for which there is a plan at all."""

from __future__ import annotations

from functools import partial

from rotor_solver.arrays.choices import operations_of
from rotor_solver.arrays.costs import Costs, Ints, costs_of
from rotor_solver.arrays.least import least_choice, least_memory
from rotor_solver.chain import Chain
from rotor_solver.limits import InfeasibleError
from rotor_solver.segments import fastest_forwards, recompute_segments
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


def store_all(chain: Chain) -> Sequence:
    """Run every stage once, with its fastest option, and keep everything: nothing is faster.

    Its `lower_bound` is its own makespan.
    """
    sequence = recompute_segments(fastest_forwards(chain), [])
    return Sequence(sequence, "store-all", lower_bound=simulate(chain, sequence).makespan)


def recompute_all(chain: Chain) -> Sequence:
    """A sequence with the least peak of all memory-persistent ones."""
    costs = costs_of(chain)
    return least_sequence(chain, costs, least_memory(costs))


def least_sequence(chain: Chain, costs: Costs, least: Ints) -> Sequence:
    """`recompute_all(chain)`, if `costs` and the table [2, L+1, L+1] of `least_memory` are already known."""
    choose = partial(least_choice, costs, least)
    return Sequence(operations_of(len(chain), choose), "recompute-all")


def min_bytes(chain: Chain) -> int:
    """The least limit in bytes for which there is a memory-persistent sequence, a_0 counted. It is exact."""
    return chain.input_bytes + int(least_memory(costs_of(chain))[0, 0, len(chain)])


class StoreAll:
    """Everything is stored: plain training."""

    name = "store-all"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """`store_all(chain)`. Raises InfeasibleError if it does not fit."""
        return _within(chain, mem_limit, store_all(chain), "storing everything")


class RecomputeAll:
    """The least possible peak of all memory-persistent sequences, however much has to be computed again."""

    name = "recompute-all"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """`recompute_all(chain)`. Raises InfeasibleError if not even that fits."""
        return _within(chain, mem_limit, recompute_all(chain), "even computing as much as possible again")


def _within(chain: Chain, mem_limit: int, sequence: Sequence, what: str) -> Sequence:
    peak = simulate(chain, sequence).peak
    if peak > mem_limit:
        raise InfeasibleError(
            f"{what} needs {peak} bytes; the limit is {mem_limit}", min_bytes=peak, mem_limit=mem_limit
        )
    return sequence
