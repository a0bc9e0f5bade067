"""Several simulated devices, with FSDP2 over all of them."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rotor_py import InfeasibleError, UnsupportedModelError, estimate
from rotor_py.data_sheet import Device
from rotor_py.estimation import simulated_target
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.estimation.simulated_target import blocks_of, world_of
from rotor_py.report import Report
from tests.checkpointable.steps import Made
from tests.distributed.processes import NOT_WHOLE
from tests.estimation import sharded_steps
from tests.estimation.conftest import Block
from tests.estimation.sharded_steps import ROWS, WIDTH
from tests.fields import logged, raises

BLOCK = 512
BATCH = torch.empty(ROWS, WIDTH)


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(WIDTH, 0.0), Block(WIDTH, 0.0), nn.Linear(WIDTH, 512))


@cache
def report(shard: Any = None, **options: Any) -> Report:
    told = {"optimizer": torch.optim.AdamW, "loss": torch.mean, "fresh_grads": True, "shard": shard}
    return estimate(blocks, BATCH, "h100:2", **told, **options)


@pytest.mark.slow
def test_peaks_of_planned_steps_are_real_and_are_measured_if_a_first_step_takes_more(two_processes, tmp_path) -> None:
    path, follow = tmp_path / "plan.json", two_processes.run
    plan = sharded_steps.planned_step("blocks", 2, torch.bfloat16, 0.5, path)
    real = follow(sharded_steps.real_peaks, "blocks", torch.bfloat16, path, plan.peaks)
    assert re.search(NOT_WHOLE, plan.sequence)
    for phase in ("forward", "backward"):
        measured = max(each[phase] for each in real)
        assert plan.peaks[phase] == pytest.approx(measured, rel=0.005), phase
        assert plan.present + measured <= plan.promised
    # Measured once any process has seen it, and all have a batch as large as the plan's.
    whole, measured_first = [ROWS, ROWS], sharded_steps.first_measured
    promised = sharded_steps.planned_step("blocks", 2, None, 0.5, path).promised
    assert follow(measured_first, "blocks", path, [whole] * 3, [promised] * 2) == [None] * 2
    rows = [whole, [ROWS, ROWS // 2], whole]
    assert follow(measured_first, "blocks", path, rows, [promised, 2 * promised]) == [2, 2]


def test_a_step_by_the_plan_takes_no_more_than_is_predicted(tmp_path: Path) -> None:
    plan = sharded_steps.planned_step("blocks", 2, None, 0.3, tmp_path / "plan.json")
    taken = plan.present + max(plan.peaks.values())
    assert re.search(NOT_WHOLE, plan.sequence)
    assert taken <= plan.promised <= 1.02 * taken
    assert plan.communication < plan.bound / 2, "the bound is loose, and a step shows more"


def test_each_device_has_its_part_and_a_batch_of_its_own_and_the_users_function_may_shard_parameters(caplog) -> None:
    found = report()
    assert not logged(caplog, "plan_not_followed")  # by the simulated optimizer
    fixed = found.budget.fixed
    parts = [math.ceil(each.shape[0] / 2) * each[0].numel() * 4 for each in blocks().parameters()]
    assert fixed.parameters == sum(math.ceil(part / BLOCK) * BLOCK for part in parts)
    assert fixed.optimizer == 2 * fixed.parameters
    assert found.measurement.input_bytes == BATCH.nbytes
    assert found.device == "2 × NVIDIA H100 SXM 80 GB"
    text = " ".join(str(found).split())
    assert "gathered parameters" in text
    assert "send to each other while they compute" in text
    assert not dist.is_initialized()
    calls = []

    def whole(model: nn.Module, mesh: Any) -> None:
        calls.append(mesh)
        fully_shard(model, mesh=mesh)

    assert report(whole).peak_bytes == report("whole").peak_bytes > report().peak_bytes
    assert len(calls) == 1


def test_a_plan_made_for_too_little_room_promises_what_its_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that `--max-overhead` chooses, in the room of another plan."""

    def plan_without_room(step: SimulatedStep, _: Device) -> None:
        step.prepare()
        step.network.divide(step.network.budget.with_communication(0))

    monkeypatch.setattr(simulated_target, "find_room", plan_without_room)
    limit = report().peak_bytes - 1000
    found = report(mem_limit=limit)
    assert found.budget.fixed.communication > 0
    assert found.peak_bytes == found.mem_limit > limit


@pytest.mark.parametrize(
    ("device", "options", "kind", "name"),
    [
        ("h100", {"shard": "blocks"}, "one_device", "shard"),
        ("h100:1", {"shard": lambda model, mesh: None}, "one_device", "shard"),
        (find_device("h100"), {"precision": torch.bfloat16}, "one_device", "precision"),
        ("h100:2", {"shard": "layers"}, "unknown_value", "shard"),
        ("h100:2", {"shard": lambda *_: None, "precision": torch.bfloat16}, "excluded_together", "precision"),
        *((f"h100:{count}", {}, "not_a_count", f"h100:{count}") for count in ("0", "", "two")),
    ],
)
def test_options_of_sharding_that_say_nothing_are_refused(device, options, kind: str, name: str) -> None:
    with raises(ValueError, kind, name=name):
        estimate(blocks, BATCH, device, **options)


def test_a_limit_that_no_plan_fits_says_what_is_least_and_a_process_group_is_refused() -> None:
    with pytest.raises(InfeasibleError) as caught:
        estimate(blocks, BATCH, "h100:2", loss=torch.mean, mem_limit="1kB")
    assert caught.value.min_bytes > 10**3
    assert not dist.is_initialized()
    with world_of(2), raises(UnsupportedModelError, "has_process_group"):
        estimate(blocks, BATCH, "h100:2", loss=torch.mean)


def test_blocks_are_the_outermost_of_a_list_that_are_alike() -> None:
    experts = (nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)) for _ in range(2))
    layers = [*(Made(experts=each) for each in experts), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]
    model = Made(inner=Made(layers=nn.ModuleList(layers)))
    assert list(blocks_of(model)) == list(model.inner.layers)[:2]
    assert list(blocks_of(nn.Linear(2, 2))) == []
