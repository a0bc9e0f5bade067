"""When two stages are of one kind: same structure, same shapes, same input; then one measurement serves both."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten


def stage_kind(function: Callable[..., Any], value: Any) -> Hashable:
    """A key that is equal for stages that cost the same. Anything that cannot be compared makes a kind of its own."""
    return _function_kind(function), value_kind(_relevant(function, value))


def value_kind(value: Any) -> Hashable:
    """The structure of a value and, for every tensor in it, shape, strides, dtype, device and need of a gradient."""
    leaves, spec = tree_flatten(value)
    return str(spec), tuple(_plain(leaf) for leaf in leaves)


def _relevant(function: Callable[..., Any], value: Any) -> Any:
    """`value`, without what the modules of `function` only hand on, where they say what that is."""
    if not isinstance(function, nn.Module):
        return value
    found: list[Any] = [module for module in function.modules() if hasattr(module, "relevant")]
    return (found[0].divided(value)[0], *(module.relevant(value) for module in found)) if found else value


def _function_kind(function: Callable[..., Any]) -> Hashable:
    return _module_kind(function) if isinstance(function, nn.Module) else id(function)


def _module_kind(module: nn.Module) -> Hashable:
    """A module that says what it does in a `signature` is compared by that, and by its parameters and buffers."""
    signature = getattr(module, "signature", None)
    if signature is not None and isinstance(signature, Hashable):
        return signature, tuple(map(_plain, module.parameters())), tuple(map(_plain, module.buffers()))
    own = tuple((key, _attribute(value)) for key, value in sorted(vars(module).items()))
    return type(module), own, tuple((name, _module_kind(child)) for name, child in module.named_children())


def _attribute(value: Any) -> Hashable:
    if isinstance(value, dict):
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
    return id(value)
