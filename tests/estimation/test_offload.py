"""Activations that wait in the host's memory, planned for a device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError, estimate
from rotor_py.data_sheet import Device
from rotor_py.estimation import reservation as reserving
from rotor_py.estimation.caching_allocator import Allocate, CachingAllocator, most_bytes
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.reservation import FollowedStep
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.report import Report
from rotor_py.stage.compression import Packed
from rotor_py.stage.protocol import ELSEWHERE
from tests.estimation.shared import WIDTH, Block
from tests.fields import raises

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def chain() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(3)))


def fast_link() -> Device:
    return replace(find_device("h100"), pcie_bandwidth=1e12)


@pytest.mark.parametrize("make", [pytest.param(chain, marks=pytest.mark.slow), Captured])
def test_what_can_leave_is_the_same_on_tensors_without_memory(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    batch = torch.randn(512, WIDTH)
    here = Checkpointable(make(), cache=False, offload=f"file:{tmp_path}", loss=torch.mean)
    here.measure(batch)
    # Its operators are those of the CPU; kernels of CUDA save other things.
    there = estimate(make(), batch, replace(find_device("l4"), vendor="cpu"), loss=torch.mean, offload="host")
    chains = [measured.chain(fresh_gradients=True) for measured in (here.inspection_values, there.measurement)]
    moved = [{(number, way.name): way.moved for number, stage in enumerate(chain) for way in stage.options if way.moved}
             for chain in chains]  # fmt: skip
    # Masks of dropout are packed here, and stay; tensors without memory show none.
    masks, packed = batch.nbytes, f"{Packed().name}, "
    found = {key: size for key, size in moved[0].items() if key[1] != f"{packed}{ELSEWHERE.name}"}
    unpacked = {
        (number, way.replace(packed, "")): size + masks * (packed in way) for (number, way), size in found.items()
    }
    both = unpacked.keys() & moved[1].keys()  # which of the others are worth it, clocks decide
    assert sum(way == ELSEWHERE.name for _, way in both) >= 3
    assert len(both) > 3 or make is Captured
    in_blocks = [{key: each[key] // 2**20 for key in both} for each in (unpacked, moved[1])]  # of CUDA there
    assert in_blocks[0] == in_blocks[1]


def test_a_stage_may_be_stored_in_part_with_the_rest_elsewhere() -> None:
    device = replace(find_device("l4"), vendor="cpu")
    options = (
        estimate(chain(), torch.empty(512, WIDTH), device, loss=torch.mean, offload="host").chain.stages[1].options
    )
    named = {option.name: option for option in options}
    whole, part, rest = (named[name] for name in ("", "in part", "in part, elsewhere"))
    assert (rest.forward_time, rest.backward_time) == (part.forward_time, part.backward_time)
    assert rest.kept == part.kept < whole.kept
    assert rest.saved < part.saved // 4


def test_a_plan_that_moves_is_faster_and_its_step_is_inside_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[tuple[int, int]] = []
    followed = reserving.followed_by_plan

    def noted(step: SimulatedStep, device: Device) -> FollowedStep:
        found = followed(step, device)
        allocator = CachingAllocator()
        for event in found.events:
            if isinstance(event, Allocate):
                allocator.allocate(event.key, event.size)
            else:
                allocator.free(event.key)
        peaks.append((most_bytes(found.events), allocator.allocated_bytes))
        return found

    monkeypatch.setattr(reserving, "followed_by_plan", noted)
    batch = torch.empty(16384, WIDTH)

    def planned(limit: int | None, **offload: str) -> Report:
        return estimate(Captured, batch, fast_link(), loss=torch.mean, fresh_grads=True, mem_limit=limit, **offload)  # type: ignore[arg-type]  # by name

    full = planned(None)
    least = full.budget.least_bytes()
    limit = (least + full.peak_bytes) // 2
    recomputing, moving = planned(limit), planned(limit, offload="host")
    assert moving.step_seconds < recomputing.step_seconds
    _, (_, left), (peak, left_by_moving) = peaks
    assert peak <= moving.peak_bytes <= limit
    assert left_by_moving == left  # nothing that moved is still there


def test_the_link_is_that_of_the_table() -> None:
    link = estimate(chain(), torch.empty(64, WIDTH), "h100", loss=torch.mean, offload="host").budget.link
    assert link.out_bytes_per_second == link.in_bytes_per_second == pytest.approx(0.64 * 64e9)


def test_what_moves_there_is_refused_in_a_sentence_where_it_cannot_be() -> None:
    with raises(ValueError, "device_elsewhere"):
        estimate(chain(), torch.empty(64, WIDTH), "h100", offload="file:/tmp")  # type: ignore[arg-type]
    with raises(UnsupportedModelError, "excluded_together", name="offload"):
        estimate(chain(), torch.empty(64, WIDTH), "h100:2", offload="host")
