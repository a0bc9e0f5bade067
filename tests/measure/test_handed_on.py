"""What a measured stage hands on to the next one: the output of its last run, if that is laid out as in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.measure import stage_measurer
from rotor_py.measure.walks.walked_chain import WalkedChain


class OtherLayout(nn.Module):
    """Makes the same numbers with and without a graph, and another layout without one."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = value * 2
        return made if torch.is_grad_enabled() else made.t().contiguous().t()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of the stages that ran for their output alone."""
    found: list[Any] = []
    run = WalkedChain.run

    def noting(chain: WalkedChain, runner: Any, value: Any) -> Any:
        found.append(runner.function)
        return run(chain, runner, value)

    monkeypatch.setattr(WalkedChain, "run", noting)
    return found


def test_a_stage_that_was_measured_does_not_run_for_its_output(runs: list[Any]) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 32))
    Checkpointable(layers, loss=lambda output: output.square().mean(), cache=False).measure(torch.randn(4, 4))
    assert runs == []


def test_an_output_that_is_laid_out_otherwise_is_not_handed_on(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strides = []
    measure_ways = stage_measurer.measure_ways

    def noting(runners: Any, value: Any, *arguments: Any) -> Any:
        strides.append(value.stride())
        return measure_ways(runners, value, *arguments)

    monkeypatch.setattr(stage_measurer, "measure_ways", noting)
    layers = nn.Sequential(nn.Linear(4, 8), OtherLayout(), nn.Softmax(1))
    Checkpointable(layers, loss=lambda output: output.square().mean(), cache=False).measure(torch.randn(4, 4))
    assert set(strides) == {(4, 1), (8, 1)}
    assert [type(function) for function in runs] == [OtherLayout]
