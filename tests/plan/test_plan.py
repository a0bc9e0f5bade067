"""Plans in files: read back whole, refused for anything but what they were made for, compared where predicted."""

import copy
import logging
import re
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
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.checkpointable.steps import Tower, between, blocks, images, planned_at, same_gradients, square, step_peak
from tests.execute.training import assert_same, steps
from tests.fields import kinds, logged, raises
from tests.plan.test_step_plans import plans_counted
from tests.training.loop import Mixer, chain, rows


def network() -> nn.Sequential:
    model = blocks(4, 16)
    model[0].requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def planned() -> Checkpointable:
    return planned_at(0.3, network())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


@pytest.fixture
def file(planned: Checkpointable, path: Path) -> Path:
    planned.save_plan(path)
    return path


def test_a_plan_from_a_file_trains_the_same_inside_the_limit_without_measuring(planned, file) -> None:
    torch.manual_seed(1)
    model, batch = network(), images()
    plain = copy.deepcopy(model)
    runs: list[int] = []
    handle = model[2].register_forward_hook(lambda *_: runs.append(1))
    assert Plan.load(file) == planned.plan()
    loaded = Checkpointable(model, plan=file)
    assert loaded.sequence == planned.sequence
    assert loaded.names == planned.names
    loaded(batch)
    assert len(runs) == 1  # and that is the forward itself: nothing is measured
    handle.remove()
    loaded.load_state_dict(plain.state_dict())
    assert_same(steps(loaded, loaded, batch), steps(plain, plain, batch))
    step_peak(loaded, batch)
    assert step_peak(loaded, batch) <= planned.plan().peak_bytes <= planned.plan().mem_limit


OTHER_MODELS: list[tuple[Callable[[], nn.Sequential], str]] = [
    (lambda: blocks(4, 17), "parameters 0.weight"),
    (lambda: blocks(4, 16), "parameters 0.weight"),  # trained
    (lambda: nn.Sequential(*network()[:5], nn.AdaptiveMaxPool2d(1), *network()[6:]), "layers 5"),
    (lambda: nn.Sequential(*network(), nn.Identity()), "layers 8"),
    (lambda: network().to(torch.bfloat16), "parameters 0.weight"),
]
OTHER_INPUTS: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: images(5), "tensors 0 shape 0"),
    (lambda: images(4, 20), "tensors 0 shape 2"),
    (lambda: images().double(), "tensors 0 dtype"),
    (lambda: images().requires_grad_(), "tensors 0 requires_grad"),
]


def test_another_model_or_input_is_refused_naming_what_differs(file: Path) -> None:
    for make, field in OTHER_MODELS:
        with raises(PlanMismatchError, "plan_for_other_model", name=field):
            Checkpointable(make(), plan=file)
    loaded = Checkpointable(network(), plan=file)
    for batch, field in OTHER_INPUTS:
        with raises(PlanMismatchError, "plan_for_other_model", name=field):
            loaded(batch())
    with torch.autocast("cpu", torch.bfloat16), raises(PlanMismatchError, "plan_for_other_model", name="autocast"):
        loaded(images())
    loaded(images(2)).sum().backward()  # a smaller batch is covered
    loaded[1].requires_grad_(False)  # a model that changes after loading
    with raises(PlanMismatchError, "plan_for_other_model", name="parameters 1.0.weight"):
        loaded(images())


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
    return nn.Sequential(nn.Linear(12, 12).requires_grad_(False), *chain(2))


