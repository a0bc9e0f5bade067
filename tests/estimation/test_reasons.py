"""The benchmark that says why a step takes something else than its plan promises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import predicted
import predicted_reasons
from cpu_scratch import cpu_scratch_bytes

WIDTH = 64


class Model(nn.Module):
    """No chain of layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), layer])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            image = image + layer(image).tanh()
        return image


def reasons(model: nn.Module, value: torch.Tensor) -> list[str]:
    def case() -> Any:
        return model, {"image": value}, lambda output: output.square().mean()

    row = predicted.row("a model", case)
    found: list[str] = row["reasons"]
    # A step that is followed without memory has no reason to be off.
    off = [abs(ratio - 1) for ratio in row["ratios"]]
    assert max(off) < 0.001 or predicted.cpu_scratch_bytes is not cpu_scratch_bytes
    return found


def test_an_operator_that_holds_more_than_the_rules_say_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (predicted, predicted_reasons):
        monkeypatch.setattr(module, "cpu_scratch_bytes", lambda *call: 0)
    depthwise = nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
    found = reasons(Model(depthwise), torch.randn(8, WIDTH, 16, WIDTH))
    assert any("inside aten.convolution" in each for each in found)
