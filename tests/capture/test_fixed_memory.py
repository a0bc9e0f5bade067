"""What is fixed in a step of a captured model: its graphs read buffers, which are no part of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, store_all
from tests.capture.steps import limits
from tests.checkpointable.steps import CPU

WIDTH, LENGTH = 32, 16


class Masked(nn.Module):
    """As decoders do that keep the mask of their longest batch."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(256, 256).tril())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        length = value.shape[1]
        scores = self.inner(value) @ value.transpose(1, 2) * self.mask[:length, :length]
        return self.outer(torch.tanh(scores @ value)) + value


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(50, WIDTH), nn.ModuleList(Masked() for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.words(words)
        for block in self.blocks:
            value = block(value)
        return value


def test_buffers_are_counted_once() -> None:
    planned, words = (
        Checkpointable(Decoder(), loss=torch.sum, fresh_grads=True),
        torch.zeros(4, LENGTH, dtype=torch.long),
    )
    planned.measure(words)
    assert planned.budget is not None
    assert planned.budget.fixed.buffers == 3 * 256 * 256 * 4
    assert planned.budget.fixed.batch in (0, words.nbytes)
    planned.sequence = store_all(planned.budget.chain)

    def step() -> None:
        planned(words).sum().backward()

    step()
    planned.zero_grad()
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert 0.97 * predicted <= measured_peak(step, [*planned.parameters(), *planned.buffers(), words], CPU) <= predicted


class LateHead(nn.Module):
    """The head and the loss have a graph of their own, which returns large logits. An early one may return values."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.first = nn.Linear(WIDTH, WIDTH)
        wide = 16 * WIDTH  # so that a plan takes most in a backward of theirs, while logits are held
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = self.first(value)
        seen = (torch.cat([value.sin()] * 4),) if self.early else ()
        torch._dynamo.graph_break()
        for layer in self.layers:
            value = layer(value).tanh().sin()
        torch._dynamo.graph_break()
        logits = self.head(value)
        return logits.logsumexp(-1).mean(), logits, *seen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("early", [False, True])
def test_what_other_graphs_return_is_held_through_the_step(early: bool) -> None:
    torch.manual_seed(0)
    model, value = LateHead(early), torch.randn(256, WIDTH)
    planned = Checkpointable(model, loss=lambda output: output[0], fresh_grads=True)
    planned.measure(value)

    def step() -> None:
        output = planned(value)  # held to the end of the step, as people do
        output[0].backward()

    least, most = limits(planned)
    for limit in (least, (least + most) // 2, most):
        planned.compute_sequence(limit)
        for _ in range(2):
            model.zero_grad()
            measured = measured_peak(step, [*model.parameters(), value], CPU)
        assert measured <= limit
