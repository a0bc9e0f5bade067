"""A chain of tensors without memory beside the measured one, stage by stage: the CPU's own operators in both."""

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from rotor_profiling.backends import using
from rotor_py import Checkpointable, store_all
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.capture.steps import measured_step
from tests.execute.zoo import convolutions, dropouts, moving_buffers

EXACT = ("activation_bytes", "saved_bytes", "input_released_bytes", "output_released_bytes")
A_MICROSECOND = PredictedDevice("cpu", 10**12, lambda *call: 1e-6)


def measured(model: nn.Module, sample: Any, loss: Any) -> Checkpointable:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    found = Checkpointable(model, loss=loss, optimizer=optimizer, fresh_grads=True, cache=False)
    found.measure(sample)
    return found


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
    """As in the ecosystem, with two blocks."""
    import ecosystem

    if name == "Llama":
        return lambda: ecosystem.llama(layers=2)[0], *ecosystem.llama(layers=2)[1:]
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
