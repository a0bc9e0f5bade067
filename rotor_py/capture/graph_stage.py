"""The pieces of a graph as modules: each takes what is live before it, and returns what is live after it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import tensors_in
from rotor_py.capture.cut_points import CutPoints
from rotor_py.capture.fsdp_marks import Table
from rotor_py.capture.graph_facts import GraphFacts, Modes
from rotor_py.capture.graph_nodes import attribute_of, module_path, new_bytes, tensors_of
from rotor_py.capture.mark_nodes import MARKS
from rotor_py.capture.min_cut import SavedPart, find_saved_part
from rotor_py.capture.run_graph import run_graph
from rotor_py.capture.skipped_output import skipping_output
from rotor_py.distributed.shard_groups import ShardGroup
from rotor_py.stage.partial_saving import PartialSaving
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.skipped_output import Run

_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


class GraphStage(nn.Module):
    """A piece of a graph, run node by node.

    Its input and output are tuples of tensors and numbers: what is live there, and then what all stages share, of which
    this one reads those at the positions `reads`; the last stage does not hand it on. `carried` says which of the
    tensors that it returns are carried past cuts: name and position. `signature` is equal for pieces that do the same.
    `groups` are those of the sharded parameters that it uses, `begun` those of them whose modules begin before it.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        *,
        reads: tuple[int, ...],
        shared: int,
        last: bool,
        carried: dict[str, int],
        signature: Hashable,
        groups: tuple[ShardGroup, ...] = (),
        begun: tuple[ShardGroup, ...] = (),
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.begun = begun
        self.body = body
        self.reads = reads
        self.shared = shared
        self.last = last
        self.carried = carried
        self.signature = signature
        # No submodules: they run on the attributes of the body.
        self._skipping_output = (skipping_output(body),)
        # Of a sharded model, what is kept for cheap operators would be let go of and gathered again.
        self._saved_part: tuple[SavedPart | None, fx.GraphModule | None, fx.GraphModule | None] | None = (
            (None, None, None) if sharded else None
        )

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._run(self.body, values)

    def forward_skipping_output(self) -> Run | None:
        """See `rotor_py.stage.skipped_output.forward_skipping_output`."""
        (graph,) = self._skipping_output
        return None if graph is None else partial(self._run, graph)

    def partial_forward(self, *, skip_output: bool = False) -> Run | None:
        """See `rotor_py.stage.partial_saving.partial_forward`."""
        if self._saved_part is None:
            self._saved_part = self._find_saved_part()
        choice, whole, without = self._saved_part
        graph = without if skip_output else whole
        return None if choice is None or graph is None else partial(self._run_partial, choice, graph)

    def _find_saved_part(self) -> tuple[SavedPart | None, fx.GraphModule | None, fx.GraphModule | None]:
        """What to keep, and the graphs that tell it: of all that the stage computes, and without its output."""
        found = find_saved_part(self.body, len(self.reads))
        if found is None:
            return None, None, None
        (bare,) = self._skipping_output
        whole = found.instrumented(self.body, self.body.graph)
        return found, whole, whole if bare is None else found.instrumented(self.body, bare.graph)

    def _run_partial(self, choice: SavedPart, graph: fx.GraphModule, values: tuple[Any, ...]) -> tuple[Any, ...]:
        devices = {tensor.device.type for tensor in (*tensors_in(values), *self.parameters())}
        with PartialSaving(choice.recipe, tuple(sorted(devices))) as recomputation:
            return self._run(graph, values, recomputation)

    def _run(self, graph: fx.GraphModule, values: tuple[Any, ...], *before: Any) -> tuple[Any, ...]:
        live, shared = self.divided(values)
        del values
        arguments = (*before, *live, *(shared[position] for position in self.reads))
        result: tuple[Any, ...] = run_graph(graph, arguments, self.body)
        return result if self.last else (*result, *shared)

    def divided(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What is live, and what is shared."""
        count = len(values) - self.shared
        return values[:count], values[count:]

    def relevant(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shared values that the stage reads."""
        return tuple(self.divided(values)[1][position] for position in self.reads)


def in_context(
    stages: Sequence[tuple[str, nn.Module]], value: tuple[Any, ...], preserve_rng_state: bool
) -> tuple[list[StageRunner], tuple[Any, ...]]:
    """Runners of the stages of a graph, with what they share, and what goes into the first beside that.

    An input of the model that gets a gradient may be among what is shared: then all of it goes from stage to stage.
    """
    ends = [_end(stage) for _, stage in stages]
    own = len(value) - ends[0].shared
    if any(tensor.requires_grad for tensor in tensors_in(value[own:])):
        own = len(value)
    runners = [
        StageRunner(stage, name, preserve_rng_state, context=value[own:], hands_on=not end.last)
        for (name, stage), end in zip(stages, ends, strict=True)
    ]
    return runners, value[:own]


def _end(stage: nn.Module) -> GraphStage:
    """The last piece of a stage that may be several joined."""
    return stage if isinstance(stage, GraphStage) else _end(list(stage.children())[-1])


class Emitter:
    """Copies nodes of a graph into another one, with the modes that each was in."""

    def __init__(self, facts: GraphFacts, inputs: Iterable[fx.Node]) -> None:
        self.facts = facts
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.copies: dict[fx.Node, fx.Node] = {node: self._input(node) for node in inputs}
        self.signature: list[Hashable] = []
        self.groups: dict[ShardGroup, None] = {}
        self.begun: dict[ShardGroup, None] = {}
        self._entered: set[ShardGroup] = set()
        self._tables: dict[str, Table] = {}
        self._numbers: dict[fx.Node, int] = {node: number for number, node in enumerate(self.copies)}
        self._open: list[tuple[fx.Node, fx.Node]] = []
        self._gradients_off: fx.Node | None = None

    def add(self, node: fx.Node) -> None:
        """Copy a node."""
        self._switch(self.facts.modes[node])
        self.copies[node] = self.graph.node_copy(node, self._copied)
        if node.op in ("get_attr", "call_module"):
            self.attributes[str(node.target)] = attribute_of(node.graph.owning_module, node.target)
        target = node.target if node.op in ("call_function", "call_method") else id(node)
        args = node.args
        if node.target in MARKS:
            self.copies[node].target = getattr(self.facts.marks, MARKS[node.target])
            args = args[1:]  # wherever it is
            if self.facts.marks is not None:
                self._entered.add(self.facts.marks.group_at(str(node.args[0]))[0])
        self.signature.append((node.op, target, self._plain(args), self._plain(node.kwargs)))
        self._numbers[node] = len(self._numbers)

    def _input(self, node: fx.Node) -> fx.Node:
        made = self.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        return made

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """The new graph as a module that returns `outputs`, nodes or constants, as a tuple."""
        self._switch(Modes())
        made = tuple(self._copied(each) if isinstance(each, fx.Node) else each for each in outputs)
        self.graph.output(made)
        self.signature.append(("output", self._plain(tuple(outputs))))
        module = fx.GraphModule(self.attributes, self.graph, "GraphStage")
        for holder, table in self._tables.items():
            getattr(module, holder).__dict__["_parameters"] = table
        return module

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:  # a parameter, a buffer, or the body of an operator
            name = node.name
            if node in self.facts.sharded:  # looked up at every use: it is gathered and let go
                (self._tables[name], key), group = self.facts.sharded[node]
                self.groups[group] = None
                if group not in self._entered:
                    self.begun[group] = None
                name = f"{name}.{key}"
            self.attributes[name] = self.facts.modules.get(node, self.facts.owned.get(node))
            self.copies[node] = self.graph.get_attr(name)
            self.copies[node].meta = dict(node.meta)
        return self.copies[node]

    def _switch(self, modes: Modes) -> None:
        kept = 0
        while kept < min(len(self._open), len(modes.autocast)) and self._open[kept][0] is modes.autocast[kept]:
            kept += 1
        while len(self._open) > kept:
            self.graph.call_function(_EXIT, (self._open.pop()[1],))
        for node in modes.autocast[kept:]:
            self._open.append((node, self.graph.call_function(_ENTER, node.args, node.kwargs)))
            self.signature.append(("autocast", node.args))
        if modes.gradients and self._gradients_off is not None:
            self.graph.call_function(torch._C._set_grad_enabled, (self._gradients_off,))
            self._gradients_off = None
        elif not modes.gradients and self._gradients_off is None:
            self._gradients_off = self.graph.call_function(torch.is_grad_enabled)
            self.graph.call_function(torch._C._set_grad_enabled, (False,))
            self.signature.append("no gradients")

    def _plain(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            if value not in self._numbers:
                self._numbers[value] = len(self._numbers)
            return "node", self._numbers[value]
        if isinstance(value, tuple | list):
            return tuple(map(self._plain, value))
        if isinstance(value, dict):
            return tuple((key, self._plain(each)) for key, each in value.items())
        if isinstance(value, slice):
            return "slice", self._plain(value.start), self._plain(value.stop), self._plain(value.step)
        return (type(value).__name__, value) if isinstance(value, Hashable) else id(value)


def stages_of(facts: GraphFacts, cuts: CutPoints) -> tuple[list[tuple[str, nn.Module]], list[fx.Node], list[fx.Node]]:
    """The stages with their names, what goes into the first, and what comes out of the last."""
    bounds = [0, *(end + 1 for end in cuts.ends)]
    pieces = [facts.body[low:high] for low, high in itertools.pairwise(bounds)]
    early = {*facts.context, *facts.given}
    shared = list(dict.fromkeys(each for node in facts.body for each in node.all_input_nodes if each in early))
    made = set(facts.body)
    leaving: list[fx.Node] = list(dict.fromkeys(node for node in facts.outputs if node in made))
    names = _names(pieces)
    result: list[tuple[str, nn.Module]] = []
    inputs: list[fx.Node] = []
    for number, piece in enumerate(pieces):
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
            signature=tuple(emitter.signature),
            groups=tuple(emitter.groups),
            begun=tuple(emitter.begun),
            sharded=facts.marks is not None,
        )
        result.append((names[number], stage))
        inputs = outputs
    return result, shared, leaving


def context_of(facts: GraphFacts, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """What runs before the chain: from what the caller passes in to `wanted`."""
    emitter = Emitter(facts, facts.given)
    for node in facts.context:
        emitter.add(node)
    return emitter.finish(wanted)


def _names(pieces: list[list[fx.Node]]) -> list[str]:
    """The path of the module in which a piece does most, one level below what all of the piece has in common."""
    found = []
    for piece in pieces:
        weights: Counter[str] = Counter()
        for node in piece:
            weights[module_path(node)] += new_bytes(node) + 1
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
