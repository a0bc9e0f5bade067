"""Models of `fully_shard` (FSDP2): recognising one, and running a part of it as if it were not sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rotor_py.distributed.shard_groups import FSDPModule, ShardGroup, cast, groups_of

_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_DTYPES: Mapping[int, torch.dtype] = MappingProxyType({})


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any module of the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes over which the parameters of a model are spread; None if they are not."""
    for group in groups_of(model):
        for parameter in group.parameters:
            mesh = parameter.sharded.device_mesh  # type: ignore[attr-defined] # a DTensor
            # A mesh of two dimensions (hybrid sharding) has no one group of its own for all its processes.
            return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    return None


def keeps_gradients(model: nn.Module) -> bool:
    """Whether whole gradients are added up here instead of sent, in any group."""
    return is_sharded(model) and any(group.keeps_gradients for group in groups_of(model))


def as_entered(model: nn.Module, arguments: Any) -> Any:
    """The arguments of a call of `model`, cast as the hook of `fully_shard` before its forward casts them."""
    own = _own_group(model)
    return arguments if own is None else cast(arguments, own.input_dtype)


def as_left(model: nn.Module, output: Any) -> Any:
    """The output of a call of `model`, cast as the hook of `fully_shard` after its forward casts it."""
    own = _own_group(model)
    return output if own is None else cast(output, own.output_dtype)


@contextmanager
def gathered(function: Any, dtypes: Mapping[int, torch.dtype] = _NO_DTYPES) -> Iterator[None]:
    """Run a stage as one that is not sharded: with whole parameters, and without the hooks that would gather them.

    All processes have to enter this context together. `dtypes` gives the dtypes in which parameters are wanted, by the
    `id` of the sharded ones; the others keep their own.
    """
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    if not any(isinstance(module, FSDPModule) for module in modules) and not any(
        isinstance(p, DTensor) for module in modules for p in module._parameters.values()
    ):
        yield
        return
    hooks = [
        (getattr(module, name), dict(getattr(module, name)))
        for module in modules
        for name in _TABLES
        if isinstance(module, FSDPModule)
    ]
    whole: dict[int, nn.Parameter] = {}  # by id of the sharded one, so that a shared parameter is gathered once
    slots = [(module._parameters, name, p) for module in modules for name, p in module._parameters.items()]
    for _, _, parameter in slots:
        if isinstance(parameter, DTensor) and id(parameter) not in whole:
            values = parameter.detach().full_tensor().to(dtypes.get(id(parameter), parameter.dtype))
            whole[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
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
