"""A joint graph as a chain of stages, for the solver.

The forward is cut where little is live. A stage is what runs between two cuts. Its input is what is live at the first
of them, its options are what it may keep for its backward:

    all that its backward reads, or the fewest bytes from which operators that are fast for what they return make it
    again: a minimum cut, as in `capture/graph/min_cut.py`, once for each of a few thresholds of "fast".
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
from torch import fx

from rotor_py.partition.joint_graph import JointGraph, is_number
from rotor_py.partition.operator_costs import Cost
from rotor_solver import Chain, Option, Stage

_MOST_STAGES = 64
"""Cuts are at least this part of all allocated bytes apart. A guess: more stages are solved longer for little gain."""
_SPREAD = 4
"""A small value that is live over so many cuts is kept and belongs to no stage: masks, tables of rotary embeddings."""
_SMALL = 0.01
"""What a small value is, as a part of all allocated bytes. A guess."""
_THRESHOLDS = 3
"""How many different limits of seconds for a byte are tried in cuts of a stage. A guess."""


@dataclass
class Stages:
    """The stages of a joint graph."""

    joint: JointGraph
    costs: dict[fx.Node, Cost]

    @cached_property
    def values(self) -> list[fx.Node]:
        """The forward's own pieces of memory, in order."""
        joint = self.joint
        inside = (node for node in joint.forward if joint.root[node] is node and not is_number(node))
        return [node for node in inside if joint.bytes_of(node) and node not in self._tuples]

    @cached_property
    def _tuples(self) -> set[fx.Node]:
        return {node.all_input_nodes[0] for node in self.joint.forward if node.target is operator.getitem}

    @cached_property
    def read_backward(self) -> set[fx.Node]:
        """The values that the backward reads, be it as views."""
        root, values = self.joint.root, set(self.values)
        read = {root[each] for node in self.joint.backward for each in node.all_input_nodes if each in root}
        return (read | {root[node] for node in self.joint.gradients if node in root}) & values

    @cached_property
    def _reads(self) -> dict[fx.Node, set[fx.Node]]:
        """By node of the forward, the values that it reads, through views, tuples and numbers."""
        joint, values = self.joint, set(self.values)
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in joint.forward:
            found[node] = set()
            for each in joint.sources(node):
                if each in values:
                    found[node].add(each)
                elif each in found:
                    found[node] |= found[each]
        return found

    @cached_property
    def _last_read(self) -> dict[fx.Node, int]:
        """By value, the position in the forward of its last reader."""
        found = {value: position for position, value in enumerate(self.joint.forward)}
        for position, node in enumerate(self.joint.forward):
            for each in self._reads[node]:
                found[each] = position
        return found

    @cached_property
    def cuts(self) -> list[int]:
        """Positions in the forward where a stage begins; the first is 0."""
        joint, values = self.joint, set(self.values)
        ending: dict[int, int] = {}
        for value in self.values:
            ending[self._last_read[value]] = ending.get(self._last_read[value], 0) + joint.bytes_of(value)
        live, made, lives, mades = 0, 0, [0], [0]
        for position, node in enumerate(joint.forward):
            size = joint.bytes_of(node) if node in values else 0
            live, made = live + size, made + size
            live -= ending.get(position, 0)
            lives.append(live)
            mades.append(made)
        apart = max(1, made // _MOST_STAGES)
        found, last = [0], 0
        for position in range(1, len(joint.forward)):
            if joint.forward[position].target is operator.getitem or mades[position] - last < apart:
                continue
            # The first of the positions with least live memory within reach.
            reach = range(position + 1, len(lives))
            near = []
            for other in reach:
                if mades[other] - mades[position] > apart:
                    break
                near.append(lives[other])
            behind = [lives[p] for p in range(position - 1, found[-1], -1) if mades[position] - mades[p] <= apart]
            if all(lives[position] <= each for each in near) and all(lives[position] <= each for each in behind):
                found.append(position)
                last = mades[position]
        return found

    @cached_property
    def stage_of(self) -> dict[fx.Node, int]:
        """By node of the forward, the number of its stage."""
        found, number = {}, -1
        starts = set(self.cuts)
        for position, node in enumerate(self.joint.forward):
            number += position in starts
            found[node] = number
        return found

    @cached_property
    def members(self) -> list[list[fx.Node]]:
        """The nodes of every stage."""
        bounds = [*self.cuts, len(self.joint.forward)]
        return [self.joint.forward[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    @cached_property
    def shared(self) -> set[fx.Node]:
        """Values that are kept throughout: outputs, which the caller has, small ones that many stages read."""
        joint = self.joint
        small = _SMALL * sum(map(joint.bytes_of, self.values))
        starts = self.cuts
        found = {joint.root[node] for node in joint.outputs if node in joint.root}
        positions = {node: position for position, node in enumerate(joint.forward)}
        for value in self.values:
            over = sum(positions[value] < start <= self._last_read[value] for start in starts)
            if over >= _SPREAD and joint.bytes_of(value) <= small:
                found.add(value)
        return found & set(self.values)

    @cached_property
    def inputs(self) -> list[list[fx.Node]]:
        """By cut, and for the end of the forward, the values that are live there and not shared."""
        positions = {node: position for position, node in enumerate(self.joint.forward)}
        own = [value for value in self.values if value not in self.shared]
        found = [[v for v in own if positions[v] < start <= self._last_read[v]] for start in self.cuts]
        return [*found, []]

    @cached_property
    def kept(self) -> list[list[frozenset[fx.Node]]]:
        """By stage, what each of its options keeps."""
        return [self._options(number) for number in range(len(self.members))]

    def _options(self, number: int) -> list[frozenset[fx.Node]]:
        inside = [value for value in self.members[number] if value in set(self.values)]
        targets = frozenset(value for value in inside if value in self.read_backward and value not in self.shared)
        found = [targets]
        for threshold in self._limits:
            option = frozenset(self._cut(number, targets, threshold))
            if self._bytes(option) < self._bytes(found[-1]):
                found.append(option)
        return found

    @cached_property
    def _limits(self) -> list[float]:
        """Seconds for a byte: what takes no longer for what it returns may run again."""
        rates = sorted({self._rate(value) for value in self.values})
        if not rates:
            return []
        return sorted({rates[(len(rates) - 1) * step // _THRESHOLDS] for step in range(1, _THRESHOLDS + 1)})

    def _rate(self, value: fx.Node) -> float:
        source = value.all_input_nodes[0] if value.target is operator.getitem else value
        return self.costs[source].seconds / max(1, self.joint.bytes_of(source))

    def _cut(self, number: int, targets: frozenset[fx.Node], threshold: float) -> set[fx.Node]:
        """The least bytes of stage `number` from which `targets` can be made by what is fast enough."""
        joint = self.joint
        flow = nx.DiGraph()
        flow.add_nodes_from(("read", "made"))
        inside = [v for v in self.members[number] if v in set(self.values) and v not in self.shared]
        mine = set(inside)
        for value in inside:
            flow.add_edge((value, "made"), (value, "kept"), capacity=joint.bytes_of(value))
            if value in targets:
                flow.add_edge((value, "kept"), "read")
            if value not in joint.replayable or self._rate(value) > threshold:
                flow.add_edge("made", (value, "made"))
            for each in self._reads[value] & mine:
                flow.add_edge((each, "kept"), (value, "made"))
        _, (before, _) = nx.minimum_cut(flow, "made", "read")
        return {value for value in inside if (value, "made") in before and (value, "kept") not in before}

    def _bytes(self, values: frozenset[fx.Node] | set[fx.Node]) -> int:
        return sum(map(self.joint.bytes_of, values))

    def again(self, number: int, kept: frozenset[fx.Node]) -> float:
        """Seconds to make what the backward of a stage reads from `kept` and the stage's input."""
        inside, done = set(self.members[number]), set()
        pending = [value for value in self.members[number] if value in self.read_backward and value not in kept]
        while pending:
            node = pending.pop()
            if node in done or node not in inside or node in kept or node in self.shared:
                continue
            done.add(node)
            pending.extend(self.joint.sources(node))
        return sum(self.costs[node].seconds for node in done)

    def chain(self) -> Chain:
        """The stages in seconds and bytes. Approximate: what is live inside a stage depends on the stages around it."""
        joint = self.joint
        seconds, gradients, temps = self._backward_costs()
        stages = []
        for number, members in enumerate(self.members):
            forward = sum(self.costs[node].seconds for node in members)
            # What an earlier stage made is there already, whoever keeps it.
            output = {value for value in self.inputs[number + 1] if self.stage_of[value] == number}
            scratch = max((self.costs[node].scratch for node in members), default=0)
            options = tuple(
                Option(
                    forward,
                    seconds[number] + self.again(number, kept),
                    self._bytes(kept | output),
                    scratch,
                    temps[number] + self._bytes(self.kept[number][0] - kept),
                    name=str(position),
                )
                for position, kept in enumerate(self.kept[number])
            )
            inside = [joint.bytes_of(node) for node in members if node in set(self.values)]
            stages.append(
                Stage(self._bytes(output), options, forward, scratch + max(inside, default=0), gradient=gradients[number])
            )
        return Chain(tuple(stages), 0)

    def _backward_costs(self) -> tuple[list[float], list[int], list[int]]:
        """By stage: seconds of its backward, bytes of gradients that it leaves, and the most that it needs meanwhile."""
        joint, count = self.joint, len(self.members)
        root, returned = joint.root, set(joint.gradients)
        seconds, gradients, temps = [0.0] * count, [0] * count, [0] * count
        wanted = []
        for node in joint.backward:
            read = [self.stage_of[root[each]] for each in node.all_input_nodes if root.get(each) in self.stage_of]
            wanted.append(max(read, default=0))
        for position in range(len(wanted) - 2, -1, -1):
            wanted[position] = max(wanted[position], wanted[position + 1])
        for node, number in zip(joint.backward, wanted, strict=True):
            seconds[number] += self.costs[node].seconds
            own = sum(s for k, s in joint.allocations[node].items() if not any(k in joint.allocations[r] for r in node.all_input_nodes))
            if node in returned:
                gradients[number] += joint.bytes_of(node)
            temps[number] = max(temps[number], own + self.costs[node].scratch)
        return seconds, gradients, temps
