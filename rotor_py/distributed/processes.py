"""Which processes train a model together, and the memory that their communication takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling import bytes_like
from rotor_profiling.backends import prediction
from rotor_profiling.torch_classes import is_dtensor
from rotor_py.distributed.joined_groups import joined
from rotor_py.distributed.shard_groups import at_rest
from rotor_py.distributed.sharded_bytes import gathered_bytes
from rotor_py.errors import InvalidValueError


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
    """The processes that train `model` together; None if the model shows none.

    Those are the processes of its DistributedDataParallel, and all that have a part of a parameter: of `fully_shard`,
    and of tensor parallelism. The first call joins them, and all processes have to come to it together.
    """
    if not dist.is_initialized():  # as most steps are, which ask for it several times
        return None
    ddp = around(model)
    found = [] if ddp is None else [ddp.process_group]
    return joined([*found, *_sharing_parameters(model)])


def _sharing_parameters(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of the meshes that the parameters of a model are spread over, one for each dimension of a mesh."""
    if not dist.is_initialized():
        return []
    with at_rest(model):
        meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if is_dtensor(p))
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def meeting_in_stages(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that wait for each other inside stages of `model`, so that all have to run these equally often."""
    synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return processes(model) if synchronized or _sharing_parameters(model) else None


def anywhere(found: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether any process of `group` has found it. All have to call this; `device` is the one that they train on."""
    if group is None or alone_in_a_prediction():
        return found
    flag = torch.tensor(float(found), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def largest_anywhere(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Of each number the largest that any process of `group` has. All have to call this, with equally many.

    ValueError, in all of them, if they have not. `device` is the one that they train on.
    """
    if group is None or alone_in_a_prediction():
        return list(numbers)
    counts = torch.tensor([len(numbers), -len(numbers)], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    most, least = int(counts[0]), -int(counts[1])
    if most != least:
        raise InvalidValueError(
            f"one process has {least}, and another {most}", kind="processes_differ", least=least, most=most
        )
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [int(number) for number in found.tolist()]


def alone_in_a_prediction() -> bool:
    """Whether devices are planned for that are not there: then nor are other processes, and all of them are alike."""
    return prediction() is not None


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of processes in a group; 1 if there is no group."""
    return dist.get_world_size(group) if group is not None else 1
