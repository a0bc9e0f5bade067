"""The operators at the end of a captured stage that need not be computed where nobody reads the stage's output."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from rotor_py.stage.skipped_output import skip_output

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
"""What may come after: its backward does not depend on the values that go into it."""


def skipping_output(body: fx.GraphModule) -> fx.GraphModule | None:
    """`body` for runs whose output nobody reads, without attributes; None if there is nothing to leave out."""
    skipped = _skippable(body.graph)
    if not any(node.target in _PRODUCTS for node in skipped):
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in skipped:
        if node.target not in _FOLLOWING:
            _let_skip(copies[node])
    found = fx.GraphModule(body, graph, "GraphStageWithoutOutput")
    for attributes in (found._parameters, found._buffers, found._modules):
        attributes.clear()
    return found


def _skippable(graph: fx.Graph) -> list[fx.Node]:
    """Operators whose value goes to nothing but the output, through operators whose backward does not look at it."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        known = node.target in _PRODUCTS or node.target in _SUMS or node.target in _FOLLOWING
        nobody = all(user.op == "output" or (user in found and user.target not in _PRODUCTS) for user in node.users)
        if node.op in ("call_function", "call_method") and known and nobody and _is_tensor(node) and not _writes(node):
            found[node] = None
    return list(found)


def _is_tensor(node: fx.Node) -> bool:
    found = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(found, torch.Tensor) and found.is_floating_point()


def _writes(node: fx.Node) -> bool:
    """Whether it may write into something that exists: `out=`, or dropout in place."""
    inplace = node.kwargs.get("inplace", node.args[3] if node.target is F.dropout and len(node.args) > 3 else False)
    return bool(inplace) or "out" in node.kwargs


def _let_skip(node: fx.Node) -> None:
    target: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    node.op, node.target = "call_function", _skipping(target)


@cache
def _skipping(target: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return skip_output(target, *args, **kwargs)

    call.__name__ = call.__qualname__ = f"skipping_{target.__name__}"
    return call
