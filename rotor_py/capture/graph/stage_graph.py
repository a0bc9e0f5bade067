"""Copy nodes of a captured graph into graphs for stages, and run graphs so that errors name the model's source line."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import torch_compat, value_signature
from rotor_profiling.stage.stage_signature import HasKind, Unlike
from rotor_py.capture.fsdp_markers import MARKS, Table
from rotor_py.capture.graph.graph_facts import GraphFacts, Modes
from rotor_py.capture.graph.graph_nodes import (
    GATHERED,
    attribute_of,
    lines_of,
    memory_root,
    need_gradients,
    new_bytes,
    tensors_of,
    written_by,
)
from rotor_py.distributed.sharding import ShardGroup, gathered_to_read
from rotor_py.stage.error_context import add_note
from rotor_py.stage.partial_storage import Around, Reading
from rotor_py.stage.protocol import StageOffers, Wrap


def run_graph(graph: fx.GraphModule, arguments: Sequence[Any], owner: fx.GraphModule | None = None) -> Any:
    """Call a graph with `arguments`. Its code reads parameters and other attributes of `owner`, by default the graph.
    Errors of operators pass through, with a note that quotes the model's source line.
    """
    # Do not call `graph(...)`, which on an error prints generated code and cuts off the traceback. Generated code has
    # no `with` blocks, so the `except` block ends the autocast and `no_grad` regions in which an error was raised.
    gradients = torch.is_grad_enabled()
    try:
        return type(graph).forward(graph if owner is None else owner, *arguments)
    except BaseException as error:
        torch_compat.set_grad_enabled(gradients)
        _explain(graph, error)
        raise


def _explain(graph: fx.GraphModule, error: BaseException) -> None:
    """Exit the autocast regions that were open when `error` was raised, and add a note with the model's source line."""
    trace = _in_code_of(graph, error.__traceback__)
    if trace is None:
        return
    # Exit the innermost region first. Regions exited before are no locals any more: generated code sets these to None.
    for value in reversed(trace.tb_frame.f_locals.values()):
        if isinstance(value, torch.autocast):
            value.__exit__(None, None, None)
    node = node_of(graph, error)
    if node is not None and (theirs := "".join(lines_of(node)).rstrip()):
        add_note(error, f"the operator {node} comes from\n{theirs}")


def node_of(graph: fx.GraphModule, error: BaseException) -> fx.Node | None:
    """Return the node whose operator raised `error`; None if the error was raised outside the graph's code."""
    trace = _in_code_of(graph, error.__traceback__)
    if trace is None:
        return None
    numbers: dict[int, int | None] = getattr(graph, "_lineno_map", None) or {}
    line = trace.tb_lineno - trace.tb_frame.f_code.co_firstlineno
    return dict(enumerate(graph.graph.nodes)).get(numbers.get(line) or 0)


def _in_code_of(graph: fx.GraphModule, trace: TracebackType | None) -> TracebackType | None:
    code = graph.forward.__code__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace


