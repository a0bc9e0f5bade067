"""A joint graph as a chain of stages, with the sets of values that each may keep."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from torch import fx

from rotor_profiling.torch_compat import partitioners
from rotor_py.compile.joint_graph import JointGraph, is_number, usually_saved
from rotor_py.compile.operator_costs import Cost
from rotor_py.compile.peak import weigh
from rotor_py.compile.program import in_time
from rotor_solver import Chain, Option, Stage
from rotor_solver.max_flow import Network


@dataclass
class Values:
    """The values of a joint graph's forward: nodes that allocate memory."""

    joint: JointGraph

    @cached_property
    def values(self) -> list[fx.Node]:
        """The nodes of the forward that allocate memory, in order."""
        joint = self.joint
        inside = (node for node in joint.forward if joint.root[node] is node and not is_number(node))
        return [node for node in inside if joint.bytes_of(node) and node not in self._tuples]

    @cached_property
    def _tuples(self) -> set[fx.Node]:
        return {node.all_input_nodes[0] for node in self.joint.forward if node.target is operator.getitem}

    @cached_property
    def read_backward(self) -> set[fx.Node]:
        """The values that the backward reads, also through views."""
        root, values = self.joint.root, set(self.values)
        read = {root[each] for node in self.joint.backward for each in node.all_input_nodes if each in root}
        return (read | {root[node] for node in self.joint.gradients if node in root}) & values

    @cached_property
    def reads(self) -> dict[fx.Node, set[fx.Node]]:
        """Per node of the forward, the values that it reads, through views, tuples and numbers."""
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
    def last_read(self) -> dict[fx.Node, int]:
        """Per value, the position of its last reader in the forward."""
        found = {value: position for position, value in enumerate(self.joint.forward)}
        for position, node in enumerate(self.joint.forward):
            for each in self.reads[node]:
                found[each] = position
        return found

    def joint_bytes(self, values: Iterable[fx.Node]) -> int:
        """Return the total bytes of these values."""
        return sum(map(self.joint.bytes_of, values))


def source_of(value: fx.Node) -> fx.Node:
    """Return the node that computes a value: a node with several results is unpacked by others."""
    return value.all_input_nodes[0] if value.target is operator.getitem else value


_MOST_STAGES = 64
"""Most stages: cuts are at least a 64th of all allocated bytes apart. A guess: more take longer to solve for little."""
_SPREAD = 4
"""Number of cuts over which a small value is live to be kept outside all stages: masks, tables of rotary embeddings."""
_SMALL = 0.01
"""Size of a small value, as a share of all allocated bytes. A guess: larger ones cost memory if always kept."""


class CutForward(Values):
    """The forward in stages, and the values between them."""

    @cached_property
    def cuts(self) -> list[int]:
        """Positions in the forward where a stage begins; the first is 0."""
        joint, values = self.joint, set(self.values)
        ending: dict[int, int] = {}
        for value in self.values:
            ending[self.last_read[value]] = ending.get(self.last_read[value], 0) + joint.bytes_of(value)
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
        """Per node of the forward, the number of its stage."""
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
        return [self.joint.forward[a:b] for a, b in pairwise(bounds)]

    @cached_property
    def shared(self) -> set[fx.Node]:
        """Values kept throughout: outputs, which the caller holds, and small ones that many stages read."""
        joint = self.joint
        small = _SMALL * sum(map(joint.bytes_of, self.values))
        starts = self.cuts
        found = {joint.root[node] for node in joint.outputs if node in joint.root}
        positions = {node: position for position, node in enumerate(joint.forward)}
        for value in self.values:
            over = sum(positions[value] < start <= self.last_read[value] for start in starts)
            if over >= _SPREAD and joint.bytes_of(value) <= small:
                found.add(value)
        return found & set(self.values)

    @cached_property
    def inputs(self) -> list[list[fx.Node]]:
        """Per cut, and for the end of the forward, the values live there and not shared."""
        positions = {node: position for position, node in enumerate(self.joint.forward)}
        own = [value for value in self.values if value not in self.shared]
        found = [[v for v in own if positions[v] < start <= self.last_read[v]] for start in self.cuts]
        return [*found, []]

    @cached_property
    def inside(self) -> list[list[fx.Node]]:
        """Per stage, its values that are not shared."""
        values = set(self.values) - self.shared
        return [[node for node in members if node in values] for members in self.members]


