"""What is fixed in a step of a captured model: its graphs read buffers, which are no part of the batch."""

from __future__ import annotations

import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, store_all
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
