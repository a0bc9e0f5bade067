"""Real steps beside plain ones, taken from Python; and what they leave behind, which is nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError, recompute_all, verify
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.validate.verification import default_loss
from tests.checkpointable.steps import between, square
from tests.fields import raises


class Expanded(nn.Module):
    """Has a buffer that is one number seen many times, which cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1).expand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.ones


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, Expanded())


def state_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entries = list(optimizer.state.values())
    values = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
    tensors = [*network.parameters(), *(p.grad for p in network.parameters()), *network.buffers(), *values]
    return [tensor.clone() for tensor in (*tensors, torch.get_rng_state())]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_plan_is_verified_and_nothing_is_left_of_the_steps(steps_before: int) -> None:
    plain, batch = model(), torch.randn(256, 32)
    optimizer = torch.optim.Adam(plain.parameters(), foreach=True)
    network = Checkpointable(plain, batch, loss=square, optimizer=optimizer)
    network.compute_sequence(between(network, 0.4))
    for _ in range(steps_before):
        square(plain(batch)).backward()
        optimizer.step()
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    network.eval()
    before, planned, limit = state_of(plain, optimizer), network.sequence, network.mem_limit
    told: list[Any] = []
    (found,) = verify(
        network, batch, loss=square, optimizer=optimizer, operations=True, progress=lambda *state: told.append(state)
    )
    assert found.max_grad_difference == found.noise == 0
    assert 0.98 * network.report().peak_bytes <= found.measured_peak_bytes <= limit < found.plain_peak_bytes
    assert min(found.measured_step_seconds, found.plain_step_seconds) > 0
    assert [ran.operation for ran in found.operations] == list(planned)
    assert [done for done, _, _ in told] == [0, 1, 2]
    assert found.problem(limit) is None
    assert "is over the limit" in found.problem(found.measured_peak_bytes - 1)
    assert len(optimizer.state) == (len(list(plain.parameters())) if steps_before else 0)
    assert all(map(torch.equal, before, state_of(plain, optimizer)))
    assert network.sequence is planned
    assert not any(module.training for module in plain.modules())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + layer(value)
        return value


def test_of_a_captured_model_the_graph_runs_without_a_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its operators round otherwise than the model's own code is noise, and no fault of the plan."""
    batch = torch.randn(64, 32)
    network = Checkpointable(Residual(), batch, loss=square)
    network.compute_sequence(between(network, 0.5))
    ran = []
    whole = CapturedGraph.run_unplanned
    monkeypatch.setattr(CapturedGraph, "run_unplanned", lambda *given: ran.append(1) or whole(*given))
    (found,) = verify(network, batch, loss=square)
    assert found.max_grad_difference == found.noise == 0
    assert ran


def test_without_a_loss_the_models_own_is_taken_or_else_the_mean_of_squares() -> None:
    value = torch.randn(4, requires_grad=True)
    own = value.sum()
    assert default_loss({"loss": own, "logits": value}) is own
    assert default_loss({"loss": own.detach(), "logits": value}) == value.square().mean()
    assert default_loss((value, value + 1)) == value.square().mean() + (value + 1).square().mean()
    batch = torch.randn(16, 32)
    network = Checkpointable(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), batch, mem_limit="1GB")
    with raises(UnsupportedModelError, "no_gradient"):
        default_loss(value.detach())
    (found,) = verify(network, batch)
    assert found.max_grad_difference == 0


def test_other_strategies_are_verified_and_the_plan_and_an_input_with_a_gradient_are_what_they_were() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    sample = torch.randn(32, 64).requires_grad_()
    network = Checkpointable(model, sample, mem_limit="1GB", loss=torch.sum)
    planned, other = network.sequence, recompute_all(network.chain)
    found = verify(network, sample, loss=torch.sum, others=[other])
    assert network.sequence is planned
    assert sample.grad is None
    assert [each.max_grad_difference for each in found] == [0, 0]
    peaks = [network.budget.peak_bytes(sequence) for sequence in (planned, other)]
    assert [each.measured_peak_bytes for each in found] == pytest.approx(peaks, rel=0.01)
