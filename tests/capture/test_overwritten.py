"""Models that write into tensors of their own, far from where these were made."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from tests.capture.steps import adamw, compare, limits


class Table(nn.Module):
    """A table made without gradients, and filled with what is known to carry none only by its mode (Pegasus-X)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layers[0](value)
        with torch.no_grad():
            table = torch.zeros(16, 32)
            table[:8] = torch.arange(32).type_as(value).sin()
            table[8:] = torch.arange(32).type_as(value).cos()
        for layer in self.layers[1:]:
            value = layer(value + table).tanh().sin()
        return value


class Beside(nn.Module):
    """Hands on its input, and a bias beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return value, self.weight.tanh().exp()


class Added(nn.Module):
    """Overwrites what neither it nor the layer before it has made."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value, bias = pair
        value += bias
        return value.softmax(-1).sin()


class HandedOn(nn.Sequential):
    """Scores that are overwritten after a bias has been made (LongT5)."""

    def __init__(self) -> None:
        super().__init__(*[make() for _ in range(4) for make in (lambda: nn.Linear(32, 32), Beside, Added)])


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("make", [Table, HandedOn])
def test_models_that_overwrite_what_was_made_earlier_train_with_the_same_numbers(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = make(), {"value" if make is Table else "input": torch.randn(64, 16, 32)}
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=mean, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    assert len(planned.names) >= 4
    for limit in (least, (least + whole) // 2):
        planned.compute_sequence(limit)
        assert compare(planned, plain, inputs, mean) <= limit