# Sets of values that a stage may keep for its backward: all that it reads, or fewer, from which operators recompute the
# rest.
#
# A smaller set is a minimum cut, as in `capture/graph/selective_recompute.py`: the fewest bytes from which operators
# that are fast for their result's size recompute the rest. Each of a few thresholds of "fast" gives one.


_THRESHOLDS = 6
"""Limits of seconds per byte tried in cuts of a stage. A guess: more give more options to solve for."""


@dataclass
class KeptParts(CutForward):
    """Sets of values that stages may keep, each by itself, and all together."""

    costs: dict[fx.Node, Cost]
    levels_kept: list[list[int]] = field(default_factory=list)
    """Per stage and option, its level of recomputing; filled with `kept`."""

    @cached_property
    def kept(self) -> list[list[frozenset[fx.Node]]]:
        """Per stage, the values that each of its options keeps."""
        return [self._options(number) for number in range(len(self.members))]

    def _options(self, number: int) -> list[frozenset[fx.Node]]:
        inside = self.inside[number]
        targets = frozenset(value for value in inside if value in self.read_backward)
        found = [targets]
        self.levels_kept.append([0])
        for level, (again, everywhere) in enumerate(self._cuts_everywhere, 1):
            alone = self._cut(inside, targets, again)
            # Values recomputed from the stage's input need it.
            alone |= set(self.inputs[number]) & self._needed(number, alone) - self.read_backward
            for option in (frozenset(alone), everywhere & set(inside)):
                if option not in found and self.joint_bytes(option) < self.joint_bytes(targets):
                    found.append(option)
                    self.levels_kept[-1].append(level)
        return found

    @cached_property
    def everywhere(self) -> list[frozenset[fx.Node]]:
        """Per level, the least to keep of the whole graph, if the level's operators may be recomputed anywhere."""
        return [kept for _, kept in self._cuts_everywhere]

    @cached_property
    def _cuts_everywhere(self) -> list[tuple[Set[fx.Node], frozenset[fx.Node]]]:
        """Recomputed values and the kept ones, in order of fewer kept bytes."""
        inside = [value for values in self.inside for value in values]
        targets = self.read_backward - self.shared
        found = {frozenset(self._cut(inside, targets, again)): again for again in self._allowed}
        return sorted(((again, kept) for kept, again in found.items()), key=lambda pair: -self.joint_bytes(pair[1]))

    @cached_property
    def _allowed(self) -> list[Set[fx.Node]]:
        """Sets of values that may be recomputed: those with few seconds per byte, and those that compilers fuse."""
        joint = self.joint
        replayed = [value for value in self.values if value in joint.replayable]
        rates = sorted({self._rate(value) for value in replayed})
        if not rates:
            return []
        limits = sorted({rates[(len(rates) - 1) * step // _THRESHOLDS] for step in range(1, _THRESHOLDS + 1)})
        found: list[Set[fx.Node]] = [{value for value in replayed if self._rate(value) <= limit} for limit in limits]
        kinds = partitioners.get_default_op_list()
        fused = {value for value in replayed if not kinds.is_compute_intensive(source_of(value))}
        # The values that PyTorch's partitioner would keep without a budget, and with a large one.
        kept = ({joint.root.get(node) for node in saved} for saved in usually_saved(joint))
        return [*found, fused, *(set(replayed) - each for each in kept)]

    def _rate(self, value: fx.Node) -> float:
        source = source_of(value)
        return self.costs[source].seconds / max(1, self.joint.bytes_of(source))

    def _cut(self, inside: list[fx.Node], targets: Set[fx.Node], again: Set[fx.Node]) -> set[fx.Node]:
        """Return the least bytes of the values `inside` from which `targets` can be made by recomputing `again`."""
        joint = self.joint
        flow = Network("made", "read")
        mine = set(inside)
        for value in inside:
            flow.add_edge((value, "made"), (value, "kept"), joint.bytes_of(value))
            if value in targets:
                flow.add_edge((value, "kept"), "read")
            if value not in again:
                flow.add_edge("made", (value, "made"))
            for each in self.reads[value] & mine:
                flow.add_edge((each, "kept"), (value, "made"))
        behind = flow.behind_least_cut()
        return {value for value in inside if (value, "kept") in behind and (value, "made") not in behind}

    def _needed(self, number: int, kept: Set[fx.Node]) -> set[fx.Node]:
        """Return nodes that a stage's backward reads or recomputes given `kept`, and their sources."""
        inside, found = set(self.members[number]), set[fx.Node]()
        pending = [value for value in self.inside[number] if value in self.read_backward]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            if node in inside and node not in kept and node not in self.shared:
                pending.extend(self.joint.root.get(each, each) for each in self.joint.sources(node))
                pending.extend(self.joint.sources(node))
        return found

    def again(self, number: int, kept: frozenset[fx.Node]) -> float:
        """Return seconds to recompute what the stage's backward reads, from `kept` and the stage's input."""
        inside = set(self.members[number]) - kept - self.shared
        return sum(self.costs[node].seconds for node in self._needed(number, kept) & inside)

    def part(self, level: int) -> Set[fx.Node]:
        """Return the values that all stages keep: at level 0 all that the backward reads, fewer at each further one."""
        return (self.read_backward if level == 0 else self.everywhere[level - 1]) | self.shared

    @property
    def levels(self) -> int:
        return len(self.everywhere) + 1


# A joint graph as a chain of stages, for the solver.
#
# The forward is cut where little is live. A stage is the code between two cuts. Its input are the values live at the
# first, its options the sets that it may keep for its backward (`KeptParts`).


class Stages(KeptParts):
    """The stages of a joint graph, in seconds and bytes."""

    def chain(self, *, keep_outputs: bool) -> Chain:
        """Return the stages in seconds and bytes; with `keep_outputs`, every option that keeps anything also keeps the
        output.

        Approximate: the live values inside a stage depend on the stages around it.
        """
        seconds = [sum(self.costs[node].seconds for node in nodes) for nodes in self.backward]
        stages = []
        for number, members in enumerate(self.members):
            forward = sum(self.costs[node].seconds for node in members)
            output = self._output(number)
            scratch = max((self.costs[node].scratch for node in members), default=0)
            options = tuple(
                Option(
                    forward + sum(self.costs[node].keeping for node in kept),
                    seconds[number] + self.again(number, kept),
                    self.joint_bytes(kept | output if keep_outputs else kept),
                    scratch,
                    self._temps[level][number],
                )
                for kept, level in zip(self.kept[number], self.levels_kept[number], strict=True)
            )
            inside = max(map(self.joint.bytes_of, self.inside[number]), default=0)
            stages.append(
                Stage(self.joint_bytes(output), options, forward, scratch + inside, gradient=self._gradients[number])
            )
        return Chain(tuple(stages), 0)

    def _output(self, number: int) -> set[fx.Node]:
        """Return a stage's values for later ones, without those that it passes on from earlier stages."""
        return {value for value in self.inputs[number + 1] if self.stage_of[value] == number}

    @cached_property
    def backward(self) -> list[list[fx.Node]]:
        """Per stage, the nodes of its backward: up to the last one that reads a value of the stage."""
        joint = self.joint
        latest = 0
        found: list[list[fx.Node]] = [[] for _ in self.members]
        for node in reversed(joint.backward):
            read = (
                self.stage_of[joint.root[each]]
                for each in node.all_input_nodes
                if joint.root.get(each) in self.stage_of
            )
            latest = max(latest, *read, 0)
            found[latest].append(node)
        return [nodes[::-1] for nodes in found]

    @cached_property
    def _gradients(self) -> list[int]:
        """Per stage, the bytes of gradients that its backward returns."""
        returned = set(self.joint.gradients)
        return [self.joint_bytes({node for node in nodes if node in returned}) for nodes in self.backward]

    @cached_property
    def _temps(self) -> list[list[int]]:
        """Per level and stage, the peak of its backward beyond kept values and surrounding gradients."""
        stage_of = {node: number for number, nodes in enumerate(self.backward) for node in nodes}
        found = []
        for level in range(self.levels):
            kept = self.part(level)
            program = in_time(self.joint, kept)
            curve = weigh(self.joint, self.costs, program).curve
            most = [0] * len(self.members)
            number = 0
            for run, live in zip(reversed(program.backward), reversed(curve), strict=True):
                number = stage_of.get(run.node, number)  # a recomputed node belongs to the next stage's backward
                most[number] = max(most[number], live)
            held = self.joint_bytes({*self.joint.primals, *self.joint.tangents, *self.shared}) + sum(self._gradients)
            temps = []
            for number, inside in enumerate(self.inside):
                held += self.joint_bytes(kept & set(inside))
                held -= self._gradients[number]
                incoming = self.joint_bytes(self._output(number - 1)) if number else 0
                temps.append(max(-incoming, most[number] - held - self.joint_bytes(self._output(number)) - incoming))
            found.append(temps)
        return found
