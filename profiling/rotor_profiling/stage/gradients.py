"""What a stage is measured with: inputs that gradients arrive at, and gradients that arrive as in training.

In training, a gradient comes from the stage that follows, in the layout that its backward happens to make. That need
not be the layout of the tensor. Recurrent layers with `batch_first` return a transposed view, and the linear layer
after them gives a gradient that is not transposed; their backward then begins with a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rotor_profiling.storage import layout_of, local, tensors_in, wait_for
from rotor_profiling.torch_compat import tree_map_only

Strides = tuple[int, ...]
Layouts = tuple[Strides | None, ...]
"""The strides of the gradient of every tensor in a value, in order; None for one like the tensor's own.

Those of a `DTensor` are the strides of the part that this process has. What is left out at the end counts as None."""
_Maker = Callable[[], torch.Tensor]


def leaves_of(value: Any) -> Any:
    """`value` with every tensor replaced by a leaf over the same memory, `requires_grad` as it was."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def gradients_at(value: Any) -> list[torch.Tensor]:
    """The gradients that a backward has brought to the leaves in `value`.

    Nobody goes on with them here. They may be results of collectives, which somebody has to wait for: until then
    PyTorch holds on to their memory.
    """
    return [tensor.grad for tensor in tensors_in(value) if tensor.grad is not None]


def gradients_for(output: Any, silent: Sequence[int] = (), layouts: Layouts = ()) -> list[torch.Tensor | None]:
    """A gradient of ones for each tensor in `output`, laid out in memory as `layouts` says.

    None for a tensor that needs no gradient, and for those at the positions `silent`.
    """
    return [make() if make else None for make in _makers(output, silent, layouts)]


def scalar_after(
    output: Any,
    silent: Sequence[int] = (),
    layouts: Layouts = (),
    made: Callable[[list[torch.Tensor]], None] | None = None,
) -> torch.Tensor | None:
    """A scalar whose backward hands every tensor in `output` a gradient that is made at that moment.

    The engine gives such a gradient away like one that another layer made, so its memory is freed as early as in
    training. A gradient that is passed to `backward` would be held by its caller. The tensors at the positions `silent`
    get no gradient. Somebody may be told that they are `made`. Returns None if nothing in `output` has a graph.
    """
    makers = _makers(output, silent, layouts)
    tensors = [tensor for tensor, make in zip(tensors_in(output), makers, strict=True) if make]
    found = [make for make in makers if make]
    return _NewGradient.apply(found, made, *tensors) if tensors else None  # type: ignore[no-untyped-call]  # torch leaves it so


class _NewGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, makers: list[_Maker], made: Callable[[list[torch.Tensor]], None] | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.makers, ctx.made = makers, made
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradients = [make() for make in ctx.makers]
        if ctx.made is not None:
            ctx.made(gradients)
        return None, None, *gradients


def _makers(output: Any, silent: Sequence[int], layouts: Layouts) -> list[_Maker | None]:
    """What makes the gradient of every tensor in `output`; None for those that get none."""
    tensors = tensors_in(output)
    return [
        _maker(tensor, strides) if tensor.requires_grad and position not in silent else None
        for position, (tensor, strides) in enumerate(zip(tensors, _filled(layouts, len(tensors)), strict=True))
    ]


def _maker(tensor: torch.Tensor, strides: Strides | None) -> _Maker:
    """What makes a gradient of a tensor, without holding the tensor: a graph that holds it would hold the output.

    That of a `DTensor` is shared as the tensor is.
    """
    part = local(tensor)
    make = partial(_ones, part.shape, strides or part.stride(), part.dtype, part.device)
    if (layout := layout_of(tensor)) is None:
        return make
    kind: Any = type(tensor)
    shape = tensor.shape
    whole = _strides_of_whole(shape, strides) if strides else tensor.stride()
    return lambda: kind.from_local(make(), *layout, run_check=False, shape=shape, stride=whole)


def _ones(shape: torch.Size, strides: Strides, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    found = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # By memory, since the elements of an expanded tensor (a sum's gradient) share theirs, and `fill_` refuses that. Its
    # storage must not be asked for in Python: the engine would not add to the gradient in place from then on.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    found.as_strided((reach if 0 not in shape else 0,), (1,)).fill_(1)
    return found


def _strides_of_whole(shape: torch.Size, strides: Strides) -> Strides:
    """The strides of a tensor of this shape, of which each process has a part with these `strides`."""
    found, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim], size = size, size * shape[dim]
    return tuple(found)


def _filled(layouts: Layouts, count: int) -> Layouts:
    return (*layouts, *(None for _ in range(count - len(layouts))))


# Where the graph of a stage begins, if the stages before it have no graph.


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
