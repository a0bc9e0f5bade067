"""Several devices that are not there, with FSDP2 over all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling.backends import using
from rotor_py import Checkpointable, InfeasibleError, Plan, UnsupportedModelError, estimate
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.fake_tensors import FakeCopies
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.estimation.simulated_target import Communication, blocks_of, shard_parameters, world_of
from rotor_solver import store_all
from tests.distributed import fsdp_models
from tests.distributed.processes import NOT_WHOLE, Processes
from tests.estimation import sharded_steps
from tests.estimation.sharded_steps import ON_THE_CPU, ROWS, WIDTH, Blocks
from tests.fields import raises

BLOCK = 512


@pytest.fixture(scope="module")
def processes_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Processes]]:
    """So many processes, which live as long as the tests of this file."""
    with ExitStack() as alive:

        @cache
        def started(count: int) -> Processes:
            return alive.enter_context(Processes(count, tmp_path_factory.mktemp("processes") / "meeting"))

        yield started


@pytest.mark.parametrize(
    ("kind", "count", "precision", "share"),
    [
        ("blocks", 2, torch.bfloat16, 0.5),
        *(
            pytest.param(*each, *how, marks=pytest.mark.slow)
            for each in [("blocks", 4), ("llama", 2), ("llama", 4)]
            for how in [(None, 0.0), (torch.bfloat16, 0.5)]
        ),
    ],
)
def test_peaks_of_planned_steps_are_those_of_real_processes(
    kind: str,
    count: int,
    precision: torch.dtype | None,
    share: float,
    tmp_path: Path,
    processes_of: Callable[[int], Processes],
) -> None:
    """Half way down, where layers are run again that gather their parameters anew, and the least plan."""
    path = tmp_path / "plan.json"
    plan = sharded_steps.planned_step(kind, count, precision, share, path)
    real = processes_of(count).run(sharded_steps.real_peaks, kind, precision, path, plan.peaks)
    assert re.search(NOT_WHOLE, plan.sequence)
    for phase in ("forward", "backward"):
        measured = max(each[phase] for each in real)
        assert plan.peaks[phase] == pytest.approx(measured, rel=0.005), phase
        assert plan.present + measured <= plan.promised


def test_a_predicted_plan_is_measured_by_all_processes_where_its_first_step_takes_something_else(
    tmp_path: Path, processes_of: Callable[[int], Processes]
) -> None:
    """Once any has seen it, and all have a batch as large as the plan's: none is refused for it later."""
    whole, path = [ROWS, ROWS], tmp_path / "plan.json"
    promised = sharded_steps.planned_step("blocks", 2, None, 0.5, path).promised
    assert Plan.load(path).predicted_for == ON_THE_CPU.name
    follow = partial(processes_of(2).run, sharded_steps.followed_prediction, "blocks", path)
    assert follow([whole] * 3, [promised, promised]) == [([], [], True)] * 2
    ranks = follow([whole, [ROWS, ROWS // 2], whole, whole], [promised, 2 * promised])
    assert [measured for measured, _, _ in ranks] == [[2], [2]]
    told = [sum("the plan was predicted for" in each for each in found) for _, found, _ in ranks]
    assert told == [0, 1]
    assert all(equal for _, _, equal in ranks)


def test_each_device_has_its_part_and_a_batch_of_its_own() -> None:
    batch = torch.randn(ROWS, WIDTH)
    report = estimate(Blocks, batch, "h100:8", optimizer=torch.optim.AdamW, loss=torch.mean, fresh_grads=True)
    fixed = report.budget.fixed
    parts = [math.ceil(each.shape[0] / 8) * each[0].numel() * 4 for each in Blocks().parameters()]
    assert fixed.parameters == sum(math.ceil(part / BLOCK) * BLOCK for part in parts)
    assert fixed.optimizer == 2 * fixed.parameters
    assert fixed.batch == ROWS * WIDTH * 4
    assert report.device == "8 × NVIDIA H100 SXM 80 GB"
    text = " ".join(str(report).split())
    assert "parameters that are whole" in text
    assert "sent while they compute" in text
    assert not dist.is_initialized()
    alone = estimate(Blocks, batch, "h100", optimizer=torch.optim.AdamW, loss=torch.mean, fresh_grads=True)
    assert alone.budget.fixed.parameters > 7 * fixed.parameters


@pytest.mark.parametrize("share", [0.1, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.5, 1.0))])
def test_a_step_by_the_plan_takes_no_more_than_is_predicted(share: float) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with using(ON_THE_CPU), world_of(4) as mesh, mode:
        model = FakeCopies(mode).model(Blocks(6)).train()
        shard_parameters(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        batch = torch.empty(ROWS, WIDTH)
        network = Checkpointable(
            model, mem_limit="1GB", loss=sharded_steps.loss, optimizer=optimizer, fresh_grads=True, cache=False
        )
        network.measure(batch)
        budget = network.budget
        bound = budget.fixed.communication
        least, most = budget.least_bytes() - bound, budget.peak_bytes(store_all(budget.chain)) - bound
        network.mem_limit = int(least + share * (most - least)) + bound // 4
        step = SimulatedStep(network, batch, sharded_steps.loss, optimizer, fresh_grads=True)
        Communication(find_device("h100")).find_room(step)
        sequence = network.compute_sequence()
        found = network.budget
        present = found.fixed.total - found.fixed.communication
        taken = present + max(sharded_steps.peaks(step).values())
        predicted = found.peak_bytes(sequence)
        assert taken <= predicted <= network.mem_limit
        assert predicted <= 1.02 * taken
        assert found.fixed.communication < bound / 2, "the bound is loose, and a step shows more"


def test_a_plan_made_for_too_little_room_promises_what_its_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that `--max-overhead` chooses, in the room of another plan."""

    def plan_without_room(communication: Communication, step: SimulatedStep) -> None:
        step.prepare()
        step.network.divide(step.network.budget.with_communication(0))

    monkeypatch.setattr(Communication, "find_room", plan_without_room)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss": torch.mean, "fresh_grads": True}
    report = estimate(Blocks, torch.empty(ROWS, WIDTH), "h100:4", mem_limit="71MB", **options)
    assert report.budget.fixed.communication > 0
    assert report.peak_bytes == report.mem_limit > 71_000_000


def test_what_divides_the_parameters_may_be_the_users_own() -> None:
    from torch.distributed.fsdp import fully_shard

    calls = []

    def whole(model: nn.Module, mesh: object) -> None:
        calls.append(mesh)
        fully_shard(model, mesh=mesh)

    batch = torch.randn(ROWS, WIDTH)
    report = estimate(Blocks(2), batch, "h100:2", loss=torch.mean, shard=whole)
    assert len(calls) == 1
    by_blocks = estimate(Blocks(2), batch, "h100:2", loss=torch.mean)
    assert report.peak_bytes > by_blocks.peak_bytes
    assert estimate(Blocks(2), batch, "h100:2", loss=torch.mean, shard="whole").peak_bytes == report.peak_bytes


@pytest.mark.parametrize(
    ("device", "options", "kind", "name"),
    [
        ("h100", {"shard": "blocks"}, "one_device", "shard"),
        ("h100:1", {"shard": lambda model, mesh: None}, "one_device", "shard"),
        (find_device("h100"), {"precision": torch.bfloat16}, "one_device", "precision"),
        ("h100:2", {"shard": "layers"}, "unknown_value", "shard"),
        ("h100:2", {"shard": lambda *_: None, "precision": torch.bfloat16}, "excluded_together", "precision"),
        *((f"h100:{count}", {}, "not_a_count", f"h100:{count}") for count in ("0", "-1", "", "two", "1.5")),
    ],
)
def test_options_of_sharding_that_say_nothing_are_refused(
    device: Any, options: dict[str, Any], kind: str, name: str
) -> None:
    with raises(ValueError, kind, name=name):
        estimate(Blocks, torch.empty(ROWS, WIDTH), device, **options)


def test_a_chain_of_layers_takes_its_input_in_the_dtype_in_which_it_runs() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))

    wide, narrow = (
        estimate(layers, torch.randn(ROWS, WIDTH), "h100:2", loss=torch.mean, precision=dtype)
        for dtype in (None, torch.bfloat16)
    )
    assert narrow.budget.chain.activation[1] == wide.budget.chain.activation[1] // 2


@pytest.mark.slow
def test_layers_of_a_chain_have_parts_unless_they_save_something_else_when_they_are_captured() -> None:
    report = estimate(
        lambda: fsdp_models.chain(fsdp_models.Otherwise), torch.randn(512, fsdp_models.WIDTH), "h100:2", loss=torch.mean
    )
    in_part = [any("in part" in option.name for option in stage.options) for stage in report.budget.chain.stages]
    assert in_part == [False, True, True, True, False]


def test_a_limit_that_no_plan_fits_says_what_is_least_and_a_process_group_is_refused() -> None:
    with pytest.raises(InfeasibleError) as caught:
        estimate(Blocks, torch.randn(ROWS, WIDTH), "h100:2", loss=torch.mean, mem_limit="1MB")
    assert caught.value.min_bytes > 10**6
    assert not dist.is_initialized()
    with world_of(2), raises(UnsupportedModelError, "has_process_group"):
        estimate(Blocks, torch.randn(ROWS, WIDTH), "h100:2", loss=torch.mean)


def test_blocks_are_the_outermost_of_a_list_that_are_alike() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.layers = nn.ModuleList([Experts(), Experts(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])

    model = Model()
    assert list(blocks_of(model)) == list(model.inner.layers)[:2]
    assert list(blocks_of(nn.Linear(2, 2))) == []
