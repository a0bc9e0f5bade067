"""Where each way to store a stage is other code, all runs of the stage in a plan are by one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.protocol import Run, StageOffers
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence

STORED = "Fe_0^1, Fe_1, Fe_2^1, L, B_2, B_1, B_0"


class Rounding(nn.Module, StageOffers):
    """A layer that rounds otherwise where it is stored in another way."""

    ways_are_code = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(value))

    def ways(self) -> tuple[str, ...]:
        return ("otherwise",)

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        return lambda value: self(value) * (1 + 1e-3)


def step(sequence: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    stages = [Rounding() for _ in range(3)]
    runners = [StageRunner(stage, str(number)) for number, stage in enumerate(stages)]
    output = Tape(runners, read_sequence(3, Sequence.parse(sequence))).forward(torch.randn(2, 4, requires_grad=True))
    output.square().sum().backward()
    return [output.detach(), *(each.grad for stage in stages for each in stage.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    "sequence",
    [
        "CF_0, Fn_1, Fe_2^1, L, B_2, CF_0, Fe_1, B_1, Fe_0^1, B_0",
        "CF_0, CF_1, CF_2, L, Fe_2^1, B_2, Fe_1, B_1, Fe_0^1, B_0",
    ],
)
def test_what_runs_again_is_what_ran_first(sequence: str) -> None:
    made, expected = step(sequence), step(STORED)
    assert len(made) == 7
    assert all(map(torch.equal, made, expected))
    assert not torch.equal(made[0], step(STORED.replace("^1", ""))[0])
