"""A chain of tensors without memory beside the measured one, stage by stage: the CPU's own operators in both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from rotor_profiling import StageCost
from rotor_profiling.backends import using
from rotor_py import Checkpointable, models, store_all
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies
from rotor_py.estimation.predicted_device import PredictedDevice
from tests.capture.steps import measured_step
from tests.execute.zoo import convolutions, dropouts, moving_buffers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

EXACT = ("activation_bytes", "saved_bytes", "input_released_bytes", "output_released_bytes")
"""What a stage holds. What kernels need beside it while they run, tensors without memory do not show."""
A_MICROSECOND = PredictedDevice("cpu", 10**12, lambda *call: 1e-6)


def measured(model: nn.Module, sample: Any, loss: Any) -> Checkpointable:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    found = Checkpointable(model, loss=loss, optimizer=optimizer, fresh_grads=True, cache=False)
    found.measure(sample)
    return found


def both(
    make: Callable[[], nn.Module], sample: Callable[[], Any], loss: Any = torch.mean
) -> tuple[Checkpointable, Checkpointable]:
    torch.manual_seed(0)
    model, batch = make(), sample()
    real = measured(model, batch, loss)
    mode = DeviceFakeMode()
    without_memory = FakeCopies(mode)
    with using(A_MICROSECOND), mode:
        return real, measured(without_memory.model(model), without_memory.value(batch), loss)


def assert_alike(real: Checkpointable, predicted: Checkpointable, trifle: int = 0) -> None:
    """`trifle` bytes may differ: numbers that operators wrap as tensors, and single values that they save."""
    assert predicted.inspection_values.names == real.inspection_values.names
    for name in EXACT:
        found, expected = (
            [getattr(stage, name) for stage in each.inspection_values.stages] for each in (predicted, real)
        )
        assert found == pytest.approx(expected, abs=trifle), name
    assert predicted.budget.fixed == real.budget.fixed
    assert predicted.inspection_values.gradient_bytes == real.inspection_values.gradient_bytes
    assert predicted.inspection_values.carried == real.inspection_values.carried
    assert predicted.inspection_values.snapshot_bytes == real.inspection_values.snapshot_bytes
    for stage in predicted.inspection_values.stages:
        assert_in_microseconds(stage)


def assert_in_microseconds(stage: StageCost) -> None:
    assert stage.forward_seconds >= 0
    assert round(stage.forward_seconds * 1e6, 6) % 1 == pytest.approx(0)


@pytest.mark.parametrize(
    ("make", "sample"),
    [
        (convolutions, lambda: torch.randn(4, 3, 8, 8)),
        (dropouts, lambda: torch.randn(8, 7)),
        (moving_buffers, lambda: torch.randn(8, 6)),
        pytest.param(models.resnet18, lambda: torch.randn(4, 3, 32, 32), marks=pytest.mark.slow),
    ],
    ids=["convolutions", "dropouts", "buffers", "ResNet-18"],
)
def test_what_stages_hold_is_what_is_measured(make: Callable[[], nn.Module], sample: Callable[[], Any]) -> None:
    assert_alike(*both(make, sample))


def unpadded(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch without padding: what is without values cannot say where padding is."""
    return {key: torch.ones_like(value) if "mask" in key else value for key, value in inputs.items()}


TRIFLES = {"GPT-2": 200, "Swin": 64, "T5": 16, "Whisper": 16}
"""A stage of these saves single numbers that operators wrap, which no dispatch shows."""
OTHERS = ("GPT-2", "T5", "Swin", "Mixtral", "Whisper", "BERT", "ResNet", "ViT", "ConvNeXt")


@cache
def both_of(name: str) -> tuple[Checkpointable, Checkpointable]:
    """A model of the ecosystem, for all tests that look at it.

    Ways are numbered as they are left: by clocks, the real stage might be left with others than the predicted one.
    """
    import ecosystem

    _, inputs, loss = ecosystem.MODELS[name]()
    with patch("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways)):
        return both(lambda: ecosystem.MODELS[name]()[0], lambda: unpadded(inputs), loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "U-Net", *OTHERS])
def test_captured_models_hold_what_is_measured(name: str) -> None:
    pytest.importorskip("transformers")
    assert_alike(*both_of(name), TRIFLES.get(name, 0))


def peaks(real: Checkpointable, predicted: Checkpointable, inputs: dict[str, Any], loss: Any) -> list[tuple[int, int]]:
    """The peaks of plans made without memory: predicted, and of a step that really follows them."""
    found = []
    optimizer = torch.optim.AdamW(real.parameters())
    stored = predicted.budget.peak_bytes(store_all(predicted.chain))
    least = predicted.budget.least_bytes()
    for limit in (stored, (least + stored) // 2, least):
        predicted.compute_sequence(limit)
        real.sequence = predicted.sequence
        for _ in range(2):  # the first step makes the optimizer's state
            optimizer.zero_grad()
            measured, _ = measured_step(real, optimizer, inputs, loss)
        found.append((predicted.budget.peak_bytes(predicted.sequence), measured))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "within"), [("Llama", 0.01), ("U-Net", 0.10)])
def test_steps_by_plans_made_without_memory_take_what_was_predicted(name: str, within: float) -> None:
    pytest.importorskip("transformers")
    import ecosystem

    _, inputs, loss = ecosystem.MODELS[name]()
    for expected, found in peaks(*both_of(name), unpadded(inputs), loss):
        assert found == pytest.approx(expected, rel=within)
