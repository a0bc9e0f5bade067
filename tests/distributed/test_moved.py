"""Processes that train together, each of which moves activations to a file of its own, by one plan."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_py import Checkpointable
from rotor_py.errors import OffloadError
from rotor_py.offload import open_tier as tiers
from tests.checkpointable.steps import Stack, square
from tests.distributed import steps
from tests.distributed.processes import Processes, least_peak
from tests.offload.tiers import held
from tests.training.stepping import Block

ROWS, WIDTH = 256, 64


def made() -> nn.Module:
    torch.manual_seed(0)
    return Stack(*(Block(WIDTH) for _ in range(2)))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def planned(rank: int, folder: str) -> Checkpointable:
    """A plan within a limit where computing again alone would be slow. The disks of ranks are not equally fast."""
    tiers.measured_bandwidth.cache_clear()
    tiers.measure_bandwidth = lambda *_: 1e13 / (1 + rank)  # type: ignore[attr-defined] # its name there
    probe = Checkpointable(made(), batch(0), 10**9, loss=square, cache=False).report()
    least = probe.budget.least_bytes()
    buckets = sum(each.nbytes for each in made().parameters())
    limit = int(least + 0.4 * (probe.store_all_bytes - least)) + buckets
    return Checkpointable(made(), mem_limit=limit, loss=square, cache=False, offload=f"file:{folder}")


def numbers(model: nn.Module, rank: int) -> steps.Numbers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return steps.trained(model, optimizer, [{"x": batch(rank)}] * 3, square, seed=rank)


def same_as_plain(rank: int, folder: str) -> tuple[str, Any]:
    """What is planned. It is exact and inside the limit, and the tier has moved something and holds nothing."""
    expected = numbers(DistributedDataParallel(made()), rank)
    network = planned(rank, folder)
    model = DistributedDataParallel(network)
    found = numbers(model, rank)
    tier: Any = network._planner.model.tier
    before, value = tier.moved_bytes, batch(rank)
    model.zero_grad(set_to_none=False)
    present = [*model.parameters(), value, *(each.grad for each in model.parameters())]
    fixed = network.budget.fixed
    predicted, beside = network.budget.peak_bytes(network.sequence), fixed.communication + fixed.optimizer
    measured = least_peak(lambda: square(model(x=value)).backward(), present, predicted - beside) + beside
    assert steps.different(found, expected) == []
    assert measured <= predicted <= (network.mem_limit or 0)
    assert tier.moved_bytes > before
    assert held(tier) == 0
    return str(network.sequence), network.sequence.moves


def refused_everywhere(rank: int, folder: str) -> str:
    """What is said where the disk of the last rank has no room."""
    model = DistributedDataParallel(planned(rank, folder))
    with pytest.MonkeyPatch.context() as patch:
        if rank == torch.distributed.get_world_size() - 1:
            patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OffloadError) as caught:
            model(x=batch(rank))
    return str(caught.value)


def moves_on_one_rank_alone(rank: int, folder: str) -> list[bool]:
    """Where one rank may move and another may not, whether anything moves, and whether the step is exact."""
    expected = numbers(DistributedDataParallel(made()), rank)
    network = planned(rank, folder)
    if rank:
        network = Checkpointable(made(), mem_limit=network.mem_limit, loss=square, cache=False)
    found = numbers(DistributedDataParallel(network), rank)
    return [network.sequence.moves is not None, steps.different(found, expected) == []]


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest) -> None:
    if "nccl" in request.node.name:
        pytest.skip("files are for models on the CPU")


def test_all_move_the_same_exactly_and_inside_the_limit(processes: Processes, tmp_path: Path) -> None:
    assert len(set(processes.run(same_as_plain, str(tmp_path)))) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_disk_without_room_on_one_rank_is_refused_on_all(processes: Processes, tmp_path: Path) -> None:
    (said,) = set(processes.run(refused_everywhere, str(tmp_path)))
    assert said.startswith("rank 1: a file of ")
    assert "No space left on device" in said


@pytest.mark.slow
def test_nothing_moves_where_one_rank_has_no_place_for_it(processes: Processes, tmp_path: Path) -> None:
    found = processes.run(moves_on_one_rank_alone, str(tmp_path))
    assert found == [[False, True]] * len(found)
