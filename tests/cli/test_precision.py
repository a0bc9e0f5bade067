"""How well times have to be known follows from what is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, least_limit, sweep
from rotor_py.measure.rounds import StageTimes
from tests.cli.conftest import SMALL

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


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value)


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], set[bool]]:
    """Whether close times are measured while a function runs."""
    found: set[bool] = set()
    begin = StageTimes.__init__

    def noting(times: StageTimes, *, closely: bool = False) -> None:
        found.add(closely)
        begin(times, closely=closely)

    def during(run: Callable[[], object]) -> set[bool]:
        found.clear()
        run()
        return {*found}

    monkeypatch.setattr(StageTimes, "__init__", noting)
    return during


@pytest.mark.parametrize("make", [layers, Captured])
def test_only_a_limit_that_is_read_off_the_curve_needs_close_times(make, closely) -> None:
    batch = torch.randn(4, 8)
    assert closely(lambda: least_limit(make(), batch, max_overhead=0.1, loss=torch.sum)) == {True}
    assert closely(lambda: sweep(make(), batch, loss=torch.sum)) == {False}
    assert closely(lambda: least_limit(make(), batch, loss=torch.sum)) == {False}
    assert closely(lambda: Checkpointable(make(), mem_limit="1MB", loss=torch.sum)(batch)) == {False}


@pytest.mark.parametrize("text", [SMALL, SCRIPT])
def test_the_command_measures_closely_for_an_overhead_only(text, model_file, report, closely) -> None:
    options = (model_file(text), "--quiet", "--no-cache")
    for more, expected in ((("--max-overhead", "50%"), True), (("--mem-limit", "1GB"), False)):
        assert closely(lambda more=more: report(*options, *more)) == {expected}
