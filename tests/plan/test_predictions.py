"""Plans that were predicted for a device: marked in their file, and compared with the first step there."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling.backends import using
from rotor_py import Checkpointable, Plan, PlanMismatchError
from rotor_py.estimation.fake_tensors import FakeCopies
from rotor_py.estimation.predicted_device import PredictedDevice
from tests.fields import logged, raises

BATCH = torch.randn(64, 256)
SCRATCH = 50_000_000


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


class Skips(nn.Module):
    """No chain of layers: it is captured."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + nn.functional.gelu(layer(value))
        return value


both_kinds = pytest.mark.parametrize("make", [blocks, Skips], ids=["layers", "captured"])


def of_products(func: Any, *call: Any) -> int:
    """What no kernel of the CPU takes."""
    return SCRATCH if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm) else 0


def saved(path: Path, model: nn.Module, **options: Any) -> Plan:
    """A plan that was predicted for a device like the CPU, with room for everything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    without_memory = FakeCopies(mode)
    given: dict[str, Any] = {"kind": "cpu", "memory_bytes": 10**9, "seconds": lambda *call: 1e-6, **options}
    with using(PredictedDevice(**given)), mode:
        network = Checkpointable(without_memory.model(model), loss=torch.mean, mem_limit="800MB")
        network.measure(without_memory.value(BATCH))
        network.save_plan(path)
    return Plan.load(path)


def step(network: nn.Module) -> None:
    network(BATCH).mean().backward()


@both_kinds
def test_the_file_says_what_was_predicted_and_a_measured_one_does_not(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    assert saved(tmp_path / "plan", make(), name="a good device").predicted_for == "a good device"
    measured = Checkpointable(make(), BATCH, "800MB", loss=torch.mean)
    measured.save_plan(tmp_path / "other")
    assert Plan.load(tmp_path / "other").predicted_for is None


@both_kinds
def test_a_prediction_that_holds_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module]
) -> None:
    saved(tmp_path / "plan", make())
    network = Checkpointable(make(), plan=tmp_path / "plan")
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for _ in range(3):
            network.zero_grad(set_to_none=False)
            step(network)
    assert not caplog.records
    assert network.inspection_values == Plan.load(tmp_path / "plan").costs.measurement


@both_kinds
def test_one_that_does_not_is_measured_at_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module]
) -> None:
    saved(tmp_path / "plan", make(), scratch=of_products, name="a bad device")
    model = make()
    plain = copy.deepcopy(model)
    network = Checkpointable(model, plan=tmp_path / "plan")
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for _ in range(3):
            step(network)
            step(plain)
    told = logged(caplog, "other_than_predicted")
    assert len(told) == 1
    assert network.budget is not None
    assert network.sequence is not None
    assert network.budget.peak_bytes(network.sequence) < SCRATCH
    assert network.mem_limit == 800_000_000
    for one, other in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]  # all have one


def test_a_plan_for_cuda_is_none_for_the_cpu(tmp_path: Path) -> None:
    saved(tmp_path / "plan", blocks(), kind="cuda")
    network = Checkpointable(blocks(), plan=tmp_path / "plan")
    with raises(PlanMismatchError, "plan_for_other_model", name="device"):
        step(network)


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    from rotor_py.plan import plan_file

    saved(tmp_path / "plan", blocks())
    data = json.loads((tmp_path / "plan").read_text())
    data["predicted_for"] = 3
    (tmp_path / "plan").write_text(json.dumps(data))
    with raises(ValueError, "damaged_plan", cause="bad_field", field="predicted_for"):
        plan_file.read(tmp_path / "plan")
