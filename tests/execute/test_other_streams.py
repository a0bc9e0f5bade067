"""Stages of chains that draw from random streams other than PyTorch's: what runs again draws the same."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.stage.replayed_routing import streams_of
from rotor_solver import store_all

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(torch.tanh(self.wide(value)))


class Skipped(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value if random.random() < 0.5 else super().forward(value)


class Scaled(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return float(np.random.rand()) * super().forward(value)


class Stream(torch.Generator):
    def __deepcopy__(self, memory: dict[int, Any]) -> torch.Generator:
        return Stream().set_state(self.get_state())


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Stream().manual_seed(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * torch.rand(value.shape, generator=self.noise))


def states(model: nn.Module) -> list[Any]:
    return [stream.state() for stream in streams_of(model)]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("make", [Skipped, Scaled, Noisy])
def test_numbers_and_streams_are_those_of_plain_training(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    seed(0)
    model, value = nn.Sequential(*(make() for _ in range(4))), torch.randn(64, WIDTH)
    plain, trained = copy.deepcopy(model), copy.deepcopy(model)
    before = states(trained)
    planned = Checkpointable(trained, value, "1GB", fresh_grads=True, cache=False, watch=False)
    assert states(trained) == before, "measuring draws nothing"
    found = planned.budget
    least, most = found.least_bytes(), found.peak_bytes(store_all(found.chain))
    for step in range(4):
        planned.compute_sequence(int(least + step * 0.1 * (most - least)))
        after = []
        for network, own in ((plain, plain), (planned, trained)):
            network.zero_grad()
            seed(step)
            output = network(value)
            if output.requires_grad:  # not if all are skipped
                output.square().mean().backward()
            after.append(states(own))
        assert after[0] == after[1]
        for mine, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad)
