"""What a partitioned graph does: the operators of its forward and of its backward, in order, and what lies between.

A `Program` is what is chosen among. It can be weighed (`peak.py`) and made into two graphs (`extract.py`), and says
which of the joint graph's nodes run again in the backward, when, and what they read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from rotor_py.partition.joint_graph import JointGraph, ancestors, is_number


@dataclass(eq=False, slots=True)
class Run:
    """One run of a node in the backward. `reads` are the runs that made its inputs, or nodes that come from outside."""

    node: fx.Node
    reads: dict[fx.Node, Run | fx.Node]


@dataclass(frozen=True, slots=True)
class Program:
    """`forward` runs, `saved` is kept from it (inputs included), then `backward` runs."""

    forward: tuple[fx.Node, ...]
    saved: frozenset[fx.Node]
    backward: tuple[Run, ...]

    @property
    def replayed(self) -> list[fx.Node]:
        """Nodes of the forward that the backward runs again, as often as it does."""
        own = set(self.forward)
        return [run.node for run in self.backward if run.node in own]

    def does_as(self, other: Program) -> bool:
        """Whether it runs the same nodes in the same order as another one of its graph, and keeps the same."""
        mine, theirs = ([run.node for run in each.backward] for each in (self, other))
        return self.saved == other.saved and self.forward == other.forward and mine == theirs


@dataclass
class BackwardWriter:
    """Writes the backward, run by run. What is neither kept nor there is made again right before it is read."""

    joint: JointGraph
    kept: set[fx.Node]
    """What the forward keeps: nodes that allocate memory, those that run early included."""
    runs: list[Run] = field(default_factory=list)
    there: dict[fx.Node, Run] = field(default_factory=dict)
    """Values of the forward that have been made again, and values of the backward."""

    def __post_init__(self) -> None:
        self.forward = set(self.joint.forward)
        self.siblings = _siblings(self.joint)

    def write(self, node: fx.Node) -> None:
        """Run a node of the backward."""
        if node in self.there or node in self.kept:  # unpacked already, or made by the forward
            return
        for each in node.all_input_nodes:
            self.make(each)
        self._run(node)

    def make(self, node: fx.Node) -> None:
        """See to it that a value is there."""
        pending, needed = [node], set()
        while pending:
            each = pending.pop()
            if each not in needed and not self._is_there(each):
                needed.add(each)
                pending.extend(self.joint.sources(each))
        for each in sorted(needed, key=self.joint.order.__getitem__):
            if each not in self.there:
                self._run(each)

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Whoever reads one of these values from now on has it made again."""
        for node in nodes:
            self.there.pop(node, None)

    def program(self) -> Program:
        """The whole, without runs whose values nobody reads."""
        joint = self.joint
        needed = {run for node in joint.gradients if (run := self.there.get(node)) is not None}
        needed.update(run for run in self.runs if run.node not in self.forward and not run.node.users)
        backward = []
        for run in reversed(self.runs):
            if run in needed or (run.node.op == "call_function" and _acts(run.node, self.forward)):
                backward.append(run)
                needed.update(each for each in run.reads.values() if isinstance(each, Run))
        tangents = set(joint.tangents)
        saved = {each for run in backward for each in run.reads.values() if isinstance(each, fx.Node)}
        saved |= {node for node in joint.gradients if node not in self.there and node not in tangents}
        saved -= tangents
        needed_forward = ancestors([*joint.outputs, *saved])
        forward = joint.in_turn(node for node in (*joint.forward, *joint.early) if node in needed_forward)
        return Program(tuple(forward), frozenset(saved), tuple(reversed(backward)))

    def _is_there(self, node: fx.Node) -> bool:
        return node in self.there or self._from_outside(node)

    def _from_outside(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self.kept:
            return True
        if node not in self.forward:
            return False
        return node not in self.joint.replayable or is_number(node)

    def _run(self, node: fx.Node) -> None:
        if node in self.joint.stand_ins:
            self.there[node] = self.there[self.joint.stand_ins[node]]
            return
        reads = {each: self.there.get(each, each) for each in node.all_input_nodes}
        run = Run(node, reads)
        self.runs.append(run)
        self.there[node] = run
        # A tuple keeps all of its tensors for as long as it is there itself: it is unpacked at once.
        for each in self.siblings.get(node, ()):
            if each not in self.kept:
                self.there[each] = Run(each, {node: run})
                self.runs.append(self.there[each])
        if node in self.siblings:
            del self.there[node]  # but not what it has returned


def in_time(joint: JointGraph, kept: Iterable[fx.Node]) -> Program:
    """The program that keeps `kept`, and makes everything else once, right before it is first read."""
    writer = BackwardWriter(joint, set(kept))
    for node in joint.backward:
        writer.write(node)
    return writer.program()


def _siblings(joint: JointGraph) -> dict[fx.Node, list[fx.Node]]:
    """By node that returns several tensors, the nodes that unpack it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in (*joint.forward, *joint.backward):
        if node.target is operator.getitem and not is_number(node):
            found.setdefault(node.all_input_nodes[0], []).append(node)
    return found


def _acts(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether a node of the backward does something beside returning a value: a write, for example."""
    return node not in forward and node.is_impure()
