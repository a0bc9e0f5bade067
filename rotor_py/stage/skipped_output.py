"""Run a stage whose output is allocated but not computed, since right before the backward, only its graph is needed.
The last operators must save only their inputs, like a linear layer or a residual addition. Autograd records all
operators, so the backward is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling.torch_compat import TorchDispatchMode, tree_map_only
from rotor_py.stage.protocol import Run, calls_forward_alone, offers_of

_aten = torch.ops.aten
# Slow layers that save their input and weight for the backward, but not their output.
_PRODUCTS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Layers that may follow those of `_PRODUCTS`: their backward does not depend on the values of their input.
_FOLLOWING: tuple[type[nn.Module], ...] = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)


def forward_skipping_output(function: Callable[..., Any]) -> Run | None:
    """Return a function that runs a stage, but allocates its output without computing it; None if this saves no time.

    A stage that does not offer one (`StageOffers`) must end in a layer of `_PRODUCTS`, maybe before `_FOLLOWING` ones.
    """
    if (offered := offers_of(function).forward_skipping_output()) is not None:
        return offered
    if not isinstance(function, nn.Module):
        return None
    layers = _flat(function)
    last = len(layers) - 1
    while last >= 0 and type(layers[last]) in _FOLLOWING and not getattr(layers[last], "inplace", False):
        last -= 1
    # A hook, compiled code or a replaced forward may read the output's values.
    if last < 0 or type(layers[last]) not in _PRODUCTS or not calls_forward_alone(function):
        return None
    return partial(_run, layers, last)


def skip_output(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator or layer whose backward does not read its output: record its graph, but do not compute it."""
    with _SkippedOutputs():
        return function(*args, **kwargs)


def _run(layers: list[nn.Module], last: int, value: Any) -> Any:
    for layer in layers[:last]:
        value = layer(value)
    value = skip_output(layers[last], value)
    for layer in layers[last + 1 :]:
        value = layer(value)
    return value


def _flat(module: nn.Module) -> list[nn.Module]:
    return [layer for child in module for layer in _flat(child)] if type(module) is nn.Sequential else [module]


class _SkippedOutputs(TorchDispatchMode):
    """Has operators of `_MAKERS` return uninitialized memory. Autocast and autograd work as without this mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._unwritten: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        make = _MAKERS.get(func)
        # If arguments are of tensor subclasses (`types`), call the operator: `make` would return no such tensor.
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if make is None or types or any(each.layout is not torch.strided for each in tensors):
            return func(*args, **(kwargs or {}))
        if make is _sum and self._is_unwritten(args[0]) and _widens_nothing(*args):
            # A linear layer adds its bias in place, but not under a dispatch mode. So share the product's memory here.
            return args[0].detach()
        made = make(func, *args, **(kwargs or {}))
        self._unwritten.append(made.untyped_storage())
        return made

    def _is_unwritten(self, tensor: Any) -> bool:
        return any(tensor.untyped_storage()._cdata == each._cdata for each in self._unwritten)


def _widens_nothing(a: torch.Tensor, b: Any) -> bool:
    if not isinstance(b, torch.Tensor) or (a.dtype, a.device) != (b.dtype, b.device) or b.dim() > a.dim():
        return False
    return all(size in (1, wide) for size, wide in zip(reversed(b.shape), reversed(a.shape), strict=False))


def _product(_: Any, *args: torch.Tensor, **__: Any) -> torch.Tensor:
    a, b = args[-2:]
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _sum(func: Any, a: torch.Tensor, b: Any, **kwargs: Any) -> torch.Tensor:
    alike = isinstance(b, torch.Tensor) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return torch.empty_like(a) if alike else func(a, b, **kwargs)


def _as_on_meta(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    like = func(*tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=args[0].device)


# Maps operators to functions that allocate their output, given the operator and its arguments.
_MAKERS: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default), _product),
    _aten.add.Tensor: _sum,
    _aten.convolution.default: _as_on_meta,  # the output's strides depend on the memory format of the arguments
}
