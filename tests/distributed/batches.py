"""What every process does in the tests of choosing a batch together."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_py import Checkpointable, best_batch, largest_batch
from tests.distributed.processes import device


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(5)))


def sample_of(batch: int) -> torch.Tensor:
    return torch.randn(batch, 64, device=device())


def least_of(rank: int, batch: int) -> int:
    """The least limit of a batch, for training together."""
    network = Checkpointable(DistributedDataParallel(chain().to(device())), sample_of(batch))
    assert network.budget is not None
    return network.budget.least_bytes()


def chosen(rank: int, aim: str, more: list[int], batch: int) -> tuple[int, str, int | None, int, bool]:
    """The batch that is chosen where each process has `more` bytes than `batch` needs, its sequence, and its peak.

    Then a step is trained by it: whether all processes have the same gradients.
    """
    model = DistributedDataParallel(chain().to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = least_of(rank, batch) + more[rank]
    choose = largest_batch if aim == "max" else best_batch
    found = choose(model, sample_of, limit, optimizer=optimizer)
    found.network(sample_of(found.batch) + rank).square().mean().backward()
    gradient = model.module[0][0].weight.grad
    assert gradient is not None
    others = [torch.empty_like(gradient) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, gradient)
    same = all(torch.equal(gradient, other) for other in others)
    return found.batch, str(found.network.sequence), found.measured_peak_bytes, limit, same
