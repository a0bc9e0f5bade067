"""Which processes train a model together, and the memory that their communication takes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling import bytes_like
from rotor_py.distributed.sharded_bytes import gathered_bytes
from rotor_py.distributed.whole_parameters import group_of, is_sharded


def around(model: nn.Module) -> DistributedDataParallel | None:
    """The `DistributedDataParallel` in whose forward this is called, or else `model` if it is one; None otherwise."""
    # PyTorch has no public way to ask. TorchDynamo reads the same attribute, so it is likely to stay.
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    found = active if active is not None else model
    return found if isinstance(found, DistributedDataParallel) else None


def communication_bytes(model: nn.Module) -> int:
    """Bytes that communication takes in this process, beside the model and its gradients."""
    ddp = around(model)
    if ddp is not None:
        # Buckets are as large as all gradients together, each in the dtype of its parameter.
        return bytes_like(p for p in ddp.module.parameters() if p.requires_grad)
    return gathered_bytes(model)


def processes(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that train `model` together; None if the model shows none."""
    ddp = around(model)
    return ddp.process_group if ddp is not None else group_of(model)


def several_processes() -> bool:
    """Whether this process is one of several, whatever they do together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def meeting_in_stages(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that wait for each other inside stages of `model`, so that all have to run these equally often."""
    synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return processes(model) if synchronized or is_sharded(model) else None


def anywhere(found: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether any process of `group` has found it. All have to call this; `device` is the one that they train on."""
    if group is None:
        return found
    flag = torch.tensor(float(found), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of processes in a group; 1 if there is no group."""
    return dist.get_world_size(group) if group is not None else 1
