"""Steps that people write, each inside its limit and with the numbers of plain training: the table of docs/training.md.

    python benchmarks/any_step.py             # on the CPU; prints the table. Needs transformers
    python benchmarks/any_step.py --write     # writes benchmarks/results and docs/training.md, too

Every step is taken three times, and the peak of the third is measured: what nobody said beforehand is noticed before.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from report import write  # noqa: E402 # beside this file

from rotor_profiling import measured_peak  # noqa: E402
from rotor_py import Checkpointable, format_bytes  # noqa: E402

CPU = torch.device("cpu")
SHARE = 0.35
"""Limits: so much of the way from the least possible to storing everything."""
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


def measured(step: Step) -> dict[str, Any]:
    """A row of the table."""
    torch.manual_seed(0)
    model = step.make()
    plain = copy.deepcopy(model)
    batch = step.batch()
    probe = Checkpointable(copy.deepcopy(model), step.sample(batch), fresh_grads=True, **step.known)
    assert probe.budget is not None
    least = probe.budget.least_bytes()
    most = probe.report().store_all_bytes
    limit = int(least + SHARE * (most - least))
    planned = Checkpointable(model, step.sample(batch), limit, fresh_grads=True, **step.said)

    def take(network: nn.Module) -> None:
        torch.manual_seed(1)
        step.take(network, batch)

    for _ in range(2):
        planned.zero_grad()
        take(planned)
    planned.zero_grad()
    # Batches of later forwards are made for them, as the plan counts them; the caller holds all of them.
    held = list(batch if isinstance(batch, tuple | list) else [batch])
    peak = measured_peak(lambda: take(planned), [*planned.parameters(), *held], CPU)
    take(plain)
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    difference = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]
    assert planned.budget is not None
    assert planned.sequence is not None
    predicted = planned.budget.peak_bytes(planned.sequence)
    return row(step.name, limit, predicted, peak, difference)


def row(name: str, limit: int, predicted: int, peak: int, difference: float) -> dict[str, Any]:
    return {
        "step": name,
        "limit_bytes": limit,
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "difference": difference,
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| step | limit | predicted | measured | difference from plain |", "| --- | --- | --- | --- | --- |"]
    for each in found:
        sizes = [format_bytes(each[f"{name}_bytes"]) for name in ("limit", "predicted", "measured")]
        lines.append(f"| {each['step']} | {' | '.join(sizes)} | {each['difference']:g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    arguments = parser.parse_args()
    found = []
    for step in STEPS:
        if arguments.only in step.name:
            found.append(measured(step))
            print(table(found[-1:]).splitlines()[-1], flush=True)
    if not arguments.only or arguments.only == "ranks":
        from any_step_processes import measured_by_ranks

        found += measured_by_ranks()
    print(table(found))
    if arguments.write:
        write("any-step", table(found), found, CPU, ROOT / "docs" / "training.md")
    over = [each["step"] for each in found if each["measured_bytes"] > each["limit_bytes"]]
    if over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
