"""Stages of a graph that follow each other, run as one.

Where they are all stored whole, nothing has to happen between them. As one function they take what the captured graph
takes: no call for each stage, and no look-up of each parameter through `nn.Module`, which is a fifth of the Python of a
small network.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from torch import fx, nn

from rotor_py.capture.graph.run_graph import node_of, run_graph
from rotor_py.stage.activity import add_note

Place = tuple[dict[str, Any], str]
"""Where a stage has a parameter, a buffer or a module: a table, and its name there."""


class WholeRun:
    """Runs stages, which follow each other in a graph, as one. None of them may be of a sharded model.

    Each of them is a graph and the positions of what it reads of the values that all share, as in `GraphStage`.
    """

    def __init__(self, stages: Sequence[tuple[fx.GraphModule, tuple[int, ...]]]) -> None:
        graph = fx.Graph()
        # Lists, not an argument for each value: the caller of a function holds its arguments until it returns.
        self._values, self._owned = graph.placeholder("values"), graph.placeholder("owned")
        self._places: list[Place] = []
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
        """Run the stages on what is live, and what they share. `values` is emptied: all is freed when it was used.

        An error gets a note with the stage that it comes from: `name_of` says what the stage with a number is called.
        """
        # Looked up in every run: another tensor may have been put in the place of a parameter.
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
        """Copy a stage, which reads what is `given`; return what it makes."""
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
