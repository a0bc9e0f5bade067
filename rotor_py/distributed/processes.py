"""Find the processes that train a model together, and exchange values between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling import bytes_like
from rotor_profiling.backends import prediction
from rotor_profiling.torch_compat import is_dtensor
from rotor_py.distributed.sharding import ShardGroup, at_rest, groups_of
from rotor_py.errors import InvalidValueError, PlanMismatchError

T = TypeVar("T")

# With two dimensions of parallelism, a process is in two groups with different members. Processes that share a group,
# directly or through others, must follow one plan: otherwise two could wait for each other in different collectives.
_joined: dict[tuple[str, ...], dist.ProcessGroup] = {}  # results of `joined`, by the names of the different groups


def joined(groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Return a group of all processes that share `groups` with this one, directly or through others; None without any.

    Groups with different members must be dimensions of one device mesh. All must make the first call together.
    """
    different = list({tuple(dist.get_process_group_ranks(group)): group for group in groups}.items())
    if len(different) <= 1:
        return different[0][1] if different else None
    key = tuple(group.group_name for _, group in different)
    if key not in _joined:
        _joined[key] = _join(different)
    return _joined[key]


def _join(groups: list[tuple[tuple[int, ...], dist.ProcessGroup]]) -> dist.ProcessGroup:
    known = {rank for ranks, _ in groups for rank in ranks}
    if len(known) < dist.get_world_size():
        # Exchange the known ranks within one group after the other. Then each process knows all connected processes.
        for ranks, group in groups:
            known_by_rank: list[set[int]] = [set()] * len(ranks)
            dist.all_gather_object(known_by_rank, known, group=group)
            known = set().union(*known_by_rank)
    if len(known) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # `use_local_synchronization`: only members call this, since other processes may train another part of the model.
    made = dist.new_group(sorted(known), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def gathered_bytes(model: nn.Module) -> int:
    """Return an upper bound of the bytes of gathered parameters, their gradients and FSDP's buffers during a step.

    No exact number, since the speed of communication decides which groups are gathered at the same time. FSDP receives
    parameters and sends gradients in flat buffers, which exist in addition to the gathered tensors.
    """
    groups = groups_of(model)
    # Bytes by group: of whole parameters, of gradients in the gathered dtype, and of gradients in the reduce dtype.
    whole, gradients, reduced = dict[ShardGroup, int](), dict[ShardGroup, int](), dict[ShardGroup, int]()
    for group in groups:
        parameters = group.parameters
        trained = [each for each in parameters if each.sharded.requires_grad]
        whole[group] = sum(each.size.numel() * each.dtype.itemsize for each in parameters)
        gradients[group] = sum(each.size.numel() * each.dtype.itemsize for each in trained)
        reduced[group] = sum(each.size.numel() * (group.reduce_dtype or each.dtype).itemsize for each in trained)
    throughout, passing, received, made = 0, [0, 0, 0], [0, 0], [0]  # zeros, so that `sorted` below has enough entries
    sent: dict[ShardGroup, int] = {}
    for group in groups:
        outer = [other for other in groups if other.contains(group)]
        # FSDP leaves the outermost group gathered until the end of the step.
        first = outer[0] if outer else group
        inner = [each for each in (*outer, group) if each is not first]  # gathered while `group` computes
        sent[first] = max(sent.get(first, 0), sum(reduced[each] for each in (*outer, group)))
        made.append(sum(gradients[each] for each in inner))
        if group.keeps_gradients:
            throughout += reduced[group]
        if group is first:
            throughout += whole[group] + gradients[group]
        elif group.reshards:
            # After a forward, parameters may be sharded over fewer processes than between steps, in larger shards.
            throughout += whole[group] // group.spread_after_forward if group.spread_after_forward else 0
            passing.append(sum(whole[each] for each in inner))
        else:
            throughout += whole[group]
            received.append(whole[group])
    # In the worst case, one group computes, one is prefetched, and one is gathered for a recomputation. The largest
    # counts twice: while it is gathered, both its receive buffer and its parameters exist.
    one, two, three = sorted(passing)[:-4:-1]
    return throughout + max(2 * one + two + three, sum(sorted(received)[-2:])) + max(made) + sum(sent.values())


def around(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward is running; else `model`, if it is one itself; else None."""
    # torch has no public name for this. TorchDynamo reads the same attribute, so it is likely to stay.
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    found = active if active is not None else model
    return found if isinstance(found, DistributedDataParallel) else None


def communication_bytes(model: nn.Module) -> int:
    """Return the bytes of DistributedDataParallel's buckets in this process, or `gathered_bytes` if it is not used."""
    ddp = around(model)
    if ddp is not None:
        # DistributedDataParallel's buckets are as large as all gradients together, each in its parameter's dtype.
        return bytes_like(p for p in ddp.module.parameters() if p.requires_grad)
    return gathered_bytes(model)


def processes(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of processes that train `model` together by DistributedDataParallel or FSDP, or None.

    All these processes must make the first call together, since it may create their group.
    """
    if not dist.is_initialized():  # checked first, since every step calls this several times
        return None
    ddp = around(model)
    found = [] if ddp is None else [ddp.process_group]
    return joined([*found, *_sharing_parameters(model)])


def _sharing_parameters(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups of the device meshes over which the parameters are sharded, one per mesh dimension."""
    with at_rest(model):
        meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if is_dtensor(p))
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def meeting_in_stages(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the processes that communicate inside stages of `model`, and so must run them equally often; or None."""
    synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return processes(model) if synchronized or _sharing_parameters(model) else None


def anywhere(found: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether `found` is true in any process of `group`. All of them must call this, each with its own `device`."""
    if group is None or alone_in_a_prediction():
        return found
    flag = torch.tensor(float(found), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def largest_anywhere(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Return, by position in `numbers`, the maximum over `group`. Collective. Raises ValueError if lengths differ."""
    if group is None or alone_in_a_prediction():
        return list(numbers)
    every = gather_objects(list(numbers), group, device)
    least, most = min(map(len, every)), max(map(len, every))
    if most != least:
        raise InvalidValueError(
            f"one process gave {least} numbers, and another {most}", kind="processes_differ", least=least, most=most
        )
    return [max(each) for each in zip(*every, strict=True)]


def gather_objects(value: T, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    """Return the `value` that each process of `group` passes, in the order of ranks. Collective."""
    if alone_in_a_prediction():
        return [value] * dist.get_world_size(group)
    found: list[Any] = [None] * dist.get_world_size(group)
    with sending_from(device):
        dist.all_gather_object(found, value, group=group)
    return found


def refuse_other_ranks(field: str, of_ranks: Sequence[object]) -> None:
    """Raise PlanMismatchError if a process has another `field` than rank 0; `of_ranks` has those of all."""
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise PlanMismatchError(field, of_ranks[0], f"{other} on rank {rank}")


def sending_from(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current while objects are exchanged: NCCL sends them from the current CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def alone_in_a_prediction() -> bool:
    """Whether devices are simulated (`estimate`). Then one process runs, whose values stand for those of all others."""
    return prediction() is not None
