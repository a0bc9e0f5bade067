"""`fully_shard` applied to each block of a model and to what is around them, as most people do, or to it as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_LISTS = (nn.ModuleList, nn.Sequential)
Sharding = Literal["blocks", "whole"]


def shard_whole(model: nn.Module, mesh: DeviceMesh, precision: torch.dtype | None = None) -> None:
    """Have the parameters of `model` divided among the processes of `mesh`, and gathered all together.

    With `precision`, parameters are gathered, and modules run, in this dtype; gradients are added up in 32 bits.
    """
    _shard([model], mesh, precision)


def shard_blocks(model: nn.Module, mesh: DeviceMesh, precision: torch.dtype | None = None) -> None:
    """The same, gathered block by block."""
    _shard([*blocks_of(model), model], mesh, precision)


SHARDINGS: dict[Sharding, Callable[..., None]] = {"blocks": shard_blocks, "whole": shard_whole}


def _shard(modules: Iterable[nn.Module], mesh: DeviceMesh, precision: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(precision, None if precision is None else torch.float32)
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of a class that comes several times in a list, as the layers of a transformer do.

    Layers without layers of their own are none: each would be gathered by itself.
    """
    classes = Counter(map(type, module.children())) if isinstance(module, _LISTS) else Counter[type]()
    for child in module.children():
        if classes[type(child)] > 1 and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks_of(child)
