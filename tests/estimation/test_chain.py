"""A chain of tensors without memory beside the measured one, stage by stage: the CPU's own operators in both."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import rotor_cli.target_device as command
from rotor_profiling.backends import using
from rotor_py import Checkpointable, UnsupportedModelError, estimate, store_all
from rotor_py.estimation.calibration import Sizes, as_toml, calibrate
from rotor_py.estimation.device_table import device_from_file, find_device
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies
from rotor_py.estimation.simulated_target import PredictedDevice
from rotor_py.stage.protocol import ELSEWHERE
from rotor_solver import Persistent
from tests.capture.steps import measured_step
from tests.checkpointable.steps import CPU
from tests.estimation.conftest import WIDTH, Block
from tests.execute.zoo import convolutions, dropouts, moving_buffers
from tests.fields import ends, invoke, raises

EXACT = ("activation_bytes", "saved_bytes", "input_released_bytes", "output_released_bytes")
A_MICROSECOND = PredictedDevice("cpu", 10**12, lambda *call: 1e-6)


def measured(model: nn.Module, sample: Any, loss: Any) -> Checkpointable:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    return Checkpointable(model, sample, loss=loss, optimizer=optimizer, fresh_grads=True, cache=False)


def both(make: Any, sample: Any, loss: Any = torch.mean) -> tuple[Checkpointable, Checkpointable]:
    torch.manual_seed(0)
    model, batch = make(), sample()
    real = measured(model, batch, loss)
    mode = DeviceFakeMode()
    without_memory = FakeCopies(mode)
    with using(A_MICROSECOND), mode:
        return real, measured(without_memory.model(model), without_memory.value(batch), loss)


def assert_alike(real: Checkpointable, predicted: Checkpointable, trifle: int = 0) -> None:
    found, expected = predicted.inspection_values, real.inspection_values
    for name in EXACT:
        bytes_found, here = ([getattr(stage, name) for stage in each.stages] for each in (found, expected))
        assert bytes_found == pytest.approx(here, abs=trifle), name
    assert predicted.budget.fixed == real.budget.fixed
    for name in ("names", "gradient_bytes", "carried", "snapshot_bytes"):
        assert getattr(found, name) == getattr(expected, name), name
    for stage in found.stages:
        assert stage.forward_seconds >= 0
        assert round(stage.forward_seconds * 1e6, 6) % 1 == pytest.approx(0)


@pytest.mark.parametrize(("make", "size"), [(convolutions, (4, 3, 8, 8)), (dropouts, (8, 7)), (moving_buffers, (8, 6))])
def test_what_stages_hold_is_what_is_measured(make: Callable[[], nn.Module], size: tuple[int, ...]) -> None:
    assert_alike(*both(make, lambda: torch.randn(size)))


def unpadded(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch without padding: what is without values cannot say where padding is."""
    return {key: torch.ones_like(value) if "mask" in key else value for key, value in inputs.items()}


TRIFLES = {"Swin": 64}
"""A stage of these saves single numbers that operators wrap, which no dispatch shows."""


def small(name: str) -> tuple[Callable[[], nn.Module], dict[str, Any], Callable[[Any], torch.Tensor]]:
    """As in the ecosystem, with one or two blocks."""
    import ecosystem

    if name == "Llama":
        return lambda: ecosystem.llama(layers=1)[0], *ecosystem.llama(layers=1)[1:]
    model, inputs, loss = ecosystem.swin(batch=2)
    model.config.depths, model.config.num_heads = [1, 1], [2, 4]
    return lambda: type(model)(model.config), inputs, loss


