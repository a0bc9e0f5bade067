"""Chains cut into segments of consecutive stages, and the sequence that runs some of them again.

One mechanism for all strategies whose checkpoints are given, not searched for: storing everything, periodic
checkpoints, the levels of a model, checkpoints chosen by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from rotor_solver.chain import Chain
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation
from rotor_solver.sequence import Sequence


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
