"""An Accelerate loop whose model is planned: wrapped as a `Checkpointable`, or by `limit_memory(accelerator, ...)`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from tests.checkpointable.steps import blocks, images
from tests.fields import logged
from tests.integrations.runs import BATCHES, assert_same_weights, entropy, halfway, run_peak

accelerate = pytest.importorskip("accelerate")

from rotor_py.integrations.accelerate_hook import limit_memory  # noqa: E402  # after the import that may skip


@pytest.fixture(autouse=True)
def _accelerate_starts_anew() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return blocks(4, 12)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def limit() -> int:
    model = network()
    return halfway(Checkpointable(model, images(), loss=entropy, optimizer=adamw(model)))


class Loop:
    """What a user of Accelerate writes. `losses` are those of training and, at the end of every epoch, evaluation."""

    def __init__(self, model: nn.Module, hooked: int | None = None, **options: str) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        self.hook = None if hooked is None else limit_memory(self.accelerator, hooked, loss=entropy)
        batches = torch.utils.data.DataLoader(BATCHES, batch_size=None)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(model, adamw(model), batches)
        self.losses: list[float] = []

    @property
    def planned(self) -> Any:
        return self.model if self.hook is None else self.hook.planned

    def epoch(self) -> None:
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = entropy(self.model(batch))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
        self.model.eval()
        with torch.no_grad():
            self.losses.append(entropy(self.model(batch)).item())
        self.model.train()

    def state(self) -> list[torch.Tensor]:
        kept = [list(entry.values()) for entry in self.optimizer.optimizer.state.values()]
        return [tensor.clone() for tensor in tensors_in(kept)]


def planned_loop(by: str, limit: int, **options: str) -> Loop:
    if by == "hook":
        return Loop(network(), limit, **options)
    return Loop(Checkpointable(network(), mem_limit=limit, loss=entropy), **options)


@pytest.mark.parametrize(
    ("by", "options"),
    [("wrapped", {}), ("hook", {}), pytest.param("hook", {"mixed_precision": "bf16"}, marks=pytest.mark.slow)],
)
def test_a_loop_is_the_plain_loop(by: str, options: dict[str, str], limit: int, tmp_path: Path) -> None:
    plain, planned = Loop(network(), **options), planned_loop(by, limit, **options)
    for loop in (plain, planned):
        loop.epoch(), loop.epoch()
    assert planned.losses == plain.losses
    assert all(map(torch.equal, planned.state(), plain.state()))
    expected = plain.accelerator.unwrap_model(plain.model)
    assert_same_weights(planned.accelerator.unwrap_model(planned.model), expected)
    assert recomputes(planned.planned.sequence) or options  # activations are half as large in bfloat16
    planned.accelerator.save_model(planned.model, str(tmp_path))
    again = network()
    accelerate.load_checkpoint_in_model(again, str(tmp_path))
    assert_same_weights(again, expected)


def test_a_loop_stays_inside_the_limit_and_the_end_of_training_leaves_the_plain_model(limit: int) -> None:
    model = network()
    loop = Loop(model, limit)
    loop.epoch()
    loop.optimizer.optimizer.state.clear()
    assert recomputes(loop.planned.sequence)
    assert run_peak(loop.epoch, loop.model, BATCHES[0]) <= limit
    loop.accelerator.end_training()
    assert loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=False) is model
    loop.planned.sequence = None
    entropy(model(BATCHES[0])).backward()
    assert loop.planned.sequence is None, "a plain model makes no plan"


def test_state_that_was_saved_with_a_plan_goes_on_without_one_and_the_other_way_round(
    tmp_path: Path, limit: int
) -> None:
    def planned() -> Checkpointable:
        return Checkpointable(network(), mem_limit=limit, loss=entropy)

    for first, then in ((planned, network), (network, planned)):
        loop = Loop(first())
        loop.epoch()
        loop.accelerator.save_state(str(tmp_path / first.__name__))
        before = copy.deepcopy(loop.losses)
        loop.epoch()
        again = Loop(then())
        again.accelerator.load_state(str(tmp_path / first.__name__))
        again.epoch()
        assert before + again.losses == loop.losses
        assert_same_weights(again.model, loop.model)


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
