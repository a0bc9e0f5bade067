"""A step whose plan keeps stages in fewer bits, compared with the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, verify
from rotor_py.validate.verification import Rounded, Verification
from rotor_solver import ForwardEnable, Sequence


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(64), nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x)).sin()  # type: ignore[no-any-return]  # a tensor


def test_differences_of_gradients_are_told_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))
    torch.manual_seed(0)
    batch = torch.randn(64, 64)
    network = Checkpointable(nn.Sequential(Normed(), Normed()), batch, mem_limit="1GB", keep="bf16")
    assert network.sequence is not None
    (exact,) = verify(network, batch)
    assert exact.rounded is None
    assert exact.max_grad_difference == 0
    network.sequence = Sequence(
        tuple(replace(each, option=1) if isinstance(each, ForwardEnable) else each for each in network.sequence)
    )
    (found,) = verify(network, batch)
    assert found.rounded is not None
    assert 0 < found.rounded.gradient_error < 0.01
    assert found.rounded.buffer_difference == 0
    assert found.loss == exact.loss
    assert found.problem(10**9) is None


@pytest.mark.parametrize(
    ("rounded", "noise", "problem"),
    [
        (Rounded("int8", 0.2, 0.0), 0.0, None),
        (Rounded("int8", float("nan"), 0.0), 0.0, "gradients of stages kept in int8 are not finite"),
        (Rounded("int8", 0.2, 0.1), 0.0, "buffers differ from plain training by up to 0.1"),
        (Rounded("int8", 0.2, 0.1), 0.05, None),
    ],
)
def test_what_is_a_problem_beyond_rounding(rounded: Rounded, noise: float, problem: str | None) -> None:
    found = Verification(100, 1.0, 5.0, 100, 1.0, noise, rounded=rounded).problem(100)
    assert found is None if problem is None else problem in str(found)
