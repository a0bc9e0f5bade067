"""Slow twins of the solver: the recurrence as a memoised recursion in bytes, and a search over all schedules."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cache
from itertools import count

from rotor_solver import Chain


def naive_optimum(chain: Chain, limit: int) -> float:
    """The least makespan of a memory-persistent sequence within `limit` bytes; infinite where there is none."""
    length, stages = len(chain), chain.stages
    sizes = (*chain.activation, 0)  # |a_{L+1}| = 0

    def left(i: int) -> int:
        return sum(stage.gradient for stage in stages[i:])

    def output(alone: bool) -> int:
        return chain.activation[length] if chain.output_held and alone else 0

    @cache
    def best(i: int, last: int, memory: int) -> float:
        if i == length:
            return chain.loss_time if memory >= sizes[length] + chain.loss_temp else math.inf
        after_loss = last < length
        others = sizes[last + 1] + left(last + 1) + output(after_loss)
        times = [math.inf]
        for option in stages[i].options:
            replay = option.backward_temp if option.replay_temp is None else option.replay_temp
            temp = replay if after_loss else option.backward_temp
            during = sizes[i] + sizes[i + 1] + left(i + 1) + output(after_loss or i < length - 1) + option.saved + temp
            if memory >= max(others + option.saved + option.forward_temp, during, left(i) + output(True)):
                rest = best(i + 1, last, memory - option.saved) if i < last else 0.0
                times.append(option.forward_time + option.backward_time + rest)
        forward, most = 0.0, 0
        for j in range(i + 1, last + 1):
            forward += chain.nograd_time[j - 1]
            most = max(most, (sizes[j - 1] if j - 1 > i else 0) + sizes[j] + chain.nograd_temp[j - 1])
            if memory >= others + most:
                times.append(forward + best(j, last, memory - sizes[j]) + best(i, j - 1, memory))
        return min(times)

    return best(0, length, limit - sizes[0])


State = tuple[frozenset[int], frozenset[int], frozenset[int], int, bool]
"""Inputs that stand alone; those of them that are kept for a later use; saved sets; the index of the gradient (-1
before the loss); and whether the loss is done."""


def exhaustive_optimum(chain: Chain, limit: int, *, persistent: bool) -> float:
    """The least makespan of all valid sequences of operations, in any order.

    If `persistent`, only of those that drop an input that was kept, or that a saved set belongs to, at its backward.
    For chains with one option per stage, without parameter gradients, whose output nobody holds.
    """
    if chain.input_bytes > limit:
        return math.inf
    order = count()
    start: State = (frozenset({0}), frozenset(), frozenset(), -1, False)
    known, queue = {start: 0.0}, [(0.0, next(order), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state[3] == 0:
            return seconds
        if seconds > known[state]:
            continue
        for more, during, following in _moves(chain, state, persistent):
            if during <= limit and seconds + more < known.get(following, math.inf):
                known[following] = seconds + more
                heapq.heappush(queue, (seconds + more, next(order), following))
    return math.inf


def _moves(chain: Chain, state: State, persistent: bool) -> Iterator[tuple[float, int, State]]:
    """What can be done next: seconds, bytes during it, and the state after it."""
    plain, kept, saved, delta, lost = state
    sizes, length = chain.activation, len(chain)
    held = sum(sizes[i] for i in plain) + sum(chain.saved[i - 1] for i in saved) + (sizes[delta] if lost else 0)
    for i in (plain | saved) - {length}:
        keep = kept | ({i} & plain) if persistent else kept
        if i + 1 not in saved:
            during = held + chain.saved[i] + chain.forward_temp[i]
            yield chain.forward_time[i], during, (plain, keep, saved | {i + 1}, delta, lost)
        during = held + sizes[i + 1] + chain.nograd_temp[i]
        yield chain.nograd_time[i], during, (plain | {i + 1}, keep, saved, delta, lost)
        if i not in kept:
            yield chain.nograd_time[i], during, (plain - {i} | {i + 1}, kept, saved, delta, lost)
    if not lost and length in plain | saved:
        yield chain.loss_time, held + sizes[length] + chain.loss_temp, (plain - {length}, kept, saved, length, True)
    if lost and delta in saved and delta - 1 in plain | saved:
        i = delta - 1
        after = held + sizes[i] - sizes[delta] - chain.saved[i] - (sizes[i] if i in plain else 0)
        during = max(held + sizes[i] + chain.backward_temp[i], after)
        yield chain.backward_time[i], during, (plain - {i}, kept - {i}, saved - {delta}, i, True)
