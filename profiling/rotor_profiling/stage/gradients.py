"""What a stage is measured with: inputs that gradients arrive at, and gradients that arrive as in training.

In training, a gradient comes from the stage that follows, in the layout that its backward happens to make. That need
not be the layout of the tensor. Recurrent layers with `batch_first` return a transposed view, and the linear layer
after them gives a gradient that is not transposed; their backward then begins with a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.storage import tensors_in

Strides = tuple[int, ...]
Layouts = tuple[Strides | None, ...]
"""The strides of the gradient of every tensor in a value, in order; None for one like the tensor's own.

What is left out at the end counts as None."""
_Like = tuple[torch.Size, Strides, torch.dtype, torch.device]
"""Shape, strides, dtype and device of a gradient."""


def leaves_of(value: Any) -> Any:
    """`value` with every tensor replaced by a leaf over the same memory, `requires_grad` as it was."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def with_graph(output: Any) -> list[torch.Tensor]:
    """The tensors of `output` that a backward can start from."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def gradients_for(output: Any, silent: Sequence[int] = (), layouts: Layouts = ()) -> list[torch.Tensor | None]:
    """A gradient of ones for each tensor in `output`, laid out in memory as `layouts` says.

    None for a tensor that needs no gradient, and for those at the positions `silent`.
    """
    return [_ones(*like) if like else None for like in _described(output, silent, layouts)]


def scalar_after(output: Any, silent: Sequence[int] = (), layouts: Layouts = ()) -> torch.Tensor | None:
    """A scalar whose backward hands every tensor in `output` a gradient that is made at that moment.

    The engine gives such a gradient away like one that another layer made, so its memory is freed as early as in
    training. A gradient that is passed to `backward` would be held by its caller. The tensors at the positions `silent`
    get no gradient. Returns None if nothing in `output` has a graph.
    """
    # What the gradients look like, and not the tensors themselves: the graph would hold the output.
    like = _described(output, silent, layouts)
    tensors = [tensor for tensor, each in zip(tensors_in(output), like, strict=True) if each]
    found = [each for each in like if each]
    return _NewGradient.apply(found, *tensors) if tensors else None  # type: ignore[no-untyped-call]  # torch leaves it so


class _NewGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: list[_Like], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = like
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *(_ones(*like) for like in ctx.like)


def _described(output: Any, silent: Sequence[int], layouts: Layouts) -> list[_Like | None]:
    """The gradient of every tensor in `output`; None for those that get none."""
    tensors = tensors_in(output)
    return [
        (tensor.shape, strides or tensor.stride(), tensor.dtype, tensor.device)
        if tensor.requires_grad and position not in silent
        else None
        for position, (tensor, strides) in enumerate(zip(tensors, _filled(layouts, len(tensors)), strict=True))
    ]


def _ones(shape: torch.Size, strides: Strides, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    found = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # By memory, since the elements of an expanded tensor (a sum's gradient) share theirs, and `fill_` refuses that.
    found.as_strided((found.untyped_storage().nbytes() // found.itemsize,), (1,)).fill_(1)
    return found


def _filled(layouts: Layouts, count: int) -> Layouts:
    return (*layouts, *(None for _ in range(count - len(layouts))))
