"""Layers that fail when told to, in a chain and in a captured model; and all that a failure could leave behind."""

import copy
from typing import Any

import torch
from torch import nn

from rotor_py import Checkpointable
from tests.checkpointable.steps import Tower, square
from tests.training.loop import rows

F = nn.functional


class Trip:
    """Counts what is run, and raises `error` at the call number `at`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, at: int = 0, error: BaseException | None = None) -> None:
        self.calls, self.at, self.error = 0, at, error

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


FORWARD, BACKWARD = Trip(), Trip()
LINE = "value = tripping(value)"


@torch.library.custom_op("rotor_tests::tripping", mutates_args=())
def tripping(value: torch.Tensor) -> torch.Tensor:
    """A copy, as one operator, so that captured graphs have it too."""
    FORWARD()
    return value.clone()


@tripping.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def _gradient(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    BACKWARD()
    return gradient.clone()


tripping.register_autograd(_gradient)


class Tripping(nn.Module):
    """Fails between its parameter, for which an alias may stand in, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = tripping(value)
        return value * self.scale


class Caught(Tower):
    """Captured. The layer that fails does so inside an autocast region."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width, 4, 0.2)
        self.entry, self.norm = nn.Linear(12, width), nn.BatchNorm1d(width)
        self.inner, self.trip = nn.Linear(width, width), Tripping()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = F.dropout(self.norm(self.entry(value)), 0.2, self.training)
        with torch.autocast("cpu", torch.bfloat16):
            value = self.trip(F.gelu(self.inner(value)))
        return super().forward(value.float())


def chain(width: int = 32) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(12, width), nn.BatchNorm1d(width), nn.Dropout(0.2)]
    layers += [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None), nn.GELU()), Tripping()]
    layers += [each for _ in range(3) for each in (nn.Linear(width, width), nn.Dropout(0.2), nn.GELU())]
    return nn.Sequential(*layers)


def train_step(network: nn.Module, seed: int = 3) -> dict[str, Any]:
    """Run one step; copies of the gradients, buffers and random state after it."""
    network.zero_grad()
    torch.manual_seed(seed)
    square(network(rows())).backward()
    gradients = {f"gradient of {name}": p.grad for name, p in network.named_parameters()}
    return copy.deepcopy({**gradients, **left_behind(network)})


def left_behind(network: nn.Module) -> dict[str, Any]:
    """What a step may leave changed besides gradients, and the modes that it has to leave alone."""
    model = network.model if isinstance(network, Checkpointable) else network
    modes = {
        f"mode of {name}": (module.training, getattr(module, "track_running_stats", None))
        for name, module in model.named_modules()
    }
    process = {
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random": torch.get_rng_state(),
    }
    return copy.deepcopy({**dict(model.named_buffers()), **modes, **process})


def slots(model: nn.Module) -> list[tuple[str, int, type]]:
    """Which tensor objects the model has, in which place."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(tensor), type(tensor)) for name, tensor in named]
