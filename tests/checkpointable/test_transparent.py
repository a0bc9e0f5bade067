"""To code that inspects or calls a model, a `Checkpointable` is the model: class, signature, forward, methods."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from tests.checkpointable.steps import between, same_gradients
from tests.execute.training import assert_same, steps

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


class Scaled(nn.Module):
    """A model with a signature of its own, and no `**kwargs`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.last(self.first(value).tanh() * scale)


def test_it_is_an_instance_of_the_models_class_and_of_its_own() -> None:
    planned = Checkpointable(Scaled())
    assert isinstance(planned, Scaled)
    assert isinstance(planned, Checkpointable)
    assert planned.__class__ is Scaled
    assert type(planned) is Checkpointable
    assert not isinstance(planned, nn.Sequential)


def test_forward_has_the_signature_of_the_models() -> None:
    planned = Checkpointable(Scaled())
    assert inspect.signature(planned.forward) == inspect.signature(Scaled().forward)
    assert list(inspect.signature(planned.__class__.forward).parameters) == ["self", "value", "scale"]
    assert inspect.signature(Checkpointable(nn.Sequential()).forward) == inspect.signature(nn.Sequential().forward)


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_is_a_checkpointable_of_the_same_model(again: Any) -> None:
    twin = again(Checkpointable(Scaled(), mem_limit="1GB"))
    assert type(twin) is Checkpointable
    assert twin.__class__ is Scaled
    assert twin.mem_limit == "1GB"


def test_a_class_that_is_put_on_it_is_put_on_the_model() -> None:
    class Shouting(Scaled):
        def shout(self) -> str:
            return "ah"

    planned = Checkpointable(Scaled())
    planned.__class__ = Shouting
    assert type(planned) is Checkpointable
    assert type(planned.model) is Shouting
    assert planned.shout() == "ah"


def test_a_forward_that_is_put_on_it_is_called_and_may_call_the_one_before() -> None:
    """As Accelerate does for mixed precision."""
    model = Scaled()
    planned = Checkpointable(model, mem_limit="1GB")
    before = planned.forward.__func__
    planned.forward = MethodType(lambda self, *args: before(self, *args).double(), planned)
    batch = torch.randn(2, 6)
    for mode in (True, False):
        planned.train(mode)
        assert planned(batch).dtype == torch.float64
        assert model(batch).dtype == torch.float32
    assert planned.sequence is not None


def test_a_parametrized_model_trains_as_ever() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    parametrizations.orthogonal(network[0])
    plain = copy.deepcopy(network)
    planned = Checkpointable(network, mem_limit="1GB")
    batch = torch.randn(4, 6)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))


def test_what_only_the_planner_knows_cannot_be_set() -> None:
    planned = Checkpointable(Scaled())
    for name in ("budget", "captured", "chain", "device", "functions", "inspection_values", "names"):
        with pytest.raises(AttributeError, match=name):
            setattr(planned, name, None)
        assert name not in vars(planned.model)


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


def test_a_method_that_calls_self_follows_the_plan_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    model, batch = Derived(), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=lambda output: output.square().mean(), fresh_grads=True)
    planned.measure(batch)
    planned.compute_sequence(between(planned, 0.3))
    for network in (planned, plain):
        for _ in range(2):
            network.zero_grad()
            network.training_step(batch).backward()
    assert recomputes(planned.sequence)
    assert same_gradients(planned, plain)
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
