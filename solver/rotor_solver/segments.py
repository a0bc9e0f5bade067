"""Sequences whose checkpoints are given, and the two ends of the scale.

`recompute_segments` cuts a chain into segments of consecutive stages and runs some of them again: storing everything,
periodic checkpoints, the levels of a model, checkpoints chosen by hand. `store_all` is the fastest sequence,
`recompute_all` the memory-persistent one with the least peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from rotor_solver.chain import Chain
from rotor_solver.least_memory import Costs, Ints, costs_of, least_choice, least_memory, operations_of
from rotor_solver.limits import InfeasibleError
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence
from rotor_solver.simulate import simulate


def recompute_segments(forwards: Iterable[ForwardEnable], again: Iterable[range], algorithm: str = "") -> Sequence:
    """The sequence in which the segments `again` are run twice, and all other stages are stored as they run.

    `forwards` says how each stage runs with a graph. `again` are disjoint segments of stages. On the way forward, only
    the first input of each is kept. Right before the backward of its last stage, the segment is run again and stored.
    """
    stored = list(forwards)
    starts, ends = {}, {}
    for segment in again:
        starts.update(dict.fromkeys(segment, segment.start))
        ends[segment.stop - 1] = segment
    forward: list[Operation] = []
    backward: list[Operation] = []
    for stage, enable in enumerate(stored):
        if stage not in starts:
            forward.append(enable)
        else:
            forward.append(ForwardCheck(stage) if stage == starts[stage] else ForwardNograd(stage))
    for stage in reversed(range(len(stored))):
        backward += [stored[each] for each in ends.get(stage, ())]
        backward.append(Backward(stage))
    return Sequence([*forward, Loss(), *backward], algorithm)


def fastest_forwards(chain: Chain) -> list[ForwardEnable]:
    """Every stage with a graph, by its fastest option."""
    return [ForwardEnable(i, stage.fastest_option) for i, stage in enumerate(chain)]


def segments_from(starts: Iterable[int], length: int) -> list[range]:
    """The segments of a chain of `length` stages that begin at `starts`, which increase from 0."""
    return [range(low, high) for low, high in pairwise([*starts, length])]


def even_segments(length: int, count: int) -> list[range]:
    """`count` segments of `length` stages, or fewer, as equal as can be: segment p begins at ⌊p · length / count⌋."""
    bounds = [length * each // count for each in range(count + 1)]
    return [range(low, high) for low, high in pairwise(bounds) if low < high]


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
