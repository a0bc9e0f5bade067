"""`estimate`: the report of a step on a simulated device."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError, estimate
from rotor_py.estimation.device_table import find_device
from rotor_py.report import Report
from tests.estimation.conftest import Block
from tests.execute.zoo import Last
from tests.fields import raises

BLOCK = 512


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)), nn.Linear(256, 10))


def rounded(tensors: Any) -> int:
    return sum(-(-each.numel() * each.element_size() // BLOCK) * BLOCK for each in tensors)


def test_parameters_state_and_batch_are_exact_in_the_blocks_of_cuda_also_of_a_model_larger_than_this_machine() -> None:
    model, batch, told = blocks(), torch.randn(64, 256), {"optimizer": torch.optim.AdamW, "loss": torch.mean}
    report = estimate(model, batch, "a100-80", **told)
    parameters = rounded(model.parameters())
    assert report.budget.fixed.parameters == report.budget.fixed.gradients == parameters
    # Two moments, and the count of steps stays on the CPU.
    assert report.budget.fixed.optimizer == 2 * parameters
    assert report.measurement.input_bytes == 64 * 256 * 4
    device = find_device("a100-80")
    assert (report.device, report.mem_limit, report.fits) == (device.name, int(0.9 * device.usable_bytes), True)
    made, slow = (estimate(blocks, batch, name, **told) for name in ("a100-80", "l4"))
    assert (made.budget, made.measurement.stages) == (report.budget, report.measurement.stages)
    assert slow.store_all_seconds > report.store_all_seconds > 0, "seconds are those of the device"

    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2**17, 2**17, dtype=torch.bfloat16) for _ in range(2)))  # 69 GB

    batch = torch.empty(8, 2**17, dtype=torch.bfloat16, device="meta")
    report = estimate(large, batch, "b200", loss=torch.mean, fresh_grads=True)
    assert report.budget.fixed.parameters > 68 * 10**9


def test_a_model_its_optimizer_the_process_and_counts_of_steps_stay_and_afterwards_models_are_measured_again() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout()]
    model = nn.Sequential(*layers, nn.Linear(8 * 30 * 30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(2, 3, 32, 32)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.eval()
    estimate(model, batch, optimizer=optimizer, loss=torch.mean)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())
    norm = nn.BatchNorm1d(4, momentum=None)  # divides by its count
    for make in (nn.Sequential(nn.Linear(4, 4), norm), lambda: nn.Sequential(nn.Linear(4, 4), norm)):
        assert estimate(make, torch.randn(2, 4), loss=torch.mean).fits
    model = blocks()
    network = Checkpointable(model, torch.randn(64, 256), "1GB", loss=torch.mean)
    assert network.report().predicted_for is None
    network(torch.randn(64, 256)).mean().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_a_calibrated_cpu_runs_the_operators_of_the_cpu() -> None:
    cpu = replace(find_device("l4"), vendor="cpu")
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.LSTMCell(64, 64), Last())
    found = [estimate(model, torch.empty(512, 64), each, loss=torch.mean) for each in (cpu, "mi300x", "l4")]
    # The mask of the CPU has the numbers' width.
    assert [each.measurement.stages[1].saved_bytes for each in found] == [512 * 64 * (4 + size) for size in (4, 1, 1)]
    here, _, nvidia = (" ".join(str(each).split()) for each in found)
    assert "attention by the CPU's kernel, and batches without padding" in here
    for words in ("cuBLAS", "driver's context", "recurrent layers (2)"):
        assert words in nvidia
        assert words not in here


def residual(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), Block(dropout=dropout))


def bytes_in_part(network: Checkpointable | Report) -> int:
    measurement = network.measurement if isinstance(network, Report) else network.inspection_values
    return {way.name: way.cost.saved_bytes for way in measurement.ways[1]}["in part"]


def test_layers_of_a_chain_are_stored_in_part_as_where_they_are_measured_with_the_operators_of_the_device() -> None:
    batch, cpu = torch.randn(2048, 256), replace(find_device("l4"), vendor="cpu")
    measured = Checkpointable(residual(0.0), batch, loss=torch.mean, fresh_grads=True, cache=False)
    there = estimate(lambda: residual(0.0), batch, cpu, loss=torch.mean)
    assert bytes_in_part(there) == bytes_in_part(measured) < there.measurement.stages[1].saved_bytes
    gpu = estimate(lambda: residual(0.1), batch, "l4", loss=torch.mean)
    assert bytes_in_part(gpu) - bytes_in_part(there) == 2048 * 256, "a mask of one byte a number, not of four"


class Reads(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = super().forward(value)
        return made * 2 if made.sum().item() > 0 else made


def test_what_cannot_be_planned_is_refused_and_where_nothing_fits_the_least_limit_is_said() -> None:
    told = partial(estimate, blocks, torch.randn(64, 256), loss=torch.mean)
    with pytest.raises(InfeasibleError) as raised:
        told(mem_limit="20MB")
    least = raised.value.min_bytes
    assert told(mem_limit=least).peak_bytes == least
    with raises(ValueError, "unknown_device", name="h1000"):
        estimate(blocks, torch.randn(2, 256), "h1000")
    with raises(UnsupportedModelError, "not_a_module"):
        estimate(lambda: 3, torch.randn(2, 256))  # type: ignore[arg-type, return-value]
    with raises(UnsupportedModelError, "depends_on_values"):
        estimate(nn.Sequential(nn.Linear(4, 4), Reads(4, 4)), torch.randn(2, 4), loss=torch.mean)
