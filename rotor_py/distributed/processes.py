"""Which processes train one model together, and what they need to send to each other."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling import bytes_like
from rotor_py.distributed.gathering import gathered_bytes
from rotor_py.distributed.whole_parameters import group_of


def around(model: nn.Module) -> DistributedDataParallel | None:
    """The `DistributedDataParallel` in whose forward this is called, or which `model` is."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    found = active if active is not None else model
    return found if isinstance(found, DistributedDataParallel) else None


def communication_bytes(model: nn.Module) -> int:
    """What processes that train `model` together need to send to each other, beside the model and its gradients."""
    ddp = around(model)
    if ddp is not None:
        return bytes_like(p for p in ddp.module.parameters() if p.requires_grad)
    return gathered_bytes(model)


def processes(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that train `model` together, as far as it shows."""
    ddp = around(model)
    return ddp.process_group if ddp is not None else group_of(model)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Processes in a group; 1 where there is none."""
    return dist.get_world_size(group) if group is not None else 1
