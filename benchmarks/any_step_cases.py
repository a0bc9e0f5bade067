"""The steps that any_step.py takes: small networks, and what people do with their outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 4096


@dataclass(frozen=True)
class Step:
    """What a user writes: `take(network, batch)` runs forward and backward; `said` is given to `Checkpointable`."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    take: Callable[[nn.Module, Any], None]
    sample: Callable[[Any], Any]
    said: dict[str, Any]
    known: dict[str, Any]
    """What there was to say: the limit is chosen for a plan that knows it."""


def blocks(width: int = 128, count: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)))


class LanguageModel(nn.Module):
    """Residual blocks over tokens: no chain of layers."""

    def __init__(self, width: int = 64, count: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = value + block(value)
        return self.head(value)


class Recurrent(nn.Module):
    """An LSTM language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 96, num_layers=3, batch_first=True, dropout=0.1)
        self.head = nn.Linear(96, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Images(nn.Module):
    """A CNN with a GRU over the columns of its last map."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.gru = nn.GRU(16 * 16, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.features(images)
        return self.head(self.gru(found.flatten(1, 2).transpose(1, 2))[0])


def rows() -> torch.Tensor:
    return torch.randn(1024, 128)


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (8, 64))


def siamese(network: nn.Module, batch: torch.Tensor) -> None:
    first, second = network(batch), network(batch + 0.1)
    F.cosine_embedding_loss(first, second, torch.ones(len(batch))).backward()


def preferences(network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    chosen, rejected = (log_likelihood(network(answers), answers) for answers in batch)
    (-F.logsigmoid(0.1 * (chosen - rejected))).mean().backward()


def log_likelihood(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy(logits.transpose(1, 2), answers, reduction="none").sum(1)


def discriminator(network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    real, fake = network(batch[0]), network(batch[1])
    (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()


def added_up(network: nn.Module, batch: list[torch.Tensor]) -> None:
    total = sum(network(each).square().mean() for each in batch)
    total.backward()  # type: ignore[union-attr] # not an int


def loss_outside(network: nn.Module, batch: torch.Tensor) -> None:
    logits = network(batch)
    F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()


def square(network: nn.Module, batch: torch.Tensor) -> None:
    network(batch).square().mean().backward()


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def likelihood(logits: torch.Tensor) -> torch.Tensor:
    answers = torch.zeros(logits.shape[:2], dtype=torch.long)
    return log_likelihood(logits, answers).mean()


def next_token(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.long))


def first(batch: Any) -> Any:
    return batch[0]


def same(batch: Any) -> Any:
    return batch


TWO: dict[str, Any] = {"forwards_in_flight": 2}
STEPS = [
    Step("siamese, told", blocks, rows, siamese, same, TWO, TWO),
    Step("siamese, noticed", blocks, rows, siamese, same, {}, TWO),
    Step(
        "as in DPO: a policy on chosen and rejected", LanguageModel, lambda: (tokens(), tokens()), preferences, first,
        {**TWO, "loss": likelihood}, {**TWO, "loss": likelihood},
    ),
    Step("GAN: discriminator on real and fake", blocks, lambda: (rows(), rows()), discriminator, first, TWO, TWO),
    Step(
        "four losses added up", blocks, lambda: [rows() for _ in range(4)], added_up, first,
        {"forwards_in_flight": 4, "loss": mean_square}, {"forwards_in_flight": 4, "loss": mean_square},
    ),
    Step("loss outside, not told", LanguageModel, tokens, loss_outside, same, {}, {"loss": next_token}),
    Step("LSTM language model", Recurrent, tokens, square, same, {"loss": mean_square}, {"loss": mean_square}),
    Step(
        "CNN with a GRU", Images, lambda: torch.randn(16, 3, 16, 32), square, same,
        {"loss": mean_square}, {"loss": mean_square},
    ),
]  # fmt: skip
