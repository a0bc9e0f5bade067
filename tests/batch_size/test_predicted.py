"""How large a batch on a device that is not there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import InfeasibleError, best_batch, estimate, largest_batch
from rotor_py.estimation.device_table import find_device

LIMIT = "22MB"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


def sample_of(batch: int) -> torch.Tensor:
    return torch.empty(batch, 128)


def estimated(batch: int) -> Any:
    return estimate(model, sample_of(batch), "l4", optimizer=torch.optim.AdamW, loss=torch.mean, mem_limit=LIMIT)


@pytest.mark.slow
def test_one_more_sample_than_the_largest_batch_finds_no_plan() -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    found = largest_batch(network, sample_of, LIMIT, optimizer=optimizer, loss=torch.mean, device="l4")
    assert estimated(found.batch).peak_bytes <= 22_000_000
    with pytest.raises(InfeasibleError):
        estimated(found.batch + 1)
    assert found.optimizer_seconds > 0
    # It is told as what it is, and the model is left alone.
    assert found.predicted
    assert found.measured_peak_bytes is None
    assert not any(point.measured for point in found.points)
    assert "predicted" in str(found)
    assert "real step" not in str(found)
    assert not optimizer.state
    assert all(each.grad is None for each in network.parameters())


@pytest.mark.slow
def test_the_best_batch_is_predicted_under_autocast_as_well() -> None:
    network = model()
    told: dict[str, Any] = {"optimizer": torch.optim.AdamW(network.parameters()), "loss": torch.mean, "device": "l4"}
    cast = best_batch(network, sample_of, LIMIT, multiple=16, autocast=torch.bfloat16, **told)
    assert cast.batch % 16 == 0
    assert not cast.measured_per_second
    with pytest.raises(InfeasibleError):
        estimated(cast.largest)  # without autocast


@pytest.mark.slow
def test_without_a_limit_the_allocator_has_room_for_what_it_reserves() -> None:
    small = replace(find_device("l4"), memory_bytes=700_000_000)
    found = largest_batch(model(), sample_of, loss=torch.mean, device=small, most=10**6)
    assert found.mem_limit <= int(0.9 * small.usable_bytes)
    report = estimate(model, sample_of(found.batch), small, loss=torch.mean, mem_limit=found.mem_limit)
    assert not report.reserved.missing_bytes