@cache
def both_of(name: str) -> tuple[Checkpointable, Checkpointable]:
    """A model of the ecosystem, measured and predicted with the same ways, whatever clocks say."""
    make, inputs, loss = small(name)
    with patch("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways)):
        return both(make, lambda: unpadded(inputs), loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Swin"])
def test_captured_models_hold_what_is_measured(name: str) -> None:
    pytest.importorskip("transformers")
    assert_alike(*both_of(name), TRIFLES.get(name, 0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_steps_by_plans_made_without_memory_take_what_was_predicted() -> None:
    pytest.importorskip("transformers")
    _, inputs, loss = small("Llama")
    real, predicted = both_of("Llama")
    optimizer = torch.optim.AdamW(real.parameters())
    stored, least = predicted.budget.peak_bytes(store_all(predicted.chain)), predicted.budget.least_bytes()
    for limit in (stored, (least + stored) // 2, least):
        real.sequence = predicted.compute_sequence(limit)
        for _ in range(2):  # the first step makes the optimizer's state
            optimizer.zero_grad()
            measured, _ = measured_step(real, optimizer, unpadded(inputs), loss)
        assert measured == pytest.approx(predicted.budget.peak_bytes(predicted.sequence), rel=0.01)


MATRICES = ((64, 64, 64), (64, 32, 128))
TINY = Sizes(matrices=MATRICES, attention=(1, 2, 32, 16), convolution=(1, 4, 8), copied_bytes=2**16)


def test_a_device_survives_its_file_which_is_printed_and_measuring_restores_random_state(tmp_path, monkeypatch) -> None:
    torch.manual_seed(3)
    expected, precision = torch.rand(3), torch.get_float32_matmul_precision()
    torch.manual_seed(3)
    said: list[str] = []
    found = calibrate(CPU, 16 * 10**9, sizes=TINY, progress=said.append)
    assert said == ["matrix products", "attention", "a convolution", "copies"]
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_float32_matmul_precision() == precision
    path = tmp_path / "mine.toml"
    for device in (found, replace(find_device("h100"), name='my "own"', sources=())):
        path.write_text(as_toml("mine", device))
        assert replace(device_from_file(path), sources=()) == device
    assert found.memory_bytes == found.usable_bytes == 16 * 10**9
    known = found.efficiencies
    numbers = [*astuple(found.rates), found.bandwidth, found.pcie_bandwidth, known.convolution, known.attention]
    assert all(math.isfinite(each) and each > 0 for each in [*numbers, known.attention_backward])
    assert max(known.matmul, known.streaming) <= 1
    assert known.anchor == f"measured on this CPU with torch {torch.__version__}"
    # The command needs no model, and prints the file alone.
    monkeypatch.setattr(command, "calibrate", lambda device, size, progress: found)
    result = invoke("--calibrate", "cpu")
    assert result.exit_code == 0
    path.write_text(result.stdout)
    assert device_from_file(path).name == "CPU"
    ends(invoke("--calibrate", "model.py"), 2, "unknown_device", name="--calibrate")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_gpu_is_measured_near_its_data_sheet() -> None:
    found = calibrate(torch.device("cuda"), 10**9)
    assert found.rates.bf16 > found.rates.fp32
    known = {"H100": "h100", "H200": "h200", "A100": "a100-80", "L4": "l4"}
    name = next((each for part, each in known.items() if part in found.name.split()), None)
    if name is not None:
        sheet = find_device(name)
        assert 0.4 < found.rates.bf16 / sheet.rates.bf16 < 1.1
        assert 0.5 < found.bandwidth / sheet.bandwidth < 1.05


def chain() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), Block())


def test_stages_offload_as_much_on_fake_tensors_and_may_be_stored_in_part_with_the_rest_elsewhere(tmp_path) -> None:
    batch = torch.randn(512, WIDTH)
    here = Checkpointable(chain(), batch, cache=False, offload=f"file:{tmp_path}", loss=torch.mean)
    # Its operators are those of the CPU; kernels of CUDA save other things.
    there = estimate(chain, batch, replace(find_device("l4"), vendor="cpu"), loss=torch.mean, offload="host")
    chains = (each.chain(fresh_gradients=True) for each in (here.inspection_values, there.measurement))
    options = ([each for stage in chain for each in stage.options if each.name == ELSEWHERE.name] for chain in chains)
    found, expected = ([each.moved // 2**20 for each in moving] for moving in options)
    assert found == expected
    assert len(found) >= 2
    named = {option.name: option for option in there.chain.stages[1].options}
    whole, part, rest = (named[name] for name in ("", "in part", "in part, elsewhere"))
    assert (rest.forward_time, rest.backward_time) == (part.forward_time, part.backward_time)
    assert rest.kept == part.kept < whole.kept
    assert rest.saved < part.saved // 4


def test_a_plan_that_moves_is_faster_inside_the_limit_over_the_link_of_the_table_and_to_no_other_place() -> None:
    batch = torch.empty(16384, WIDTH)
    fast = replace(find_device("h100"), pcie_bandwidth=1e12)
    full = estimate(chain, batch, fast, loss=torch.mean, fresh_grads=True)
    limit = (full.budget.least_bytes() + full.peak_bytes) // 2
    moving = estimate(chain, batch, fast, loss=torch.mean, fresh_grads=True, mem_limit=limit, offload="host")
    assert moving.budget.makespan(moving.sequence) < full.budget.makespan(full.budget.solve(limit, Persistent()))
    assert moving.sequence.moves is not None
    assert moving.reserved.step_bytes <= moving.peak_bytes <= limit
    link = moving.budget.link
    assert link.out_bytes_per_second == link.in_bytes_per_second == pytest.approx(0.64 * fast.pcie_bandwidth)
    with raises(ValueError, "device_elsewhere"):
        estimate(chain(), torch.empty(64, WIDTH), "h100", offload="file:/tmp")  # type: ignore[arg-type]
    with raises(UnsupportedModelError, "excluded_together", name="offload"):
        estimate(chain(), torch.empty(64, WIDTH), "h100:2", offload="host")
