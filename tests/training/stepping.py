"""Training with `step_in_backward` beside plain training: the same numbers, and the memory of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable

CPU = torch.device("cpu")
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """A part of a language model, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

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
        head: torch.Tensor = self.head(value)
        return head


def chain(count: int = 6, width: int = 96) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)])


def tied_chain(words: int = 120, width: int = 48) -> nn.Sequential:
    made = nn.Sequential(nn.Embedding(words, width), *chain(4, width), nn.Linear(width, words, bias=False))
    made[-1].weight = made[0].weight
    return made


def words(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(0, 120, (4, 16)) for _ in range(count)]


def vectors(count: int = 3, width: int = 96) -> list[torch.Tensor]:
    return [torch.randn(64, width) for _ in range(count)]


def square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[torch.Tensor],
    scheduler: Any = None,
) -> Iterator[int]:
    """The measured peak of one step after the other, of a loop as anybody writes it."""
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        state = tensors_in([list(entry.values()) for entry in optimizer.state.values()])
        gradients = [each.grad for each in network.parameters() if each.grad is not None]
        present = [*network.parameters(), *network.buffers(), *gradients, *state, batch]

        def step(batch: torch.Tensor = batch) -> None:
            output = network(batch)
            loss = square(output)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()

        yield measured_peak(step, present, CPU)


def same_parameters(found: nn.Module, expected: nn.Module) -> bool:
    return all(
        torch.equal(mine, theirs) for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True)
    )


def same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> bool:
    """Whether the state dicts of two optimizers are equal bit for bit."""
    mine, theirs = found.state_dict(), expected.state_dict()
    entries = [(mine["state"][key], theirs["state"][key]) for key in theirs["state"]]
    return (
        mine["param_groups"] == theirs["param_groups"]
        and mine["state"].keys() == theirs["state"].keys()
        and all(mine.keys() == theirs.keys() for mine, theirs in entries)
        and all(_equal(mine[name], theirs[name]) for mine, theirs in entries for name in theirs)
    )


def _equal(found: Any, expected: Any) -> bool:
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else bool(found == expected)


def stepping(
    model: nn.Module, make: Make, batch: torch.Tensor, limit: int | None = None, **options: Any
) -> tuple[Checkpointable, torch.optim.Optimizer]:
    """A copy of `model` that is stepped in the backward, and its optimizer."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    found = Checkpointable(model, batch, limit, step_in_backward=optimizer, loss=square, progress=False, **options)
    return found, optimizer
