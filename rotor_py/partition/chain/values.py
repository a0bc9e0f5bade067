"""The forward's own pieces of memory, in order: who reads them, and how long."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from rotor_py.partition.joint_graph import JointGraph, is_number


@dataclass
class Values:
    """The values of the forward of a joint graph: nodes that allocate memory."""

    joint: JointGraph

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
    def reads(self) -> dict[fx.Node, set[fx.Node]]:
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
    def last_read(self) -> dict[fx.Node, int]:
        """By value, the position in the forward of its last reader."""
        found = {value: position for position, value in enumerate(self.joint.forward)}
        for position, node in enumerate(self.joint.forward):
            for each in self.reads[node]:
                found[each] = position
        return found

    def joint_bytes(self, values: Iterable[fx.Node]) -> int:
        """Bytes of these values together."""
        return sum(map(self.joint.bytes_of, values))


def source_of(value: fx.Node) -> fx.Node:
    """The node that computes a value: one that returns several is unpacked by others."""
    return value.all_input_nodes[0] if value.target is operator.getitem else value
