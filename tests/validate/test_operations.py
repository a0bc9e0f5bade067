"""The operations of real steps: those of the plan, with the memory that the simulator says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py import Checkpointable
from rotor_py.validate.steps import TimedOperation, measured_operations
from rotor_solver import Backward, ForwardEnable, Loss, Sequence, moments
from tests.checkpointable.steps import between, square

BATCH = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5)))


def planned(model: nn.Module, share: float) -> Checkpointable:
    found = Checkpointable(model, BATCH, loss=square)
    found.compute_sequence(between(found, share))
    return found


def operations(model: Checkpointable, step: Any = None) -> tuple[TimedOperation, ...]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    present = [*model.parameters(), *(p.grad for p in model.parameters()), BATCH]

    def train() -> None:
        output = model(BATCH)
        square(output).backward()

    return measured_operations(step or train, model.sequence, model.names, tensors_in(present), torch.device("cpu"))


@pytest.mark.parametrize(("network", "share"), [(blocks, 0.5), (blocks, 1.0), (lambda: Residual(blocks()), 0.5)])
def test_a_step_does_what_the_plan_says_in_the_memory_that_it_predicts(network: Any, share: float) -> None:
    model = planned(network(), share)
    found = operations(model)
    predicted = moments(model.budget.chain, model.sequence)
    assert [(ran.operation, ran.again) for ran in found] == [(moment.operation, moment.again) for moment in predicted]
    assert any(ran.again for ran in found) == (share < 1)
    beside = model.budget.beside_chain(model.sequence)
    peak = model.budget.peak_bytes(model.sequence)
    assert 0.97 * peak < max(ran.during for ran in found) <= peak
    for ran, moment in zip(found, predicted, strict=True):
        if not isinstance(ran.operation, Backward | Loss):
            assert ran.during == pytest.approx(beside + moment.during, rel=0.05)
    assert all(ran.seconds > 0 for ran in found)
    assert all(ran.after <= ran.during for ran in found)
    for ran, following in pairwise(found):
        assert ran.begin + ran.seconds == pytest.approx(following.begin)


def test_backwards_that_no_gradient_reaches_are_left_out() -> None:
    model = planned(blocks(), 1.0)
    found = operations(model, lambda: model(BATCH))
    assert [type(ran.operation) for ran in found] == [ForwardEnable] * len(model.names) + [Loss]


def test_the_second_gradient_of_a_stage_is_not_another_backward() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, x * 3

    class Sum(nn.Module):
        def forward(self, pair: Any) -> torch.Tensor:
            return pair[0] + pair[1]

    model = planned(nn.Sequential(nn.Linear(64, 64), Two(), Sum(), nn.Linear(64, 64)), 1.0)
    model.sequence = Sequence.parse("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0")
    assert [ran.operation for ran in operations(model)] == list(model.sequence)
