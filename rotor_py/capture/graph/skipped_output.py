"""A captured stage for runs with a skipped output: the operators at its end that need not be computed.

A stage that is run again for its backward makes its output a second time, though nobody reads it. If the last operator
is a matrix product, as in a transformer's block, its backward needs its inputs and not its value, so it can be skipped.
Operators before it cannot: autograd saves what they made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from rotor_py.capture.graph.graph_nodes import overwrites
from rotor_py.capture.graph.sizes import example_of
from rotor_py.capture.graph.stage_graph import StageGraph
from rotor_py.stage.skipped_output import skip_output

# Listed, not found by what autograd saves: that is not known before the stage runs.
_PRODUCTS: set[Any] = {
    F.linear,
    operator.matmul,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    "matmul",
    "mm",
    "bmm",
}
_SUMS: set[Any] = {operator.add, torch.add, "add"}
_FOLLOWING: set[Any] = {
    F.dropout,
    torch.reshape,
    torch.transpose,
    torch.permute,
    torch.flatten,
    torch.unflatten,
    torch.squeeze,
    torch.unsqueeze,
    "view",
    "reshape",
    "transpose",
    "permute",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "to",
    "float",
    "half",
    "bfloat16",
}
"""Operators that may follow a product: their backward does not read the values that go into them."""


def skipping_output(body: fx.GraphModule) -> fx.GraphModule | None:
    """`body` for runs with a skipped output; None if there is nothing worth skipping.

    It has no attributes of its own: it is run on those of `body`, so that parameters are there once.
    """
    skipped = _skippable(body.graph)
    if not any(node.target in _PRODUCTS for node in skipped):  # sums and views take hardly any time
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in skipped:
        if node.target not in _FOLLOWING:  # those run on what stands in for the value, and cost little or nothing
            _let_skip(copies[node])
    return StageGraph.like(body, graph, "GraphStageWithoutOutput")


def _skippable(graph: fx.Graph) -> list[fx.Node]:
    """The operators whose value only the stage's output depends on, and no backward."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        known = node.target in _PRODUCTS or node.target in _SUMS or node.target in _FOLLOWING
        # The backward of a product needs the values that went into it, so a product's input is not skipped.
        unused = all(user.op == "output" or (user in found and user.target not in _PRODUCTS) for user in node.users)
        called = node.op in ("call_function", "call_method")
        if called and known and unused and _is_tensor(node) and not overwrites(node):
            found[node] = None
    return list(found)


def _is_tensor(node: fx.Node) -> bool:
    found = example_of(node)
    return isinstance(found, torch.Tensor) and found.is_floating_point()


def _let_skip(node: fx.Node) -> None:
    target: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    node.op, node.target = "call_function", _skipping(target)


@cache
def _skipping(target: Callable[..., Any]) -> Callable[..., Any]:
    """The operator `target` for runs with a skipped output. It has a name, since the graph is turned into code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return skip_output(target, *args, **kwargs)

    call.__name__ = call.__qualname__ = f"skipping_{target.__name__}"
    return call