def train(planned: Checkpointable, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    square(planned(rows())).backward()
    optimizer.step()


def same_report(loaded: Checkpointable, saver: Checkpointable) -> None:
    found, expected = loaded.report(), saver.report()
    # How well times are known is not in the file.
    assert found == expected
    assert str(found) == str(expected)
    assert (found.gap, found.sequence.algorithm) == (expected.gap, expected.sequence.algorithm)
    assert loaded.memory() == saver.memory()
    assert loaded.summary() == saver.summary()
    assert loaded.build_chain() == saver.build_chain()


@pytest.mark.parametrize(("make", "fresh_grads"), [(frozen_first, True), (Skipping, False)])
def test_the_report_of_a_loaded_plan_is_that_of_the_model_that_saved_it(make, path: Path, fresh_grads: bool) -> None:
    model = make()
    loaded = copy.deepcopy(model)
    saver = planned_at(0.4, model, rows(), optimizer=torch.optim.AdamW(model.parameters()), fresh_grads=fresh_grads)
    saver.save_plan(path)
    loaded = Checkpointable(loaded, plan=path)
    same_report(loaded, saver)  # before any step
    pages = [re.sub(r"Made on .*? with", "", each.report()._repr_html_()) for each in (loaded, saver)]
    assert pages[0] == pages[1]
    for planned in (saver, loaded):
        train(planned, torch.optim.AdamW(planned.parameters()))
    same_report(loaded, saver)
    if make is Skipping:
        assert loaded.memory().beside_bytes > 0
    assert "stored" in str(loaded.report())


def test_a_strategy_by_hand_is_loaded_without_a_limit(path: Path) -> None:
    saver = Checkpointable(chain(2), rows(), loss=square, every_n_layers=3)
    saver.save_plan(path)
    loaded = Checkpointable(chain(2), plan=path)
    same_report(loaded, saver)
    assert loaded.report().mem_limit is None
    assert str(loaded.report()).startswith("Sequential is planned without a limit on cpu")
    assert Checkpointable(chain(2), plan=path, mem_limit="1MB").report().mem_limit == 10**6
    beside = Checkpointable(chain(2), plan=path, mem_limit=1000).report()
    assert not beside.fits
    assert str(beside).startswith("Sequential does not fit in")


def unknown_of_adam(path: Path) -> Checkpointable:
    """A plan with a limit that leaves no room for an optimizer's state, which is not known."""
    saver = planned_at(0.2, chain(), rows())
    saver.save_plan(path)
    return saver


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_a_loaded_plan_has_no_room_for_is_warned_of_with_numbers(path: Path, caplog, given) -> None:
    saver, model = unknown_of_adam(path), chain()
    adam = torch.optim.Adam(model.parameters())
    with caplog.at_level(logging.WARNING, "rotor_py"):
        loaded = Checkpointable(model, plan=path, optimizer=adam if given else None)
        train(loaded, adam)
        train(loaded, adam)
    state = sum(t.nbytes for entry in adam.state.values() for t in entry.values())
    assert loaded.report().peak_bytes >= saver.report().peak_bytes + state
    (record,) = caplog.records
    assert logged(caplog, "late_optimizer", peak_bytes=loaded.report().peak_bytes) == [record]
    assert loaded.sequence == saver.sequence  # the plan in use is that of the file
    assert Checkpointable(chain(), plan=loaded.plan()).report() == loaded.report()


def test_a_loaded_plan_can_be_planned_again_for_another_limit_without_measuring(path: Path) -> None:
    saver = unknown_of_adam(path)
    loaded = Checkpointable(chain(), plan=path)
    limit = between(saver, 0.7)
    with plans_counted(loaded) as measured:
        loaded.compute_sequence(limit)
        loaded.save_plan(path)
    assert measured == []
    assert Plan.load(path).mem_limit == limit
    again = Checkpointable(chain(), plan=path)
    assert str(again.report()) == str(loaded.report())
    assert again.sequence == saver.compute_sequence(limit)
    square(again(rows())).backward()
    again.mem_limit = "1MB"
    again.measure(rows(0, 128))  # which gives the plan up
    square(again(rows(0, 128))).backward()
    assert again.plan().input["tensors"][0]["shape"] == [128, 12]


ROWS = torch.randn(64, 256)
SCRATCH = 50_000_000


def skips() -> nn.Module:
    torch.manual_seed(0)
    return Tower(256, 6)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(each, nn.GELU()) for each in skips().layers))


def of_products(func: Any, *call: Any) -> int:
    """What no kernel of the CPU takes."""
    return SCRATCH if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm) else 0


def predicted(path: Path, model: nn.Module, **options: Any) -> Plan:
    """A plan that was predicted for a device like the CPU, with room for everything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    without_memory = FakeCopies(mode)
    given: dict[str, Any] = {"kind": "cpu", "memory_bytes": 10**9, "seconds": lambda *call: 1e-6, **options}
    with using(PredictedDevice(**given)), mode:
        network = Checkpointable(without_memory.model(model), loss=torch.mean, mem_limit="800MB")
        network.measure(without_memory.value(ROWS))
        network.save_plan(path)
    return Plan.load(path)


def mean_step(network: nn.Module) -> None:
    network(ROWS).mean().backward()


def test_a_prediction_that_holds_is_followed(path: Path, caplog) -> None:
    assert predicted(path, skips(), name="a good device").predicted_for == "a good device"
    network = Checkpointable(skips(), plan=path)
    for _ in range(3):
        network.zero_grad(set_to_none=False)
        mean_step(network)
    assert kinds(caplog) == []
    assert network.inspection_values == Plan.load(path).costs.measurement


@pytest.mark.parametrize("make", [layers, skips])
def test_one_that_does_not_is_measured_at_the_next_step(path: Path, caplog, make) -> None:
    predicted(path, make(), scratch=of_products, name="a bad device")
    plain, network = make(), Checkpointable(make(), plan=path)
    for _ in range(3):
        mean_step(network)
        mean_step(plain)
    assert len(logged(caplog, "other_than_predicted")) == 1
    assert network.plan().predicted_for is None
    assert network.budget.peak_bytes(network.sequence) < SCRATCH
    assert network.mem_limit == 800_000_000
    assert same_gradients(network, plain)


def test_a_plan_for_cuda_is_none_for_the_cpu(path: Path) -> None:
    predicted(path, layers(), kind="cuda")
    network = Checkpointable(layers(), plan=path)
    with raises(PlanMismatchError, "plan_for_other_model", name="device"):
        mean_step(network)
