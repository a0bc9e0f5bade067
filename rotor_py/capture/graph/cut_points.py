"""Cut a graph into stages where a single tensor is live, apart from carried ones.

A stage of a chain has one input. Between the blocks of a network usually one tensor is live, and a cut there costs
nothing. A tensor that stays live over many blocks (an encoder's output, a skip connection) would forbid every cut in
between. So it is carried: each stage passes it on with its main output.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from torch import fx

from rotor_py.capture.fsdp_markers import enter, leave
from rotor_py.capture.graph.graph_facts import GraphFacts
from rotor_py.capture.graph.graph_nodes import (
    carries_gradient,
    example_of,
    memory_root,
    module_path,
    new_bytes,
    tensors_of,
    written_by,
)

_HUGE = 0.3
"""Share of all bytes above which a stage is cut further, by carrying tensors past the cuts. A guess: with more, large
stages stay in which a plan cannot save much; with less, more carried tensors stay in memory all the way.
"""
_WORTHWHILE = 4
"""Fewest new cuts for which one more tensor is carried. A guess: fewer cost more than they gain."""
_SMALL = 0.25
"""Share of an average stage's bytes below which a stage is joined to the next. A guess: a cut after every reshape would
slow down the solver, and save nothing.
"""


@dataclass(frozen=True, slots=True)
class CutPoints:
    """Stage boundaries, as positions in the graph's body."""

    ends: list[int]
    """Position of each stage's last node, increasing."""
    carried: list[fx.Node]
    """Tensors carried past cuts with the main one."""
    live: list[list[fx.Node]]
    """live[p]: values made up to position p and read after it."""


def weights_of(facts: GraphFacts) -> list[int]:
    """Return the work of each node of the body: its new bytes, at least one."""
    # Bytes stand for work: times are known only once stages are measured, and stages only once the graph is cut.
    return [max(1, new_bytes(node, facts.sizes)) for node in facts.body]


def find_cut_points(facts: GraphFacts, weights: list[int], granularity: int) -> CutPoints:
    """Cut where one tensor is live, into at most `granularity` stages; `weights` has one entry per body node.

    While a stage is too large, carry one of the tensors live inside the largest: the one that allows most new cuts.
    Join tiny stages to the next one.
    """
    live = _liveness(facts)
    crossings = _Crossings(facts, live)
    carried: list[fx.Node] = []
    possible = crossings.possible(carried)
    while True:
        low, high = _largest(possible, weights)
        if sum(weights[low:high]) <= _HUGE * sum(weights):
            break
        inside = {node for position in range(low, high - 1) for node in live[position]}
        gained = crossings.gained(carried)
        # In the order of the graph, the first among equals: processes that train together have to cut alike.
        best = max((node for node in facts.body if node in inside), key=gained.__getitem__, default=None)
        if best is None or gained[best] < _WORTHWHILE:
            break
        carried.append(best)
        possible = crossings.possible(carried)
    smallest = _SMALL / granularity
    ends = _merged(possible, weights, smallest)
    while len(ends) > granularity:
        smallest *= 1.5  # a guess: a few rounds suffice, and the number of stages ends not far below the bound
        ends = _merged(possible, weights, smallest)
    return CutPoints(ends, carried, live)


def cut_points_like(facts: GraphFacts, other: GraphFacts, cuts: CutPoints) -> CutPoints | None:
    """Cut a graph where `other` was cut at `cuts`; None if it has no such cuts, or is another graph.

    Its own cuts would depend on its sizes, but a plan serves other sizes only with the same stages.
    """
    if facts.operators != other.operators:
        return None
    # Numbers, and the nodes that compute them, differ between known and open sizes.
    here, there = ([at for at, node in enumerate(each.body) if tensors_of(node)] for each in (facts, other))
    partner = {other.body[at]: facts.body[position] for at, position in zip(there, here, strict=True)}
    live = _liveness(facts)
    ends = []
    for end in cuts.ends[:-1]:
        count = bisect_right(there, end)
        found = here[count - 1] if there[count - 1] == end else here[count] - 1
        if [partner[node] for node in cuts.live[end] if tensors_of(node)] != [n for n in live[found] if tensors_of(n)]:
            return None
        ends.append(found)
    return CutPoints([*ends, len(facts.body) - 1], [partner[node] for node in cuts.carried], live)


