"""What a stage stored in part keeps, what it drops, and the recipe by which that is made again."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from rotor_py.capture.graph.parts.prices import is_cheap
from rotor_py.capture.graph.parts.saved_values import SavedValues
from rotor_py.capture.graph.stage_graph import StageGraph
from rotor_py.capture.marks.fsdp_marks import is_mark, passed_through
from rotor_py.stage.ways.recipe import Call, Recipe, Value


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a stage stored in part keeps for its backward, what it drops, and how to make that again.

    Values are named by the number of their node in the stage's graph, so that they mean the same for all equal stages.
    """

    kept: frozenset[int]
    dropped: frozenset[int]
    recipe: Recipe

    @classmethod
    def of_cut(cls, body: fx.GraphModule, values: SavedValues, kept: Set[fx.Node]) -> SavedPart:
        """That of a stage with the graph `body` which keeps the values of these nodes of all that allocate memory."""
        numbers = {node: number for number, node in enumerate(body.graph.nodes)}
        dropped = values.saved - kept
        calls: dict[int, Call] = {}
        found: set[int] = set()
        pending = list(dropped)
        while pending:
            node = pending.pop()
            # A number costs nothing to keep, nor does an input whose memory is kept as that of another one.
            if node in kept or node not in values.roots or not node.op.startswith("call"):
                found.add(numbers[node])
            elif numbers[node] not in calls:
                calls[numbers[node]] = _call(node, numbers, values)
                pending.extend(node.all_input_nodes)
        places = frozenset(numbers[node] for node in dropped)
        needs = {number: _needs(calls, found, number) for number in places}
        return cls(frozenset(found), places, Recipe(calls, needs))

    def instrumented(self, body: fx.GraphModule, stage: fx.Graph) -> fx.GraphModule:
        """A copy of a graph on `body` whose first input is a `PartialSaving`.

        The copy hands it every value to keep or drop, as soon as the value is there. The copy has no attributes: it is
        run on those of `body`, so that parameters are there once.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        saving = graph.placeholder("saving")
        graph.output(graph.graph_copy(stage, copies))
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for number, node in enumerate(stage.nodes):
            if number in self.kept or number in self.dropped:
                with graph.inserting_after(last if node.op == "placeholder" else copies[node]):
                    how = "drop" if number in self.dropped else "keep"
                    graph.call_method(how, (saving, number, copies[node]))
        return StageGraph.like(body, graph, "PartialGraphStage")


def _call(node: fx.Node, numbers: dict[fx.Node, int], values: SavedValues) -> Call:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value_in(numbers))
    # Methods by name: those of a DTensor are none of a plain tensor.
    function: Any = partial(_call_method, node.target) if isinstance(node.target, str) else node.target
    if is_mark(node):  # making a value again is no forward of the module
        function = passed_through
    reads = tuple(numbers[each] for each in node.all_input_nodes)
    # With a graph, operators may choose another kernel: `matmul` folds a batch into one product where a gradient is
    # wanted. What is cheap, and views, have one kernel each.
    whole = values.roots.get(node) is node and not is_cheap(node)
    wanted = frozenset(numbers[each] for each in node.all_input_nodes if each in values.in_graph) if whole else None
    return Call(function, args, kwargs, reads, wanted)


def _value_in(numbers: dict[fx.Node, int]) -> Any:
    """What stands for a node in the arguments of a `Call`."""
    return lambda node: Value(numbers[node])


def _call_method(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _needs(calls: dict[int, Call], kept: set[int], number: int) -> frozenset[int]:
    """The kept values from which value `number` is made."""
    found: set[int] = set()
    pending, seen = [number], set[int]()
    while pending:
        each = pending.pop()
        if each in kept:
            found.add(each)
        elif each not in seen:
            seen.add(each)
            pending.extend(calls[each].reads)
    return frozenset(found)
