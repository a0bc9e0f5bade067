"""Lines of the log while a model is measured."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from tests.fields import kinds, logged


def messages(caplog: pytest.LogCaptureFixture, **options: Any) -> list[tuple[int, str]]:
    """Levels and lines that a first step of four layers logs."""
    model = Checkpointable(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), mem_limit="1GB", **options)
    with caplog.at_level(logging.INFO, "rotor_py"):
        model(torch.randn(4, 8)).sum().backward()
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "rotor_py"]


def test_measuring_begins_and_ends_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    found = messages(caplog)
    assert [level for level, _ in found] == [logging.INFO] * 3
    assert kinds(caplog) == ["planning", "measuring", "measured"]
    assert logged(caplog, "planning", name="Sequential")
    assert logged(caplog, "measured", stages=4)


@pytest.mark.parametrize("options", [{"progress": True}, {"verbosity": 1}])
def test_who_asks_is_told_without_setting_up_logging(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    found = messages(caplog, **options)
    assert all(level == logging.WARNING for level, _ in found[:3])
    assert kinds(caplog)[0] == "planning"


def test_progress_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    assert [level for level, _ in messages(caplog, progress=False)] == [logging.INFO] * 3


def test_a_profiler_that_measuring_ends_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Checkpointable(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), loss=torch.sum)
    with caplog.at_level(logging.WARNING, "rotor_py"), torch.profiler.profile():
        model.measure(torch.randn(2, 4))
    assert logged(caplog, "profiler_lost")
    caplog.clear()
    with torch.profiler.profile() as profile:
        model(torch.randn(2, 4)).sum().backward()
    assert not logged(caplog, "profiler_lost")
    assert any("addmm" in event.key for event in profile.key_averages())
