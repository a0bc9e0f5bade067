"""Small models, and training steps of them under `aot_eager`, whose operators run one by one and can be counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor_profiling import measured_peak
from rotor_py import memory_budget
from rotor_py.compile import partitioner
from rotor_py.compile.candidates import Candidate
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.partition import GraphCosts


class Loss(nn.Sequential):
    """A model with a loss inside the graph: the caller has nothing but a number."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value).pow(2).mean()


class Block(nn.Module):
    """A block of a Llama, with PyTorch's attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, width = value.shape
        heads = self.qkv(self.norms[0](value)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        value = value + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inside = self.norms[1](value)
        return value + self.down(F.silu(self.gate(inside)) * self.up(inside))


@dataclass
class Step:
    """A training step: its peak in bytes, parameters, buffers and inputs included, and what it leaves."""

    peak: int
    numbers: list[torch.Tensor]
    """The loss, gradients and buffers."""

    def equals(self, other: Step) -> bool:
        return len(self.numbers) == len(other.numbers) and all(map(torch.equal, self.numbers, other.numbers))


def compiled_step(made: Callable[[], nn.Module], value: torch.Tensor, budget: int | None = None) -> Step:
    """The second step of a new model that is compiled within `budget` bytes; without one, PyTorch partitions it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Loss(made())
    if budget is None:
        return take_step(model, torch.compile(model, backend="aot_eager"), value)
    with memory_budget(budget):
        run = torch.compile(model, backend="aot_eager")
    return take_step(model, run, value)


def take_step(model: nn.Module, run: Any, value: torch.Tensor) -> Step:
    run(value).backward()  # compiles
    model.zero_grad()
    torch.manual_seed(1)
    losses: list[torch.Tensor] = []

    def step() -> None:
        losses.append(run(value))
        losses[0].backward()

    peak = measured_peak(step, [*model.parameters(), *model.buffers(), value], torch.device("cpu"))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Step(peak, [losses[0].detach(), *gradients, *(each.clone() for each in model.buffers())])


@contextmanager
def seen_candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Candidate]]]:
    found: list[list[Candidate]] = []
    plain = partitioner.candidates

    def noted(*joint: Any, **options: Any) -> list[Candidate]:
        found.append(plain(*joint, **options))
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(partitioner, "candidates", noted)
        yield found


def noted_usual(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JointGraph, Candidate]]:
    found: list[tuple[JointGraph, Candidate]] = []
    honest = partitioner.by_torch

    def noted(joint: JointGraph, costs: GraphCosts, budgets: Sequence[float]) -> list[Candidate]:
        made = honest(joint, costs, budgets)
        found.append((joint, made[0]))
        return made

    monkeypatch.setattr(partitioner, "by_torch", noted)
    return found
