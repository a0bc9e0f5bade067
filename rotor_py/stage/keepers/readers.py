"""Who reads a saved tensor in the backward, and what of it: ReLU and its like ask where it is positive, and no more.

The hook that saves a tensor is not told which node saves it. But nodes are numbered in the order in which they are
made, and a tensor knows the node that it comes from: so a result that is saved by its own node is known at once. Nodes
that save their input are found in the graph, from what is computed after them.

Some bounds are no question of one bit. Of NaN, the backward of hardtanh and ReLU6 lets a gradient pass or not by where
in memory it is: vector instructions do the one, and the loop over what is left after them does the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

import torch
from torch.autograd.graph import Node


class Need(Enum):
    """What a backward reads of a saved tensor."""

    SHAPE = "its shape"
    POSITIVE = "which numbers are greater than 0"
    POSITIVE_OR_NAN = "which numbers are greater than 0, or NaN"
    NOT_NEGATIVE = "which numbers are 0, or greater"
    NUMBERS = "its numbers"

    def together_with(self, other: Need) -> Need:
        """What is needed if two nodes read a tensor."""
        if other in (self, Need.SHAPE):
            return self
        return other if self is Need.SHAPE else Need.NUMBERS


_MOST_NODES = 256
"""Nodes that are looked at for those that save a tensor: these have just been made, as a rule. A guess."""
_SHAPE_ALONE = ("AvgPool", "MaxPool")
"""How the names begin of nodes that save their input for its shape: where the largest of a window was, indices say."""
_SEEN = ("cpu", "cuda")
"""Devices whose kernels were read for what they need."""


def last_node() -> int:
    """The number of the node that was made last, of this thread: the one that saves, where a hook is called."""
    return torch._C._autograd._get_sequence_nr() - 1


def own_need(tensor: torch.Tensor, number: int) -> Need | None:
    """What node `number`, which saves `tensor`, needs of it, if it is the result of that node; None if it is not."""
    node = _origin(tensor)
    return need_of(node, tensor.device) if node is not None and node._sequence_nr() == number else None


def need_of(node: Node, device: torch.device) -> Need:
    """What the backward of `node` reads of the floating tensor that it has saved."""
    name = node.name()
    if device.type not in _SEEN:
        return Need.NUMBERS
    if name.startswith(_SHAPE_ALONE):
        return Need.SHAPE
    if name == "ReluBackward0" or (name.startswith("ThresholdBackward") and _bound(node, "threshold") == 0):
        return Need.POSITIVE_OR_NAN
    if name.startswith("LeakyReluBackward"):  # whatever the slope
        return Need.POSITIVE
    if name == "ClampMinBackward0" and _bound(node, "min") == 0:
        return Need.NOT_NEGATIVE
    if name == "ClampBackward1" and _bound(node, "min") == 0 and _bound(node, "max") is None:
        return Need.NOT_NEGATIVE
    return Need.NUMBERS


def node_behind(tensors: Iterable[torch.Tensor], number: int) -> Node | None:
    """The node with this number in the graph behind `tensors`; None if it is not there."""
    return nodes_behind(tensors, {number}, most=None).get(number)


def nodes_behind(
    tensors: Iterable[torch.Tensor], numbers: Collection[int], most: int | None = _MOST_NODES
) -> dict[int, Node]:
    """The nodes with these numbers in the graph behind `tensors`, as far as `most` nodes show them."""
    found: dict[int, Node] = {}
    pending = [node for node in map(_origin, tensors) if node is not None]
    seen: set[Node] = set()
    while pending and len(found) < len(numbers) and (most is None or len(seen) < most):
        node = pending.pop()
        made_at = node._sequence_nr()
        if made_at >= min(numbers) and node not in seen:  # a node is made after those that it leads to
            seen.add(node)
            if made_at in numbers:
                found[made_at] = node
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _bound(node: Node, name: str) -> float | None:
    bound: float | None = getattr(node, f"_saved_{name}")
    return bound


def _origin(tensor: torch.Tensor) -> Node | None:
    # A view that was written to gets a new node when it is asked for it, which would change the numbers of others.
    return None if tensor._is_view() and tensor._version else tensor.grad_fn
