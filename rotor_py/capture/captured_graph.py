"""One graph of TorchDynamo as a chain of stages, with a context that runs before it.

The context is what needs no gradient. What it makes, and what the caller passes in, goes into the first stage. What the
graph returns may come out of the last stage, out of the context, or straight from the caller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import memory_meter, storage_bytes, tensors_in
from rotor_profiling.timing import several_processes
from rotor_py.capture.fsdp_markers import FSDPMarks, enter, leave
from rotor_py.capture.graph.cut_points import CutPoints, cut_points_like, find_cut_points, weights_of
from rotor_py.capture.graph.graph_facts import GraphFacts, read_graph, written_input
from rotor_py.capture.graph.graph_nodes import carries_gradient, tensors_of
from rotor_py.capture.graph.graph_rewrites import (
    draws_from_own_state,
    with_layers_apart,
    with_saving_functions,
    with_whole_transforms,
)
from rotor_py.capture.graph.graph_stage import context_of, stages_of
from rotor_py.capture.graph.stage_graph import line_of, run_graph
from rotor_py.capture.guarded_branches import (
    Answers,
    answers_of,
    asking_at_once,
    is_question,
    without_questions_about_the_batch,
)
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.cut import Cut, Layer
from rotor_py.measure.measurement import PrefixCost
from rotor_py.stage.forward_state import remember_moved_elsewhere

Agree = Callable[[list[int]], list[int]]


class CapturedGraph:
    """A graph for one model. `split` has to be called first, with the graph's inputs.

    `buffers` are the ids of the model's buffers. There are at most `granularity` stages. OtherAnswerError if yes is
    assumed of a question about the batch in one of several processes.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        buffers: frozenset[int],
        granularity: int,
        marks: FSDPMarks | None = None,
    ) -> None:
        with_saving_functions(graph_module)
        with_whole_transforms(graph_module)
        if several_processes():  # Rule 3 in `guarded_branches.py`
            graph_module = without_questions_about_the_batch(graph_module)
        self.graph_module = graph_module = with_layers_apart(graph_module)
        self._marks = marks
        self.layers: list[Layer] = []
        """The stages; none if nothing in the graph has a gradient."""
        self.trains = False
        """Whether anything in the graph has a gradient."""
        self._buffers = buffers
        self._granularity = granularity
        self._facts: GraphFacts | None = None
        self._cuts: CutPoints | None = None
        self._placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._entering: list[fx.Node] = []
        """What goes into the first stage."""
        self._leaving: list[fx.Node] = []
        """What comes out of the last stage."""
        self._wanted: list[fx.Node] = []
        """What the context has to make."""
        self._context: fx.GraphModule | None = None
        self._owned: dict[fx.Node, torch.Tensor] = {}
        self._owned_at: list[int] = []
        """The positions of these among the graph's inputs."""

    def split(
        self, arguments: tuple[Any, ...], like: CapturedGraph | None = None, agree: Agree = lambda weights: weights
    ) -> None:
        """Cut the graph into stages at its first call. Only then are the parameters at hand; later calls do nothing.

        If it is the same graph as `like` but for sizes, it is cut as that one was, where that is possible. Else it is
        cut by what its nodes weigh: `agree` is given that, and returns what processes that cut alike have agreed upon.

        Raises UnsupportedModelError if the model writes into its own input or draws from a random state that cannot be
        set back, or if a sharded module returns no tensor that a gradient could come through, and OtherAnswerError if
        yes is assumed of a question about what carries a gradient.
        """
        if self._facts is not None:
            return
        facts = read_graph(self.graph_module, arguments, self._buffers, self._marks)
        if self._marks is not None:
            _refuse_lost(facts, self._marks)
        if (writing := written_input(facts)) is not None:
            raise UnsupportedModelError(
                f"the model writes into its own input at {line_of(writing)}, and running a stage again would write "
                "again; let it make a new tensor there",
                kind="in_place_input",
                name=line_of(writing),
            )
        if (drawing := next(filter(draws_from_own_state, facts.body), None)) is not None:
            raise UnsupportedModelError(
                f"there is dropout between recurrent layers at {line_of(drawing)}, which cuDNN draws from a random "
                "state of its own, so that it cannot be run again with the same numbers; use single-layer modules with "
                "nn.Dropout between them, or torch.backends.cudnn.enabled = False",
                kind="recurrent_dropout",
                name=line_of(drawing),
            )
        _ask(facts, dict(zip(self._placeholders, arguments, strict=True)))
        self._facts = facts  # only now, so that a graph that was refused is refused again
        self.trains = any(map(carries_gradient, facts.body))
        self._owned = dict(facts.owned)
        self._owned_at = [self._placeholders.index(node) for node in self._owned]
        if not facts.body:  # all of it is context, so nothing has a gradient
            return
        self._cuts, names = None, None
        if like is not None and like._facts is not None and like._cuts is not None:
            self._cuts, names = cut_points_like(facts, like._facts, like._cuts), [name for name, _ in like.layers]
        weights = weights_of(facts)
        if self._cuts is None:
            weights = agree(weights)
            self._cuts, names = find_cut_points(facts, weights, self._granularity), None
        self.layers, self._entering, self._leaving = stages_of(facts, self._cuts, weights, names)
        # Only what the stages read or the graph returns. All else that the context makes is freed once it has run.
        made = set(facts.context)
        self._wanted = [node for node in dict.fromkeys([*self._entering, *facts.outputs]) if node in made]
        self._context = asking_at_once(context_of(facts, self._wanted))

    def has(self, arguments: tuple[Any, ...]) -> bool:
        """Whether its stages have the parameters and buffers that are among these arguments."""
        owned = map(arguments.__getitem__, self._owned_at)  # every step looks at all of them
        return self._facts is not None and all(map(operator.is_, owned, self._owned.values()))

    def _owned_among(self, arguments: tuple[Any, ...]) -> Iterable[Any]:
        """The parameters and buffers among the inputs of a call, in the order of `_owned`."""
        return map(arguments.__getitem__, self._owned_at)

    @property
    def answers(self) -> Answers:
        """What the graph assumes of questions about data."""
        return answers_of(self.graph_module.graph)

    def remember_written(self, cut: Cut) -> None:
        """Have the stages of `cut` find buffers that others of them write into as they were, when they run again."""
        assert self._facts is not None
        written = [tensor for node, tensor in self._owned.items() if node in self._facts.written]
        remember_moved_elsewhere([function for _, function in cut.stages], written)

    def same_as(self, other: CapturedGraph) -> bool:
        """Whether both do the same, if for other sizes: numbers may differ, and what computes them."""
        assert self._facts is not None
        assert other._facts is not None
        return self._facts.operators == other._facts.operators

    @property
    def silent(self) -> tuple[int, ...]:
        """The positions, among the tensors that the last stage returns, of those that will get no gradient.

        If the graph returns single numbers with a gradient, they are taken to be the loss, and nobody calls `backward`
        on the logits beside it. To count a gradient for them would add what is often the model's largest tensor.
        """
        tensors = [node for node in self._leaving if tensors_of(node)]
        losses = [node for node in tensors if carries_gradient(node) and all(t.dim() == 0 for t in tensors_of(node))]
        return tuple(i for i, node in enumerate(tensors) if losses and node not in losses)

    def enter(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[fx.Node, Any]]:
        """Run the context. Return what goes into the first stage, and all values that do not come out of the chain.

        OtherAnswerError if the data answer a question otherwise than the graph assumes.
        """
        assert self._facts is not None
        if not self.has(arguments):
            self._bind(dict(zip(self._owned, self._owned_among(arguments), strict=True)))
        values = dict(zip(self._placeholders, arguments, strict=True))
        if self._context is not None:
            made = self._run_context([values[node] for node in self._facts.given])
            values.update(zip(self._wanted, made, strict=True))
        return tuple(values[node] for node in self._entering), values

    def leave(self, made: Sequence[Any], values: dict[fx.Node, Any]) -> list[Any]:
        """The graph's outputs, from what the last stage returned and the values that `enter` returned."""
        assert self._facts is not None
        left = dict(zip(self._leaving, made, strict=True))
        return [
            (left if each in left else values)[each] if isinstance(each, fx.Node) else each
            for each in self._facts.outputs
        ]

    def run_unplanned(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Run the whole graph as Dynamo captured it, and return its outputs.

        Raises UnsupportedModelError for a graph of a sharded model: only stages gather parameters.
        """
        if self._marks is not None:
            raise UnsupportedModelError(
                f"nothing in the graph of {self._marks.model_name} has a gradient, and fully_shard was applied to it; "
                "train some of its parameters, or call it in eval mode",
                kind="no_gradient",
                name=self._marks.model_name,
            )
        return list(run_graph(self.graph_module, arguments))

    def context_cost(self, arguments: tuple[Any, ...], device: torch.device) -> PrefixCost:
        """What the context costs: the bytes that it needs while it runs, beyond those of its results.

        Its time counts as zero. It runs once with every plan, so it changes no decision.
        """
        assert self._facts is not None
        if self._context is None:
            return PrefixCost(0.0, 0)
        given = [arguments[self._placeholders.index(node)] for node in self._facts.given]
        # `enter` has run it before, so libraries have allocated what they keep for good.
        with memory_meter(device) as meter:
            made = self._run_context(given)
        (phase,) = meter.phases.values()
        return PrefixCost(0.0, max(0, phase.rise - storage_bytes(tensors_in(made))))

    def _run_context(self, given: list[Any]) -> Any:
        assert self._context is not None
        # Nothing in it has a gradient. But gradients are on where the model runs it, and some kernels look at that: an
        # LSTM on the CPU has other last digits where they are off.
        with torch.enable_grad():
            return run_graph(self._context, given)

    def let_go_of_parameters(self) -> None:
        """Hold no memory of parameters until the next call brings them: gathered ones are freed in between."""
        assert self._facts is not None
        for node, tensor in self._facts.owned.items():
            if isinstance(tensor, nn.Parameter) and tensor.untyped_storage().nbytes() > tensor.element_size():
                one = torch.empty((), dtype=tensor.dtype, device=tensor.device)
                self._facts.owned[node] = nn.Parameter(one.expand(tensor.shape), tensor.requires_grad)
        self._bind({**self._owned, **self._facts.owned})

    def _bind(self, now: dict[fx.Node, Any]) -> None:
        """Replace parameters and buffers in the stages by those of this call, which brings other tensors than the last.

        A model's tensors may be replaced between steps: `module.weight = nn.Parameter(…)`, or `load_state_dict` with
        `assign=True`. Dynamo passes the graph what the model has now.
        """
        other = {id(old): now[node] for node, old in self._owned.items() if now[node] is not old}
        roots = [module for _, module in self.layers] + ([self._context] if self._context is not None else [])
        for module in (each for root in roots for each in root.modules()):
            for table in (module._parameters, module._buffers):
                table.update({name: other[id(old)] for name, old in table.items() if id(old) in other})
        self._owned = now


def _ask(facts: GraphFacts, values: dict[fx.Node, Any]) -> None:
    """OtherAnswerError if the data answer a question otherwise than the graph assumes, which then need not be cut."""
    questions = [position for position, node in enumerate(facts.context) if is_question(node)]
    if questions:
        # All that comes before the last one: a node may write into what a question reads.
        before = asking_at_once(context_of(facts, (), facts.context[: questions[-1] + 1]))
        with torch.no_grad():
            run_graph(before, [values[node] for node in facts.given])


def _refuse_lost(facts: GraphFacts, marks: FSDPMarks) -> None:
    """UnsupportedModelError if a sharded module returns no tensor that autograd could come back through.

    FSDP gathers parameters for a module's backward when a gradient arrives at what the module returned. So its mark
    needs a tensor with a gradient, and finds none in objects that pytrees do not look into.
    """
    attached: dict[Any, bool] = {}
    """For every module that has begun: whether anything since has had a gradient."""
    for node in facts.body:
        if node.target is enter:
            attached[node.args[0]] = False
        elif node.target is leave and len(node.args) == 1 and attached[node.args[0]]:
            group, module = marks.group_at(str(node.args[0]))
            raise UnsupportedModelError(
                f"no tensor with a gradient was found in what {type(group.modules[module]).__name__} returns, to which "
                "fully_shard was applied; let it return tensors, in tuples, lists or dicts",
                kind="no_gradient",
                name=type(group.modules[module]).__name__,
            )
        elif carries_gradient(node):
            attached = dict.fromkeys(attached, True)
