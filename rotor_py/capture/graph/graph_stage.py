"""Pieces of a graph as modules: each maps the values live before it to those live after it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any

from torch import fx, nn

from rotor_profiling import tensors_in, value_signature
from rotor_profiling.isolate import accelerators
from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.timing import several_processes
from rotor_py.capture.graph.graph_facts import CutPoints, GraphFacts, name_pieces
from rotor_py.capture.graph.graph_nodes import (
    SymbolValues,
    need_gradients,
    tensors_of,
)
from rotor_py.capture.graph.saved_values import SavedPart
from rotor_py.capture.graph.stage_graph import Emitter, MarkedStage, node_of, run_graph
from rotor_py.capture.graph.stage_parts import Known, StageParts
from rotor_py.distributed.sharding import ShardGroup
from rotor_py.execute.instructions import Runners
from rotor_py.stage.error_context import add_note
from rotor_py.stage.partial_storage import Around, PartialSaving
from rotor_py.stage.protocol import Keeper, Run, RunThrough, StageOffers, Wrap
from rotor_py.stage.runner import StageRunner

# One function for consecutive stages that are stored whole has no call for each, and no look-up of each parameter
# through `nn.Module`: a fifth of the Python time of a small network.


class WholeRun:
    """Runs consecutive stages of an unsharded graph as one, each with the positions of shared values that it reads."""

    def __init__(self, stages: Sequence[tuple[fx.GraphModule, tuple[int, ...]]]) -> None:
        graph = fx.Graph()
        # Lists, not one argument for each value: the caller of a function holds its arguments until it returns.
        self._values, self._owned = graph.placeholder("values"), graph.placeholder("owned")
        # Tables of the stages' parameters, buffers or modules, and their names there.
        self._places: list[tuple[dict[str, Any], str]] = []
        self._stage_of: dict[fx.Node, int] = {}
        first, read = stages[0]
        live = [self._item(graph, position) for position in range(len(_inputs(first)) - len(read))]
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
        """Run the stages on `values`, the live and the shared ones; empties the list. Errors get their stage's name."""
        # Looked up in every run: a parameter may have been replaced.
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
        """Copy a stage that reads `given`; return its results."""
        copies = dict(zip(_inputs(body), given, strict=True))
        for node in body.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [copies[each] if isinstance(each, fx.Node) else each for each in node.args[0]]
            if node.op == "get_attr":
                copies[node] = self._own(graph, body, str(node.target))
            elif node.op == "call_module":
                module = self._own(graph, body, str(node.target))
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = graph.call_function(_call, (module, *args), kwargs)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
            self._stage_of[copies[node]] = number
        raise AssertionError("a graph has an output")

    def _own(self, graph: fx.Graph, body: fx.GraphModule, target: str) -> fx.Node:
        *path, name = target.split(".")
        owner = reduce(getattr, path, body)
        tables = owner._parameters, owner._buffers, owner._modules, owner.__dict__
        self._places.append((next(table for table in tables if name in table), name))
        return graph.call_function(operator.getitem, (self._owned, len(self._places) - 1))


def _inputs(body: fx.GraphModule) -> list[fx.Node]:
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


# Most runs that a stage remembers. A guess, far above the sequences that a model alternates between; with too few, runs
# are built again.
_MOST_RUNS = 16