def graph_on(body: fx.GraphModule, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Return `graph` as a module without parameters: `run_graph` runs it with `body` as the owner of these."""
    found = fx.GraphModule(body, graph, name)
    for attributes in (found._parameters, found._buffers, found._modules):
        attributes.clear()
    return found


_ENTER, _EXIT = torch_compat.enter_autocast, torch_compat.exit_autocast


class Emitter:
    """Copy nodes of a captured graph into a new graph, which runs each in the autocast and gradient mode of the model.

    `inputs` become the new graph's placeholders. Other values that the nodes read (parameters, buffers, bodies of
    operators) become its attributes. If two emitters have an equal `signature`, their nodes compute the same.
    """

    def __init__(self, facts: GraphFacts, inputs: Iterable[fx.Node], nodes: Iterable[fx.Node] = ()) -> None:
        self.facts = facts
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            self.copies[node] = self.graph.placeholder(node.name)
            self.copies[node].meta = dict(node.meta)
        self.signature: list[Hashable] = []
        self.begun: dict[ShardGroup, None] = {}
        self._entered: set[ShardGroup] = set()
        self._tables: dict[str, Table] = {}
        self._numbers: dict[fx.Node, int] = {node: number for number, node in enumerate(self.copies)}
        self._open: list[tuple[fx.Node, fx.Node]] = []
        self._gradients_off: fx.Node | None = None
        for node in nodes:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        self._switch(self.facts.modes[node])
        self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        self.copies[node] = self.graph.node_copy(node, self._copied)
        if node.op in ("get_attr", "call_module"):
            self.attributes[str(node.target)] = attribute_of(node.graph.owning_module, node.target)
        # Compare functions and methods by their targets. With a node of another `op`, the signature equals no other.
        target = node.target if node.op in ("call_function", "call_method") else Unlike(id(node))
        args = node.args
        if node.target in MARKS:
            self.copies[node].target = getattr(self.facts.marks, MARKS[node.target])
            args = args[1:]  # leave out `place`, which differs between equal modules
            if self.facts.marks is not None:
                self._entered.add(self.facts.marks.group_at(str(node.args[0]))[0])
        self.signature.append((node.op, target, self._plain(args), self._plain(node.kwargs)))
        self._numbers[node] = len(self._numbers)

    def add_module(self, name: str, module: nn.Module, reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> None:
        """Add a call of `module` in place of nodes: it takes the values of `reads` and returns those of `makes`."""
        self._switch(Modes())  # the module's own graph enters the modes of its nodes
        self.attributes[name] = module
        made = self.graph.call_module(name, (tuple(map(self._copied, reads)),))
        for position, node in enumerate(makes):
            self.copies[node] = self.graph.call_function(operator.getitem, (made, position))

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """End the new graph with the tuple `outputs` (nodes or constants), and return it as a module."""
        self._switch(Modes())  # exit all open autocast and `no_grad` regions
        self.graph.output(tuple(self._copied(each) if isinstance(each, fx.Node) else each for each in outputs))
        self.signature.append(("output", self._plain(tuple(outputs))))
        module = fx.GraphModule(self.attributes, self.graph, "GraphStage")
        for holder, table in self._tables.items():
            getattr(module, holder).__dict__["_parameters"] = table
        return module

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self.copies and node in self.facts.arithmetic:
            self._copy(node)
        elif node not in self.copies:  # a parameter, a buffer, or the body of an operator
            # Equal stages share graphs, which find attributes by name, so number attributes. In a sharded model, stages
            # share none: name attributes after nodes, so that the pieces of a stage find them.
            name = node.name if self.facts.marks is not None else f"owned_{len(self.attributes)}"
            if node in self.facts.sharded:
                # Refer to the module's `_parameters`, since gathering puts another parameter into this dict.
                (self._tables[name], key), group = self.facts.sharded[node]
                if group not in self._entered:
                    self.begun[group] = None
                name = f"{name}.{key}"
                self.signature.append(("held as", key))
            self.attributes[name] = self.facts.modules.get(node, self.facts.owned.get(node))
            self.copies[node] = self.graph.get_attr(name)
            self.copies[node].meta = dict(node.meta)
            if node in self.facts.sharded:
                self.copies[node].meta[GATHERED] = True
        return self.copies[node]

    def _switch(self, modes: Modes) -> None:
        kept = 0  # number of open autocast regions, from the outermost on, that the new modes have, too
        while kept < min(len(self._open), len(modes.autocast)) and self._open[kept][0] is modes.autocast[kept]:
            kept += 1
        while len(self._open) > kept:
            self.graph.call_function(_EXIT, (self._open.pop()[1],))
        for node in modes.autocast[kept:]:
            self._open.append((node, self.graph.call_function(_ENTER, node.args, node.kwargs)))
            self.signature.append(("autocast", node.args))
        if modes.gradients and self._gradients_off is not None:
            self.graph.call_function(torch_compat.set_grad_enabled, (self._gradients_off,))
            self._gradients_off = None
        elif not modes.gradients and self._gradients_off is None:
            # When the graph runs, read the mode to restore later: the graph's caller may be under `no_grad`.
            self._gradients_off = self.graph.call_function(torch.is_grad_enabled)
            self.graph.call_function(torch_compat.set_grad_enabled, (False,))
            self.signature.append("no gradients")

    def _plain(self, value: Any) -> Hashable:
        """Return an argument for the signature: nodes become numbers, since their names differ between equal stages."""
        if isinstance(value, fx.Node):
            if value not in self._numbers:
                self._numbers[value] = len(self._numbers)
            return "node", self._numbers[value]
        if isinstance(value, tuple | list):
            return tuple(map(self._plain, value))
        if isinstance(value, dict):
            return tuple((key, self._plain(each)) for key, each in value.items())
        if isinstance(value, slice):
            return "slice", self._plain((value.start, value.stop, value.step))
        if isinstance(value, float):  # as text, since 0.0 == -0.0
            return repr(value)
        return (type(value).__name__, value) if isinstance(value, Hashable) else Unlike(id(value))


# A stage of a sharded model is compiled in pieces, cut at nodes of MARKS: these run FSDP's hooks, which gather and free
# parameters, and which compiled code cannot call. While a piece runs, all parameters that it reads are gathered.


class UnmarkedPiece(nn.Module, StageOffers, HasKind):
    def __init__(self, body: fx.GraphModule, signature: Hashable, needs_gradient: Sequence[bool]) -> None:
        super().__init__()
        self.body = body
        self.needs_gradient = needs_gradient
        self._signature = signature

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return run_graph(self.body, values)  # type: ignore[no-any-return]  # a graph returns a tuple

    def kind(self, value: Any) -> Hashable:
        return self._signature, value_signature(value)


@dataclass(frozen=True, slots=True)
class MarkedStage:
    facts: GraphFacts
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]

    def in_pieces(self, body: fx.GraphModule, wrap: Wrap) -> fx.GraphModule:
        """Return a copy of the stage's graph `body` that calls `wrap(piece)` in place of the nodes of each piece."""
        emitter = Emitter(self.facts, self.inputs)
        end = 0
        for number, (is_mark, group) in enumerate(itertools.groupby(self.nodes, lambda node: node.target in MARKS)):
            nodes = list(group)
            end += len(nodes)
            own = {*nodes, *self.facts.owned, *self.facts.modules}
            reads = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in own))
            later = {*self.outputs, *(each for node in self.nodes[end:] for each in node.all_input_nodes)}
            makes = [node for node in nodes if node in later]
            if is_mark or not self._worth_compiling(nodes, makes):
                for node in nodes:
                    emitter.add(node)
            else:
                piece = Emitter(self.facts, reads, nodes)
                found = _on_the_tables_of(body, piece.finish(makes))
                module = wrap(UnmarkedPiece(found, tuple(piece.signature), need_gradients(reads)))
                emitter.add_module(f"piece_{number}", module, reads, makes)
        return _on_the_tables_of(body, emitter.finish(self.outputs))

    def gathering(self, body: fx.GraphModule) -> Around:
        """Return a context for recomputing values. It yields a function to gather the parameters among given nodes."""
        sharded = {f"{node.name}.{key}": group for node, ((_, key), group) in self.facts.sharded.items()}
        groups: dict[fx.Node, ShardGroup] = {}
        for node in body.graph.nodes:
            if node.op == "get_attr" and str(node.target) in sharded:
                groups[node] = sharded[str(node.target)]
            elif len(node.all_input_nodes) == 1 and not new_bytes(node, self.facts.sizes):  # a view: of a parameter?
                (read,) = node.all_input_nodes
                if read in groups:
                    groups[node] = groups[read]
        by_number = {number: groups[node] for number, node in enumerate(body.graph.nodes) if node in groups}

        @contextmanager
        def around() -> Iterator[Reading | None]:
            marks = self.facts.marks
            if marks is None or marks.measuring:
                yield None
                return
            with gathered_to_read() as need:

                def reading(numbers: Collection[int]) -> None:
                    if wanted := dict.fromkeys(by_number[each] for each in numbers if each in by_number):
                        need(wanted.keys())

                yield reading

        return around

    def _worth_compiling(self, nodes: list[fx.Node], makes: list[fx.Node]) -> bool:
        """Whether `nodes` allocate memory, and write into no input: compiled code would copy such an input."""
        own = {*nodes, *self.facts.owned}
        if any(memory_root(each) not in own for node in nodes for each in written_by(node)):
            return False
        return any(map(tensors_of, makes)) and any(new_bytes(node, self.facts.sizes) for node in nodes)


def _on_the_tables_of(body: fx.GraphModule, graph: fx.GraphModule) -> fx.GraphModule:
    """Let `graph` use the dicts of parameters and buffers of `body`, so that a tensor is replaced in both at once."""
    graph.__dict__["_parameters"], graph.__dict__["_buffers"] = body._parameters, body._buffers
    return graph
