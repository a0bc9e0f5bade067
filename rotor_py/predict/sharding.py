"""`fully_shard` applied to a model as most people do: to each of its blocks, and to what is around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_LISTS = (nn.ModuleList, nn.Sequential)


def shard_blocks(model: nn.Module, mesh: DeviceMesh, precision: torch.dtype | None = None) -> None:
    """Have the parameters of `model` divided among the processes of `mesh`, gathered block by block.

    With `precision`, parameters are gathered, and blocks run, in this dtype; gradients are added up in 32 bits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(precision, None if precision is None else torch.float32)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


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
