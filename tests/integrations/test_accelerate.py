"""An Accelerate loop whose model is planned: wrapped as a `Checkpointable`, or by `limit_memory(accelerator, ...)`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from tests.capture.steps import adamw
from tests.checkpointable.steps import images
from tests.fields import logged
from tests.integrations.runs import BATCHES, assert_same_weights, entropy, halfway, network, run_peak

accelerate = pytest.importorskip("accelerate")

from rotor_py.integrations.accelerate_hook import limit_memory  # noqa: E402  # after the import that may skip


@pytest.fixture(autouse=True)
def _accelerate_starts_anew() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """What a user of Accelerate writes. `losses` are those of training and, at the end of every epoch, evaluation."""

    def __init__(self, model: nn.Module, hooked: int | str | None = None) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.hook = None if hooked is None else limit_memory(self.accelerator, hooked, loss=entropy)
        batches = torch.utils.data.DataLoader(BATCHES, batch_size=None)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(model, adamw(model), batches)
        self.losses: list[float] = []

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


@pytest.mark.parametrize("by", ["wrapped", "hook"])
def test_a_loop_is_the_plain_loop_inside_the_limit_and_its_end_leaves_the_plain_model(by: str, tmp_path: Path) -> None:
    plain, model = Loop(network()), network()
    limit = halfway(Checkpointable(network(), images(), loss=entropy, optimizer=adamw(network())))
    loop = Loop(model, limit) if by == "hook" else Loop(Checkpointable(model, mem_limit=limit, loss=entropy))
    planned: Any = loop.model if loop.hook is None else loop.hook.planned
    for each in (plain, loop):
        each.epoch(), each.epoch()
    assert loop.losses == plain.losses
    assert all(map(torch.equal, loop.state(), plain.state()))
    expected = plain.accelerator.unwrap_model(plain.model)
    assert_same_weights(loop.accelerator.unwrap_model(loop.model), expected)
    loop.accelerator.save_model(loop.model, str(tmp_path))
    again = network()
    accelerate.load_checkpoint_in_model(again, str(tmp_path))
    assert_same_weights(again, expected)
    loop.optimizer.optimizer.state.clear()
    assert recomputes(planned.sequence)
    assert run_peak(loop.epoch, loop.model, BATCHES[0]) <= limit
    if by == "hook":
        loop.accelerator.end_training()
        assert loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=False) is model
        planned.sequence = None
        entropy(model(BATCHES[0])).backward()
        assert planned.sequence is None, "a plain model makes no plan"


def test_state_that_was_saved_with_a_plan_goes_on_without_one_and_the_other_way_round(tmp_path: Path) -> None:
    def planned() -> Checkpointable:
        return Checkpointable(network(), mem_limit="1GB", loss=entropy)

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
    assert hook.planned.model is first
    assert "forward" not in {**frozen.__dict__, **second.__dict__}
    assert logged(caplog, "second_model")
    hook.end()
    assert "forward" not in first.__dict__
    assert not {"prepare", "prepare_model", "end_training"} & accelerator.__dict__.keys()
