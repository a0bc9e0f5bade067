"""When two stages are of one kind: same structure, same shapes, same input; then one measurement serves both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten


class HasKind(ABC):
    """A module that says itself when it does the same as another one.

    The attributes of generated code differ from piece to piece even where the code does the same. Only its generator
    can tell.
    """

    @abstractmethod
    def kind(self, value: Any) -> Hashable:
        """A key that is equal for modules that do the same with parameters and buffers that look the same.

        `value` is the input of the stage that the module is a part of. The key should depend on what of it the module
        reads, and not on what it only hands on.
        """


def stage_kind(function: Callable[..., Any], value: Any) -> Hashable:
    """A key that is equal for stages that cost the same on `value`.

    Anything that cannot be compared makes a kind of its own: better one measurement too many than one too few.
    """
    if not isinstance(function, nn.Module):
        return id(function), value_kind(value)  # functions do not show what they do
    described = [module for module in function.modules() if isinstance(module, HasKind)]
    read = tuple(module.kind(value) for module in described) if described else value_kind(value)
    return _module_kind(function), read


def value_kind(value: Any) -> Hashable:
    """The structure of a value and, for every tensor in it, shape, strides, dtype, device and need of a gradient."""
    leaves, spec = tree_flatten(value)
    return str(spec), tuple(_plain(leaf) for leaf in leaves)


def _module_kind(module: nn.Module) -> Hashable:
    if isinstance(module, HasKind):
        return type(module), tuple(map(_plain, module.parameters())), tuple(map(_plain, module.buffers()))
    own = tuple((key, _attribute(value)) for key, value in sorted(vars(module).items()))
    return type(module), own, tuple((name, _module_kind(child)) for name, child in module.named_children())


def _attribute(value: Any) -> Hashable:
    if isinstance(value, dict):  # a table of parameters, buffers, hooks or modules; modules are described on their own
        return tuple((key, None if isinstance(item, nn.Module) else _plain(item)) for key, item in value.items())
    return _plain(value)


def _plain(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | type):
        return value
    if isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value):
        return tuple(sorted(value))
    return id(value)  # an object that does not show its state, such as a hook
