"""To code that inspects or calls a model, a `Checkpointable` is the model: class, signature, forward, methods."""

import copy
import inspect
import pickle
from types import MethodType

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from tests.checkpointable.steps import Tower, planned_at, same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


class Scaled(nn.Module):
    """A model with a signature of its own, and no `**kwargs`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.last(self.first(value).tanh() * scale)


def test_it_has_the_class_of_the_model_and_its_own_and_the_signature_of_the_models_forward() -> None:
    planned = Checkpointable(Scaled())
    assert isinstance(planned, Scaled)
    assert isinstance(planned, Checkpointable)
    assert (planned.__class__, type(planned)) == (Scaled, Checkpointable)
    assert not isinstance(planned, nn.Sequential)
    assert inspect.signature(planned.forward) == inspect.signature(Scaled().forward)
    assert list(inspect.signature(planned.__class__.forward).parameters) == ["self", "value", "scale"]
    assert inspect.signature(Checkpointable(nn.Sequential()).forward) == inspect.signature(nn.Sequential().forward)
    for name in ("budget", "captured", "chain", "device", "functions", "inspection_values", "names"):
        with pytest.raises(AttributeError, match=name):  # what only the planner knows cannot be set
            setattr(planned, name, None)
        assert name not in vars(planned.model)


def test_a_copy_is_a_checkpointable_of_the_same_model_and_so_is_one_of_another_class() -> None:
    class Shouting(Scaled):
        def shout(self) -> str:
            return "ah"

    planned = Checkpointable(Scaled(), mem_limit="1GB")
    for twin in (copy.deepcopy(planned), copy.copy(planned), pickle.loads(pickle.dumps(planned))):
        assert (type(twin), twin.__class__) == (Checkpointable, Scaled)
        assert twin.mem_limit == "1GB"
    planned.__class__ = Shouting
    assert (type(planned), type(planned.model)) == (Checkpointable, Shouting)
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


class WithLoss(Tower):
    """As a LightningModule, or a model with a `compute_loss`, is written."""

    _calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) / self.scale

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


def test_a_method_that_calls_self_follows_the_plan_with_the_same_numbers_and_attributes_are_the_models() -> None:
    model, batch = Derived(64, 6), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    planned = planned_at(0.3, model, batch, fresh_grads=True)
    for network in (planned, plain):
        for _ in range(2):
            network.zero_grad()
            network.training_step(batch).backward()
    assert recomputes(planned.sequence)
    assert same_gradients(planned, plain)
    assert planned._calls == model._calls == plain._calls == 2
    planned._calls = 100
    assert model._calls == 100
    assert planned.scale == 4.0
    del planned._calls
    assert "_calls" not in vars(model)


def test_in_eval_mode_and_without_gradients_methods_are_the_models_own() -> None:
    planned = Checkpointable(WithLoss(64), mem_limit="1GB")
    assert planned.training_step.__self__ is planned
    planned.predict(torch.randn(8, 64))
    with torch.no_grad():
        assert planned.training_step.__self__ is planned.model
    planned.eval()
    assert planned.training_step.__self__ is planned.model
    assert planned.sequence is None
