"""Slow twins: all sequences with all timetables of copies, on tiny chains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from rotor_solver import Backward, Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence, moments
from rotor_solver.moving import Link

Trip = tuple[int, int, int]
"""Where bytes are made, where they are read, and how many they are."""


def all_sequences(chain: Chain) -> Iterator[Sequence]:
    """Every memory-persistent sequence."""
    length = len(chain)

    def parts(i: int, last: int) -> Iterator[tuple[Operation, ...]]:
        if i == length:
            yield (Loss(),)
            return
        for option in range(len(chain.stages[i].options)):
            for rest in parts(i + 1, last) if i < last else [()]:
                yield ForwardEnable(i, option), *rest, Backward(i)
        for j in range(i + 1, last + 1):
            for right, left in product(parts(j, last), parts(i, j - 1)):
                yield ForwardCheck(i), *map(ForwardNograd, range(i + 1, j)), *right, *left

    return map(Sequence, parts(0, length))


def exhaustive_moving_optimum(chain: Chain, limit: int, link: Link) -> float:
    """The least seconds of all sequences with all timetables of all that may move; infinite if nothing fits."""
    best = math.inf
    for sequence in all_sequences(chain):
        steps = moments(chain, sequence)
        if sum(step.seconds for step in steps) >= best:
            continue
        for trips in _subsets(possible_trips(chain, sequence)):
            best = min(best, best_timetable(chain, sequence, trips, limit, link))
    return best


def possible_trips(chain: Chain, sequence: Sequence) -> list[Trip]:
    operations = list(sequence)
    return [
        (place, operations.index(Backward(each.stage)), chain.stages[each.stage].options[each.option].moved)
        for place, each in enumerate(operations[: operations.index(Loss())])
        if isinstance(each, ForwardEnable) and chain.stages[each.stage].options[each.option].moved
    ]


def _subsets(trips: list[Trip]) -> Iterator[list[Trip]]:
    for chosen in product((False, True), repeat=len(trips)):
        yield [trip for trip, yes in zip(trips, chosen, strict=True) if yes]


def best_timetable(chain: Chain, sequence: Sequence, trips: list[Trip], limit: int, link: Link) -> float:
    """The least seconds in which exactly these trips are made inside the limit, waits and fetches tried everywhere."""
    steps = moments(chain, sequence)
    after_loss = sequence.operations.index(Loss()) + 1
    best = math.inf
    leaves = [range(forward + 1, after_loss + 1) for forward, _, _ in trips]
    returns = [range(after_loss, backward + 1) for _, backward, _ in trips]
    for waits in product(*leaves):
        for fetches in product(*returns):
            away = list(zip(trips, waits, fetches, strict=True))
            held = [
                step.during - sum(moved for (_, _, moved), wait, fetch in away if wait <= place < fetch)
                for place, step in enumerate(steps)
            ]
            if max(held) <= limit:
                best = min(best, _seconds([step.seconds for step in steps], away, link))
    return best


def _seconds(steps: list[float], away: list[tuple[Trip, int, int]], link: Link) -> float:
    now = out_free = in_free = 0.0
    out_end: dict[Trip, float] = {}
    in_end: dict[Trip, float] = {}
    for place, seconds in enumerate(steps):
        now = max([now, *(out_end[trip] for trip, wait, _ in away if wait == place)])
        for trip, _, fetch in sorted(away, key=lambda each: each[0][1]):
            if fetch == place:
                in_free = in_end[trip] = max(in_free, now) + trip[2] / link.in_bytes_per_second
        now = max([now, *(in_end[trip] for trip, _, _ in away if trip[1] == place)]) + seconds
        for trip, _, _ in away:
            if trip[0] == place:
                out_free = out_end[trip] = max(out_free, now) + trip[2] / link.out_bytes_per_second
    return now
