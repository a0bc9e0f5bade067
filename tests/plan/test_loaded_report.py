"""A plan from a file says of itself what the model said that saved it."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, Plan
from tests.checkpointable.steps import between, square
from tests.fields import logged
from tests.training.loop import Mixer, chain, rows


class Skipping(Mixer):
    """One tensor goes past every stage."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        entry = self.entry(value)
        value = entry
        for layer in self.layers:
            value = nn.functional.gelu(layer(value))
        return self.head(value * entry)


def frozen_first() -> nn.Sequential:
    """A layer before the chain."""
    return nn.Sequential(nn.Linear(12, 12).requires_grad_(False), *chain())


def trained(planned: Checkpointable, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    square(planned(rows())).backward()
    optimizer.step()


def same_report(loaded: Checkpointable, saver: Checkpointable) -> None:
    found, expected = loaded.report(), saver.report()
    # How well times are known is not in the file.
    assert found == expected
    assert str(found) == str(expected)
    pages = [re.sub(r"Made on .*? with", "", each._repr_html_()) for each in (found, expected)]
    assert pages[0] == pages[1]
    assert (found.gap, found.sequence.algorithm) == (expected.gap, expected.sequence.algorithm)
    assert loaded.memory() == saver.memory()
    assert loaded.summary() == saver.summary()
    assert loaded.build_chain() == saver.build_chain()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


CASES = [(chain, False), (frozen_first, True), (Mixer, True), (Skipping, False)]
"""Chains and other models, each with fresh gradients and without."""
OTHERS = [(make, not fresh_grads) for make, fresh_grads in CASES]


@pytest.mark.parametrize(
    ("make", "fresh_grads"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_the_report_of_a_loaded_plan_is_that_of_the_model_that_saved_it(make, path: Path, fresh_grads: bool) -> None:
    torch.manual_seed(0)
    model = make()
    loaded_model = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters())
    saver = Checkpointable(model, rows(), loss=square, optimizer=adamw, fresh_grads=fresh_grads)
    saver.compute_sequence(between(saver, 0.4))
    saver.save_plan(path)
    loaded = Checkpointable(loaded_model, plan=path)
    same_report(loaded, saver)  # before any step
    for planned in (saver, loaded):
        trained(planned, torch.optim.AdamW(planned.parameters()))
    same_report(loaded, saver)
    if make is Skipping:
        assert loaded.memory().beside_bytes > 0
    assert "stored" in str(loaded.report())


def test_a_strategy_by_hand_is_loaded_without_a_limit(path: Path) -> None:
    torch.manual_seed(0)
    saver = Checkpointable(chain(), rows(), loss=square, every_n_layers=3)
    saver.save_plan(path)
    loaded = Checkpointable(chain(), plan=path)
    same_report(loaded, saver)
    assert loaded.report().mem_limit is None
    assert Checkpointable(chain(), plan=path, mem_limit="1MB").report().mem_limit == 10**6


def test_a_limit_given_beside_the_plan_is_the_one_reported(path: Path) -> None:
    saver = Checkpointable(chain(), rows(), mem_limit="1GB", loss=square)
    saver.save_plan(path)
    loaded = Checkpointable(chain(), plan=path, mem_limit=1000)
    assert not loaded.report().fits
    assert str(loaded.report()).startswith("Sequential does not fit in")


def unknown_of_adam(path: Path) -> Checkpointable:
    """A plan with a limit that leaves no room for an optimizer's state, which is not known."""
    torch.manual_seed(0)
    saver = Checkpointable(chain(), rows(), loss=square)
    saver.compute_sequence(between(saver, 0.2))
    saver.save_plan(path)
    return saver


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_a_loaded_plan_has_no_room_for_is_warned_of_with_numbers(path: Path, caplog, given) -> None:
    saver, model = unknown_of_adam(path), chain()
    adam = torch.optim.Adam(model.parameters())
    with caplog.at_level(logging.WARNING, "rotor_py"):
        loaded = Checkpointable(model, plan=path, optimizer=adam if given else None)
        trained(loaded, adam)
        trained(loaded, adam)
    state = sum(t.nbytes for entry in adam.state.values() for t in entry.values())
    assert loaded.report().peak_bytes >= saver.report().peak_bytes + state
    (record,) = caplog.records
    assert logged(caplog, "late_optimizer", peak_bytes=loaded.report().peak_bytes) == [record]
    assert loaded.sequence == saver.sequence  # the plan in use is that of the file
    assert Checkpointable(chain(), plan=loaded.plan()).report() == loaded.report()


def test_a_loaded_plan_can_be_planned_again_for_another_limit_without_measuring(path: Path, monkeypatch: Any) -> None:
    saver = unknown_of_adam(path)
    loaded = Checkpointable(chain(), plan=path)
    monkeypatch.setattr("rotor_py.plan.layer_source.measure", None)
    limit = between(saver, 0.7)
    loaded.compute_sequence(limit)
    loaded.save_plan(path)
    assert Plan.load(path).mem_limit == limit
    again = Checkpointable(chain(), plan=path)
    assert str(again.report()) == str(loaded.report())
    assert again.sequence == saver.compute_sequence(limit)
    square(again(rows())).backward()


def test_measuring_a_model_with_a_loaded_plan_gives_the_plan_up(path: Path) -> None:
    unknown_of_adam(path)
    model = Checkpointable(chain(), plan=path, mem_limit="1MB")
    model.measure(rows(0, 128))
    square(model(rows(0, 128))).backward()
    assert model.plan().input["tensors"][0]["shape"] == [128, 12]
    assert model.report().mem_limit == 10**6
