"""Dropout's output made again from its mask: a byte for an element is kept in place of four.

Running dropout again would draw anew. The CPU's operator multiplies by the mask, and then by the scale; so do the two
operators that are put beside it, bit for bit. Inductor takes dropout apart by itself, and CUDA's kernel rounds once.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten


def add_stand_ins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Put what makes a dropout's output from its input and mask beside it; by output, what stands in for it."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        source, probability, training = node.args
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if training is False or not {0, 1} <= parts.keys() or source.meta["val"].device.type != "cpu":
            continue
        output, mask = parts[0], parts[1]
        output.prepend(mask)
        scale = 0.0 if probability == 1 else 1 / (1 - probability)
        with graph.inserting_before(output):
            masked = _multiply(graph, source, mask, node)
            found[output] = _multiply(graph, masked, scale, node)
    return found


def _multiply(graph: fx.Graph, left: fx.Node, right: fx.Node | float, beside: fx.Node) -> fx.Node:
    made = graph.call_function(aten.mul.Tensor, (left, right))
    made.meta = {
        key: value for key, value in beside.meta.items() if key not in ("val", "tensor_meta", "eager_input_vals")
    }
    value = left.meta["val"]
    with value.fake_mode:
        made.meta["val"] = aten.mul.Tensor(value, right.meta["val"] if isinstance(right, fx.Node) else right)
    return made
