"""Tensors that are carried past cuts count as long as they are in memory: no step takes more than was predicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, store_all

WIDTH = 32


class Wide(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(self.norm(x))))


class ReadAgain(nn.Module):
    """One tensor, with a gradient or without, is read by some of the layers after it: each has a width, and a use.

    Without a gradient it is the result of dropout, as XLNet's positions are: what is not random would run in front.
    """

    def __init__(self, layers: list[tuple[int, str]], trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Wide(factor) for factor, _ in layers)
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.uses = [use for _, use in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.first(x) if self.trained else F.dropout(x, 0.5)
        value = read if self.trained else read + self.first(x)
        for block, product, use in zip(self.blocks, self.products, self.uses, strict=True):
            value = value + block(value) if use != "no" else block(value)
            if use == "add":
                value = value + read
            elif use == "multiply":
                value = value * read
            elif use == "product":
                value = value * product(read).sigmoid()
        return self.head(value)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


LAYERS = [(1, "product"), (1, "add"), (16, "no"), (2, "product"), (8, "multiply"), (8, "product")]


@pytest.mark.parametrize("trained", [False, True])
def test_what_several_stages_read_is_in_memory_until_the_first_of_them_has_run_backward(trained: bool) -> None:
    torch.manual_seed(0)
    model, batch = ReadAgain(LAYERS, trained).train(), torch.randn(256, WIDTH)
    planned = Checkpointable(model, loss=loss, fresh_grads=True, cache=False, watch=False)
    planned.measure(batch)
    assert planned.budget is not None
    assert planned.inspection_values is not None
    assert (0 in [each.gradient_bytes for each in planned.inspection_values.carried]) is not trained

    def step() -> None:
        output = planned(batch)  # held to the end, as people do
        loss(output).backward()

    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    for share in (0.1, 1):
        sequence = planned.compute_sequence(least + int(share * (most - least)))
        model.zero_grad()
        step()
        model.zero_grad()
        measured = measured_peak(step, [*model.parameters(), batch], torch.device("cpu"))
        predicted = planned.budget.peak_bytes(sequence)
        assert 0.95 * predicted <= measured <= predicted
