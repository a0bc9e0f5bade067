"""Where the graph of a stage begins, if the stages before it have no graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.storage import wait_for


class _Entry(torch.autograd.Function):
    """A leaf in its place would be held by the graph, needed or not, and would copy a gradient in another layout."""

    @staticmethod
    def forward(ctx: Any, origin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wait_for(gradients)  # nobody goes on with them, and PyTorch holds the memory of collectives until then
        return None, None


def enter_graph(origin: torch.Tensor, value: Any) -> Any:
    """`value` as the input of a graph of its own: the tensors of it that need a gradient hang on the leaf `origin`.

    A backward through the whole graph hands on what arrives at the input to nobody.
    """
    return tree_map_only(torch.Tensor, partial(_entered, origin), value)


def _entered(origin: torch.Tensor, tensor: torch.Tensor) -> Any:
    # Most stages are run again while a backward runs, where gradients are off.
    with torch.enable_grad():
        return _Entry.apply(origin, tensor.detach()) if tensor.requires_grad else tensor.detach()  # type: ignore[no-untyped-call]  # torch leaves it so
