"""Models that are split among processes by `parallelize_module`, and further by `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.processes import device

BATCH, LENGTH, WIDTH = 8, 64, 32


class MLP(nn.Sequential):
    """Named layers, for plans of `parallelize_module`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)


def chain() -> nn.Sequential:
    return nn.Sequential(*(MLP() for _ in range(6)), nn.Linear(WIDTH, 4))


def columns_and_rows(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The first layer of each block by columns, the second by rows: as in Megatron."""
    for block in list(model)[:-1]:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    return model


def sequence(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Between the blocks, each process has a part of the sequence."""
    for block in list(model)[:-1]:
        plan = {
            "norm": SequenceParallel(),  # returns a DTensor
            "wide": ColwiseParallel(input_layouts=Shard(1)),
            "narrow": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, {"6": ColwiseParallel(input_layouts=Shard(1))})


def all_shared(model: Any, mesh: DeviceMesh) -> nn.Module:
    """All that goes from layer to layer is a DTensor, the output too."""
    for block in list(model)[:-1]:
        plan = {
            "norm": SequenceParallel(),
            "wide": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "narrow": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, {"6": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)})


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, DeviceMesh], nn.Module]]] = {
    "chain": (chain, columns_and_rows),
    "sequence": (chain, sequence),
    "all shared": (chain, all_shared),
}


def made(kind: str, parallel: str) -> nn.Module:
    """A model with tensor parallelism over all processes or, if `parallel` has two dimensions, with `fully_shard`."""
    torch.manual_seed(0)
    make, split = MODELS[kind]
    if parallel == "tensor":
        return split(make().train(), init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",)))
    grid = init_device_mesh(device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model: Any = split(make().train(), grid["tp"])
    for each in list(model)[:-1]:
        fully_shard(each, mesh=grid["dp"])
    return fully_shard(model, mesh=grid["dp"])


def batches(kind: str, count: int) -> list[dict[str, Any]]:
    """The same in all processes, or a part of each sequence."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn: dict[str, Any] = {"generator": generator, "device": "cpu"}
    found = [torch.randn(BATCH, LENGTH, WIDTH, **drawn) for _ in range(count)]
    if kind in ("sequence", "all shared"):
        found = [each.chunk(dist.get_world_size(), 1)[dist.get_rank()] for each in found]
    return [{"input": each} for each in found]


def loss(output: Any) -> torch.Tensor:
    if isinstance(output, DTensor):
        output = output.full_tensor()
    found: torch.Tensor = output.loss if hasattr(output, "loss") else output.float().square().mean()
    return found
