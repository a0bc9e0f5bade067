"""Which settings exclude each other stands in one table: the code checks it, and the page shows it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.plan.settings import EXCLUSIONS, SEVERAL_PROCESSES, SHARDED
from rotor_py.plan.trained_model import TrainedModel
from tests.checkpointable.steps import CPU, Residual, between, square, step_peak
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


def test_an_unknown_value_is_refused() -> None:
    for name, value in (("backward_order", "odd"), ("keep", "fp4"), ("keep", torch.bfloat16), ("on_oom", "odd")):
        with raises(ValueError, "unknown_value", name=name):
            Checkpointable(MODEL, **{name: value})


BATCH = torch.randn(4, 4)


@pytest.mark.parametrize("option", ["step_in_backward", "on_oom='replan'"])
def test_what_is_for_one_process_is_refused_once_there_are_several(option: str, monkeypatch) -> None:
    plain = Checkpointable(MODEL, BATCH, "1GB")
    planned = Checkpointable(MODEL, BATCH, "1GB", **ASKED[option])
    planned(BATCH)
    monkeypatch.setattr(TrainedModel, "alone", False)
    for refused in (planned, planned.measure):
        with raises(UnsupportedModelError, "one_process_only", name=option):
            refused(BATCH)
    plain(BATCH).sum().backward()
    monkeypatch.undo()
    MODEL.zero_grad()
    planned(BATCH)


WIDTH = 64


def block() -> Residual:
    return Residual(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))


def repeated() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[block() for _ in range(3)] * 3), torch.randn(256, WIDTH)


def test_sums_of_the_gradients_of_repeated_layers_are_inside_the_limit_and_count_once_for_all_in_flight(
    tmp_path: Path,
) -> None:
    model, batch = repeated()
    planned = Checkpointable(model, batch, loss=square, watch=False)
    for share in (0.0, 1.0):
        sequence = planned.compute_sequence(between(planned, share))
        step_peak(planned, batch)
        present = [*planned.parameters(), batch, *(each.grad for each in planned.parameters())]
        measured = measured_peak(lambda: square(planned(batch)).backward(), present, CPU)  # the output goes at once
        assert 0.95 * planned.budget.peak_bytes(sequence) <= measured <= planned.budget.peak_bytes(sequence)
        planned.zero_grad()
    planned.save_plan(tmp_path / "plan.json")
    again = Checkpointable(repeated()[0], plan=tmp_path / "plan.json")
    square(again(batch)).backward()
    assert again.budget.chain == planned.budget.chain
    assert any(stage.gradient for stage in planned.chain)
    together = Checkpointable(repeated()[0], batch, loss=square, forwards_in_flight=2)
    assert not any(stage.gradient for stage in together.chain)
