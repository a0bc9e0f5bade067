"""What a stage is measured with: inputs that gradients arrive at, and gradients that arrive as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.storage import layout_of, local, tensors_in


def leaves_of(value: Any) -> Any:
    """`value` with every tensor replaced by a leaf over the same memory, `requires_grad` as it was."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def gradients_at(value: Any) -> list[torch.Tensor]:
    """The gradients that a backward has brought to the leaves in `value`.

    Nobody goes on with them here. They may be results of collectives, which somebody has to wait for: until then
    PyTorch holds on to their memory.
    """
    return [tensor.grad for tensor in tensors_in(value) if tensor.grad is not None]


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
        ctx.makers = [_gradient_of(tensor) for tensor in tensors]
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(make() for make in ctx.makers)


def _gradient_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes a gradient of a tensor, without holding the tensor. That of a `DTensor` is shared as the tensor is."""
    part = local(tensor)
    make = partial(_ones, part.shape, part.stride(), part.dtype, part.device)
    if (layout := layout_of(tensor)) is None:
        return make
    kind: Any = type(tensor)
    shape, stride = tensor.shape, tensor.stride()
    return lambda: kind.from_local(make(), *layout, run_check=False, shape=shape, stride=stride)


def _ones(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
