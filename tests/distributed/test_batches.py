"""A batch that processes choose together: the same in all of them, whatever each of them has."""

import torch
from torch.nn.parallel import DistributedDataParallel

from rotor_py import Checkpointable, largest_batch
from tests.distributed.processes import Processes, device
from tests.distributed.test_ddp import made


def sample_of(batch: int) -> torch.Tensor:
    return torch.randn(batch, 64, device=device())


def least_of(rank: int, batch: int) -> int:
    """The least limit of a batch, for training together."""
    network = Checkpointable(DistributedDataParallel(made("chain")), sample_of(batch))
    assert network.budget is not None
    return network.budget.least_bytes()


def chosen(rank: int, more: list[int], batch: int) -> tuple[int, str, int | None, int, bool]:
    """The batch that is chosen where each process has `more` bytes than `batch` needs, its sequence, and its peak.

    Then a step is trained by it: whether all processes have the same gradients.
    """
    model = DistributedDataParallel(made("chain"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = least_of(rank, batch) + more[rank]
    found = largest_batch(model, sample_of, limit, optimizer=optimizer)
    found.network(sample_of(found.batch) + rank).square().mean().backward()
    gradient = model.module[0].weight.grad
    assert gradient is not None
    others = [torch.empty_like(gradient) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, gradient)
    same = all(torch.equal(gradient, other) for other in others)
    return found.batch, str(found.network.sequence), found.measured_peak_bytes, limit, same


def test_all_processes_take_the_batch_that_fits_the_smallest_limit(processes: Processes) -> None:
    count = len(processes.processes)
    found = processes.run(chosen, [*range(0, (count - 1) * 100_000, 100_000), 50][::-1], 40)
    ((batch, sequence),) = {(batch, sequence) for batch, sequence, *_ in found}
    for _, _, peak, limit, same in found:
        assert peak is not None
        assert peak <= limit
        assert same
    assert batch == 40
    assert "CF_" in sequence or "Fn_" in sequence
