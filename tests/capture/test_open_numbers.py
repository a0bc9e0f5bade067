"""Numbers that a model holds and changes: TorchDynamo traces a step for them once more, and not in every step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.capture.steps import assert_same_gradients
from tests.fields import logged


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 128), nn.Linear(128, 32)
        self.calls, self.temperature, self.width = 0, 1.0, 32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.outer(torch.relu(self.inner(x.reshape(-1, self.width))))
        return torch.softmax(y / self.temperature, -1) * (1 + 0.1 * self.calls)


class Counting(nn.Module):
    """Counts its calls, which change what it computes; so does a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for block in self.blocks:
            x = x + block(x)
        return x


def _nothing(model: nn.Module, step: int) -> None:
    """What the model does by itself."""


def _cooler(model: nn.Module, step: int) -> None:
    """What a training loop does between steps."""
    for block in model.modules():
        if isinstance(block, Block):
            block.temperature = 1 / (1 + step)


@pytest.mark.parametrize("before", [_nothing, _cooler])
def test_numbers_are_those_of_plain_training_and_tracing_ends(
    before: Callable[[nn.Module, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain, x = Counting(), torch.randn(128, 32)
    model = copy.deepcopy(plain)
    measured = Checkpointable(copy.deepcopy(plain), fresh_grads=True)
    measured.measure(x)
    assert measured.budget is not None
    least, most = measured.budget.least_bytes(), measured.budget.peak_bytes(store_all(measured.budget.chain))
    planned = Checkpointable(model, mem_limit=(least + most) // 2, fresh_grads=True)
    for step in range(6):
        before(plain, step)
        before(model, step)
        if step == 3:
            caplog.clear()
        outputs = []
        for each, run in ((plain, plain), (model, planned)):
            each.zero_grad()
            outputs.append(run(x))
            outputs[-1].square().mean().backward()
        assert torch.equal(*outputs), step
        assert_same_gradients(model, plain)
        assert model.steps == plain.steps == step + 1
        assert [each.calls for each in model.blocks] == [step + 1] * 5
    assert not logged(caplog, "captured_again")
    assert planned.budget is not None
    assert planned.sequence != store_all(planned.budget.chain)  # something was made again


def test_a_count_takes_one_graph_more_however_long_training_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    for block in model.blocks:
        block.temperature = 2.0
    planned = Checkpointable(model, mem_limit="1GB")
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for _ in range(70):  # more than there may be graphs
            planned(torch.randn(8, 32)).sum().backward()
    assert len(logged(caplog, "captured_again")) <= 2
    assert model.steps == 70
