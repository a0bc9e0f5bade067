"""Stages of a captured graph as modules: each maps the values live before it to the values live after it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, cached_property, partial, reduce
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from rotor_profiling import tensors_in, value_signature
from rotor_profiling.isolate import accelerators_of
from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.storage import local
from rotor_profiling.timing import several_processes
from rotor_py.capture.graph.graph_facts import CutPoints, GraphFacts, name_pieces
from rotor_py.capture.graph.graph_nodes import (
    example_of,
    is_random,
    is_size,
    need_gradients,
    overwrites,
    owned_by,
    tensors_of,
)
from rotor_py.capture.graph.saved_values import KINDS, SavedPart, named
from rotor_py.capture.graph.selective_recompute import find_saved_parts, same_parts
from rotor_py.capture.graph.stage_graph import Emitter, MarkedStage, graph_on, node_of, run_graph
from rotor_py.stage.error_context import add_note
from rotor_py.stage.partial_storage import Around, PartialSaving
from rotor_py.stage.protocol import Run, RunThrough, StageOffers, Wrap
from rotor_py.stage.skipped_output import skip_output

# A stage that is recomputed right before its backward can skip a product that only its output depends on: no operator's
# backward reads the product. (Which operators besides products and sums could be skipped, only a run would show.)
_PRODUCTS = {*KINDS["products"], *KINDS["convolutions"]}
_SUMS: set[Any] = {operator.add, torch.add, "add"}
# Operators that may follow a skipped product: their backward does not read the values of their inputs.
_RESHAPING = ("reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "view", "contiguous")
_FOLLOWING = {F.dropout, *named((*_RESHAPING, "to", "float", "half", "bfloat16"), torch)}
# Number of cached `WholeRun`s at which a stage clears its cache. A guess, far above the number of plans in use at once.
_MOST_RUNS = 16


def skipping_output(body: fx.GraphModule) -> fx.GraphModule | None:
    skipped = _skippable(body.graph)
    if not any(node.target in _PRODUCTS for node in skipped):  # to skip only sums and views saves no time
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in skipped:
        if node.target not in _FOLLOWING:  # those run on the product's memory, which nothing has filled: this is fast
            copy, target = copies[node], node.target
            function: Any = getattr(torch.Tensor, target) if isinstance(target, str) else target
            copy.op, copy.target = "call_function", _skipping(function)
    return graph_on(body, graph, "GraphStageWithoutOutput")


def _skippable(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes whose values only the stage's output depends on, and no operator's backward reads."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        known = node.target in _PRODUCTS or node.target in _SUMS or node.target in _FOLLOWING
        # An operator that makes a product's input cannot be skipped: the product's backward reads the input.
        unused = all(user.op == "output" or (user in found and user.target not in _PRODUCTS) for user in node.users)
        made, called = example_of(node), node.op in ("call_function", "call_method")
        is_tensor = isinstance(made, torch.Tensor) and made.is_floating_point()
        if called and known and unused and is_tensor and not overwrites(node):
            found[node] = None
    return list(found)


@cache
def _skipping(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that allocates the output of `target` without computing it. Generated code uses `__name__`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return skip_output(target, *args, **kwargs)

    call.__name__ = call.__qualname__ = f"skipping_{target.__name__}"
    return call


# Consecutive stages that store everything run as one function, which takes a fifth less Python time in small networks.


class WholeRun:
    """Run consecutive `stages`, pairs of a graph and the positions of the shared values it reads, as one function."""

    def __init__(self, stages: Sequence[tuple[fx.GraphModule, tuple[int, ...]]]) -> None:
        graph = fx.Graph()
        # Pass values in a list that the graph empties: Python would hold separate arguments until the graph returns.
        self._values, self._owned = graph.placeholder("values"), graph.placeholder("owned")
        # Pairs of a dict and a key in it, for each parameter, buffer or module that the stages read.
        self._places: list[tuple[dict[str, Any], str]] = []
        self._stage_of: dict[fx.Node, int] = {}
        first, read = stages[0]
        inputs = len(first.graph.find_nodes(op="placeholder"))
        live = [self._item(graph, position) for position in range(inputs - len(read))]
        shared = {
            position: self._item(graph, len(live) + position)
            for position in sorted({position for _, reads in stages for position in reads})
        }
        graph.call_method("clear", (self._values,))
        for number, (body, reads) in enumerate(stages):
            live = self._add(graph, number, body, [*live, *(shared[position] for position in reads)])
        graph.output(tuple(live))
        self._graph = fx.GraphModule(nn.Module(), graph, "WholeRun")

    def __call__(self, values: list[Any], name_of: Callable[[int], str]) -> tuple[Any, ...]:
        """Run the stages on `values`, first the live, then the shared ones; empty this list. Errors name the stage."""
        # Look parameters up in every run, since the user may have replaced one.
        owned = [table[name] for table, name in self._places]
        try:
            made: tuple[Any, ...] = run_graph(self._graph, (values, owned))
        except BaseException as error:
            if (node := node_of(self._graph, error)) is not None:
                add_note(error, f"in the forward of stage {name_of(self._stage_of.get(node, 0))!r}")
            raise
        return made

    def _item(self, graph: fx.Graph, position: int) -> fx.Node:
        return graph.call_function(operator.getitem, (self._values, position))

    def _add(self, graph: fx.Graph, number: int, body: fx.GraphModule, given: Sequence[Any]) -> list[Any]:
        copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
        copies |= {node: self._own(graph, body, node) for node in body.graph.find_nodes(op="get_attr")}
        results: Any = graph.graph_copy(body.graph, copies)
        self._stage_of |= {copy: number for node, copy in copies.items() if node.op != "placeholder"}
        return list(results)

    def _own(self, graph: fx.Graph, body: fx.GraphModule, node: fx.Node) -> fx.Node:
        *path, name = str(node.target).split(".")
        owner = reduce(getattr, path, body)
        tables = owner._parameters, owner._buffers, owner._modules, owner.__dict__
        self._places.append((next(table for table in tables if name in table), name))
        made = graph.call_function(operator.getitem, (self._owned, len(self._places) - 1))
        made.meta = dict(node.meta)
        return made


class GraphStage(nn.Module, StageOffers, HasKind):
    """A stage of a captured graph.

    Its input and output are tuples: the live values, then the values that all stages share. The stage reads the shared
    values at the positions `reads`, and returns all shared ones unless it is the `last`. `marked`: None if unsharded.
    """

    def __init__(
        self,
        emitter: Emitter,
        outputs: Sequence[fx.Node],
        *,
        reads: tuple[int, ...],
        shared: int,
        last: bool,
        carried: dict[str, int],
        handed_on: dict[int, int],
        needs_gradient: Sequence[bool],
        marked: MarkedStage | None,
        known: dict[Hashable, GraphStage],
    ) -> None:
        super().__init__()
        self.body = emitter.finish(outputs)
        self.needs_gradient = needs_gradient
        self.wiring = self.reads, self.shared, self.last = reads, shared, last
        self.carried, self.handed_on = carried, handed_on
        self._begun = tuple(emitter.begun)
        self._marked = marked
        self._around: Around | None = None if marked is None else marked.gathering(self.body)
        self._signature = tuple(emitter.signature)
        self._sizes = emitter.facts.sizes
        self._known = known
        self._like: list[GraphStage] = []  # at most one: this stage for other sizes. A list hides it from `nn.Module`
        self._parts: dict[str, SavedPart] | None = None
        # Maps pairs to graphs. A pair: a storage mode (None if everything is stored), and whether to skip the output.
        self._own_graphs: dict[tuple[str | None, bool], fx.GraphModule | None] = {}
        self._runs: dict[tuple[GraphStage, ...], WholeRun | None] = {}  # results of `run_through` by its argument

    def __getstate__(self) -> dict[str, Any]:
        # Leave out graphs: those of `graph_on` have no attributes, so they cannot be copied. A copy makes new ones.
        kept = {name: each for name, each in self.__dict__.items() if name not in ("_graphs", "_first")}
        return {**kept, "_own_graphs": {}, "_known": {}, "_runs": {}}

    def __call__(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.forward(values)  # do not call global module hooks, which are meant for the user's modules

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._run(self.body, values)

    @cached_property
    def may_draw(self) -> bool:  # type: ignore[override]  # an attribute there
        # A custom operator, a module or the body of an operator may draw in some runs only.
        nodes = self.body.graph.nodes
        custom = any(type(node.target).__module__ == "torch._ops" for node in nodes)
        return custom or bool(self.body._modules) or any(map(is_random, nodes))

    def gather_begun(self) -> None:
        for group in self._begun:
            group.gather()

    def forward_skipping_output(self) -> Run | None:
        graph = self._bare
        return None if graph is None else partial(self._run, graph)

    def be_stored_like(self, other: GraphStage) -> None:
        """Use the storage modes of `other`, the same stage for other sizes. Call this before `ways`."""
        self._like = [other]

    def ways(self) -> tuple[str, ...]:
        return tuple(self.parts_by_way())

    def ways_for(self, value: Any) -> tuple[str, ...]:
        # With several processes, find saved values with fake tensors: a real run may wait for other processes.
        if self._marked is not None or several_processes():
            return self.ways()
        live, shared = self._divide(value)
        return tuple(self.parts_by_way((*live, *(shared[position] for position in self.reads))))

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        parts = self.parts_by_way()
        if way not in parts:
            return super().forward_by(way, skip_output=skip_output)
        bare = self._bare if skip_output else None
        key: tuple[str | None, bool] = way, bare is not None
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = parts[way].instrumented(self.body, (bare or self.body).graph)
        return partial(self._run_in_part, parts[way], graph)

    def run_through(self, following: Sequence[StageOffers]) -> RunThrough | None:
        stages = tuple(each for each in following if isinstance(each, GraphStage))
        if self._marked is not None or len(stages) < len(following):
            return None
        if stages not in self._runs:
            if len(self._runs) == _MOST_RUNS:
                self._runs.clear()
            calls = any(each.body.graph.find_nodes(op="call_module") for each in (self, *stages))
            self._runs[stages] = None if calls else WholeRun([(each.body, each.reads) for each in (self, *stages)])
        return self._runs[stages]

    def in_pieces(self, wrap: Wrap) -> Run | None:
        if self._marked is None:
            return None
        graph = self._marked.in_pieces(self.body, wrap)
        return partial(self._run, graph, owner=graph)

    def kind(self, value: Any) -> Hashable:
        live, shared = self._divide(value)
        return self._signature, value_signature((live, [shared[position] for position in self.reads]))

    def parts_by_way(self, arguments: Sequence[Any] | None = None) -> dict[str, SavedPart]:
        """Return a dict from storage modes to the parts that they keep, most bytes first. May run on `arguments`."""
        if self._parts is None:
            if self._first._parts is None:
                # Run on `arguments` only if all tensors in them are plain ones with memory.
                plain = (torch.Tensor, nn.Parameter)
                usable = all(type(each) in plain and each.device.type != "meta" for each in tensors_in(arguments))
                self._first._parts = self._find_parts(arguments if usable else None)
            self._parts = self._first._parts
        return self._parts

    def _find_parts(self, arguments: Sequence[Any] | None) -> dict[str, SavedPart]:
        for example in self._like:
            # Leave out nodes that compute sizes: where a size is 1, a graph has a constant in place of such a node.
            theirs, own = (
                {at: node for at, node in enumerate(each.body.graph.nodes) if not is_size(node)}
                for each in (example, self)
            )
            if [*map(_operator, theirs.values())] == [*map(_operator, own.values())]:
                nodes = dict(zip(theirs, own.values(), strict=True))
                return same_parts(self.body, self._sizes, example.parts_by_way(), nodes, arguments)
        return find_saved_parts(self.body, len(self.reads), self._sizes, arguments)

    @cached_property
    def _first(self) -> GraphStage:
        """The first stage with the same operators and sizes: equal stages share its storage modes and their graphs."""
        nodes = self.body.graph.nodes
        given = (tensor for node in nodes if node.op == "placeholder" for tensor in tensors_of(node))
        owned = (owned_by(self.body, node) for node in nodes if node.op == "get_attr")
        layouts = tuple(self._layout(each) for each in (*given, *owned) if isinstance(each, torch.Tensor))
        # Compare `op` of all nodes, too: the signature does not say where autocast regions end.
        return self._known.setdefault((self._signature, tuple(node.op for node in nodes), layouts), self)

    def _layout(self, tensor: torch.Tensor) -> Hashable:
        number, here = self._sizes.number, local(tensor)
        shape: tuple[Any, ...] = tuple(map(number, here.shape))
        return type(tensor), shape, tuple(map(number, here.stride())), here.dtype, here.device, tensor.requires_grad

    @cached_property
    def _graphs(self) -> dict[tuple[str | None, bool], fx.GraphModule | None]:
        # A graph finds parameters by name. In a sharded model, names differ between stages, so each has its own graphs.
        return self._first._own_graphs if self._marked is None else self._own_graphs

    @property
    def _bare(self) -> fx.GraphModule | None:
        """The graph that allocates the stage's output without computing it; None if this saves no time."""
        if (None, True) not in self._graphs:
            self._graphs[None, True] = skipping_output(self.body)
        return self._graphs[None, True]

    def _run_in_part(self, part: SavedPart, graph: fx.GraphModule, values: tuple[Any, ...]) -> tuple[Any, ...]:
        with PartialSaving(part.recipe, accelerators_of(values, self), self._around) as saving:
            return self._run(graph, values, saving)

    def _run(
        self, graph: fx.GraphModule, values: tuple[Any, ...], *before: Any, owner: fx.GraphModule | None = None
    ) -> tuple[Any, ...]:
        live, shared = self._divide(values)
        del values  # the graph can then free each value after its last use, unless the caller holds it
        arguments = (*before, *live, *(shared[position] for position in self.reads))
        result: tuple[Any, ...] = run_graph(graph, arguments, owner or self.body)
        return result if self.last else (*result, *shared)

    def _divide(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        count = len(values) - self.shared
        return values[:count], values[count:]


def _operator(node: fx.Node) -> tuple[str, str]:
    return node.op, str(node.target) if node.op.startswith("call") else ""


def shared_by_stages(facts: GraphFacts) -> list[fx.Node]:
    """Return the nodes outside of the body whose values it reads: all stages share them."""
    early = {*facts.context, *facts.given}
    return [each for each in _read_by(facts.body, facts) if each in early]


def stages_of(
    facts: GraphFacts, cuts: CutPoints, weights: list[int], shared: list[fx.Node], names: list[str] | None = None
) -> tuple[list[tuple[str, nn.Module]], list[fx.Node]]:
    """Return pairs of a name and a stage, and the last stage's outputs. All stages share the values of `shared`."""
    pieces = [facts.body[low:high] for low, high in itertools.pairwise([0, *(end + 1 for end in cuts.ends)])]
    names = name_pieces(pieces, dict(zip(facts.body, weights, strict=True))) if names is None else names
    made = set(facts.body)
    leaving: list[fx.Node] = list(dict.fromkeys(node for node in facts.outputs if node in made))
    result: list[tuple[str, nn.Module]] = []
    inputs: list[fx.Node] = []
    known: dict[Hashable, GraphStage] = {}
    for number, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        last = number == len(pieces) - 1
        outputs = leaving if last else cuts.live[cuts.ends[number]]
        used = [each for each in _read_by(piece, facts) if each in shared]
        tensors = [node for node in outputs if tensors_of(node)]
        stage = GraphStage(
            Emitter(facts, [*inputs, *used], piece),
            outputs,
            reads=tuple(map(shared.index, used)),
            shared=len(shared),
            last=last,
            carried={node.name: tensors.index(node) for node in cuts.carried if node in tensors},
            handed_on=_handed_on(piece, inputs, outputs),
            needs_gradient=need_gradients([*inputs, *shared]),
            known=known,
            marked=None if facts.marks is None else MarkedStage(facts, piece, [*inputs, *used], outputs),
        )
        result.append((name, stage))
        inputs = outputs
    return result, leaving


def _read_by(nodes: Iterable[fx.Node], facts: GraphFacts) -> list[fx.Node]:
    """Return the nodes that `nodes` read, each once; in place of arithmetic on sizes, the nodes that this reads."""
    found: dict[fx.Node, None] = {}
    for each in (each for node in nodes for each in node.all_input_nodes):
        found |= dict.fromkeys(_read_by([each], facts) if each in facts.arithmetic else [each])
    return list(found)


def _handed_on(piece: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[int, int]:
    """For input tensors that a piece returns without reading, map positions in the output to positions in the input."""
    read = {each for node in piece for each in node.all_input_nodes}
    given, made = ([node for node in nodes if tensors_of(node)] for nodes in (inputs, outputs))
    return {made.index(node): at for at, node in enumerate(given) if node in made and node not in read}
