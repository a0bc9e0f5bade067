"""Models whose parameters `fully_shard` (FSDP2) has spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined] # not in newer ones

_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GATHERED_AT_ONCE = 2
"""Groups of parameters that are there at once: the one in use, and the next, fetched while that is used."""
_COPIES = 2
"""What is received lies in one piece before it is copied into parameters; gradients likewise before they are sent."""


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any module of the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes over which the parameters are spread."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    return None


@contextmanager
def gathered(function: Any) -> Iterator[None]:
    """Run a stage as one that is not sharded: with whole parameters, and without the hooks that would gather them.

    All processes have to enter this context together.
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
    whole: dict[int, nn.Parameter] = {}
    slots = [(module._parameters, name, p) for module in modules for name, p in module._parameters.items()]
    for _, _, parameter in slots:
        if isinstance(parameter, DTensor) and id(parameter) not in whole:
            whole[id(parameter)] = nn.Parameter(parameter.detach().full_tensor(), parameter.requires_grad)
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


def gathered_bytes(model: nn.Module) -> int:
    """What gathering parameters, and sending gradients, needs at most at any moment of a step; an estimate."""
    groups: dict[int, int] = {}
    owner: dict[int, int] = {}
    for module in model.modules():  # parents before children: a parameter belongs to the innermost sharded module
        if isinstance(module, FSDPModule):
            for parameter in module.parameters():
                owner[id(parameter)] = id(module)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            size = parameter.numel() * parameter.element_size()
            key = owner[id(parameter)]
            groups[key] = groups.get(key, 0) + size
    largest = sorted(groups.values(), reverse=True)[:_GATHERED_AT_ONCE]
    gradients = largest[0] if largest else 0
    return _COPIES * (sum(largest) + gradients)
