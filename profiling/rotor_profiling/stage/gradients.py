"""What a stage is measured with: inputs that gradients arrive at, and gradients that arrive as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.storage import tensors_in


def leaves_of(value: Any) -> Any:
    """`value` with every tensor replaced by a leaf over the same memory, `requires_grad` as it was."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def with_graph(output: Any) -> list[torch.Tensor]:
    """The tensors of `output` that a backward can start from."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def scalar_after(output: Any, silent: Sequence[int] = ()) -> torch.Tensor | None:
    """A scalar whose backward hands every tensor in `output` a gradient that is made at that moment.

    The engine gives such a gradient away like one that another layer made, so its memory is freed as early as in
    training. A gradient that is passed to `backward` would be held by its caller. The tensors at the positions `silent`
    get no gradient. Returns None if nothing in `output` has a graph.
    """
    tensors = with_graph([tensor for i, tensor in enumerate(tensors_in(output)) if i not in silent])
    return _NewGradient.apply(*tensors) if tensors else None  # type: ignore[no-untyped-call]  # torch leaves it so


class _NewGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        # Not the tensors themselves: the graph would hold the output.
        ctx.like = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
            for shape, stride, dtype, device in ctx.like
        )
