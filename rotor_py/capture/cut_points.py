"""Where a graph is cut into stages."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from torch import fx

from rotor_py.capture.fsdp_marks import enter, leave
from rotor_py.capture.graph_facts import GraphFacts, carries_gradient, new_bytes, tensors_of

_HUGE = 0.3
"""A stage with more than this part of all that is computed is cut further, by carrying tensors past the cuts."""
_WORTHWHILE = 4
"""CutPoints that carrying one more tensor past them has to make possible."""
_SMALL = 0.25
"""A stage of less than this part of an average one is joined to the next."""


@dataclass(frozen=True, slots=True)
class CutPoints:
    """Positions in the body after which a stage ends, and the tensors that are carried past cuts beside the main one.

    live[p] are the values that are made up to position p and needed after it.
    """

    ends: list[int]
    carried: list[fx.Node]
    live: list[list[fx.Node]]


def find_cut_points(facts: GraphFacts, granularity: int) -> CutPoints:
    """Cut where one tensor is live, into at most `granularity` stages.

    A tensor that stays live over a large part of the graph (an encoder's output, a skip connection) is carried past
    the cuts, where that makes cuts possible. Stages that do next to nothing are joined to the next one.
    """
    live = _liveness(facts)
    weights = [max(1, new_bytes(node)) for node in facts.body]
    crossings = _Crossings(facts, live)
    carried: list[fx.Node] = []
    possible = crossings.possible(carried)
    while True:
        low, high = _largest(possible, weights)
        if sum(weights[low:high]) <= _HUGE * sum(weights):
            break
        inside = {node for position in range(low, high - 1) for node in live[position]} - set(carried)
        counts = {node: len(crossings.possible([*carried, node])) - len(possible) for node in inside}
        best = max(counts, key=lambda node: (counts[node], -facts.body.index(node)), default=None)
        if best is None or counts[best] < _WORTHWHILE:
            break
        carried.append(best)
        possible = crossings.possible(carried)
    smallest = _SMALL / granularity
    ends = _merged(possible, weights, smallest)
    while len(ends) > granularity:
        smallest *= 1.5
        ends = _merged(possible, weights, smallest)
    return CutPoints(ends, carried, live)


def _liveness(facts: GraphFacts) -> list[list[fx.Node]]:
    position = {node: at for at, node in enumerate(facts.body)}
    last = {node: max((position.get(user, -1) for user in node.users), default=-1) for node in facts.body}
    last |= {node: len(facts.body) for node in facts.outputs if node in position}
    found: list[list[fx.Node]] = []
    now: list[fx.Node] = []
    for at, node in enumerate(facts.body):
        now = [each for each in [*now, node] if last[each] > at]
        found.append(now)
    return found


class _Crossings:
    """The values that are live where a stage may end, if one at most of them is neither carried nor returned."""

    def __init__(self, facts: GraphFacts, live: list[list[fx.Node]]) -> None:
        tensors = {node: tensors_of(node) for node in facts.body}
        gradient = {node for node in facts.body if carries_gradient(node)}
        self._end = len(facts.body) - 1
        self._live: dict[int, list[fx.Node]] = {}
        for at, (node, following) in enumerate(itertools.pairwise(facts.body)):
            if _begins(node) or following.target is leave or not facts.modes[node].gradients:
                continue
            here = [each for each in live[at] if tensors[each]]
            if not gradient.isdisjoint(here):
                self._live[at] = here
        self._checkpoints = {
            node
            for node, found in tensors.items()
            if len(found) == 1
            and not isinstance(node.meta.get("example_value"), tuple)
            and node not in facts.outputs  # what is returned is no checkpoint to drop
        }

    def possible(self, carried: list[fx.Node]) -> list[int]:
        """The positions after which a stage may end; the last one is the end of the graph."""
        aside, found = set(carried), []
        for at, live in self._live.items():
            main = [node for node in live if node not in aside]
            if len(main) <= 1 and self._checkpoints.issuperset(main):
                found.append(at)
        return [*found, self._end]


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
