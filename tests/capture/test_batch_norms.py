"""Batch norms in models that are captured: their statistics move once a step, and the copies of them count."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.capture.steps import assert_same_gradients
from tests.checkpointable.steps import between, square, step_peak


class Normalized(nn.Module):
    """Equal blocks with skip connections: no chain, so the graph is captured."""

    def __init__(self, momentum: float | None = 0.1, blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, momentum=momentum) for _ in range(blocks))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            value = value + norm(layer(value)).relu()
        return value


class OwnNorm(nn.BatchNorm1d):
    """Of a type of its own: nobody knows that it does what other batch norms do."""


def chain() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(32, 32, bias=False), OwnNorm(32)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(32, 4))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_copies_of_statistics_of_equal_stages_are_inside_the_limit(share: float) -> None:
    torch.manual_seed(0)
    planned, batch = Checkpointable(Normalized(blocks=16), loss=square), torch.randn(8, 32)
    planned.measure(batch)
    limit = between(planned, share)
    planned.compute_sequence(limit)
    for _ in range(2):
        peak = step_peak(planned, batch)
    assert peak <= limit
    assert planned.sequence != store_all(planned.build_chain())


@pytest.mark.parametrize("make", [Normalized, lambda: Normalized(momentum=None), chain])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_statistics_that_did_not_move_when_they_were_measured_move_once(make, share: float) -> None:
    torch.manual_seed(0)
    plain = make()
    planned = Checkpointable(deepcopy(plain))
    planned.measure(torch.zeros(64, 32))  # whose mean is what the running mean begins with
    planned.compute_sequence(between(planned, share))
    for _ in range(3):
        batch = torch.randn(64, 32)
        for network in (plain, planned):
            network.zero_grad()
            square(network(batch)).backward()
        assert_same_gradients(planned, plain)
