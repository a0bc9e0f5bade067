import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.fields import invoke

SMALL = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.ReLU()) for i in range(6)])

def sample(batch):
    return torch.randn(batch, 3, 32, 32)

def loss(output):
    return output.square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
FICKLE = """
import torch
from torch import nn

class Fickle(nn.Linear):
    # Does something else during a backward: it cannot be computed again.
    def forward(self, x):
        return super().forward(x) * (1 if torch._C._current_graph_task_id() < 0 else 2)

model = nn.Sequential(*[Fickle(64, 64) for _ in range(6)])
sample = torch.randn(8, 64)
"""


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., str]:
    def write(text: str = SMALL, name: str = "net.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def plan() -> Callable[..., Result]:
    return invoke


@pytest.fixture
def report() -> Callable[..., dict[str, Any]]:
    """Run the command, which has to succeed, and return its JSON."""

    def run(*arguments: object) -> dict[str, Any]:
        result = invoke(*arguments, "--json", "-")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run
