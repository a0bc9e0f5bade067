"""A layer that uses the parameter of another one without having it would get no gradient for it where it runs again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from tests.fields import raises

ROWS = torch.randn(512, 8)


class InAList(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.others[0].weight)


class AsASubmodule(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.other.weight)


class Detached(InAList):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.others[0].weight.detach())


def chain(user: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    return nn.Sequential(first, nn.Tanh(), user(first), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), user(first))


def least(model: nn.Module) -> Checkpointable:
    planned = Checkpointable(model, loss=torch.sum, fresh_grads=True, cache=False)
    planned.measure(ROWS)
    assert planned.budget is not None
    planned.compute_sequence(planned.budget.least_bytes())
    return planned


def test_it_is_refused_and_measuring_leaves_no_gradient() -> None:
    model = chain(InAList)
    with raises(UnsupportedModelError, "foreign_parameter", name="2"):
        least(model)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("user", [AsASubmodule, Detached])
def test_what_has_it_or_wants_no_gradient_is_run_again_with_the_same_numbers(
    user: Callable[[nn.Linear], nn.Module],
) -> None:
    plain, model = chain(user), chain(user)
    plain(ROWS).sum().backward()
    planned = least(model)
    assert "CF_" in str(planned.sequence)
    planned(ROWS).sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_a_tensor_of_the_users_that_needs_a_gradient_is_no_other() -> None:
    scale = torch.ones(8, requires_grad=True)

    class Scaled(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * scale

    with raises(UnsupportedModelError, "foreign_parameter"):
        least(nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)))
    assert scale.grad is None
