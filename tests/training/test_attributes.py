"""Layers that keep something in plain attributes train as they do without a plan."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.validate.verification import verify
from tests.checkpointable.steps import between, same_gradients, square
from tests.fields import logged


class _Layer(nn.Module):
    """Depends on how often it was called, and on what it made of its last batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)
        self.kind = kind
        self.calls, self.rate = 0, 1.0
        self.seen: list[float] = []
        self.state: torch.Tensor | None = None
        self.total = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(torch.tanh(self.inner(x)))
        match self.kind:
            case "count":
                self.calls += 1
                self.rate *= 0.9
                return y * (self.calls + self.rate)
            case "list":
                self.seen.append(float(len(self.seen)))
                return y * sum(self.seen)
            case "state":
                y = y if self.state is None else y + self.state
                self.state = y.detach().mean(0)
                return y
            case _:
                self.total += y.detach().mean()
                return y * self.total


def _halfway(model: nn.Module, x: torch.Tensor, **options: Any) -> Checkpointable:
    """The model with a limit for which some of its layers are run again."""
    measured = Checkpointable(copy.deepcopy(model), loss=square, fresh_grads=True, cache=False)
    measured.measure(x)
    limit = between(measured, 0.5)
    return Checkpointable(model, mem_limit=limit, loss=square, fresh_grads=True, cache=False, **options)


def _attributes(model: nn.Module) -> list[Any]:
    layers = [each for each in model.modules() if isinstance(each, _Layer)]
    tensors = [[None if t is None else t.tolist() for t in (each.state, each.total)] for each in layers]
    return [tensors, [(each.calls, each.rate, list(each.seen)) for each in layers]]


@pytest.mark.parametrize(
    ("kind", "options"), [("count", {}), ("list", {}), ("state", {}), ("sum", {}), ("state", {"on_oom": "replan"})]
)
def test_numbers_and_attributes_are_those_of_plain_training(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(_Layer(kind) for _ in range(6)))
    model = copy.deepcopy(plain)
    x = torch.randn(64, 16)
    planned = _halfway(model, x, **options)
    for step in range(4):
        outputs = []
        for each in (plain, planned):
            each.zero_grad()
            outputs.append(each(x))
            square(outputs[-1]).backward()
        assert torch.equal(*outputs), step
        assert same_gradients(model, plain), step
        assert _attributes(model) == _attributes(plain), step
    assert len(list(planned.sequence)) > 2 * 6 + 1  # something was run again


def test_layers_that_count_are_of_one_kind_and_verification_moves_no_attribute() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(_Layer("count") for _ in range(6))), torch.randn(64, 16)
    planned = _halfway(model, x)
    planned(x).sum().backward()
    assert len(set(planned.report().measurement.stages[1:-1])) == 1
    before = _attributes(model)
    (found,) = verify(planned, torch.randn(64, 16), loss=square)
    assert found.max_grad_difference == 0
    assert _attributes(model) == before


class _Balanced(nn.Module):
    """Leaves a loss of its own in an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.balance = y.square().mean()
        return torch.relu(y)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_gradient_that_leaves_by_an_attribute_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(_Balanced(), _Balanced(), nn.utils.weight_norm(nn.Linear(16, 16)))
    with caplog.at_level(logging.WARNING, "rotor_py"):
        Checkpointable(model, loss=square, cache=False).measure(torch.randn(8, 16))
    records = logged(caplog, "kept_in_attribute", attribute="balance")
    assert len(records) == 2  # one for each kind of stage: the input of the first gets no gradient
