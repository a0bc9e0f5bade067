"""Whole training steps of networks whose activations are large enough for memory to be about them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable
from rotor_solver import store_all

CPU = torch.device("cpu")


def blocks(count: int = 8, width: int = 48) -> nn.Sequential:
    """Convolutions of one size; a stage is a layer or a block."""
    first: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for index in range(count):
        inner = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        first.append(Residual(*inner) if index % 2 else nn.Sequential(*inner))
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Residual(nn.Sequential):
    """One stage of several layers."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + super().forward(value)


class Stack(nn.Module):
    """Layers one after the other. No chain: TorchDynamo captures it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Made(nn.Module):
    """A module that has what it is given, under these names: layers, parameters, numbers."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Applies(Made):
    """Hands its input to a function."""

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Tower(nn.Module):
    """Linear layers with skips around them. No chain: TorchDynamo captures it."""

    def __init__(self, width: int, depth: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)), dropout

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
            if self.dropout:
                value = nn.functional.dropout(value, self.dropout, self.training)
        return value


def images(batch: int = 4, size: int = 24) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def square(output: Any) -> torch.Tensor:
    return sum((t.float().square().mean() for t in tensors_in(output)), torch.zeros(()))


def step_peak(planned: nn.Module, batch: Any, optimizer: Any = None, *, fresh_grads=False, loss: Any = square) -> int:
    """The measured peak of a whole step: its forward, loss, backward and optimizer step."""
    if fresh_grads:
        planned.zero_grad(set_to_none=True)
    state = [] if optimizer is None else tensors_in([list(entry.values()) for entry in optimizer.state.values()])
    gradients = [p.grad for p in planned.parameters() if p.grad is not None]
    present = [*planned.parameters(), *planned.buffers(), *gradients, *state, *tensors_in(batch)]

    def step() -> None:
        output = planned(**batch) if isinstance(batch, dict) else planned(batch)
        loss(output).backward()
        if optimizer is not None:
            optimizer.step()

    return measured_peak(step, present, CPU)


def between(planned: Checkpointable, share: float) -> int:
    """A limit `share` of the way from the least possible to storing everything."""
    least, full = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    return int(least + share * (full - least))


def planned_at(share: float, model: nn.Module | None = None, batch: Any = None, **options: Any) -> Checkpointable:
    """A model planned for a limit `share` of the way; some blocks, if none is given."""
    torch.manual_seed(0)
    planned = Checkpointable(model or blocks(4, 16), **{"loss": square, **options})
    planned.measure(images() if batch is None else batch)
    planned.compute_sequence(between(planned, share))
    return planned


def same_gradients(network: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(network.parameters(), plain.parameters(), strict=True)
    return all(a.grad is b.grad or torch.equal(a.grad, b.grad) for a, b in pairs)


def said_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rotor_py"]


@contextmanager
def without_collector() -> Iterator[None]:
    """Reference counts alone let everything go."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
