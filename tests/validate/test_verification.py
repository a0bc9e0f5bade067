"""Real steps beside plain ones, their operations, and what they leave behind, which is nothing."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py import Checkpointable, UnsupportedModelError, recompute_all, verify
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.validate.steps import TimedOperation, measured_operations
from rotor_py.validate.verification import Rounded, Verification, default_loss
from rotor_solver import Backward, ForwardEnable, Loss, Sequence, moments
from tests.capture.steps import with_options
from tests.checkpointable.steps import Applies, Made, Residual, Tower, planned_at, square
from tests.fields import raises


class Expanded(Made):
    """Has a buffer that is one number seen many times, which cannot be written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.ones


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, Expanded(ones=nn.Buffer(torch.ones(1).expand(32))))


def state_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = tensors_in([list(entry.values()) for entry in optimizer.state.values()])
    tensors = [*network.parameters(), *(p.grad for p in network.parameters()), *network.buffers(), *values]
    return [tensor.clone() for tensor in (*tensors, torch.get_rng_state())]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_plan_is_verified_and_nothing_is_left_of_the_steps(steps_before: int) -> None:
    plain, batch = model(), torch.randn(256, 32)
    optimizer = torch.optim.Adam(plain.parameters(), foreach=True)
    network = planned_at(0.4, plain, batch, optimizer=optimizer)
    for _ in range(steps_before):
        square(plain(batch)).backward()
        optimizer.step()
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    network.eval()
    before, planned, limit = state_of(plain, optimizer), network.sequence, network.mem_limit
    told: list[Any] = []
    options = {"loss": square, "optimizer": optimizer, "progress": lambda *state: told.append(state)}
    (found,) = verify(network, batch, operations=True, **options)
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


def test_of_a_captured_model_the_graph_runs_without_a_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its operators round otherwise than the model's own code is noise, and no fault of the plan."""
    batch = torch.randn(64, 32)
    network = planned_at(0.5, Tower(32, 4), batch)
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


@pytest.mark.usefixtures("any_clock")
def test_differences_of_gradients_are_told_and_no_problem_unless_beyond_rounding() -> None:
    torch.manual_seed(0)
    batch = torch.randn(64, 64)
    layers = [Residual(nn.BatchNorm1d(64), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(2)]
    network = Checkpointable(nn.Sequential(*layers), batch, mem_limit="1GB", keep="bf16")
    (exact,) = verify(network, batch)
    assert (exact.rounded, exact.max_grad_difference) == (None, 0)
    network.sequence = with_options(network.sequence, lambda _: 1)
    (found,) = verify(network, batch)
    assert 0 < found.rounded.gradient_error < 0.01
    assert found.rounded.buffer_difference == 0
    assert found.loss == exact.loss
    assert found.problem(10**9) is None
    for error, difference, noise, problem in (
        (0.2, 0.0, 0.0, "None"),
        (float("nan"), 0.0, 0.0, "gradients of stages kept in int8 are not finite"),
        (0.2, 0.1, 0.0, "buffers differ from plain training by up to 0.1"),
        (0.2, 0.1, 0.05, "None"),
    ):
        rounded = Rounded("int8", error, difference)
        assert problem in str(Verification(100, 1.0, 5.0, 100, 1.0, noise, rounded=rounded).problem(100))


BATCH = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)))


def operations(model: Checkpointable, step: Any = None) -> tuple[TimedOperation, ...]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    present = [*model.parameters(), *(p.grad for p in model.parameters()), BATCH]

    def train() -> None:
        output = model(BATCH)
        square(output).backward()

    return measured_operations(step or train, model.sequence, model.names, tensors_in(present), torch.device("cpu"))


@pytest.mark.parametrize(("network", "share"), [(blocks, 0.5), (blocks, 1.0), (lambda: Tower(256, 5), 0.5)])
def test_a_step_does_what_the_plan_says_in_the_memory_that_it_predicts(network: Any, share: float) -> None:
    model = planned_at(share, network(), BATCH)
    found = operations(model)
    predicted = moments(model.budget.chain, model.sequence)
    assert [(ran.operation, ran.again) for ran in found] == [(moment.operation, moment.again) for moment in predicted]
    assert any(ran.again for ran in found) == (share < 1)
    beside, peak = model.budget.beside_chain(model.sequence), model.budget.peak_bytes(model.sequence)
    assert 0.97 * peak < max(ran.during for ran in found) <= peak
    for ran, moment in zip(found, predicted, strict=True):
        if not isinstance(ran.operation, Backward | Loss):
            assert ran.during == pytest.approx(beside + moment.during, rel=0.05)
    assert all(ran.seconds > 0 for ran in found)
    assert all(ran.after <= ran.during for ran in found)
    for ran, following in pairwise(found):
        assert ran.begin + ran.seconds == pytest.approx(following.begin)


def test_backwards_that_no_gradient_reaches_and_the_second_gradient_of_a_stage_are_left_out() -> None:
    model = planned_at(1.0, blocks(), BATCH)
    found = operations(model, lambda: model(BATCH))
    assert [type(ran.operation) for ran in found] == [ForwardEnable] * len(model.names) + [Loss]

    two = Applies(function=lambda value: (value * 2, value * 3))
    model = planned_at(1.0, nn.Sequential(nn.Linear(256, 9), two, Applies(function=sum), nn.Linear(9, 9)), BATCH)
    model.sequence = Sequence.parse("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0")
    assert [ran.operation for ran in operations(model)] == list(model.sequence)
