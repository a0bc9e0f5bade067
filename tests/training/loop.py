"""A training loop as people write it: AdamW, a learning rate that changes, gradients clipped, and a file to resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor_py import Checkpointable, store_all
from tests.checkpointable.steps import Tower, planned_at, square

F = nn.functional


class Mixer(Tower):
    """Written by hand, with a residual in every layer, BatchNorm and dropout: captured, since it is no chain."""

    def __init__(self, depth: int = 5, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__(width, depth, dropout)
        self.entry, self.head = nn.Linear(12, width), nn.Linear(width, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.entry(value)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            value = value + F.dropout(F.gelu(layer(norm(value))), self.dropout, self.training)
        return self.head(value)


def chain(depth: int = 5, width: int = 32, dropout: float = 0.2) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(12, width)]
    for _ in range(depth):
        layers += [nn.BatchNorm1d(width), nn.Sequential(nn.Linear(width, width), nn.GELU()), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def rows(step: int = 0, count: int = 64) -> torch.Tensor:
    """The batch of a step, which does not depend on the random stream."""
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(step))


def planned(model: nn.Module, sample: torch.Tensor | None = None, share: float = 0.0) -> Checkpointable:
    """`model`, planned for a limit `share` of the way from the least possible to storing all; some is recomputed."""
    found = planned_at(share, model, rows() if sample is None else sample)
    assert str(found.sequence) != str(store_all(found.budget.chain))
    return found


@dataclass
class Training:
    """A model in training, and all that a checkpoint file holds of it."""

    model: nn.Module
    loss: Callable[[Any], torch.Tensor] = square
    seed: int = 5
    done: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LRScheduler = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model(rows(self.done))).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.done += 1
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "done": self.done,
        }

    def save(self, path: Path) -> None:
        torch.save(self.state(), path)

    def resume(self, path: Path) -> Training:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.done = state["done"]
        return self

    def everything(self) -> dict[str, Any]:
        """Copies of the state and of the gradients, one entry per value."""
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return copy.deepcopy(flat({**self.state(), "gradients": gradients}))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists, by their path."""
    if isinstance(value, dict | list | tuple):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, each in named for key, leaf in flat(each, f"{path}/{name}").items()}
    return {path: value}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The paths at which two states differ in any bit."""
    wrong = sorted(found.keys() ^ expected.keys())
    for key in found.keys() & expected.keys():
        a, b = found[key], expected[key]
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a == b
        wrong += [] if same else [key]
    return wrong
