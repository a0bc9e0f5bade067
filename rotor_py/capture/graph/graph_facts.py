"""Read a captured graph once, before it is cut: gradients, modes, context and body.

The nodes are divided into a context and a body. Nodes without gradient (masks, positions, rotary tables) need no
backward, so they run once, before the first stage, and all stages share their values; the body is cut into stages. Left
in place, a mask that every layer reads would be live at every position, so no position would have a single live tensor
to cut at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import torch_compat
from rotor_py.capture.fsdp_markers import MARKS, FSDPMarks, Place
from rotor_py.capture.graph.graph_nodes import (
    Sizes,
    attribute_of,
    carries_gradient,
    is_random,
    memory_root,
    name_of,
    tensors_of,
    written_by,
)
from rotor_py.capture.graph.graph_rewrites import draws_random_numbers
from rotor_py.capture.graph.stage_graph import Codes
from rotor_py.capture.guarded_branches import give_up, is_question
from rotor_py.distributed.sharding import ShardGroup

_GRAD_MODE = torch_compat.set_grad_enabled
_ENTER, _EXIT = torch_compat.enter_autocast, torch_compat.exit_autocast


@dataclass(frozen=True, slots=True)
class Modes:
    """Modes around a node: autocast regions, by the node that enters each, and gradients."""

    autocast: tuple[fx.Node, ...] = ()
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A graph, read once. Together, `context` and `body` are all nodes that compute something."""

    context: list[fx.Node]
    """Nodes without gradient that can run before all others, in the order of the graph."""
    body: list[fx.Node]
    """The other nodes, in the order of the graph."""
    outputs: list[Any]
    modes: dict[fx.Node, Modes]
    owned: dict[fx.Node, torch.Tensor]
    """Placeholders that are parameters or buffers of the model."""
    modules: dict[fx.Node, nn.Module]
    """Nodes that name a module, such as the body of a higher-order operator."""
    given: list[fx.Node]
    """The other placeholders: the caller's inputs."""
    sizes: Sizes
    """Values of the graph's symbols."""
    marks: FSDPMarks | None = None
    written: set[fx.Node] = field(default_factory=set)
    """Nodes whose memory the body may write. Readers after such a write have to run in the body, too."""
    sharded: dict[fx.Node, tuple[Place, ShardGroup]] = field(default_factory=dict)
    """Owned placeholders that are holes, each with its parameter's place and FSDP group."""
    codes: Codes = field(default_factory=Codes)
    """Code shared by equal stages."""

    @property
    def operators(self) -> list[str]:
        """Operators of the body's tensors, in order, and which tensors need a gradient, with those of `given`.

        Equal for graphs that do the same, possibly for other sizes.
        """
        given = ["gradient" if carries_gradient(node) else "given" for node in self.given if tensors_of(node)]
        made = [f"{node.op} {name_of(node)} {carries_gradient(node)}" for node in self.body if tensors_of(node)]
        return [*given, *made]


def read_graph(
    graph_module: fx.GraphModule, inputs: Iterable[Any], buffers: frozenset[int], marks: FSDPMarks | None = None
) -> GraphFacts:
    """Read a graph that will be called with `inputs`; `buffers` are the ids of the model's buffers."""
    values = list(inputs)
    sizes = Sizes([node for node in graph_module.graph.nodes if node.op == "placeholder"], values)
    late: set[fx.Node] = set()
    while True:
        facts = _read(graph_module, values, _Reader(sizes, buffers, marks, late))
        # All stages share the context's results, so none may write into them: a recomputed stage would write again.
        written = {node for node in facts.context if memory_root(node) in facts.written}
        if not written:
            return facts
        late |= written


def _read(graph_module: fx.GraphModule, inputs: list[Any], reader: _Reader) -> GraphFacts:
    remaining = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            reader.read_input(node, next(remaining))
        elif node.op == "output":
            reader.facts.outputs.extend(node.args[0])
        elif node.op == "get_attr" and isinstance(found := attribute_of(graph_module, node.target), nn.Module):
            reader.facts.modules[node] = found
        else:
            reader.read_operator(node)
    return reader.facts


