"""Methods of a model that call the model itself: while they train, they follow the plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from tests.checkpointable.steps import between
from tests.execute.training import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


class WithLoss(nn.Module):
    """As a LightningModule, or a model with a `compute_loss`, is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self._calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + torch.tanh(layer(value)) / self.scale
        return value

    @property
    def scale(self) -> float:
        return 2.0 if self._calls < 100 else 4.0

    def compute_loss(self, value: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return self(value).square().mean()

    def training_step(self, value: torch.Tensor) -> torch.Tensor:
        return self.compute_loss(value)

    def predict(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self(value)


class Derived(WithLoss):
    def training_step(self, value: torch.Tensor) -> torch.Tensor:
        return super().training_step(value) * 2


def gradients(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.grad) for name, p in model.named_parameters()]


@pytest.mark.parametrize("kind", [WithLoss, Derived])
def test_a_method_that_calls_self_follows_the_plan_with_the_same_numbers(kind: type[WithLoss]) -> None:
    torch.manual_seed(0)
    model, batch = kind(), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=lambda output: output.square().mean(), fresh_grads=True)
    planned.measure(batch)
    planned.compute_sequence(between(planned, 0.3))
    for network in (planned, plain):
        for _ in range(2):
            network.zero_grad()
            network.training_step(batch).backward()
    assert recomputes(planned.sequence)
    assert_same(gradients(planned), gradients(plain))
    assert planned._calls == model._calls == plain._calls == 2


def test_private_attributes_are_those_of_the_model() -> None:
    model = WithLoss()
    planned = Checkpointable(model, mem_limit="1GB")
    planned._calls = 100
    assert model._calls == 100
    assert planned.scale == 4.0
    del planned._calls
    assert not hasattr(model, "_calls")


def test_in_eval_mode_and_without_gradients_methods_are_the_models_own() -> None:
    planned = Checkpointable(WithLoss(), mem_limit="1GB")
    assert planned.training_step.__self__ is planned
    planned.predict(torch.randn(8, 64))
    with torch.no_grad():
        assert planned.training_step.__self__ is planned.model
    planned.eval()
    assert planned.training_step.__self__ is planned.model
    assert planned.sequence is None
