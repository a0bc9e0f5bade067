"""Small chains, one for each thing that a replay could get wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from tests.checkpointable.steps import Applies


def image(channels: int = 3, size: int = 8, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout2d(0.3)),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6, momentum=None),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(24, 5),
    )


def dropouts() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5), nn.RReLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.AlphaDropout(0.2), nn.Linear(7, 3))


class Drift(nn.Module):
    """Its output depends on a buffer that every forward changes, in place or by putting another in its place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.weight = in_place, nn.Parameter(torch.randn(6))
        self.register_buffer("mean", torch.ones(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = value * self.weight * self.mean.clone()
        if self.training:
            moved = 0.5 * self.mean + value.detach().mean(0)
            self.mean = self.mean.copy_(moved) if self.in_place else moved
        return output


class Derived(nn.BatchNorm1d):
    """Not one that is recognised: its statistics are buffers like any other."""


def moving_buffers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 6),
        Drift(in_place=True),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        Drift(in_place=False),
        Derived(6),
        nn.Linear(6, 2),
    )


class Twice(nn.Linear):
    """Tuples in, tuples out, with a tensor that has no gradient."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        left, right, mask = pair
        return super().forward(left) * mask, right + left.sin(), mask


class Start(nn.Linear):
    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = super().forward(value).chunk(2, dim=1)
        return left.contiguous(), right.contiguous(), (value > 0).float()


class FromDict(nn.Linear):
    def forward(self, named: dict[str, Any]) -> torch.Tensor:
        return named["scale"] * super().forward(named["sum"]) + named["parts"][0]


def structures() -> nn.Sequential:
    to_dict = Applies(function=lambda pair: {"sum": pair[0] + pair[1], "parts": [pair[0].tanh()], "scale": 2})
    return nn.Sequential(Start(5, 10), Twice(5, 5), Twice(5, 5), to_dict, FromDict(5, 5), nn.Dropout(0.1))


Last = partial(Applies, function=itemgetter(0))


def recurrent() -> nn.Sequential:
    layers = nn.GRU(4, 6, batch_first=True), Last(), nn.LSTM(6, 3, num_layers=2, dropout=0.4), Last()
    return nn.Sequential(*layers, nn.Linear(3, 3))


def shared() -> nn.Sequential:
    """One layer as two stages, and one weight in two layers."""
    layer, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.bias = layer.bias
    return nn.Sequential(layer, nn.Tanh(), other, nn.Dropout(0.2), layer, nn.Tanh(), nn.Linear(6, 6))


def frozen() -> nn.Sequential:
    """A frozen beginning, and a frozen stage and a frozen weight in the middle."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *(nn.Linear(6, 6) for _ in range(4)), nn.BatchNorm1d(6))
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


def transformer() -> nn.Sequential:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Embedding(20, 8), *layers, nn.LayerNorm(8), nn.Linear(8, 20))


def views() -> nn.Sequential:
    """Stages that return views, layers that write into them, and outputs that are no stage's own memory."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.ReLU(inplace=True), nn.Linear(9, 6), nn.Flatten(), nn.Hardswish(True),
        nn.Identity(), nn.Linear(24, 4), nn.Unflatten(1, (2, 2)),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A chain, an input for it, and the autocast that its forward runs in."""

    model: Callable[[], nn.Sequential]
    sample: Callable[[], Any]
    autocast: torch.autocast | None = None


BF16 = torch.autocast("cpu", torch.bfloat16)
UNCACHED = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

ZOO = {
    "convolutions": Case(convolutions, image),
    "convolutions, input with gradient": Case(convolutions, lambda: image().requires_grad_()),
    "convolutions, channels last": Case(convolutions, lambda: image().to(memory_format=torch.channels_last)),
    "convolutions, autocast": Case(convolutions, image, autocast=BF16),
    "dropouts": Case(dropouts, lambda: torch.randn(5, 7)),
    "dropouts, autocast": Case(dropouts, lambda: torch.randn(5, 7).requires_grad_(), autocast=BF16),
    "moving buffers": Case(moving_buffers, lambda: torch.randn(9, 6)),
    "structures": Case(structures, lambda: torch.randn(4, 5)),
    "structures, autocast": Case(structures, lambda: torch.randn(4, 5), autocast=BF16),
    "recurrent": Case(recurrent, lambda: torch.randn(3, 5, 4)),
    "shared": Case(shared, lambda: torch.randn(3, 6)),
    "shared, autocast": Case(shared, lambda: torch.randn(3, 6), autocast=UNCACHED),
    "frozen": Case(frozen, lambda: torch.randn(5, 6)),
    "frozen, input with gradient": Case(frozen, lambda: torch.randn(5, 6).requires_grad_()),
    "transformer": Case(transformer, lambda: torch.randint(20, (2, 7))),
    "transformer, autocast": Case(transformer, lambda: torch.randint(20, (2, 7)), autocast=BF16),
    "views": Case(views, lambda: image(size=5)),
}
