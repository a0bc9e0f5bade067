"""The backward pass that runs now: which it is, whether it retains the graph, and what it goes through.

To be asked inside a node's backward or a hook. These are private functions of torch: nothing public tells one backward
from the next, nor what it is for. `ctx.needs_input_grad` says what had a gradient in the forward, whatever this pass
was asked for.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import Node

_NO_TASK = -1


def current_task() -> int:
    """The number of the pass: no two of a process have the same."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether a pass runs at all."""
    return current_task() != _NO_TASK


def retains_graph() -> bool:
    """Whether the pass leaves the graph as it is, so that another can follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def goes_through(node: Node) -> bool:
    """Whether the pass runs `node`, or was asked for the gradient of the leaf that it stands for."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # said of a leaf whose gradient `torch.autograd.grad` was asked for
        return True
