"""`limit_memory(accelerator, ...)`: what the Accelerator prepares is planned where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.measure.step_memory import recomputes
from tests.fields import logged
from tests.integrations.runs import assert_same_weights, run_peak
from tests.integrations.test_accelerate import BATCHES, Loop, accelerate, entropy, limit, network

from rotor_py.integrations.accelerate_hook import limit_memory  # isort: skip  # after the import that may skip


@pytest.fixture(autouse=True)
def _accelerate_starts_anew() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class LimitedLoop(Loop):
    """A loop whose Accelerator has the limit before it prepares anything."""

    def __init__(self, model: nn.Module, most: float, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        make = accelerate.Accelerator

        def limited(**given: Any) -> Any:
            accelerator = make(**given)
            self.hook = limit_memory(accelerator, most, loss=entropy)
            return accelerator

        with monkeypatch.context() as patched:
            patched.setattr(accelerate, "Accelerator", limited)
            super().__init__(model, **options)


@pytest.mark.parametrize("options", [{}, pytest.param({"mixed_precision": "bf16"}, marks=pytest.mark.slow)])
def test_a_loop_is_the_plain_loop_and_leaves_the_plain_model(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = Loop(network(), **options), network()
    loop = LimitedLoop(model, limit(), monkeypatch, **options)
    for each in (plain, loop):
        each.epoch(), each.epoch()
    assert loop.losses == plain.losses
    assert all(map(torch.equal, loop.state(), plain.state()))
    assert recomputes(loop.hook.planned.sequence) or options  # activations are half as large in bfloat16
    loop.accelerator.save_model(loop.model, str(tmp_path))
    again = network()
    accelerate.load_checkpoint_in_model(again, str(tmp_path))
    loop.accelerator.end_training()
    assert_same_weights(again, model)
    assert_same_weights(model, plain.accelerator.unwrap_model(plain.model))
    assert loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=False) is model
    before = loop.hook.planned.sequence
    loop.hook.planned.sequence = None
    entropy(model(BATCHES[0])).backward()
    assert loop.hook.planned.sequence is None, "a plain model makes no plan"
    assert before is not None


def test_a_loop_stays_inside_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    most = limit()
    loop = LimitedLoop(network(), most, monkeypatch)
    loop.epoch()
    loop.optimizer.optimizer.state.clear()
    assert recomputes(loop.hook.planned.sequence)
    assert run_peak(loop.epoch, loop.model, BATCHES[0]) <= most


def test_frozen_and_wrapped_models_are_left_alone_and_a_second_one_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    hook = limit_memory(accelerator, "1GB")
    frozen, wrapped = network().requires_grad_(False), Checkpointable(network(), mem_limit="1GB")
    first, second = network(), nn.Linear(3, 3)
    accelerator.prepare(frozen, wrapped)
    assert hook.planned is None
    accelerator.prepare(first, second)
    assert hook.planned is not None
    assert hook.planned.model is first
    assert "forward" not in {**frozen.__dict__, **second.__dict__}
    assert logged(caplog, "second_model")
    hook.end()
    assert "forward" not in first.__dict__
    assert not {"prepare", "prepare_model", "end_training"} & accelerator.__dict__.keys()
