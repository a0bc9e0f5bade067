"""Inputs of measuring a stage as in training: its runner, its position in a chain, and its output's gradients.

The gradients have the strides that the next stage's backward makes, as strides may cost time and memory: a recurrent
layer with `batch_first` returns a transposed view, and copies the contiguous gradient that a linear layer gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

import torch

from rotor_profiling.storage import layout_of, local, tensors_in, wait_for
from rotor_profiling.torch_compat import is_dtensor
from rotor_profiling.value_tree import tree_map_only

Strides = tuple[int, ...]
# Strides of the gradients of a value's tensors, in order; None if equal to the tensor's strides. For a `DTensor`, the
# strides of the local part. Missing entries at the end count as None.
Layouts = tuple[Strides | None, ...]
_Maker = Callable[[], torch.Tensor]


def leaves_of(value: Any) -> Any:
    """Return `value` with every tensor replaced by a leaf over the same memory, with the same `requires_grad`."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def gradients_at(value: Any) -> list[torch.Tensor]:
    """Return the gradients that a backward has stored in the leaves of `value`, possibly results of collectives."""
    return [tensor.grad for tensor in tensors_in(value) if tensor.grad is not None]


def gradients_for(output: Any, silent: Sequence[int] = (), layouts: Layouts = ()) -> list[torch.Tensor | None]:
    """Return gradients of ones in these `layouts`; None if a tensor needs no gradient, and at indices `silent`."""
    return [make() if make else None for make in _makers(output, silent, layouts)]


def scalar_after(
    output: Any,
    silent: Sequence[int] = (),
    layouts: Layouts = (),
    made: Callable[[list[torch.Tensor]], None] | None = None,
) -> torch.Tensor | None:
    """Return a scalar whose backward makes a gradient for every tensor in `output`; None if none requires a gradient.

    The engine owns these gradients like those of another layer, so it frees their memory as early as in training. A
    gradient passed to `backward` would be held by its caller. Tensors at the indices `silent` get no gradient. `made`
    is called with the gradients.
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
    laid_out = zip(tensors_in(output), chain(layouts, repeat(None)), strict=False)
    return [
        _maker(tensor, strides) if tensor.requires_grad and position not in silent else None
        for position, (tensor, strides) in enumerate(laid_out)
    ]


def _maker(tensor: torch.Tensor, strides: Strides | None) -> _Maker:
    # The maker must not hold the tensor, or the graph would hold the output through the maker.
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
    # Fill memory, not elements: `fill_` raises if elements share memory, as in expanded tensors (a sum's gradient). Do
    # not access the storage in Python: from then on, the engine would not add to the gradient in place.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    found.as_strided((reach if 0 not in shape else 0,), (1,)).fill_(1)
    return found


def _strides_of_whole(shape: torch.Size, strides: Strides) -> Strides:
    """Return the strides of a whole tensor of this shape, whose local parts have these `strides`."""
    found, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim], size = size, size * shape[dim]
    return tuple(found)


class _Entry(torch.autograd.Function):
    """Input of a graph, not a leaf: the graph would hold a leaf, which would copy gradients with other strides."""

    @staticmethod
    def forward(ctx: Any, origin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wait_for(gradients)  # no operator reads them, and PyTorch holds the memory of collectives until a wait
        return None, None


def enter_graph(origin: torch.Tensor, value: Any) -> Any:
    """Return `value` as the input of a graph that begins at the leaf `origin` and discards gradients of the input."""
    return tree_map_only(torch.Tensor, partial(_entered, origin), value)


def _entered(origin: torch.Tensor, tensor: torch.Tensor) -> Any:
    # Most recomputations run during a backward, where grad mode is off.
    with torch.enable_grad():
        return _Entry.apply(origin, tensor.detach()) if tensor.requires_grad else tensor.detach()  # type: ignore[no-untyped-call]  # torch leaves it so


@contextmanager
def hooked(hooks: Iterable[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]) -> Iterator[None]:
    """Inside this context, call each parameter's hook when its gradient is complete."""
    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def added_up(parameters: Sequence[torch.Tensor], *, fresh: bool) -> AbstractContextManager[None]:
    """In this context, add each new gradient to a present one and free it, as if gradients accumulate; not if `fresh`.

    The parameter stands for its present gradient, which would take memory: measuring must fit wherever the plan does.
    """
    return hooked(() if fresh else [(parameter, _added) for parameter in parameters])


def _added(parameter: Any) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and gradient.layout is torch.strided:
        with torch.no_grad():
            if is_dtensor(gradient):  # present gradients have the parameter's placements
                gradient = gradient.redistribute(gradient.device_mesh, parameter.placements)
            gradient.add_(parameter)  # takes as long as adding to a present gradient


# Protocols that the executor implements. Measurements call its code, but cannot import it: it imports this package.


class Attached(Protocol):
    """A recomputed stage with a graph of its own."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Given the outputs' gradients, return those of the input's tensors, then those of the parameters."""


class Runner(Protocol):
    """Runs a stage in one storage mode, in every way in which the executor runs it."""

    function: Callable[..., Any]

    @property
    def can_skip_output(self) -> bool:
        """Whether the stage can run without computing its output's values."""

    def make_ready(self) -> None:
        """Do one-time work of a run in advance, so that it is not timed."""

    def forward(self, value: Any, *, skip_output: bool = False) -> Any:
        """Run the stage in the surrounding graph; with `skip_output`, the output is allocated but not computed."""

    def first(self, value: Any) -> tuple[Any, Any]:
        """Run the stage without a graph; return its output, and the state for a recomputation (`surroundings`)."""

    def again(self, value: Any, surroundings: Any) -> Any:
        """Recompute the stage without a graph, exactly as in the first run."""

    def attach(self, value: Any, surroundings: Any, *, skip_output: bool = False) -> tuple[Attached, Any]:
        """Recompute the stage with a graph of its own, exactly as in the first run; return graph and output."""


# For each trained parameter of a stage, in the order of `trained_parameters`, the temporary bytes of its optimizer step
# if the stage's backward runs that step, else None.
Stepped = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StageContext:
    """Position of a stage in a chain, in which its input takes `input_bytes`.

    `owned`: addresses of storages that belong to the caller (parameters, the batch), not to the stage. Without
    `fresh_gradients`, parameters already have a gradient when the backward runs. `output_held`: the caller keeps the
    output until the backward is done, as for the last stage. `carried`: indices of output tensors kept outside the
    chain, which count neither as |a_{i+1}| nor as saved, but are in memory while the stage runs. `silent`: indices of
    output tensors that require a gradient but get none, as the loss does not use them. The caller drops them before
    the backward unless `silent_held`; bytes that the graph keeps count as saved. `arriving`: the gradients' layouts.
    """

    device: torch.device
    input_bytes: int
    owned: Sequence[int] = ()
    fresh_gradients: bool = False
    output_held: bool = False
    carried: Sequence[int] = ()
    silent: Sequence[int] = ()
    arriving: Layouts = ()
    stepped: Stepped = ()
    silent_held: bool = False