class GraphStage(nn.Module, StageOffers, HasKind):
    """A piece of a graph, run node by node.

    Its input and output are tuples: first the live values, then those that all stages share. It reads the shared values
    at the positions `reads`, and passes all of them on unless it is the `last`. `begun` are the groups of sharded
    parameters that it uses, of modules that begin before it; `marked` are its nodes in the graph of a sharded model.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        *,
        reads: tuple[int, ...],
        shared: int,
        last: bool,
        carried: dict[str, int],
        handed_on: dict[int, int],
        signature: Hashable,
        sizes: SymbolValues,
        needs_gradient: Sequence[bool],
        begun: tuple[ShardGroup, ...],
        marked: MarkedStage | None,
        known: Known,
    ) -> None:
        super().__init__()
        self.needs_gradient = needs_gradient
        self._begun = begun
        self._marked = marked
        self.body = body
        self.reads = reads
        self.shared = shared
        self.last = last
        self.wiring = (reads, shared, last)
        self.carried = carried
        self.handed_on = handed_on
        self._signature = signature
        self._parts = StageParts(body, len(reads), sizes, signature, known, own_names=marked is not None)
        self._around: Around | None = None if marked is None else marked.gathering(body)
        self._runs: dict[tuple[GraphStage, ...], WholeRun] = {}  # this stage as one with following ones

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._run(self.body, values)

    def gather_begun(self) -> None:
        for group in self._begun:
            group.gather()

    def forward_skipping_output(self) -> Run | None:
        graph = self._parts.bare
        return None if graph is None else partial(self._run, graph)

    def be_stored_like(self, other: GraphStage) -> None:
        self._parts.follow(other._parts)

    def ways(self) -> tuple[str, ...]:
        return tuple(self._parts.found())

    def ways_for(self, value: Any) -> tuple[str, ...]:
        # Where processes wait for each other in a stage, they do not run it equally often to find its saved values.
        if self._marked is not None or several_processes():
            return self.ways()
        live, shared = self._divide(value)
        return tuple(self._parts.found((*live, *(shared[position] for position in self.reads))))

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        parts = self._parts
        if way not in parts.found():
            return super().forward_by(way, skip_output=skip_output)
        return partial(self._run_in_part, parts.found()[way], parts.graph(way, skip_output=skip_output))

    def run_through(self, following: Sequence[StageOffers]) -> RunThrough | None:
        stages = tuple(each for each in following if isinstance(each, GraphStage))
        if self._marked is not None or len(stages) < len(following):
            return None
        if stages not in self._runs:
            if len(self._runs) == _MOST_RUNS:
                self._runs.clear()
            self._runs[stages] = WholeRun([(each.body, each.reads) for each in (self, *stages)])
        return self._runs[stages]

    def in_pieces(self, wrap: Wrap) -> Run | None:
        if self._marked is None:
            return None
        graph = self._marked.in_pieces(self.body, wrap)
        return partial(self._run, graph, owner=graph)

    def kind(self, value: Any) -> Hashable:
        live, shared = self._divide(value)
        return self._signature, value_signature((live, [shared[position] for position in self.reads]))

    def _run_in_part(self, part: SavedPart, graph: fx.GraphModule, values: tuple[Any, ...]) -> tuple[Any, ...]:
        devices = accelerators(tensor.device for tensor in (*tensors_in(values), *self.parameters()))
        with PartialSaving(part.recipe, devices, self._around) as saving:
            return self._run(graph, values, saving)

    def _run(
        self, graph: fx.GraphModule, values: tuple[Any, ...], *before: Any, owner: fx.GraphModule | None = None
    ) -> tuple[Any, ...]:
        live, shared = self._divide(values)
        del values  # if the caller released them too, they are freed as soon as the graph has used them
        arguments = (*before, *live, *(shared[position] for position in self.reads))
        result: tuple[Any, ...] = run_graph(graph, arguments, owner or self.body)
        return result if self.last else (*result, *shared)

    def _divide(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        count = len(values) - self.shared
        return values[:count], values[count:]


def runners_of(
    stages: Sequence[tuple[str, nn.Module]],
    preserve_rng_state: bool,
    ways: Sequence[Sequence[str]],
    keepers: Sequence[Keeper],
) -> Runners:
    """Return runners of a graph's stages; `ways` are the names of each stage's options."""

    def runner(number: int) -> StageRunner:
        name, stage = stages[number]
        hands_on = not _end(stage).last
        return StageRunner(stage, name, preserve_rng_state, hands_on=hands_on, ways=ways[number], keepers=keepers)

    return Runners(stages, runner)


def shared_apart(
    stages: Sequence[tuple[str, nn.Module]], value: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split the first stage's input into values passed between stages, and the shared context."""
    own = len(value) - _end(stages[0][1]).shared
    if any(tensor.requires_grad for tensor in tensors_in(value[own:])):
        # A shared value gets a gradient: an input of the model. Gradients flow back only through a stage's input, so
        # all shared values pass from stage to stage.
        own = len(value)
    return value[:own], value[own:]


def _end(stage: nn.Module) -> GraphStage:
    """The last piece of a stage that may be several joined."""
    return stage if isinstance(stage, GraphStage) else _end(list(stage.children())[-1])


def stages_of(
    facts: GraphFacts, cuts: CutPoints, weights: list[int], names: list[str] | None = None
) -> tuple[list[tuple[str, nn.Module]], list[fx.Node], list[fx.Node]]:
    """The named stages, the values that all of them share, and the outputs of the last."""
    bounds = [0, *(end + 1 for end in cuts.ends)]
    pieces = [facts.body[low:high] for low, high in itertools.pairwise(bounds)]
    names = name_pieces(pieces, dict(zip(facts.body, weights, strict=True))) if names is None else names
    early = {*facts.context, *facts.given}
    shared = list(dict.fromkeys(each for node in facts.body for each in node.all_input_nodes if each in early))
    made = set(facts.body)
    leaving: list[fx.Node] = list(dict.fromkeys(node for node in facts.outputs if node in made))
    result: list[tuple[str, nn.Module]] = []
    inputs: list[fx.Node] = []
    known: Known = {}
    for number, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        last = number == len(pieces) - 1
        outputs = leaving if last else cuts.live[cuts.ends[number]]
        used = list(dict.fromkeys(each for node in piece for each in node.all_input_nodes if each in early))
        emitter = Emitter(facts, [*inputs, *used])
        for node in piece:
            emitter.add(node)
        body = emitter.finish(outputs)
        tensors = [node for node in outputs if tensors_of(node)]
        stage = GraphStage(
            body,
            reads=tuple(map(shared.index, used)),
            shared=len(shared),
            last=last,
            carried={node.name: tensors.index(node) for node in cuts.carried if node in tensors},
            handed_on=_handed_on(piece, inputs, outputs),
            signature=tuple(emitter.signature),
            sizes=facts.sizes,
            needs_gradient=need_gradients([*inputs, *shared]),
            begun=tuple(emitter.begun),
            known=known,
            marked=None if facts.marks is None else MarkedStage(facts, piece, [*inputs, *used], outputs),
        )
        result.append((name, stage))
        inputs = outputs
    return result, shared, leaving


def _handed_on(piece: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[int, int]:
    """The `outputs` that are `inputs` unread by the piece: output position to input position."""
    read = {each for node in piece for each in node.all_input_nodes}
    given, made = ([node for node in nodes if tensors_of(node)] for nodes in (inputs, outputs))
    return {made.index(node): at for at, node in enumerate(given) if node in made and node not in read}


def context_of(facts: GraphFacts, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph that runs before the chain, from the caller's inputs to `wanted`."""
    emitter = Emitter(facts, facts.given)
    for node in facts.context:
        emitter.add(node)
    return emitter.finish(wanted)
