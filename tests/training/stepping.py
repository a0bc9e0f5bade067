"""Training with `step_in_backward` beside plain training: the same numbers, and the memory of both."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor_py import Checkpointable
from tests.checkpointable.steps import square, step_peak
from tests.training.loop import differences, flat

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """A part of a language model, with dropout."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(value)))))


class Language(nn.Module):
    """No chain, so it is captured; its embedding is its head, too, if it is `tied`."""

    def __init__(self, *, tied: bool, blocks: int = 4, width: int = 48, words: int = 120) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value = self.embedding(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def chain(count: int = 6, width: int = 96) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)])


def tied(words: int = 120, width: int = 48) -> nn.Sequential:
    made = nn.Sequential(nn.Embedding(words, width), *chain(4, width), nn.Linear(width, words, bias=False))
    made[-1].weight = made[0].weight
    return made


def words(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(0, 120, (4, 16)) for _ in range(count)]


def vectors(count: int = 3, width: int = 96) -> list[torch.Tensor]:
    return [torch.randn(64, width) for _ in range(count)]


def train(network: nn.Module, optimizer: Any, batches: list[torch.Tensor], scheduler: Any = None) -> list[int]:
    """The measured peaks of the steps of a loop as anybody writes it."""
    peaks = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        peaks.append(step_peak(network, batch, optimizer))
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return peaks


def same_parameters(found: nn.Module, expected: nn.Module) -> bool:
    return all(map(torch.equal, found.parameters(), expected.parameters()))


def same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> bool:
    """Whether the state dicts of two optimizers are equal bit for bit."""
    return not differences(flat(found.state_dict()), flat(expected.state_dict()))


def stepping(model: nn.Module, make: Make, batch: Any, limit: Any = None, **options: Any) -> tuple[Checkpointable, Any]:
    """A copy of `model` that is stepped in the backward, and its optimizer."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    found = Checkpointable(model, batch, limit, step_in_backward=optimizer, loss=square, progress=False, **options)
    return found, optimizer
