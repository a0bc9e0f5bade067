"""An Accelerate loop whose model is a `Checkpointable`: gradients accumulated and clipped, state saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py import Checkpointable
from rotor_py.measure.step_memory import recomputes
from tests.checkpointable.steps import blocks, images
from tests.integrations.runs import assert_same_weights, halfway, run_peak

accelerate = pytest.importorskip("accelerate")

BATCHES = list(torch.randn(4, 4, 3, 24, 24, generator=torch.Generator().manual_seed(1)))
"""An epoch. They are there already, so that the memory of a run is that of its steps."""


@pytest.fixture(autouse=True)
def _accelerate_starts_anew() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return blocks(4, 12)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def entropy(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output)))


def limit() -> int:
    model = network()
    return halfway(Checkpointable(model, images(), loss=entropy, optimizer=adamw(model)))


class Loop:
    """What a user of Accelerate writes. `losses` are those of training and, at the end of every epoch, evaluation."""

    def __init__(self, model: nn.Module, **options: str) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
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


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}])
def test_a_loop_is_the_plain_loop(options: dict[str, str]) -> None:
    plain = Loop(network(), **options)
    planned = Loop(Checkpointable(network(), mem_limit=limit(), loss=entropy), **options)
    for loop in (plain, planned):
        loop.epoch(), loop.epoch()
    assert planned.losses == plain.losses
    assert all(map(torch.equal, planned.state(), plain.state()))
    assert_same_weights(planned.accelerator.unwrap_model(planned.model), plain.accelerator.unwrap_model(plain.model))
    assert type(planned.accelerator.unwrap_model(planned.model, keep_fp32_wrapper=False)) is Checkpointable
    assert recomputes(planned.model.sequence) or options  # activations are half as large in bfloat16


def test_a_loop_stays_inside_the_limit() -> None:
    most = limit()
    loop = Loop(Checkpointable(network(), mem_limit=most, loss=entropy))
    loop.epoch()
    loop.optimizer.optimizer.state.clear()
    assert recomputes(loop.model.sequence)
    assert run_peak(loop.epoch, loop.model, BATCHES[0]) <= most


def test_state_that_was_saved_with_a_plan_goes_on_without_one_and_the_other_way_round(tmp_path: Path) -> None:
    most = limit()

    def planned() -> Checkpointable:
        return Checkpointable(network(), mem_limit=most, loss=entropy)

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