def _liveness(facts: GraphFacts) -> list[list[fx.Node]]:
    """Return, per position, the values made up to it that a later node or the caller reads."""
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
    """The positions where a stage may end, with the tensors live there."""

    def __init__(self, facts: GraphFacts, live: list[list[fx.Node]]) -> None:
        tensors = {node: tensors_of(node) for node in facts.body}
        gradient = {node for node in facts.body if carries_gradient(node)}
        self._end = len(facts.body) - 1
        self._live: dict[int, list[fx.Node]] = {}
        unfinished = _unfinished(facts)
        for at, (node, following) in enumerate(itertools.pairwise(facts.body)):
            # A mark belongs into one stage with its module. A stage must not end where gradients are off: none would
            # arrive at its output. A stage that overwrites its input could not be recomputed from it.
            if _begins_module(node) or following.target is leave or not facts.modes[node].gradients or at in unfinished:
                continue
            here = [each for each in live[at] if tensors[each]]
            if not gradient.isdisjoint(here):
                self._live[at] = here
        self._checkpoints = {
            node
            for node, found in tensors.items()
            if len(found) == 1
            and not isinstance(example_of(node), tuple)
            and node not in facts.outputs  # the caller holds it: dropping it as a checkpoint would free nothing
        }

    def possible(self, carried: list[fx.Node]) -> list[int]:
        """Positions after which a stage may end if these tensors are carried; the last is the graph's end."""
        found = [at for at, main in self._beside(carried).items() if self._is_one(main)]
        return [*found, self._end]

    def gained(self, carried: list[fx.Node]) -> Counter[fx.Node]:
        """Count, for each further tensor to carry, the positions that it makes possible; omits zeros."""
        blocked = [main for main in self._beside(carried).values() if not self._is_one(main)]
        return Counter(
            node
            for main in blocked
            if len(main) <= 2
            for node in main
            if self._is_one([each for each in main if each is not node])
        )

    def _beside(self, carried: list[fx.Node]) -> dict[int, list[fx.Node]]:
        """Live tensors at each position, except carried ones."""
        aside = set(carried)
        return {at: [node for node in live if node not in aside] for at, live in self._live.items()}

    def _is_one(self, main: list[fx.Node]) -> bool:
        return len(main) <= 1 and self._checkpoints.issuperset(main)


def _unfinished(facts: GraphFacts) -> set[int]:
    """Return positions after which a later node writes to an earlier value."""
    position = {node: at for at, node in enumerate(facts.body)}
    found: set[int] = set()
    for node in facts.body:
        for target in map(memory_root, written_by(node)):
            found.update(range(position.get(target, position[node]), position[node]))
    return found


def _begins_module(node: fx.Node) -> bool:
    """Whether parameters have just been gathered: a cut here would keep them until the next stage."""
    # `enter` returns a tuple, whose elements are nodes that follow it.
    if node.target is operator.getitem:
        return bool(node.all_input_nodes[0].target is enter)
    return node.target is enter


def _largest(ends: list[int], weights: list[int]) -> tuple[int, int]:
    """Return the bounds of the heaviest stage: its first position, and one past its last."""
    bounds = [0, *(end + 1 for end in ends)]
    pairs = list(itertools.pairwise(bounds))
    return max(pairs, key=lambda pair: sum(weights[pair[0] : pair[1]]))


def _merged(ends: list[int], weights: list[int], smallest: float) -> list[int]:
    """Return the ends after joining stages lighter than the share `smallest` of all to the next stage."""
    least, kept, begin = smallest * sum(weights), [], 0
    for end in ends[:-1]:
        if sum(weights[begin : end + 1]) >= least:
            kept.append(end)
            begin = end + 1
    if kept and sum(weights[begin:]) < least:  # the last stage has no next one
        kept.pop()
    return [*kept, ends[-1]]


def name_pieces(pieces: list[list[fx.Node]], weights_of: dict[fx.Node, int]) -> list[str]:
    """Name each piece after the module in which its nodes weigh most.

    The path ends one level below the part that all modules of the piece share. Repeated names are numbered.
    """
    found = []
    for piece in pieces:
        weights: Counter[str] = Counter()
        for node in piece:
            weights[module_path(node)] += weights_of[node]
        found.append(_name(weights))
    repeated = {name for name, count in Counter(found).items() if count > 1}
    seen: Counter[str] = Counter()
    for number, name in enumerate(found):
        if name in repeated:
            seen[name] += 1
            found[number] = f"{name}#{seen[name]}"
    return found


def _name(weights: Counter[str]) -> str:
    paths = [path.split(".") for path in weights if path]
    if not paths:
        return "(top)"
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    below: Counter[str] = Counter()
    for path, weight in weights.items():
        if path:
            below[".".join(path.split(".")[: common + 1])] += weight
    return max(below, key=lambda path: below[path])
