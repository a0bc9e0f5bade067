"""Sequences that recompute segments of consecutive stages, and the two extremes: `store_all` and `recompute_all`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from rotor_solver.chain import Chain, check_chain
from rotor_solver.described_error import check_fits, whole_bytes, within_memory
from rotor_solver.grouping import coarse_chain, fine_sequence, joined
from rotor_solver.least_memory import Costs, Ints, costs_of, least_choice, least_memory, operations_of
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence
from rotor_solver.simulate import simulate


def recompute_segments(forwards: Iterable[ForwardEnable], again: Iterable[range], algorithm: str = "") -> Sequence:
    """Return the sequence that runs `forwards`, and each segment in `again` once more right before its backwards."""
    stored, segments = list(forwards), list(again)
    forward: list[Operation] = [*stored]
    for segment in segments:
        for stage in segment:
            forward[stage] = ForwardCheck(stage) if stage == segment.start else ForwardNograd(stage)
    ends = {segment.stop - 1: segment for segment in segments}
    backward: list[Operation] = []
    for stage in reversed(range(len(stored))):
        backward += [stored[each] for each in ends.get(stage, ())]
        backward.append(Backward(stage))
    return Sequence([*forward, Loss(), *backward], algorithm)


def fastest_forwards(chain: Chain) -> list[ForwardEnable]:
    """Return each stage's forward with a graph, by its fastest option."""
    check_chain(chain)
    return [ForwardEnable(i, stage.fastest_option) for i, stage in enumerate(chain)]


def segments_from(starts: Iterable[int], length: int) -> list[range]:
    """Return the segments of a chain of `length` stages that begin at the stages `starts`, which increase from 0."""
    return [range(low, high) for low, high in pairwise([*starts, length])]


def even_segments(length: int, count: int) -> list[range]:
    """Return at most `count` nearly equal segments of `length` stages: segment p begins at ⌊p · length / count⌋."""
    bounds = [length * each // count for each in range(count + 1)]
    return [range(low, high) for low, high in pairwise(bounds) if low < high]


def store_all(chain: Chain) -> Sequence:
    """Return the sequence that runs every stage once, by its fastest option, and stores everything.

    No sequence is faster, so its `lower_bound` is its own makespan.
    """
    sequence = recompute_segments(fastest_forwards(chain), [])
    return Sequence(sequence, "store-all", lower_bound=simulate(chain, sequence).makespan)


@within_memory
def recompute_all(chain: Chain) -> Sequence:
    """Return the memory-persistent sequence with the least peak (with a low one for chains of over 2,500 stages)."""
    check_chain(chain)
    if (groups := joined(chain)) is not None:
        return Sequence(fine_sequence(chain, groups, recompute_all(coarse_chain(chain, groups))), "recompute-all")
    costs = costs_of(chain)
    return least_sequence(costs, least_memory(costs))


def least_sequence(costs: Costs, least: Ints) -> Sequence:
    """Return `recompute_all(chain)`, given the chain's `costs_of` and `least_memory`."""
    return Sequence(operations_of(len(costs.activation) - 1, partial(least_choice, costs, least)), "recompute-all")


@within_memory
def min_bytes(chain: Chain) -> int:
    """Return the least limit in bytes within which a memory-persistent sequence fits, the chain's input included.

    Exact for up to 2,500 stages. The stages of longer chains are merged into 400 groups, which may need a higher limit.
    """
    check_chain(chain)
    if (groups := joined(chain)) is not None:
        return min_bytes(coarse_chain(chain, groups))
    return chain.input_bytes + int(least_memory(costs_of(chain))[0, 0, len(chain)])


class StoreAll:
    """Algorithm that stores everything, as plain training does."""

    name = "store-all"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return `store_all(chain)`. Raises InfeasibleError if it needs more than `mem_limit` bytes."""
        return _within(chain, mem_limit, store_all(chain), "storing everything")


class RecomputeAll:
    """Algorithm with the least peak of all memory-persistent sequences, however much it recomputes."""

    name = "recompute-all"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return `recompute_all(chain)`. Raises InfeasibleError if it needs more than `mem_limit` bytes."""
        return _within(chain, mem_limit, recompute_all(chain), "even recomputing as much as possible")


def _within(chain: Chain, mem_limit: int, sequence: Sequence, what: str) -> Sequence:
    check_fits(f"{what} needs", simulate(chain, sequence).peak, whole_bytes(mem_limit))
    return sequence
