"""What every process does in the tests of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rotor_profiling import tensors_in
from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.distributed.processes import here, kept, least_peak, mesh, present_bytes, random_state
from tests.distributed.ways import free_to_store_in_part

BATCH, WIDTH = 512, 32


def blocks() -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Module:
        wide = 4 * WIDTH
        return nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, WIDTH))

    return nn.Sequential(*(block() for _ in range(6)), nn.Linear(WIDTH, 4)).train()


def sharded(**options: Any) -> nn.Sequential:
    model = blocks()
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(rank)
    return [torch.randn(BATCH, WIDTH, generator=generator, device="cpu") for _ in range(3)]


def trained(rank: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """All numbers of three steps of Adam."""
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters())
    numbers = {}
    for step, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        value = loss(model(here(batch)))
        value.backward()
        numbers[f"loss {step}"] = kept(value)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            numbers[f"gradient {step} {name}"] = kept(parameter.grad.to_local())
        optimizer.step()
    numbers |= {name: kept(p.to_local()) for name, p in model.named_parameters()}
    numbers["random"] = random_state()
    return numbers


def limit_between(planned: Checkpointable, rank: int, share: float) -> int:
    """So much of the way from the least possible to storing everything."""
    planned.measure(here(batches(rank)[0]))
    assert planned.budget is not None
    planned.compute_sequence("1GB")
    assert planned.budget is not None
    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    return least + int(share * (most - least))


def packed(rank: int) -> tuple[str, list[str], int, int, int]:
    """As `same_as_plain`, with a plan that packs what stages save."""
    with free_to_store_in_part():
        return same_as_plain(rank, {})


def same_as_plain(
    rank: int, options: dict[str, Any], make: Callable[..., nn.Module] = sharded, share: float = 0.5
) -> tuple[str, list[str], int, int, int]:
    """The sequence, the names of numbers that differ; limit, prediction and measured peak of one more step."""
    expected = trained(rank, make(**options))
    model = make(**options)
    names = list(model.state_dict())
    planned = Checkpointable(model, loss=loss)
    limit = limit_between(planned, rank, share)
    dist.barrier()
    planned.compute_sequence(limit)
    found = trained(rank, planned)
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert list(planned.state_dict()) == names
    batch = here(batches(rank)[0])
    present_bytes()  # the optimizer's state is counted below, and is to be gone
    present = [*(p.to_local() for p in model.parameters()), *(p.grad.to_local() for p in model.parameters()), batch]
    assert planned.sequence is not None
    assert planned.budget is not None
    predicted, gone = planned.budget.peak_bytes(planned.sequence), planned.budget.fixed.optimizer
    measured = least_peak(lambda: loss(planned(batch)).backward(), tensors_in(present), predicted - gone) + gone
    return str(planned.sequence), different, limit, predicted, measured
