"""One graph of TorchDynamo as a chain of stages, with what runs before it and what is returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rotor_profiling import memory_meter, storage_bytes, tensors_in
from rotor_py.capture.cut_points import find_cut_points
from rotor_py.capture.fsdp_marks import FSDPMarks, enter, leave
from rotor_py.capture.graph_facts import GraphFacts, carries_gradient, read_graph, tensors_of, written_input
from rotor_py.capture.graph_stage import context_of, stages_of
from rotor_py.capture.run_graph import line_of, run_graph
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.cut import Layer
from rotor_py.measure.measurement import PrefixCost

Run = Callable[["CapturedGraph", tuple[Any, ...]], Sequence[Any]]


class CapturedGraph:
    """What the backend returns to Dynamo: called with the graph's inputs, it returns its outputs.

    It is cut into stages at its first call, when the parameters are at hand. `run` decides how it is run.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        buffers: frozenset[int],
        granularity: int,
        run: Run,
        marks: FSDPMarks | None = None,
    ) -> None:
        self.graph_module = graph_module
        self._marks = marks
        self.layers: list[Layer] = []
        self._buffers = buffers
        self._granularity = granularity
        self._run = run
        self._facts: GraphFacts | None = None
        self._placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._entering: list[fx.Node] = []
        self._leaving: list[fx.Node] = []
        self._wanted: list[fx.Node] = []
        self._context: fx.GraphModule | None = None
        self._owned: dict[fx.Node, torch.Tensor] = {}

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        return self._run(self, arguments)

    def split(self, arguments: tuple[Any, ...]) -> None:
        """Cut the graph into stages."""
        if self._facts is not None:
            return
        facts = read_graph(self.graph_module, arguments, self._buffers, self._marks)
        if self._marks is not None:
            _refuse_lost(facts, self._marks)
        if (writing := written_input(facts)) is not None:
            raise UnsupportedModelError(
                f"the model writes into its own input at {line_of(writing)}, which running a stage again would do "
                "again; let it make a new tensor there"
            )
        self._facts = facts
        self._owned = dict(facts.owned)
        if not facts.body:
            return
        self.layers, self._entering, self._leaving = stages_of(facts, find_cut_points(facts, self._granularity))
        made = set(facts.context)
        self._wanted = [node for node in dict.fromkeys([*self._entering, *facts.outputs]) if node in made]
        self._context = context_of(facts, self._wanted)

    @property
    def trains(self) -> bool:
        """Whether anything in the graph has a gradient."""
        return self._facts is not None and any(map(carries_gradient, self._facts.body))

    @property
    def silent(self) -> tuple[int, ...]:
        """The positions, among the tensors that the last stage returns, of those that will get no gradient.

        Where the graph returns single numbers with a gradient, they are the loss, and all others are not.
        """
        tensors = [node for node in self._leaving if tensors_of(node)]
        losses = [node for node in tensors if carries_gradient(node) and all(t.dim() == 0 for t in tensors_of(node))]
        return tuple(i for i, node in enumerate(tensors) if losses and node not in losses)

    def enter(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[fx.Node, Any]]:
        """What goes into the first stage, and all values that do not come out of the chain."""
        assert self._facts is not None
        values = dict(zip(self._placeholders, arguments, strict=True))
        self._bind(values)
        if self._context is not None:
            with torch.no_grad():
                made = run_graph(self._context, [values[node] for node in self._facts.given])
            values.update(zip(self._wanted, made, strict=True))
        return tuple(values[node] for node in self._entering), values

    def leave(self, made: Sequence[Any], values: dict[fx.Node, Any]) -> list[Any]:
        """The graph's outputs, from what the last stage returned and what `enter` had."""
        assert self._facts is not None
        values = {**values, **dict(zip(self._leaving, made, strict=True))}
        return [values[each] if isinstance(each, fx.Node) else each for each in self._facts.outputs]

    def context_cost(self, arguments: tuple[Any, ...], device: torch.device) -> PrefixCost:
        """What running before the chain needs beyond what it makes."""
        assert self._facts is not None
        if self._context is None:
            return PrefixCost(0.0, 0)
        given = [arguments[self._placeholders.index(node)] for node in self._facts.given]
        with torch.no_grad(), memory_meter(device) as meter:
            made = self._context(*given)
        (phase,) = meter.phases.values()
        return PrefixCost(0.0, max(0, phase.rise - storage_bytes(tensors_in(made))))

    def _bind(self, values: dict[fx.Node, Any]) -> None:
        """Put parameters and buffers in the place of those that were there at the last call, if they are others."""
        other = {id(old): values[node] for node, old in self._owned.items() if values[node] is not old}
        if not other:
            return
        roots = [module for _, module in self.layers] + ([self._context] if self._context is not None else [])
        for module in (each for root in roots for each in root.modules()):
            for table in (module._parameters, module._buffers):
                table.update({name: other[id(old)] for name, old in table.items() if id(old) in other})
        self._owned = {node: values[node] for node in self._owned}


def _refuse_lost(facts: GraphFacts, marks: FSDPMarks) -> None:
    """UnsupportedModelError if a module returns what was not understood: nothing would gather for its backward."""
    attached: dict[Any, bool] = {}
    for node in facts.body:
        if node.target is enter:
            attached[node.args[0]] = False
        elif node.target is leave and len(node.args) == 1 and attached[node.args[0]]:
            group, module = marks.at(str(node.args[0]))
            raise UnsupportedModelError(
                f"no tensor with a gradient was found in what {type(group.modules[module]).__name__} returns, to which "
                "fully_shard was applied; let it return tensors, in tuples, lists or dicts"
            )
        elif carries_gradient(node):
            attached = dict.fromkeys(attached, True)
