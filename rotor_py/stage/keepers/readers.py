"""Who reads a saved tensor in the backward, and whether for its numbers: ReLU needs the sign of its result alone.

The hook that saves a tensor is not told which node saves it. But nodes are numbered in the order in which they are
made, and a tensor knows the node that it comes from: so a result that is saved by its own node is known at once. Nodes
that save their input are found in the graph, from what is computed after them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import Node

_SHAPE_ALONE = ("AvgPool", "MaxPool")
"""How the names begin of nodes that save their input for its shape: where the largest of a window was, indices say."""
_SEEN = ("cpu", "cuda")
"""Devices whose kernels were read for that."""


def last_node() -> int:
    """The number of the node that was made last, of this thread: the one that saves, where a hook is called."""
    return torch._C._autograd._get_sequence_nr() - 1


def is_own_relu(tensor: torch.Tensor, number: int) -> bool:
    """Whether `tensor`, which node `number` saves, is the result of that node, and the node a ReLU's."""
    node = _origin(tensor)
    return node is not None and node.name() == "ReluBackward0" and node._sequence_nr() == number


def node_behind(tensors: Iterable[torch.Tensor], number: int) -> Node | None:
    """The node with this number in the graph behind `tensors`; None if it is not there."""
    pending = [node for node in map(_origin, tensors) if node is not None]
    seen = set()
    while pending:
        node = pending.pop()
        made_at = node._sequence_nr()
        if made_at == number:
            return node
        if made_at > number and node not in seen:  # a node is made after those that it leads to
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return None


def reads_shape_alone(node: Node, device: torch.device) -> bool:
    """Whether the backward of `node` reads the shape of its input, and no number of it."""
    return node.name().startswith(_SHAPE_ALONE) and device.type in _SEEN


def _origin(tensor: torch.Tensor) -> Node | None:
    # A view that was written to gets a new node when it is asked for it, which would change the numbers of others.
    return None if tensor._is_view() and tensor._version else tensor.grad_fn
