"""Where a graph is cut into stages."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from torch import fx

from rotor_py.capture.borders import enter, leave
from rotor_py.capture.graph import Facts, carries_gradient, new_bytes, tensors_of

_HUGE = 0.3
"""A stage with more than this part of all that is computed is cut further, by carrying tensors past the cuts."""
_WORTHWHILE = 4
"""Cuts that carrying one more tensor past them has to make possible."""
_SMALL = 0.25
"""A stage of less than this part of an average one is joined to the next."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Positions in the body after which a stage ends, and the tensors that are carried past cuts beside the main one.

    live[p] are the values that are made up to position p and needed after it.
    """

    ends: list[int]
    carried: list[fx.Node]
    live: list[list[fx.Node]]


def find_cuts(facts: Facts, granularity: int) -> Cuts:
    """Cut where one tensor is live, into at most `granularity` stages.

    A tensor that stays live over a large part of the graph (an encoder's output, a skip connection) is carried past
    the cuts, where that makes cuts possible. Stages that do next to nothing are joined to the next one.
    """
    live = _liveness(facts)
    weights = [max(1, new_bytes(node)) for node in facts.body]
    carried: list[fx.Node] = []
    possible = _possible(facts, live, carried)
    while True:
        low, high = _largest(possible, weights)
        if sum(weights[low:high]) <= _HUGE * sum(weights):
            break
        inside = {node for position in range(low, high - 1) for node in live[position]} - set(carried)
        counts = {node: len(_possible(facts, live, [*carried, node])) - len(possible) for node in inside}
        best = max(counts, key=lambda node: (counts[node], -facts.body.index(node)), default=None)
        if best is None or counts[best] < _WORTHWHILE:
            break
        carried.append(best)
        possible = _possible(facts, live, carried)
    smallest = _SMALL / granularity
    ends = _merged(possible, weights, smallest)
    while len(ends) > granularity:
        smallest *= 1.5
        ends = _merged(possible, weights, smallest)
    return Cuts(ends, carried, live)


def _liveness(facts: Facts) -> list[list[fx.Node]]:
    position = {node: at for at, node in enumerate(facts.body)}
    last = {node: max((position.get(user, -1) for user in node.users), default=-1) for node in facts.body}
    last |= {node: len(facts.body) for node in facts.outputs if node in position}
    found: list[list[fx.Node]] = []
    now: list[fx.Node] = []
    for at, node in enumerate(facts.body):
        now = [each for each in [*now, node] if last[each] > at]
        found.append(now)
    return found


def _possible(facts: Facts, live: list[list[fx.Node]], carried: list[fx.Node]) -> list[int]:
    """The positions after which a stage may end; the last one is the end of the graph."""
    end = len(facts.body) - 1
    found = []
    for at in range(end):
        if _begins(facts.body[at]) or facts.body[at + 1].target is leave:
            continue
        tensors = [node for node in live[at] if tensors_of(node)]
        main = [node for node in tensors if node not in carried]
        if len(main) > 1 or any(node in facts.outputs for node in main):  # what is returned is no checkpoint to drop
            continue
        if not any(map(carries_gradient, tensors)) or not facts.modes[facts.body[at]].gradients:
            continue
        if all(len(tensors_of(node)) == 1 and not isinstance(node.meta.get("example_value"), tuple) for node in main):
            found.append(at)
    return [*found, end]


def _begins(node: fx.Node) -> bool:
    """Whether parameters have just been gathered: they would be kept for the next stage."""
    if node.target is operator.getitem:
        return bool(node.all_input_nodes[0].target is enter)
    return node.target is enter


def _largest(ends: list[int], weights: list[int]) -> tuple[int, int]:
    bounds = [0, *(end + 1 for end in ends)]
    pairs = list(itertools.pairwise(bounds))
    return max(pairs, key=lambda pair: sum(weights[pair[0] : pair[1]]))


def _merged(ends: list[int], weights: list[int], smallest: float) -> list[int]:
    least, kept, begin = smallest * sum(weights), [], 0
    for end in ends[:-1]:
        if sum(weights[begin : end + 1]) >= least:
            kept.append(end)
            begin = end + 1
    if kept and sum(weights[begin:]) < least:
        kept.pop()
    return [*kept, ends[-1]]
