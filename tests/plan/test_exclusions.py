"""Which settings exclude each other stands in one table: the code checks it, and the page shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.plan.settings import EXCLUSIONS, SEVERAL_PROCESSES, SHARDED
from tests.fields import raises

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
ASKED: dict[str, dict[str, Any]] = {
    "another optimizer": {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
    "compile": {"compile": True},
    "forwards_in_flight > 1": {"forwards_in_flight": 2},
    "keep": {"keep": "bf16"},
    "level or every_n_layers": {"every_n_layers": 1},
    "offload": {"offload": "file:/tmp"},
    "on_oom='replan'": {"on_oom": "replan"},
    "plan": {"plan": "a file that nobody reads"},
    "preserve_rng_state=False": {"preserve_rng_state": False},
    "step_in_backward": {"step_in_backward": torch.optim.SGD(MODEL.parameters(), 0.1)},
}
EXPECTED = [(each.first, each.second, each.why.format(given="it")) for each in EXCLUSIONS]
OF_SETTINGS = [each for each in EXCLUSIONS if each.second not in (SEVERAL_PROCESSES, SHARDED)]


@pytest.mark.parametrize("row", OF_SETTINGS, ids=lambda each: f"{each.first}, {each.second}")
def test_every_row_of_the_table_is_refused(row: Any) -> None:
    with raises(ValueError, "excluded_together", name=row.first.partition("=")[0], other=row.second):
        Checkpointable(MODEL, **ASKED[row.first], **ASKED[row.second])


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("`", "")
    rows = [tuple(line.strip("| ").split(" | ")) for line in text.splitlines() if line.startswith("|")]
    assert [row for row in rows if row in EXPECTED] == EXPECTED
