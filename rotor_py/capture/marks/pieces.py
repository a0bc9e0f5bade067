"""A stage of a sharded model in pieces: what stands between two marks can be compiled, and the marks cannot.

A mark calls a hook of FSDP, which gathers parameters or lets go of them. Compiled code would not see that happen, so
the marks stay outside. Between two marks nothing is gathered and nothing let go of: a piece finds whole parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from rotor_profiling import value_kind
from rotor_profiling.stage.kind import HasKind
from rotor_py.capture.graph.emitter import Emitter
from rotor_py.capture.graph.graph_facts import GraphFacts
from rotor_py.capture.graph.graph_nodes import memory_root, need_gradients, new_bytes, tensors_of, written_by
from rotor_py.capture.graph.run_graph import run_graph
from rotor_py.capture.marks.mark_nodes import MARKS
from rotor_py.distributed.gathering import GatheredToRead
from rotor_py.distributed.shard_groups import ShardGroup
from rotor_py.stage.protocol import StageOffers, Wrap
from rotor_py.stage.ways.recipe import Around, Reading, reading_all_there


class Piece(nn.Module, StageOffers, HasKind):
    """Nodes of a stage, none of which is a mark: from a tuple of values to a tuple of values."""

    def __init__(self, body: fx.GraphModule, signature: Hashable, needs_gradient: Sequence[bool]) -> None:
        super().__init__()
        self.body = body
        self.needs_gradient = needs_gradient
        self._signature = signature

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        made: tuple[Any, ...] = run_graph(self.body, values)
        return made

    def kind(self, value: Any) -> Hashable:
        return self._signature, value_kind(value)


@dataclass(frozen=True, slots=True)
class MarkedStage:
    """The nodes of a stage as the model's graph has them, marks among them, with what goes in and what comes out."""

    facts: GraphFacts
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]

    def in_pieces(self, body: fx.GraphModule, wrap: Wrap) -> fx.GraphModule:
        """The stage's graph, with `wrap(piece)` in the place of every piece.

        `body` is the graph without pieces.
        """
        emitter = Emitter(self.facts, self.inputs)
        end = 0
        for number, (is_mark, group) in enumerate(itertools.groupby(self.nodes, lambda node: node.target in MARKS)):
            nodes = list(group)
            end += len(nodes)
            reads, makes = self._reads(nodes), self._makes(nodes, end)
            if is_mark or not self._worth_compiling(nodes, makes):
                for node in nodes:
                    emitter.add(node)
            else:
                emitter.add_module(f"piece_{number}", wrap(self._piece(nodes, reads, makes, body)), reads, makes)
        return _on_the_tables_of(body, emitter.finish(self.outputs))

    def gathering(self, body: fx.GraphModule) -> Around:
        """What has parameters gathered that are read, by their numbers as nodes of `body`, the stage's graph.

        Which parameters are there when a backward asks for a value is up to FSDP. They are for the module whose
        backward it is, which need not be the one whose parameters the value is made from.
        """
        sharded = {f"{node.name}.{key}": group for node, ((_, key), group) in self.facts.sharded.items()}
        groups: dict[fx.Node, ShardGroup] = {}
        for node in body.graph.nodes:
            if node.op == "get_attr" and str(node.target) in sharded:
                groups[node] = sharded[str(node.target)]
            elif len(node.all_input_nodes) == 1 and not new_bytes(node, self.facts.sizes):  # it may be a view of one
                (read,) = node.all_input_nodes
                if read in groups:
                    groups[node] = groups[read]
        by_number = {number: groups[node] for number, node in enumerate(body.graph.nodes) if node in groups}

        @contextmanager
        def around() -> Iterator[Reading]:
            marks = self.facts.marks
            if marks is None or marks.measuring:
                yield reading_all_there
                return
            with GatheredToRead() as gathered:

                def reading(numbers: Collection[int]) -> None:
                    if wanted := dict.fromkeys(by_number[each] for each in numbers if each in by_number):
                        gathered.need(wanted.keys())

                yield reading

        return around

    def _piece(
        self, nodes: list[fx.Node], reads: list[fx.Node], makes: list[fx.Node], body: fx.GraphModule
    ) -> nn.Module:
        emitter = Emitter(self.facts, reads)
        for node in nodes:
            emitter.add(node)
        found = _on_the_tables_of(body, emitter.finish(makes))
        return Piece(found, tuple(emitter.signature), need_gradients(reads))

    def _reads(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """What the nodes read that others make, the model's own tensors aside."""
        own = {*nodes, *self.facts.owned, *self.facts.modules}
        return list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in own))

    def _makes(self, nodes: list[fx.Node], end: int) -> list[fx.Node]:
        """What is read of the nodes by those from `end` on, or returned."""
        later = {*self.outputs, *(each for node in self.nodes[end:] for each in node.all_input_nodes)}
        return [node for node in nodes if node in later]

    def _worth_compiling(self, nodes: list[fx.Node], makes: list[fx.Node]) -> bool:
        """Whether the nodes compute anything, and write into nothing but their own memory and the model's buffers.

        Compiled code makes a new tensor of one that it writes into, and earlier pieces have handed that on already.
        """
        own = {*nodes, *self.facts.owned}
        if any(memory_root(each) not in own for node in nodes for each in written_by(node)):
            return False
        return any(map(tensors_of, makes)) and any(new_bytes(node, self.facts.sizes) for node in nodes)


def _on_the_tables_of(body: fx.GraphModule, graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` with the parameters and buffers that `body` has: whoever replaces them there replaces them here."""
    graph.__dict__["_parameters"], graph.__dict__["_buffers"] = body._parameters, body._buffers
    return graph
