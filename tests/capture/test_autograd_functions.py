"""A captured model that has functions with backwards of its own keeps to its plan, and needs no garbage collector."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from tests.checkpointable.steps import CPU, between
from tests.execute.training import assert_same, steps

WIDTH = 64


class Squash(torch.autograd.Function):
    """Saves inputs, an output, and a tensor of its own that is no output; another output has no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: torch.Tensor, times: float) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.tanh(value * factor * times)
        ctx.save_for_backward(value, factor, made)
        ctx.slope = 1 - made * made
        ctx.times = times
        count = torch.ones((), dtype=torch.int64)
        ctx.mark_non_differentiable(count)
        return made, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value, factor, made = ctx.saved_tensors
        inner = gradients[0] * ctx.slope * ctx.times
        return inner * factor + 0 * made, (inner * value).sum(0), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.ones(4 * WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made, _ = Squash.apply(self.inner(value), self.factor, 0.5)  # type: ignore[no-untyped-call]  # torch's
        return value + self.outer(made)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # TorchDynamo does, for a moment
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_step_keeps_to_the_plan(share: float, without_collection: None) -> None:
    torch.manual_seed(0)
    model, value = Model(), torch.randn(256, WIDTH)
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=torch.sum, fresh_grads=True, watch=False)
    planned.measure(value)
    assert planned.budget is not None
    planned.compute_sequence(between(planned, share))

    def step() -> None:
        planned(value).sum().backward()

    step()
    planned.zero_grad()
    assert planned.sequence is not None
    peak = measured_peak(step, [*planned.parameters(), value], CPU)
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert 0.98 * predicted <= peak <= predicted
    planned.zero_grad()
    assert_same(steps(planned, planned, value), steps(plain, plain, value))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_gradients_of_gradients_are_refused() -> None:
    planned, value = Checkpointable(Model(), mem_limit="1GB"), torch.randn(8, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(planned(value).sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.square().sum().backward()
