"""Models that write into tensors of their own, far from where these were made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from rotor_py import Checkpointable
from rotor_py.capture.graph.graph_nodes import written_by
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


@torch.library.custom_op("rotor_tests::scale_quietly", mutates_args={"value"})
def scale_quietly(value: torch.Tensor) -> None:
    value.mul_(2)


class Quiet(nn.Module):
    """Writes by an operator whose name does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value).sin()
            with torch.no_grad():
                noted = value.detach().clone()
                scale_quietly(noted)
            value = (value + noted).exp()
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


@pytest.mark.parametrize("make", [Table, Quiet, HandedOn])
def test_models_that_overwrite_what_was_made_earlier_train_with_the_same_numbers(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = make(), {"input" if make is HandedOn else "value": torch.randn(64, 16, 32)}
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=mean, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    assert len(planned.names) >= 4
    for limit in (least, (least + whole) // 2):
        planned.compute_sequence(limit)
        assert compare(planned, plain, inputs, mean) <= limit


@pytest.mark.parametrize(
    ("write", "overwritten"),
    [
        (lambda value: F.relu(value, True), ["value"]),
        (lambda value: F.relu(value, False), []),
        (lambda value: value & value, []),
        (lambda value: F.dropout(value, 0.1, True, True), ["value"]),
        (lambda value: F.hardtanh(value, inplace=True), ["value"]),
        (lambda value: torch._foreach_add_([value.neg(), value], 1), ["neg", "value"]),
        (lambda value: torch.add(torch.zeros(1), 1, out=value), ["value"]),
    ],
)
def test_what_an_operator_writes_into_shows_however_it_is_told_to(
    write: Callable[[torch.Tensor], Any], overwritten: list[str]
) -> None:
    graph = fx.symbolic_trace(write).graph
    (*_, last, _) = graph.nodes
    assert [node.name for node in written_by(last)] == overwritten
