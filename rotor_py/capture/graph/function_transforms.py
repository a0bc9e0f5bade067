"""Regions of `torch.vmap` and its like in a captured graph, each turned into one node.

Dynamo traces into such a function: operators switch the transform on and off, and those in between work on wrapped
tensors, which have no memory of their own and do not say whether they carry a gradient. So neither could a stage end
there, nor a single one of these operators be moved or looked at. A region as one node takes and returns plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from rotor_py.capture.graph.graph_nodes import name_of, written_by
from rotor_py.capture.graph.run_graph import line_of
from rotor_py.capture.graph.sizes import example_of
from rotor_py.errors import UnsupportedModelError

_TRANSFORMS = ("_vmap", "_grad", "_jvp")
_ENTER = {f"{name}_increment_nesting" for name in _TRANSFORMS}
_EXIT = {f"{name}_decrement_nesting" for name in _TRANSFORMS}
_functions: dict[Hashable, Callable[..., Any]] = {}
"""A function for each kind of region, so that stages with equal regions are equal, and measured once."""


def with_whole_transforms(graph_module: fx.GraphModule) -> None:
    """Replace the regions of function transforms in a graph, in place, each by one node that does the same.

    UnsupportedModelError if a region writes into a tensor from outside: the node would hide that.
    """
    region: list[fx.Node] = []
    depth = 0
    for node in list(graph_module.graph.nodes):
        name = name_of(node) if node.op == "call_function" else ""
        depth += name in _ENTER
        if depth:
            region.append(node)
        depth -= name in _EXIT
        if region and not depth:
            _replace(graph_module.graph, region)
            region = []
    graph_module.recompile()


def _replace(graph: fx.Graph, region: list[fx.Node]) -> None:
    members = set(region)
    inputs = list(dict.fromkeys(each for node in region for each in node.all_input_nodes if each not in members))
    outputs = [node for node in region if any(user not in members for user in node.users)]
    for node in region:
        if not set(inputs).isdisjoint(written_by(node)):
            raise UnsupportedModelError(
                f"{line_of(node)} writes into a tensor inside of a function that torch.func transforms, and running a "
                "stage again would write again; let it make a new tensor there"
            )
    with graph.inserting_before(region[0]):
        whole = graph.call_function(_function_of(region, inputs, outputs), tuple(inputs))
        whole.meta = {**region[0].meta, "example_value": tuple(example_of(node) for node in outputs)}
        for number, node in enumerate(outputs):
            taken = graph.call_function(_take, (whole, number))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(taken, lambda user: user not in members)
    for node in reversed(region):
        graph.erase_node(node)


def _function_of(region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Callable[..., Any]:
    """What a region computes of its inputs, as a function: the same for regions that compute the same."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    numbers = {copy: number for number, copy in enumerate(copies.values())}
    key = tuple(
        (node.op, node.target, *map(str, fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)))
        for node in graph.nodes
    )
    if key not in _functions:
        module = fx.GraphModule(torch.nn.Module(), graph, "TransformedFunction")

        def transformed(*values: Any) -> Any:
            level = torch._C._functorch.maybe_current_level()
            try:
                return type(module).forward(module, *values)
            except BaseException:
                # Generated code has no `with` blocks, so an error would leave the transform on.
                while torch._C._functorch.maybe_current_level() != level:
                    torch._C._functorch.pop_dynamic_layer_stack()
                raise

        # By their names, operators that draw random numbers are known, and graphs that are the same but for sizes.
        transformed.__name__ = transformed.__qualname__ = f"transformed({', '.join(map(name_of, region))})"
        _functions[key] = transformed
    return _functions[key]


def _take(values: tuple[Any, ...], number: int) -> Any:
    return values[number]
