"""Offloading planned for a simulated device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError, estimate
from rotor_py.estimation.device_table import find_device
from rotor_py.report import Report
from rotor_py.stage.protocol import ELSEWHERE
from tests.estimation.conftest import WIDTH, Block
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
    return nn.Sequential(Block(), Block())


def test_stages_offload_as_much_on_fake_tensors(tmp_path: Path) -> None:
    batch = torch.randn(512, WIDTH)
    here = Checkpointable(Captured(), cache=False, offload=f"file:{tmp_path}", loss=torch.mean)
    here.measure(batch)
    # Its operators are those of the CPU; kernels of CUDA save other things.
    there = estimate(Captured(), batch, replace(find_device("l4"), vendor="cpu"), loss=torch.mean, offload="host")
    chains = (each.chain(fresh_gradients=True) for each in (here.inspection_values, there.measurement))
    options = ([each for stage in chain for each in stage.options if each.name == ELSEWHERE.name] for chain in chains)
    found, expected = ([each.moved // 2**20 for each in moving] for moving in options)
    assert found == expected
    assert len(found) >= 2


def test_a_stage_may_be_stored_in_part_with_the_rest_elsewhere() -> None:
    device = replace(find_device("l4"), vendor="cpu")
    report = estimate(chain(), torch.empty(512, WIDTH), device, loss=torch.mean, offload="host")
    named = {option.name: option for option in report.chain.stages[1].options}
    whole, part, rest = (named[name] for name in ("", "in part", "in part, elsewhere"))
    assert (rest.forward_time, rest.backward_time) == (part.forward_time, part.backward_time)
    assert rest.kept == part.kept < whole.kept
    assert rest.saved < part.saved // 4


def test_a_plan_that_moves_is_faster_and_its_step_is_inside_the_limit() -> None:
    batch = torch.empty(16384, WIDTH)
    fast = replace(find_device("h100"), pcie_bandwidth=1e12)

    def planned(limit: int | None, **offload: str) -> Report:
        return estimate(Captured, batch, fast, loss=torch.mean, fresh_grads=True, mem_limit=limit, **offload)  # type: ignore[arg-type]  # by name

    full = planned(None)
    limit = (full.budget.least_bytes() + full.peak_bytes) // 2
    recomputing, moving = planned(limit), planned(limit, offload="host")
    assert moving.step_seconds < recomputing.step_seconds
    assert moving.sequence.moves is not None
    assert moving.reserved.step_bytes <= moving.peak_bytes <= limit


def test_the_link_is_that_of_the_table_and_moving_elsewhere_is_refused_in_a_sentence() -> None:
    link = estimate(chain(), torch.empty(64, WIDTH), "h100", loss=torch.mean, offload="host").budget.link
    assert link.out_bytes_per_second == link.in_bytes_per_second == pytest.approx(0.64 * 64e9)
    with raises(ValueError, "device_elsewhere"):
        estimate(chain(), torch.empty(64, WIDTH), "h100", offload="file:/tmp")  # type: ignore[arg-type]
    with raises(UnsupportedModelError, "excluded_together", name="offload"):
        estimate(chain(), torch.empty(64, WIDTH), "h100:2", offload="host")
