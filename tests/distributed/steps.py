"""Training steps of a model that processes share, with a plan and without one."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Adam, Optimizer

from rotor_profiling import tensors_in
from rotor_profiling.storage import local
from rotor_py import Checkpointable
from tests.checkpointable import steps as single
from tests.distributed.processes import here, kept, least_peak, random_state

Numbers = dict[str, torch.Tensor]
Batch = dict[str, Any]
Loss = Callable[[Any], torch.Tensor]
Found = tuple[str, list[str], int, int, int]


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), foreach=False)  # tensors of several meshes are not stepped together


def set_sync(model: nn.Module, on: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(on)


def backward(model: Any, given: list[Batch], loss: Loss) -> list[torch.Tensor]:
    """The losses of batches whose gradients add up, and are sent with the last."""
    losses = []
    for number, batch in enumerate(given, 1):
        set_sync(model, number == len(given))
        with model.no_sync() if number < len(given) and hasattr(model, "no_sync") else nullcontext():
            losses.append(loss(model(**batch)))
            losses[-1].backward()
    return losses


def trained(model, optimizer: Optimizer, given: list[Batch], loss: Loss, accumulated=1, seed=0) -> Numbers:
    """All numbers of a step for each `accumulated` of the batches, as this process has them."""
    torch.manual_seed(seed)
    numbers: Numbers = {}
    for step in range(0, len(given), accumulated):
        optimizer.zero_grad()
        for number, value in enumerate(backward(model, here(given[step : step + accumulated]), loss)):
            numbers[f"loss {step} {number}"] = kept(local(value))
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (parameter.requires_grad and "unused" not in name), name
            if parameter.grad is not None:
                numbers[f"gradient {step} {name.replace('module.', '')}"] = kept(local(parameter.grad))
        optimizer.step()
    numbers |= {name.replace("module.", ""): kept(local(each)) for name, each in model.state_dict().items()}
    return numbers | {"random": random_state()}


def different(found: Numbers, expected: Numbers) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


def between(planned: Checkpointable, share: float) -> int:
    found = torch.tensor(single.between(planned, share))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def measured_peak_of(planned: Checkpointable, optimizer: Optimizer, given: list[Batch], loss: Loss, enough: int) -> int:
    """The peak of a step on these batches; see `least_peak`."""
    batches = here(given)
    state = [list(entry.values()) for entry in optimizer.state.values()]
    held = [*tensors_in(state), *planned.parameters(), *(p.grad for p in planned.parameters() if p.grad is not None)]
    present = [*map(local, held), *planned.buffers(), *tensors_in(batches)]
    return least_peak(lambda: backward(planned, batches, loss), present, enough)


def same_as_plain(make, given: list[Batch], loss: Loss, share: float, accumulated=1, seed=0, closest=False) -> Found:
    """The sequence, the names of numbers that differ; limit, prediction and measured peak of a step with a plan."""
    model = make()
    expected = trained(model, adam(model), given, loss, accumulated, seed)
    model = make()
    optimizer, names, measured_stages = adam(model), list(model.state_dict()), list[object]()
    set_sync(model, accumulated == 1)
    told = {"loss": loss, "optimizer": optimizer, "progress": lambda *state: measured_stages.append(state)}
    planned = Checkpointable(model, here(given[0]), **told)
    measured_stages.clear()
    limit = between(planned, share)
    sequence = planned.compute_sequence(limit)
    found = trained(planned, optimizer, given, loss, accumulated, seed)
    predicted = planned.budget.peak_bytes(sequence)
    measured = measured_peak_of(planned, optimizer, given[:1] * accumulated, loss, 0 if closest else predicted)
    assert measured_stages == []  # it is not planned again
    assert list(planned.state_dict()) == names
    assert torch._C._distributed_c10d._get_work_registry_size() == 0  # none is still waited for
    return str(sequence), different(found, expected), limit, predicted, measured
