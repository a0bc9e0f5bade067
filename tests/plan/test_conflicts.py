"""What is for one process alone is refused where several come to train the model, measured or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.plan.trained_model import TrainedModel
from tests.fields import raises

BATCH = torch.randn(4, 8)
OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "step_in_backward": lambda model: {"step_in_backward": torch.optim.SGD(model.parameters(), 0.1)},
    "on_oom='replan'": lambda model: {"on_oom": "replan"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_for_one_process_is_refused_once_there_are_several(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    planned = Checkpointable(model, BATCH, "1GB", **OPTIONS[option](model))
    planned(BATCH)
    monkeypatch.setattr(TrainedModel, "alone", False)
    with raises(UnsupportedModelError, "one_process_only", name=option):
        planned(BATCH)
    monkeypatch.undo()
    planned(BATCH)


def test_several_processes_are_no_conflict_without_such_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedModel, "alone", False)
    Checkpointable(nn.Sequential(nn.Linear(8, 8)), BATCH, "1GB")(BATCH).sum().backward()
