"""Parameters that several stages share, where gradients are there from before: the engine sums up what they get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_solver import store_all

WIDTH, WORDS = 64, 2000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = value + self.down(self.up(value).tanh())
        return result


class Tied(nn.Module):
    """No chain: it is captured. Its embedding is the last stage's, too, and its blocks run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value = self.words(ids)
        for _ in range(2):
            for block in self.blocks:
                value = block(value)
        result: torch.Tensor = self.head(value[:8])
        return result


def repeated() -> tuple[nn.Module, torch.Tensor]:
    blocks = [Block() for _ in range(3)]
    return nn.Sequential(*blocks, *blocks, *blocks), torch.randn(256, WIDTH)


def tied() -> tuple[nn.Module, torch.Tensor]:
    return Tied(), torch.randint(WORDS, (512,))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize(("made", "fresh"), [(repeated, False), (tied, True)])
def test_their_sums_are_inside_the_limit(made, fresh: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, batch = made()
    planned = Checkpointable(model, batch, loss=loss, fresh_grads=fresh, watch=False)
    assert planned.budget is not None
    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    for share in (0.0, 1.0):
        sequence = planned.compute_sequence(int(least + share * (most - least)))
        loss(planned(batch)).backward()
        if fresh:
            planned.zero_grad()
        gradients = [each.grad for each in planned.parameters() if each.grad is not None]
        present = [*planned.parameters(), batch, *gradients]
        measured = measured_peak(lambda: loss(planned(batch)).backward(), present, torch.device("cpu"))
        assert 0.95 * planned.budget.peak_bytes(sequence) <= measured <= planned.budget.peak_bytes(sequence)
        planned.zero_grad()
    planned.save_plan(tmp_path / "plan.json")
    again = Checkpointable(made()[0], plan=tmp_path / "plan.json", fresh_grads=fresh)
    loss(again(batch)).backward()
    assert again.budget is not None
    assert again.budget.chain == planned.budget.chain


def test_forwards_in_flight_count_all_gradients_once() -> None:
    torch.manual_seed(0)
    model, batch = tied()
    alone = Checkpointable(model, batch, loss=loss)
    several = Checkpointable(model, batch, loss=loss, forwards_in_flight=2)
    assert alone.chain is not None
    assert several.chain is not None
    assert any(stage.gradient for stage in alone.chain)
    assert not any(stage.gradient for stage in several.chain)
