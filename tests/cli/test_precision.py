"""How well times have to be known follows from what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from rotor_cli.main import main
from rotor_py import Checkpointable, least_limit, sweep
from rotor_py.measure.rounds import StageTimes
from tests.cli.conftest import SMALL

BATCH = torch.randn(4, 8)

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
"""


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether close times were wanted, each time that stages were measured."""
    found: list[bool] = []
    begin = StageTimes.__init__

    def noting(times: StageTimes, *, closely: bool = False) -> None:
        found.append(closely)
        begin(times, closely=closely)

    monkeypatch.setattr(StageTimes, "__init__", noting)
    return found


@pytest.mark.parametrize("make", [layers, Captured])
def test_a_limit_that_is_read_off_the_curve_needs_close_times(
    make: Callable[[], nn.Module], closely: list[bool]
) -> None:
    least_limit(make(), BATCH, max_overhead=0.1, loss=torch.sum)
    assert {*closely} == {True}
    closely.clear()
    sweep(make(), BATCH, loss=torch.sum)
    least_limit(make(), BATCH, loss=torch.sum)
    assert {*closely} == {False}


@pytest.mark.parametrize("make", [layers, Captured])
def test_a_limit_that_is_given_does_not(make: Callable[[], nn.Module], closely: list[bool]) -> None:
    Checkpointable(make(), mem_limit="1MB", loss=torch.sum)(BATCH).sum().backward()
    assert {*closely} == {False}


@pytest.mark.parametrize("text", [SMALL, SCRIPT])
def test_so_does_the_command(text: str, model_file: Callable[..., str], closely: list[bool]) -> None:
    def run(*arguments: Any) -> None:
        closely.clear()
        result = CliRunner().invoke(main, [model_file(text), "--quiet", "--no-cache", *arguments])
        assert result.exit_code == 0, result.output

    run("--max-overhead", "50%")
    assert {*closely} == {True}
    run("--mem-limit", "1GB")
    assert {*closely} == {False}
