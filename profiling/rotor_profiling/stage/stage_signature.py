"""Compute signatures, which are equal for stages of equal structure and input: one measurement serves all of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn

from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import is_fsdp_module
from rotor_profiling.value_tree import tree_flatten

# Names of a module's dicts of hooks that no training step calls; `fully_shard` adds hooks to some.
_OF_NO_STEP = re.compile("_(load_)?state_dict_.*hooks")
# Maps each dict of a module with hooks' options to its dict of these hooks: without hooks, options do not matter.
_OF_HOOKS = {"_forward_pre_hooks_with_kwargs": "_forward_pre_hooks", "_forward_hooks_with_kwargs": "_forward_hooks"}
# Prefix of attributes in which `fully_shard` keeps a module's state. Signatures leave them out, since a stage is
# measured with gathered parameters, and so costs the same however it is sharded.
_SHARDING = "__composable_api_state_key"


@dataclass(frozen=True, slots=True)
class Unlike:
    """Entry of a signature for an object that cannot be compared by value: equal only to that of the same object."""

    address: int


class HasKind(ABC):
    """Base class of generated modules, which define a part of their signature themselves."""

    @abstractmethod
    def kind(self, value: Any) -> Hashable:
        """Return a key that is equal for modules that compute the same from tensors of the same shapes.

        It depends only on those parts of the stage's input `value` that the module reads, not on those it passes on.
        """


def stage_signature(function: Callable[..., Any], value: Any) -> Hashable:
    """Return a key that is equal for stages that cost the same on `value`.

    A stage with an object that cannot be compared gets a unique key, so it is measured even if an equal one was.
    """
    if not isinstance(function, nn.Module):
        return Unlike(id(function)), value_signature(value)  # other callables cannot be compared
    described = [module for module in function.modules() if isinstance(module, HasKind)]
    read = tuple(module.kind(value) for module in described) if described else value_signature(value)
    return _module_kind(function), read


def value_signature(value: Any) -> Hashable:
    """Return the structure of a value and, for every tensor, shape, strides, dtype, device and `requires_grad`."""
    leaves, spec = tree_flatten(value)
    return str(spec), tuple(_plain(leaf) for leaf in leaves)


def _module_kind(module: nn.Module) -> Hashable:
    if isinstance(module, HasKind):
        return type(module), tuple(map(_plain, module.parameters())), tuple(map(_plain, module.buffers()))
    own = tuple((key, _attribute(value)) for key, value in sorted(vars(module).items()) if _counts(module, key))
    return type(module), own, tuple((name, _module_kind(child)) for name, child in module.named_children())


def _counts(module: nn.Module, key: str) -> bool:
    if key in _OF_HOOKS:
        return bool(vars(module)[_OF_HOOKS[key]])
    return not _OF_NO_STEP.fullmatch(key) and not (key.startswith(_SHARDING) and is_fsdp_module(module))


def _attribute(value: Any) -> Hashable:
    if isinstance(value, dict):  # a table of parameters, buffers, hooks or modules; modules are described separately
        return tuple((key, None if isinstance(item, nn.Module) else _plain(item)) for key, item in value.items())
    return _plain(value)


def _plain(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return tuple(value.shape), strides, value.dtype, value.device, value.requires_grad, layout_of(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | type):
        return value
    if isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value):
        return tuple(sorted(value))
    if isinstance(value, FunctionType | partial):
        return _function(value)
    if isinstance(value, ref):  # recurrent layers hold weak references to their weights
        there = value()
        return _plain(there) if there is None or isinstance(there, torch.Tensor) else Unlike(id(value))
    return value if _equal_by_value(value) else Unlike(id(value))


def _function(function: Any) -> Hashable:
    """Return a key that is equal for functions that compute the same: `parallelize_module` makes many equal hooks."""
    if isinstance(function, partial):
        return Unlike(id(function.func)), _bound(function.args), _bound(tuple(function.keywords.items()))
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        return Unlike(id(function))
    defaults = function.__defaults__, tuple((function.__kwdefaults__ or {}).items())
    return function.__code__, Unlike(id(function.__globals__)), _bound(defaults), _bound(cells)


def _bound(value: Any) -> Hashable:
    """Return the key of a default or closure cell of a function; unique for a closure, which may refer back to it."""
    if isinstance(value, list | tuple):
        return tuple(map(_bound, value))
    return Unlike(id(value)) if isinstance(value, FunctionType) and value.__closure__ else _plain(value)


def _equal_by_value(value: Any) -> bool:
    if not any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1]):  # the last one is `object`
        return False
    try:
        hash(value)
    except (TypeError, ValueError):  # the latter for a memoryview that can be written to
        return False
    return True
