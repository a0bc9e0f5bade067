"""The sequence that keeps the input of every segment and runs each one again."""

from __future__ import annotations

from collections.abc import Sequence as Starts
from itertools import pairwise

from rotor_solver import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence


def recompute_segments(length: int, starts: Starts[int], *, last_too: bool = False) -> Sequence:
    """For `length` stages, segments that begin at `starts`, the first of which is 0.

    The last segment is stored as it runs, since it would be run again at once, unless `last_too`.
    """
    segments = [range(low, high) for low, high in pairwise([*starts, length])]
    again = segments if last_too else segments[:-1]
    forward: list[Operation] = []
    for segment in again:
        forward += [ForwardCheck(segment.start), *map(ForwardNograd, segment[1:])]
    replay: list[Operation] = []
    for segment in reversed(segments):
        run: list[Operation] = [ForwardEnable(stage) for stage in segment]
        if segment in again:
            replay += run
        else:
            forward += run
        replay += map(Backward, reversed(segment))
    return Sequence([*forward, Loss(), *replay])
