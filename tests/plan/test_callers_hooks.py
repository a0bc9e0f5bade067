"""Models that are measured where the caller has hooks on saved tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rotor_py import Checkpointable
from rotor_py.plan.observers.outer_checkpoint_regions import outer_hooks_aside


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.dropout(layer(x).tanh(), 0.1, True)
        return x


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)))


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    checkpoint(model, batch, use_reentrant=False).square().mean().backward()
    return [batch.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("make", [chain, Captured])
def test_a_model_is_planned_inside_of_a_region_that_is_run_again(make: type[nn.Module]) -> None:
    plain = make()
    planned = Checkpointable(copy.deepcopy(plain), mem_limit="1GB")
    for _ in range(2):
        batches = [torch.ones(64, 32, requires_grad=True) for _ in range(2)]
        for found, expected in zip(gradients(planned, batches[0]), gradients(plain, batches[1]), strict=True):
            assert torch.equal(found, expected)


def test_hooks_see_nothing_of_planning_and_all_that_comes_after_it() -> None:
    seen: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: seen.append(name) or tensor, lambda tensor: tensor)

    value = torch.ones(2, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with outer_hooks_aside():
            value.exp()
        assert seen == []
        value.exp()
        with pytest.raises(ZeroDivisionError), outer_hooks_aside():
            1 / 0  # noqa: B018  # an error in the middle of planning
        value.exp()
    assert seen == ["inner", "inner"]
    with hooks("outer"):
        value.exp()
    assert seen == ["inner", "inner", "outer"]
