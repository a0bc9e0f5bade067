"""The least limits of a model, from Python: the same as planning for each of them."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, Sweep, compare, least_limit, sweep, verify
from rotor_solver import Persistent
from tests.fields import raises

BATCH = torch.randn(64, 16)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))


class Captured(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value)


def test_every_point_of_the_curve_is_a_plan_for_its_limit_and_none_fits_below_the_least() -> None:
    model = Checkpointable(layers(), BATCH, loss=torch.sum)
    found, least = sweep(model), least_limit(layers(), BATCH, loss=torch.sum)
    assert isinstance(found, Sweep)
    assert found.strategies
    assert least == found.points[0].mem_limit <= found.points[-1].mem_limit == found.store_all_bytes
    for point in found.points:
        assert model.budget.peak_bytes(model.compute_sequence(point.mem_limit)) <= point.mem_limit
    with pytest.raises(InfeasibleError) as error:
        model.compute_sequence(least - 1)
    assert error.value.min_bytes == least
    for overhead in (0.0, 0.1, 0.5, 10.0):
        limit = least_limit(model, max_overhead=overhead)
        assert limit == min(point.mem_limit for point in found.points if point.overhead <= 1 + overhead)


def test_limits_of_plans_that_move_are_lower_and_each_is_that_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = nn.Sequential(*(Captured(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    batch = torch.randn(256, 64)
    alone = Checkpointable(copy.deepcopy(blocks), batch, loss=torch.sum, fresh_grads=True)
    rate = 1.5 * alone.report().store_all_bytes / alone.report().store_all_seconds  # so that to move costs something
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: rate)
    moving = Checkpointable(blocks, batch, loss=torch.sum, fresh_grads=True, offload=f"file:{tmp_path}")
    limit, report = least_limit(moving, max_overhead=0.1), moving.report()
    assert limit < least_limit(alone, max_overhead=0.1)
    # The least, as closely as is looked: clearly below it, plans are slower.
    below = limit - (report.store_all_bytes - report.budget.least_bytes()) // 50
    assert below > report.budget.least_bytes()
    seconds = moving.budget.makespan(moving.budget.solve(below, Persistent()))
    assert seconds > 1.1 * report.store_all_seconds
    found = sweep(moving)
    assert any(point.sequence.moves is not None for point in found.points)
    for point in found.points:
        assert moving.budget.peak_bytes(point.sequence) == point.mem_limit
        assert moving.budget.makespan(point.sequence) == pytest.approx(point.step_seconds)


def test_all_questions_take_a_model_and_a_sample_or_what_has_been_measured() -> None:
    for ask in (sweep, least_limit, compare, verify):
        assert [*inspect.signature(ask).parameters][:2] == ["model", "sample"]
    model, options = layers(), {"mem_limit": "1GB", "loss": torch.sum, "fresh_grads": True}
    before = copy.deepcopy(model.state_dict())
    planned = Checkpointable(copy.deepcopy(model), BATCH, **options)
    assert least_limit(model, BATCH, **options) == least_limit(planned)
    assert sweep(model, BATCH, **options).store_all_bytes == sweep(planned).store_all_bytes
    for found in (compare(model, BATCH, **options), compare(planned)):
        assert {each.strategy: each.peak_bytes for each in found}["store-all"] == planned.report().store_all_bytes
    (found,), (same,) = verify(model, BATCH, **options), verify(planned, BATCH, loss=torch.sum)
    assert found.measured_peak_bytes == same.measured_peak_bytes <= planned.report().peak_bytes
    assert found.max_grad_difference == same.max_grad_difference == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for ask in (sweep, least_limit, compare):
        with raises(ValueError, "no_sample"):
            ask(model)
        with raises(ValueError, "sample_given_twice"):
            ask(planned, BATCH)
    with raises(ValueError, "sample_given_twice"):
        verify(planned, BATCH, mem_limit="1GB")
