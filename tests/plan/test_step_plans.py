"""Several kinds of steps in turn: each is planned once, keeps to the limit, and has the numbers of plain training."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from tests.checkpointable.steps import between, square, step_peak
from tests.checkpointable.test_behaviour import recomputes
from tests.fields import raises

F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


class Residual(nn.Module):
    """No chain: TorchDynamo captures it."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(count))
        self.norm = nn.BatchNorm2d(16)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.enter(value)
        for block in self.blocks:
            value = value + F.leaky_relu(block(value), 0.2)
        return F.dropout(self.norm(value), 0.1, self.training).mean((1, 2, 3))


def chain() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers.append(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)))
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def generator() -> nn.Sequential:
    return nn.Sequential(nn.ConvTranspose2d(8, 8, 16), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))


MODELS = {"chain": chain, "captured": Residual}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def images(*, gradient: bool = False) -> torch.Tensor:
    return torch.randn(8, 3, 16, 16).requires_grad_(gradient)


@contextmanager
def plans_counted(planned: Checkpointable) -> Iterator[list[str]]:
    """The names of the stages that are measured: none if nothing is planned."""
    seen: list[str] = []
    before, planned.progress = planned.progress, lambda done, count, name: seen.append(name)
    try:
        yield seen
    finally:
        planned.progress = before


