"""Parameters that several stages share, where gradients are there from before: the engine sums up what they get."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from tests.checkpointable.steps import CPU, Residual, between, square, step_peak

WIDTH, WORDS = 64, 2000


def block() -> Residual:
    return Residual(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))


class Tied(nn.Module):
    """No chain: it is captured. Its embedding is the last stage's, too, and its blocks run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value = self.words(ids)
        for _ in range(2):
            for block in self.blocks:
                value = block(value)
        result: torch.Tensor = self.head(value[:8])
        return result


def repeated() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[block() for _ in range(3)] * 3), torch.randn(256, WIDTH)


def tied() -> tuple[nn.Module, torch.Tensor]:
    return Tied(), torch.randint(WORDS, (512,))


@pytest.mark.parametrize(("made", "fresh"), [(repeated, False), (tied, True)])
def test_their_sums_are_inside_the_limit(made, fresh: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, batch = made()
    planned = Checkpointable(model, batch, loss=square, fresh_grads=fresh, watch=False)
    for share in (0.0, 1.0):
        sequence = planned.compute_sequence(between(planned, share))
        step_peak(planned, batch)
        if fresh:
            planned.zero_grad()
        present = [*planned.parameters(), batch, *(each.grad for each in planned.parameters() if each.grad is not None)]
        measured = measured_peak(lambda: square(planned(batch)).backward(), present, CPU)  # the output goes at once
        assert 0.95 * planned.budget.peak_bytes(sequence) <= measured <= planned.budget.peak_bytes(sequence)
        planned.zero_grad()
    planned.save_plan(tmp_path / "plan.json")
    again = Checkpointable(made()[0], plan=tmp_path / "plan.json", fresh_grads=fresh)
    square(again(batch)).backward()
    assert again.budget.chain == planned.budget.chain


def test_forwards_in_flight_count_all_gradients_once() -> None:
    model, batch = repeated()
    for forwards in (1, 2):
        planned = Checkpointable(model, batch, loss=square, forwards_in_flight=forwards)
        assert any(stage.gradient for stage in planned.chain) == (forwards == 1)