class _Reader:
    """A graph as far as it has been read, node by node."""

    def __init__(self, sizes: Sizes, buffers: frozenset[int], marks: FSDPMarks | None, late: set[fx.Node]) -> None:
        self.facts = GraphFacts([], [], [], {}, {}, {}, [], sizes, marks)
        self._buffers = buffers
        self._places = marks.places if marks else {}
        self._modes = Modes()
        self._late = late
        """Nodes that have to stay in the body."""
        self._early: set[fx.Node] = set()
        """Values available before the body runs: the caller's, frozen parameters, and the context's."""
        self._read_by_body: set[fx.Node] = set()
        """Nodes whose memory the body has read so far."""

    def read_input(self, node: fx.Node, value: Any) -> None:
        facts = self.facts
        facts.modes[node] = self._modes
        if isinstance(value, nn.Parameter) or id(value) in self._buffers or _is_named_as_buffer(node, value):
            facts.owned[node] = value
            if id(value) in self._places:
                facts.sharded[node] = self._places[id(value)]
            elif not value.requires_grad and isinstance(value, nn.Parameter):
                self._early.add(node)
        else:
            facts.given.append(node)
            if not carries_gradient(node):
                self._early.add(node)

    def read_operator(self, node: fx.Node) -> None:
        facts = self.facts
        facts.modes[node] = self._modes
        if node.target in (_GRAD_MODE, _ENTER, _EXIT):
            # Modes become facts about nodes: a stage that begins inside a region enters it itself.
            self._modes = _switched(self._modes, node)
        elif self._is_early(node):
            self._early.add(node)
            facts.context.append(node)
        elif is_question(node):
            give_up(node)
        else:
            facts.body.append(node)
            self._read_by_body.update(map(memory_root, node.all_input_nodes))
            self.facts.written.update(map(memory_root, written_by(node)))
            if "_norm" in name_of(node):  # it may update its running statistics
                self.facts.written.update(each for each in node.all_input_nodes if self._is_buffer(each))

    def _is_early(self, node: fx.Node) -> bool:
        """Whether a node can run before all nodes of the body, with the same result."""
        # Random numbers have to be drawn in the model's order. A norm may update its running statistics; measuring
        # restores them after a stage, but not after the context. A mark has to run in place.
        if (
            node in self._late
            or carries_gradient(node)
            or is_random(node)
            or draws_random_numbers(node)
            or "_norm" in name_of(node)
            or node.target in MARKS
        ):
            return False
        inputs, owned = node.all_input_nodes, self.facts.owned
        # A sharded parameter is a hole outside the stage that gathers it, frozen or not.
        if any(each in self.facts.sharded for each in inputs):
            return False
        if not all(each in self._early or (each in owned and not owned[each].requires_grad) for each in inputs):
            return False
        if not self.facts.written.isdisjoint(map(memory_root, inputs)):
            return False
        # Moved before the body, a write would reach nodes of the body that have read its target before.
        if any(
            target.op in ("placeholder", "get_attr") or target in self._read_by_body
            for target in map(memory_root, written_by(node))
        ):
            return False
        return node.op in ("call_function", "call_method", "get_attr")

    def _is_buffer(self, node: fx.Node) -> bool:
        return node in self.facts.owned and not isinstance(self.facts.owned[node], nn.Parameter)


def written_input(facts: GraphFacts) -> fx.Node | None:
    """Return a node that writes into an input of the model, if any."""
    for node in facts.body:
        for target in map(memory_root, written_by(node)):
            # Dynamo names a placeholder after its source: `args` or `kwargs` of the compiled function.
            if target in facts.given and target.name.startswith(("l_args_", "l_kwargs_")):
                return node
    return None


def _switched(now: Modes, node: fx.Node) -> Modes:
    if node.target is _GRAD_MODE:
        return Modes(now.autocast, bool(node.args[0]))
    if node.target is _ENTER:
        return Modes((*now.autocast, node), now.gradients)
    # The node that leaves a region has the entering one as its argument.
    return Modes(tuple(each for each in now.autocast if each is not node.args[0]), now.gradients)


def _is_named_as_buffer(node: fx.Node, value: Any) -> bool:
    """Whether Dynamo found the value in a module's buffers.

    Ids alone do not suffice: a backend of torch.compile does not get the model, and has none.
    """
    return isinstance(value, torch.Tensor) and "_buffers_" in str(node.target)