def adversarial(judge: nn.Module, maker: nn.Module, steps: int, *, freeze: bool) -> list[torch.Tensor]:
    """Steps of a GAN as people write them; losses, and all that is left after the last."""
    judging, making = (torch.optim.Adam(network.parameters(), 1e-3) for network in (judge, maker))
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        if freeze:
            judge.requires_grad_(True)
        judging.zero_grad()
        fake = maker(torch.randn(8, 8, 1, 1))
        losses = [judge(images()).square().mean(), judge(fake.detach()).exp().mean()]
        for loss in losses:
            loss.backward()
        judging.step()
        if freeze:
            judge.requires_grad_(False)
        making.zero_grad()
        losses.append(judge(fake).square().mean())
        losses[-1].backward()
        making.step()
        found += [loss.detach() for loss in losses]
    return [*found, *judge.state_dict().values(), *maker.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_gan_trains_as_without_a_plan_and_each_kind_of_step_is_planned_once(kind: str, freeze: bool) -> None:
    judge, maker = made(kind), generator()
    planned = Checkpointable(copy.deepcopy(judge), mem_limit="1GB")
    other = Checkpointable(copy.deepcopy(maker), mem_limit="1GB")
    expected = adversarial(judge, maker, 2, freeze=freeze)
    found = adversarial(planned, other, 2, freeze=freeze)
    assert all(map(torch.equal, found, expected))
    with plans_counted(planned) as measured:
        adversarial(planned, other, 3, freeze=freeze)
    assert measured == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_beginning_that_is_frozen_in_every_other_step_leaves_the_chain_and_comes_back(kind: str) -> None:
    plain = made(kind)
    planned, stages = Checkpointable(copy.deepcopy(plain)), []
    for trains in (True, False):
        for layer in list(planned.model.children())[: 3 if kind == "chain" else 1]:
            layer.requires_grad_(trains)
        planned.measure(images())
        planned.mem_limit = max(planned.mem_limit or 0, between(planned, 0.0))
    with plans_counted(planned) as measured:
        for step in range(4):
            for network in (planned, plain):
                torch.manual_seed(step)
                for layer in list(network.children())[: 3 if kind == "chain" else 1]:
                    layer.requires_grad_(step % 2 == 0)
                network.zero_grad()
                square(network(images())).backward()
            for found, expected in zip(planned.parameters(), plain.parameters(), strict=True):
                assert (found.grad is None) == (expected.grad is None)
                assert found.grad is None or torch.equal(found.grad, expected.grad)
            stages.append(tuple(planned.names))
    assert measured == []
    assert stages[0] == stages[2] != stages[1] == stages[3]


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_that_are_measured_first_are_each_inside_the_limit(kind: str) -> None:
    """What is frozen may still have the gradients of the step before.

    In a captured model an input that gets a gradient counts once too often: it goes along from stage to stage.
    """
    planned = Checkpointable(made(kind), loss=square)
    square(planned(images())).backward()
    planned.requires_grad_(False)
    planned.measure(images(gradient=True))
    limit = between(planned, 0.3)
    planned.requires_grad_(True)
    planned.measure(images())
    limit = max(limit, between(planned, 0.3))
    planned.compute_sequence(limit)
    with plans_counted(planned) as measured:
        for trains in (True, False, True, False):
            planned.requires_grad_(trains)
            batch = images(gradient=not trains)
            above = batch.nbytes if kind == "captured" and batch.requires_grad else 0
            peak = step_peak(planned, batch)
            assert planned.budget is not None
            assert planned.sequence is not None
            assert recomputes(planned)
            assert 0.98 * planned.budget.peak_bytes(planned.sequence) - above <= peak <= limit
    assert measured == []


def test_a_new_limit_holds_for_kinds_that_were_planned_before() -> None:
    planned = Checkpointable(chain(), loss=square, mem_limit="1GB")
    for gradient in (True, False):
        square(planned(images(gradient=gradient))).backward()
        assert not recomputes(planned)
    planned.compute_sequence(between(planned, 0.5))
    with plans_counted(planned) as measured:
        batch = images(gradient=True)
        square(planned(batch)).backward()
        assert recomputes(planned)
        assert planned.budget is not None
        assert planned.budget.peak_bytes(planned.sequence) <= planned.mem_limit
        planned.zero_grad(set_to_none=False)
        assert step_peak(planned, images(gradient=True)) <= planned.mem_limit
    assert measured == []


def test_an_optimizer_that_is_noticed_in_one_kind_counts_in_all() -> None:
    planned = Checkpointable(chain(), loss=square)
    for gradient in (True, False):
        planned.measure(images(gradient=gradient))
    without = planned.budget
    assert without is not None
    limit = between(planned, 1.0)  # stores everything, as long as there is no optimizer
    planned.compute_sequence(limit)
    adam = torch.optim.Adam(planned.parameters())
    for gradient in (True, False, True, False):
        square(planned(images(gradient=gradient))).backward()
        adam.step()
    for gradient in (True, False):
        square(planned(images(gradient=gradient))).backward()
        assert planned.budget.fixed.optimizer > 0
        assert planned.budget.peak_bytes(planned.sequence) <= limit
        assert recomputes(planned)


def test_layers_that_are_taken_out_are_let_go_though_kinds_with_them_were_planned() -> None:
    planned = Checkpointable(chain(), mem_limit="1GB")
    for trains in (True, False):
        planned[1].requires_grad_(trains)
        square(planned(images())).backward()
    old = weakref.ref(planned[1][0].weight)
    planned[1] = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
    square(planned(images())).backward()
    gc.collect()
    assert old() is None


def test_of_many_kinds_the_one_that_has_waited_longest_is_planned_again() -> None:
    planned = Checkpointable(chain(), mem_limit="1GB")

    def planned_for(number: int) -> bool:
        for index, layer in enumerate(planned[1:5]):
            layer.requires_grad_(bool(number >> index & 1))
        with plans_counted(planned) as measured:
            square(planned(images(gradient=True))).backward()
        return bool(measured)

    assert all(planned_for(number) for number in range(1, 10))
    assert not any(planned_for(number) for number in range(1, 10))
    assert planned_for(10)
    assert not planned_for(9)
    assert planned_for(1)


@pytest.mark.parametrize("kind", MODELS)
def test_forwards_of_several_kinds_may_come_before_their_backwards(kind: str) -> None:
    plain = made(kind)
    planned = Checkpointable(copy.deepcopy(plain))
    for gradient in (True, False):
        planned.measure(images(gradient=gradient))
        planned.mem_limit = max(planned.mem_limit or 0, between(planned, 0.0))
    found: list[Any] = []
    for network in (planned, plain):
        torch.manual_seed(3)
        first, second = images(gradient=True), images()
        loss = square(network(first)) + square(network(second)) + square(network(first))
        loss.backward()
        found.append([loss, first.grad, *(p.grad for p in network.parameters()), *network.buffers()])
    assert all(map(torch.equal, *found))


class Branches(nn.Module):
    """Two branches from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = value if isinstance(value, tuple) else (value, value)
        return self.a(first).tanh(), self.b(second).tanh()


def test_outputs_without_a_gradient_in_one_kind_have_theirs_in_another() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Branches() for _ in range(5)))
    planned = Checkpointable(copy.deepcopy(plain), loss=square)
    for step in range(4):
        for network in (planned, plain):
            for block in network:
                block.b.requires_grad_(step % 2 == 0)
            torch.manual_seed(step)
            network.zero_grad()
            if network is planned and step < 2:
                planned.measure(torch.randn(64, 16))
                planned.mem_limit = max(planned.mem_limit or 0, between(planned, 0.1))
            torch.manual_seed(step)
            square(network(torch.randn(64, 16))).backward()
        for found, expected in zip(planned.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
            assert found.grad is None or torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("fresh", [False, True])
def test_gradients_that_are_left_over_later_count_when_their_turn_comes(fresh: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)]
    planned, batch = Checkpointable(nn.Sequential(*layers), loss=square, fresh_grads=fresh), torch.randn(256, 128)
    halves = [nn.ModuleList(layers[:4]), nn.ModuleList(layers[4:])]

    def turn(step: int) -> None:
        for number, half in enumerate(halves):
            half.requires_grad_(number == step % 2)

    limits = []
    for step in range(2):
        turn(step)
        planned.measure(batch)
        limits.append(between(planned, 0.7 if fresh else 0.5))
    planned.mem_limit = max(limits)
    for step in range(6):
        turn(step)
        halves[step % 2].zero_grad(set_to_none=fresh)
        peak = step_peak(planned, batch)
        assert planned.budget is not None
        if step > 1:
            left = sum(p.grad.nbytes for p in planned.parameters() if not p.requires_grad)
            assert planned.budget.fixed.gradients >= left > 0
            assert peak <= planned.budget.peak_bytes(planned.sequence) <= planned.mem_limit


def test_waiting_kinds_of_a_captured_model_keep_no_input() -> None:
    planned = Checkpointable(Residual(), mem_limit="1GB")
    batches = [images(gradient=gradient) for gradient in (True, False)]
    alive = [weakref.ref(batch.untyped_storage()) for batch in batches]
    for batch in batches:
        square(planned(batch)).backward()
    del batch, batches
    gc.collect()
    assert [each() for each in alive] == [None, None]


@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_is_not_saved_for_a_kind_that_it_is_not_for(kind: str, tmp_path: Any) -> None:
    planned = Checkpointable(made(kind), images(), mem_limit="1GB")
    planned.eval()
    planned.save_plan(tmp_path / "plan.json")  # a plan is for training
    list(planned.model.children())[-3 if kind == "chain" else -1].requires_grad_(False)
    next(planned.model.parameters()).requires_grad_(False)
    with raises(ValueError, "plan_for_other_step"):
        planned.save_plan(tmp_path / "plan.json")


def test_modes_that_change_between_forward_and_backward_are_refused_where_a_stage_is_run_again() -> None:
    planned = Checkpointable(chain(), loss=square)
    planned.measure(images())
    planned.compute_sequence(between(planned, 0.0))
    loss = square(planned(images()))
    planned.eval()
    with raises(RuntimeError, "mode_switched"):
        loss.backward()
    planned.train()
    square(planned(images())).backward()


class Scaled(nn.Linear):
    def forward(self, value: torch.Tensor, scale: Any) -> torch.Tensor:
        return super().forward(value * torch.from_numpy(scale)).relu()


def test_arrays_of_numpy_are_compared_whole() -> None:
    planned = Checkpointable(Scaled(8, 8), mem_limit="1GB")
    for _ in range(3):
        square(planned(torch.randn(4, 8), np.ones(8, dtype=np.float32))).backward()
