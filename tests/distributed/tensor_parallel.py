"""What every process does in the tests of tensor parallelism, alone and with `fully_shard`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Adam, Optimizer

from rotor_profiling import loss_layouts, tensors_in
from rotor_profiling.stage.gradients import gradients_for, scalar_after
from rotor_profiling.storage import layout_of, local
from rotor_py import Checkpointable
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.measure.cut import cut
from rotor_py.measure.stage_measurer import MeasuringOptions, StageMeasurer
from rotor_solver import store_all
from tests.distributed.processes import device, here, kept, least_peak, random_state
from tests.distributed.tensor_parallel_models import BATCH, WIDTH, batches, loss, made, time_first

Numbers = dict[str, torch.Tensor]


def trained(kind: str, model: nn.Module, optimizer: Optimizer) -> Numbers:
    """All numbers of three steps, as this process has them."""
    torch.manual_seed(0)
    numbers: Numbers = {}
    for step, batch in enumerate(batches(kind, 3)):
        optimizer.zero_grad()
        value = loss(model(**here(batch)))
        value.backward()
        numbers[f"loss {step}"] = kept(local(value))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            numbers[f"gradient {step} {name}"] = kept(local(parameter.grad))
        optimizer.step()
    numbers |= {name: kept(local(p)) for name, p in model.named_parameters()}
    numbers["random"] = random_state()
    return numbers


def same_as_plain(
    rank: int, kind: str, parallel: str, share: float, closest: bool = False
) -> tuple[str, list[str], int, int, int]:
    """The sequence, the names of numbers that differ; limit, prediction and measured peak of a step with a plan.

    The limit is so much of the way from the least possible to storing everything. With `closest`, the peak is measured
    as closely as can be; else, one inside the prediction will do.
    """
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = made(kind, parallel)
    expected = trained(kind, model, Adam(model.parameters(), foreach=False))
    model = made(kind, parallel)
    optimizer = Adam(model.parameters(), foreach=False)
    planned = Checkpointable(model, loss=loss, optimizer=optimizer)
    planned.measure(here(batches(kind, 1)[0]))
    dist.barrier()
    assert planned.budget is not None
    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    limit = agreed(least + int(share * (most - least)))
    sequence = planned.compute_sequence(limit)
    found = trained(kind, planned, optimizer)
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    predicted = planned.budget.peak_bytes(sequence)
    measured = measured_peak_of(kind, planned, optimizer, 0 if closest else predicted)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0  # nobody is still to be waited for
    return str(sequence), different, limit, predicted, measured


def agreed(limit: int) -> int:
    """The largest of what the processes say: where their parts are not equally large, the limit is to do for all."""
    found = torch.tensor(limit)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def measured_peak_of(kind: str, planned: Checkpointable, optimizer: Optimizer, enough: int) -> int:
    """The peak of a step; see `least_peak`."""
    batch = here(batches(kind, 1)[0])
    state = [list(entry.values()) for entry in optimizer.state.values()]
    parameters = list(planned.parameters())
    held: list[Any] = [*tensors_in(state), *parameters, *(p.grad for p in parameters), *planned.buffers()]
    present = [*map(local, held), *tensors_in(batch)]
    return least_peak(lambda: loss(planned(**batch)).backward(), present, enough)


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
    return len(walks), [bool(layouts) for layouts in survey.layouts.arriving]


def gradients_laid_out(rank: int) -> None:
    """A gradient of a DTensor is laid out as was asked, and shared as the tensor is."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    tensor = distribute_tensor(torch.randn(4, 5, 6, device=device()), mesh, [Shard(1)]).requires_grad_()
    time = local(tensor).shape[1]
    (gradient,) = gradients_for([tensor], layouts=((6, 24, 1),))
    assert gradient is not None
    assert (local(gradient).shape, local(gradient).stride()) == ((4, time, 6), (6, 24, 1))
    assert (gradient.shape, gradient.stride()) == (tensor.shape, (6, 24, 1))
    assert layout_of(gradient) == layout_of(tensor)
    source = scalar_after([tensor * 2], layouts=((6, 24, 1),))
    assert source is not None
    source.backward()
    assert tensor.grad is not None
    assert torch.equal(local(tensor.grad), torch.full_like(local(tensor), 2))
