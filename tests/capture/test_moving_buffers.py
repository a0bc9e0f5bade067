"""Buffers that the forward of a captured model moves: read after that, by other stages, or put in another's place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor_py import Checkpointable
from tests.capture.steps import assert_same_gradients, limits

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(F.gelu(self.wide(value)))


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


class Moving(nn.Module):
    """Blocks, and a mean that moves with them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: torch.Tensor

    def move(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.mean.lerp_(value.detach().mean(0), 0.1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            self.move(value)
            value = block(value - self.mean)
        return value


class ReadBefore(Moving):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value - self.mean)
            self.move(value)
        return value


class Statistics(Moving):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert isinstance(self.norm.running_mean, torch.Tensor)
            value = block(self.norm(value)) - self.norm.running_mean
        return value


class Into(Moving):
    def move(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            torch.mul(value.detach()[0], 0.1, out=self.mean)


class Replaced(Moving):
    def move(self, value: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + value.detach().mean(0)


class Outside(Moving):
    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def count(self) -> None:
        self.mean.add_(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count()
        return super().forward(value)


def shares(model: nn.Module, value: torch.Tensor, count: int) -> list[int]:
    """Limits from the least that a plan needs to all that is stored."""
    planned = Checkpointable(model, value, "1GB", fresh_grads=True, cache=False, forwards_in_flight=count)
    least, most = limits(planned)
    return [least, int(least + 0.3 * (most - least)), most]


MODELS = [Moving, ReadBefore, Statistics, Into, Replaced, Outside]
IN_FLIGHT = [ReadBefore, Replaced]
"""With two forwards: a buffer that is written to, and one that is another tensor afterwards."""


@pytest.mark.parametrize(
    ("make", "count"),
    [
        *(pytest.param(make, 1, id=f"{make.__name__}-one forward") for make in MODELS),
        *(
            pytest.param(
                make, 2, id=f"{make.__name__}-two in flight", marks=() if make in IN_FLIGHT else pytest.mark.slow
            )
            for make in MODELS
        ),
    ],
)
def test_numbers_are_those_of_plain_training(make: Callable[[], nn.Module], count: int) -> None:
    torch.manual_seed(0)
    model, values = make().train(), [torch.randn(16, WIDTH) for _ in range(count)]
    for limit in shares(copy.deepcopy(model), values[0], count):
        plain, trained = copy.deepcopy(model), copy.deepcopy(model)
        options = {"fresh_grads": True, "cache": False, "forwards_in_flight": count, "watch": False}
        planned = Checkpointable(trained, values[0], limit, **options)
        assert all(map(torch.equal, trained.buffers(), model.buffers())), "measuring moves nothing"
        for _ in range(2):
            for network in (plain, planned):
                network.zero_grad()
                torch.stack([network(value).square().mean() for value in values]).sum().backward()
            assert_same_gradients(trained, plain)


def test_measuring_leaves_a_generator_of_the_model_as_it_was() -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.Generator().manual_seed(1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value + torch.rand(value.shape, generator=self.noise))

    model = Blocks(Noisy(), Block(), Block())
    noisy = model.blocks[0]
    assert isinstance(noisy, Noisy)
    before = noisy.noise.get_state()
    Checkpointable(model, torch.randn(16, WIDTH), "1GB", cache=False)
    assert torch.equal(noisy.noise.get_state(), before)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_layers_that_are_traced_alike_keep_their_own_parameters() -> None:
    """Their graphs are made while training, since each has another number in it."""

    class Scaled(Block):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            scale = float(np.random.rand())  # as models do
            return value + scale * super().forward(value)

    torch.manual_seed(0)
    model, value = Blocks(Scaled(), Scaled()), torch.randn(16, WIDTH)
    for limit in shares(copy.deepcopy(model), value, 1):
        plain, trained = copy.deepcopy(model), copy.deepcopy(model)
        planned = Checkpointable(trained, value, limit, fresh_grads=True, cache=False, watch=False)
        for network in (plain, planned):
            np.random.seed(0)
            network(value).square().mean().backward()
        assert_same_gradients(trained, plain)
