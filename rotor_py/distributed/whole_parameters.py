"""Models of `fully_shard` (FSDP2): recognising one, and running a part of it as if it were not sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from rotor_profiling.torch_classes import has_fsdp_module, is_fsdp_module
from rotor_py.distributed.shard_groups import ShardGroup, Sharding, cast, groups_of

_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any module of the model."""
    return dist.is_initialized() and has_fsdp_module(model)  # it needs processes


def keeps_gradients(model: nn.Module) -> bool:
    """Whether whole gradients are added up here instead of sent, in any group."""
    return is_sharded(model) and any(group.keeps_gradients for group in groups_of(model))


def gathers_in_another_dtype(model: nn.Module) -> bool:
    """Whether parameters are gathered in another dtype than their own: `MixedPrecisionPolicy(param_dtype=…)`."""
    groups = groups_of(model) if is_sharded(model) else []
    return any(each.dtype != each.sharded.dtype for group in groups for each in group.parameters)


def as_entered(model: nn.Module, arguments: Any) -> Any:
    """The arguments of a call of `model`, cast as the hook of `fully_shard` before its forward casts them."""
    own = _own_group(model) if dist.is_initialized() else None
    return arguments if own is None else cast(arguments, own.input_dtype)


def as_left(model: nn.Module, output: Any) -> Any:
    """The output of a call of `model`, cast as the hook of `fully_shard` after its forward casts it."""
    own = _own_group(model)
    return output if own is None else cast(output, own.output_dtype)


@contextmanager
def gathered(function: Any, sharding: Sharding) -> Iterator[None]:
    """Run a stage as one that is not sharded: with whole parameters, and without the hooks that would gather them.

    All processes have to enter this context together.
    """
    if not sharding or not isinstance(function, nn.Module):
        yield
        return
    modules = list(function.modules())
    hooks = [
        (getattr(module, name), dict(getattr(module, name)))
        for module in modules
        for name in _TABLES
        if is_fsdp_module(module)
    ]
    whole: dict[int, nn.Parameter] = {}  # by id of the sharded one, so that a shared parameter is gathered once
    slots = [(module._parameters, name, p) for module in modules for name, p in module._parameters.items()]
    for _, _, parameter in slots:
        if id(parameter) in sharding and id(parameter) not in whole:
            assert parameter is not None
            whole[id(parameter)] = nn.Parameter(sharding[id(parameter)].gather(), parameter.requires_grad)
    try:
        for table, _ in hooks:
            table.clear()
        for table, name, parameter in slots:
            table[name] = whole.get(id(parameter), parameter)
        yield
    finally:
        for table, name, parameter in slots:
            table[name] = parameter
        for table, kept in hooks:
            table.update(kept)


def _own_group(model: nn.Module) -> ShardGroup | None:
    return next((group for group in groups_of(model) if model in group.modules), None)
