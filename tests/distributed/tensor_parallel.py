"""Models that are split among processes by `parallelize_module`, and further by `fully_shard`; what processes do."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rotor_profiling import loss_layouts
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.measure.cut import cut
from rotor_py.measure.stage_measurer import MeasuringOptions, StageMeasurer
from tests.checkpointable.steps import Made, Stack
from tests.distributed import steps
from tests.distributed.fsdp_models import BATCH, LENGTH, WIDTH, llama
from tests.distributed.processes import device

warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def chain() -> nn.Sequential:
    """Blocks of named layers, for plans of `parallelize_module`."""

    def block() -> nn.Sequential:
        layers = {"norm": nn.LayerNorm(WIDTH), "wide": nn.Linear(WIDTH, 4 * WIDTH), "act": nn.GELU()}
        return nn.Sequential(OrderedDict(layers, drop=nn.Dropout(0.1), narrow=nn.Linear(4 * WIDTH, WIDTH)))

    return nn.Sequential(*(block() for _ in range(3)), nn.Linear(WIDTH, 4))


def columns_and_rows(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The first layer of each block by columns, the second by rows: as in Megatron."""
    for block in list(model)[:-1]:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    return model


def all_shared(model: Any, mesh: DeviceMesh) -> nn.Module:
    """All that goes from layer to layer is a DTensor, the output too."""
    for block in list(model)[:-1]:
        plan = {
            "norm": SequenceParallel(),
            "wide": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "narrow": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, {"3": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)})


class TimeFirst(Made):
    """Lays its output out with time first, as recurrent layers do; the gradient that arrives is not."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value).transpose(0, 1).contiguous().transpose(0, 1)


def time_first(mesh: DeviceMesh) -> nn.Sequential:
    """Blocks that return a DTensor with time first, divided along time."""
    model = chain()
    all_shared(model, mesh)
    return nn.Sequential(*(TimeFirst(layer=block) for block in list(model)[:-1]), model[-1])


def skipped() -> Stack:
    """Blocks with skip connections, which are captured."""
    return Stack(*(SkippedBlock() for _ in range(3)), nn.Linear(WIDTH, 5))


class SkippedBlock(nn.Module):
    """Its hidden layer has a width of three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(nn.functional.gelu(self.wide(self.norm(value))) * 1.5)
        return value + self.drop(self.narrow(hidden))


def uneven_parts(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The first process has two of three columns. Only as DTensors can parts be of several sizes."""
    for block in model.layers[:-1]:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(use_local_output=False), "narrow": RowwiseParallel()})
    return parallelize_module(model, mesh, {"layers.3": ColwiseParallel(output_layouts=Replicate())})


def heads_and_sequence(model: Any, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan does it: norms and residuals on a part of the sequence, and the head split too."""
    whole = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {
        "input_layernorm": SequenceParallel(),
        "self_attn": whole,
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    outer = {
        # The embedding is whole: transformers makes positions and masks for as many tokens as come out of it.
        "model.layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, outer)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, DeviceMesh], nn.Module]]] = {
    "chain": (chain, columns_and_rows),
    "all shared": (chain, all_shared),
    "uneven": (skipped, uneven_parts),
    "llama, sequence": (partial(llama, **HEADS, num_hidden_layers=1), heads_and_sequence),
}


def made(kind: str, parallel: str) -> nn.Module:
    """A model with tensor parallelism over all processes or, if `parallel` has two dimensions, with `fully_shard`."""
    torch.manual_seed(0)
    make, split = MODELS[kind]
    if parallel == "tensor":
        return split(make().train(), init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",)))
    grid = init_device_mesh(device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model: Any = split(make().train(), grid["tp"])
    for each in model.model.layers if hasattr(model, "model") else list(model)[:-1]:
        fully_shard(each, mesh=grid["dp"])
    return fully_shard(model, mesh=grid["dp"])


def batches(kind: str, count: int) -> list[dict[str, Any]]:
    """The same in all processes, or a part of each sequence."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn: dict[str, Any] = {"generator": generator, "device": "cpu"}
    if "llama" in kind:
        ids = [torch.randint(64, (BATCH, LENGTH), **drawn) for _ in range(count)]
        return [{"input_ids": each, "labels": each} for each in ids]
    found = [torch.randn(BATCH, LENGTH, WIDTH, **drawn) for _ in range(count)]
    if kind == "all shared":
        found = [each.chunk(dist.get_world_size(), 1)[dist.get_rank()] for each in found]
    return [{"x" if kind == "uneven" else "input": each} for each in found]


def loss(output: Any) -> torch.Tensor:
    if isinstance(output, DTensor):
        output = output.full_tensor()
    found: torch.Tensor = output.loss if hasattr(output, "loss") else output.float().square().mean()
    return found


def same_as_plain(rank: int, kind: str, parallel: str, share: float, closest: bool = False) -> steps.Found:
    return steps.same_as_plain(partial(made, kind, parallel), batches(kind, 2), loss, share, closest=closest)


def with_parts_of_other_layouts(rank: int) -> tuple[int, list[bool]]:
    """How often a chain is measured whose gradients arrive in another layout, and in which layout they are known to.

    Of three points in time, the second process has one. Along a side of length one, strides mean nothing.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = time_first(mesh)
    value = distribute_tensor(torch.randn(BATCH, 3, WIDTH, device=device()), mesh, [Shard(1)])
    stages = StageMeasurer(
        cut(model, value, device()), value, device(), MeasuringOptions(group=meeting_in_stages(model))
    )
    walks: list[int] = []
    survey = stages._survey
    walk = survey.walk
    survey.walk = lambda *a, **k: (walks.append(1), walk(*a, **k))[1]  # type: ignore[method-assign] # to count
    output = stages.walk()
    stages.settle_layouts(loss_layouts(loss, output, device()))
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    return len(walks), [bool(layouts) for layouts in survey.arriving]
