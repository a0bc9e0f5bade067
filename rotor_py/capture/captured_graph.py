"""A captured graph as a chain of stages. Before the first stage, its context runs: the nodes that need no gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import memory_meter, storage_bytes, tensors_in
from rotor_profiling.timing import several_processes
from rotor_py.capture.fsdp_markers import FSDPMarks, enter, leave
from rotor_py.capture.graph.graph_facts import (
    CutPoints,
    GraphFacts,
    cut_points_like,
    find_cut_points,
    is_the_callers,
    losses_of,
    overwritten_by,
    read_by_turns,
    read_graph,
    weights_of,
)
from rotor_py.capture.graph.graph_nodes import (
    SymbolValues,
    carries_gradient,
    line_of,
    memory_root,
    name_of,
    tensors_of,
)
from rotor_py.capture.graph.graph_rewrites import REWRITES, draws_from_own_state
from rotor_py.capture.graph.graph_stage import shared_by_stages, stages_of
from rotor_py.capture.graph.stage_graph import Emitter, run_graph
from rotor_py.capture.patches import Answers, is_question, without_questions_about_the_batch
from rotor_py.errors import UnsupportedModelError
from rotor_py.execute.instructions import Runners
from rotor_py.measure.cut import Cut, Layer
from rotor_py.measure.measurement import PrefixCost
from rotor_py.stage.forward_state import remember_moved_elsewhere
from rotor_py.stage.protocol import Keeper, offers_of
from rotor_py.stage.runner import StageRunner

Agree = Callable[[list[int]], list[int]]


class CapturedGraph:
    """A captured graph of one model, to be `split` into at most `granularity` stages. `buffers`: ids of the model's
    buffers. Raises OtherAnswerError if several processes train and yes is assumed about the batch (`patches.py`).
    """

    def __init__(
        self, graph_module: fx.GraphModule, buffers: frozenset[int], granularity: int, marks: FSDPMarks | None = None
    ) -> None:
        for rewrite in REWRITES:
            rewrite(graph_module.graph)
        graph_module.recompile()
        if several_processes():  # do not assume yes about the batch: Rule 3 in `patches.py`
            graph_module = without_questions_about_the_batch(graph_module)
        self.graph_module = graph_module
        self._marks = marks
        self._buffers = buffers
        self._granularity = granularity
        self._placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.layers: list[Layer] = []  # the stages with their names; none if no output of the graph requires a gradient
        self.trains = False  # whether an output that the graph makes requires a gradient
        self._is_split = False
        self._facts = GraphFacts(SymbolValues(), marks)
        self._cuts: CutPoints | None = None
        self._entering: list[fx.Node] = []  # inputs of the first stage
        self._leaving: list[fx.Node] = []  # outputs of the last stage
        self.overwriting: fx.Node | None = None  # the last node of the context that writes into an input of the graph
        self._context: fx.GraphModule | None = None
        self.passed_on: list[torch.Tensor] = []  # parameters and buffers that stages pass on, with their gradients
        self._made: list[fx.Node] = []  # nodes of the context whose values it returns
        # Maps placeholders to the model's parameters and buffers. `_owned_at`: their indices among the graph's inputs.
        self._owned: dict[fx.Node, torch.Tensor] = {}
        self._owned_at: list[int] = []

    def split(
        self, arguments: tuple[Any, ...], like: CapturedGraph | None = None, agree: Agree = lambda weights: weights
    ) -> None:
        """Cut the graph into stages, given the `arguments` of its first call. Cuts it where `like`, the same graph for
        other sizes, was cut; else, by the bytes that nodes allocate, which `agree` makes equal in all processes. Raises
        UnsupportedModelError for graphs that cannot be recomputed, and OtherAnswerError (Note in `patches.py`).
        """
        if self._is_split:
            return
        facts = read_graph(self.graph_module, arguments, self._buffers, self._marks)
        if self._marks is not None:
            _refuse_lost(facts, self._marks)
        inputs = list(filter(is_the_callers, facts.given))
        nodes = [*facts.context, *facts.body]
        if (writing := next((node for node in nodes if overwritten_by(node, inputs)), None)) is not None:
            raise written_input(writing)
        read = {memory_root(node) for node in nodes if name_of(node) == "_get_data_attr"}.intersection(facts.given)
        if (writing := next((node for node in nodes if overwritten_by(node, read)), None)) is not None:
            line = line_of(writing)
            text = f"write under torch.no_grad() at {line}, not through .data, or make the tensor a buffer: measuring "
            text += "would not put it back, as its version counter does not show the write"
            raise UnsupportedModelError(text, kind="written_through_data", name=line)
        if (drawing := next(filter(draws_from_own_state, facts.body), None)) is not None:
            raise UnsupportedModelError(
                f"use single-layer modules with nn.Dropout between them at {line_of(drawing)}, or "
                "torch.backends.cudnn.enabled = False: cuDNN's dropout between layers cannot be recomputed exactly",
                kind="recurrent_dropout",
                name=line_of(drawing),
            )
        self._facts = facts
        # A graph that writes to buffers may return an input as it is: no gradient reaches its operators.
        passed_on = () if any(overwritten_by(node, facts.given) for node in facts.body) else self._placeholders
        outputs = (node for node in facts.outputs if isinstance(node, fx.Node) and node not in passed_on)
        self.trains = any(map(carries_gradient, outputs))
        self._note_owned()
        if not self.trains or not facts.body:
            self._is_split = True
            return
        self._make_context()
        self.overwriting = next((node for node in reversed(facts.context) if overwritten_by(node, facts.given)), None)
        if self.overwriting is None and any(map(is_question, facts.context)):
            self.enter(arguments)  # raises OtherAnswerError before the graph is cut, which takes longer
        names: list[str] | None = None
        if like is not None and like._cuts is not None:
            self._cuts, names = cut_points_like(facts, like._facts, like._cuts), [name for name, _ in like.layers]
        weights = weights_of(facts)
        if self._cuts is None:
            weights = agree(weights)
            self._cuts, names = find_cut_points(facts, weights, self._granularity), None
        if turns := read_by_turns(facts, self._cuts):
            for node in turns:
                facts.given.append(node)
                del facts.owned[node]
            self._note_owned()
            self._make_context()
        trained = [arguments[self._placeholders.index(node)] for node in facts.given if carries_gradient(node)]
        self.passed_on = [each for each in trained if isinstance(each, nn.Parameter) or id(each) in self._buffers]
        self.layers, self._leaving = stages_of(facts, self._cuts, weights, self._entering, names)
        self._is_split = True  # only now: after an error above, a later call raises it again

    def _note_owned(self) -> None:
        self._owned = self._facts.owned
        self._owned_at = [self._placeholders.index(node) for node in self._owned]

    def _make_context(self) -> None:
        facts = self._facts
        self._entering = shared_by_stages(facts)
        # The context returns only the values that stages read or the graph returns; it frees all others.
        early = set(facts.context)
        self._made = [node for node in dict.fromkeys([*self._entering, *facts.outputs]) if node in early]
        self._context = Emitter(facts, facts.given, facts.context).finish(self._made)

    def has(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the stages have the same parameters and buffers as the `arguments` of this call."""
        owned = map(arguments.__getitem__, self._owned_at)  # `map`, for speed: this runs in every step
        return self._is_split and all(map(operator.is_, owned, self._owned.values()))

    @property
    def answers(self) -> Answers:
        return tuple(bool(node.args[2]) for node in self.graph_module.graph.nodes if is_question(node))

    def overwritten(self, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the arguments that the context writes into."""
        pairs = zip(self._placeholders, arguments, strict=True)
        return [given for node, given in pairs if any(overwritten_by(each, [node]) for each in self._facts.context)]

    def remember_written(self, cut: Cut) -> None:
        """Tell the stages of `cut` which buffers the graph writes into: recomputations must read the earlier values."""
        written = [tensor for node, tensor in self._owned.items() if node in self._facts.written]
        remember_moved_elsewhere([function for _, function in cut.stages], written)

    def same_as(self, other: CapturedGraph) -> bool:
        """Whether both graphs have the same operators. Sizes, and constants computed from sizes, may differ."""
        return self._facts.operators == other._facts.operators

    @property
    def silent(self) -> tuple[int, ...]:
        """Indices of the last stage's output tensors that get no gradient: if it returns losses, all other tensors."""
        tensors = [node for node in self._leaving if tensors_of(node)]
        losses = losses_of(tensors)
        return tuple(i for i, node in enumerate(tensors) if losses and node not in losses)

    def enter(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[fx.Node, Any]]:
        """Run the context. Return the first stage's inputs, and the graph's inputs and context's results by node."""
        if not self.has(arguments):
            self._bind(dict(zip(self._owned, map(arguments.__getitem__, self._owned_at), strict=True)))
        values = dict(zip(self._placeholders, arguments, strict=True))
        if self._context is not None:
            made = _run_context(self._context, [values[node] for node in self._facts.given])
            values.update(zip(self._made, made, strict=True))
        return tuple(values[node] for node in self._entering), values

    def leave(self, made: Sequence[Any], values: dict[fx.Node, Any]) -> list[Any]:
        """Return the graph's outputs, given the last stage's outputs and the `values` that `enter` returned."""
        known = {**values, **dict(zip(self._leaving, made, strict=True))}
        return [known[each] if isinstance(each, fx.Node) else each for each in self._facts.outputs]

    def run_unplanned(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Run the graph unplanned. Raises UnsupportedModelError for a sharded model: only stages gather parameters."""
        if self._marks is not None:
            raise UnsupportedModelError(
                f"nothing in the graph of {self._marks.model_name} requires grad, and fully_shard was applied to it; "
                "train some of its parameters, or call it in eval mode",
                kind="no_gradient",
                name=self._marks.model_name,
            )
        return list(run_graph(self.graph_module, arguments))

    def context_cost(self, arguments: tuple[Any, ...], device: torch.device) -> PrefixCost:
        """Measure the scratch bytes of the context. Its time counts as 0: it runs once under every plan."""
        if self._context is None:
            return PrefixCost(0.0, 0)
        given = [arguments[self._placeholders.index(node)] for node in self._facts.given]
        # `enter` has run the context before, so libraries have made the allocations that they keep.
        with memory_meter(device) as meter:
            made = _run_context(self._context, given)
        (phase,) = meter.phases.values()
        return PrefixCost(0.0, max(0, phase.rise - storage_bytes(tensors_in(made))))

    def let_go_of_parameters(self) -> None:
        """Until the next call, hold parameters with memory for one element, so that FSDP can free the gathered ones."""
        now: dict[fx.Node, torch.Tensor] = {}
        for node, tensor in self._owned.items():
            if isinstance(tensor, nn.Parameter) and tensor.untyped_storage().nbytes() > tensor.element_size():
                one = torch.empty((), dtype=tensor.dtype, device=tensor.device)
                now[node] = nn.Parameter(one.expand(tensor.shape), tensor.requires_grad)
        self._bind(now)

    def _bind(self, now: dict[fx.Node, torch.Tensor]) -> None:
        """Put the tensors `now` into the stages in place of their previous parameters and buffers."""
        changed = ((node, tensor) for node, tensor in now.items() if tensor is not self._owned[node])
        other: dict[int, Any] = {id(self._owned[node]): tensor for node, tensor in changed}
        roots = [module for _, module in self.layers] + ([self._context] if self._context is not None else [])
        for module in (each for root in roots for each in root.modules()):
            for table in (module._parameters, module._buffers):
                table.update({name: other[id(old)] for name, old in table.items() if id(old) in other})
        self._owned.update(now)


def written_input(writing: fx.Node) -> UnsupportedModelError:
    line = line_of(writing)
    text = f"let the model make a new tensor at {line}: there it overwrites its input, which recomputations must read"
    return UnsupportedModelError(text, kind="in_place_input", name=line)


def _run_context(context: fx.GraphModule, given: list[Any]) -> Any:
    # Keep gradients enabled, as in plain training: under `no_grad`, an LSTM on the CPU rounds differently.
    with torch.enable_grad():
        return run_graph(context, given)


def _refuse_lost(facts: GraphFacts, marks: FSDPMarks) -> None:
    """Raise UnsupportedModelError if no output of a sharded module needs a gradient: FSDP gathers when one arrives."""
    attached: dict[Any, bool] = {}  # maps the `place` of each module to whether a node inside it requires a gradient
    for node in facts.body:
        if node.target is enter:
            attached[node.args[0]] = False
        elif node.target is leave and len(node.args) == 1 and attached[node.args[0]]:
            group, module = marks.group_at(str(node.args[0]))
            name = type(group.modules[module]).__name__
            raise UnsupportedModelError(
                f"let {name} return tensors that require grad, in tuples, lists or dicts: fully_shard was applied, "
                f"and no tensor with a gradient was found in what {name} returned",
                kind="no_gradient",
                name=name,
            )
        elif carries_gradient(node):
            attached = dict.fromkeys(attached, True)


def runners_of(
    stages: Sequence[Layer], preserve_rng_state: bool, ways: Sequence[Sequence[str]], keepers: Sequence[Keeper]
) -> Runners:
    return Runners(
        StageRunner(stage, name, preserve_rng_state, hands_on=not offers_of(stage).last, ways=own, keepers=keepers)
        for (name, stage), own in zip(stages, ways, strict=True)
    )


def shared_apart(stages: Sequence[Layer], value: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split the first stage's input into values that stages pass on, and values that all stages share."""
    own = len(value) - offers_of(stages[0][1]).shared
    if any(tensor.requires_grad for tensor in tensors_in(value[own:])):
        own = len(value)  # gradients flow back only to values that stages pass on
    return value[:own], value[own:]
