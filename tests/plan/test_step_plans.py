"""Several kinds of steps in turn: each is planned once, keeps to the limit, and has the numbers of plain training."""

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

from rotor_py import Checkpointable, InfeasibleError
from rotor_py.measure.budget import recomputes
from tests.capture.steps import assert_same_step
from tests.checkpointable.steps import Residual, Stack, Tower, between, planned_at, square, step_peak
from tests.execute.training import assert_same, steps
from tests.fields import logged, raises


def residual() -> Stack:
    blocks = [Residual(nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(0.2)) for _ in range(3)]
    return Stack(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.BatchNorm2d(16), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1))


def chain() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)) for _ in range(3)]
    first = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(first, *blocks, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS = {"chain": chain, "captured": residual}


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


@pytest.mark.parametrize("kind", MODELS)
def test_a_beginning_that_is_frozen_in_every_other_step_leaves_the_chain_and_comes_back(kind: str) -> None:
    plain = made(kind)
    planned, stages = Checkpointable(copy.deepcopy(plain)), []

    def freeze(network: Any, trains: bool) -> None:
        for layer in network[:3] if kind == "chain" else network.layers[:1]:
            layer.requires_grad_(trains)

    for trains in (True, False):
        freeze(planned, trains)
        planned.measure(images())
        planned.mem_limit = max(planned.mem_limit or 0, between(planned, 0.0))
    with plans_counted(planned) as measured:
        for step in range(4):
            for network in (planned, plain):
                freeze(network, step % 2 == 0)
            assert_same_step(planned, plain, images())
            stages.append(tuple(planned.names))
    assert measured == []
    assert stages[0] == stages[2] != stages[1] == stages[3]


def test_kinds_that_are_measured_first_are_each_inside_the_limit_and_inside_a_new_one() -> None:
    """What is frozen may still have the gradients of the step before."""
    planned, plain = Checkpointable(made("chain"), loss=square), made("chain")
    square(planned(images())).backward()
    limit = 0
    for trains in (False, True):
        planned.requires_grad_(trains)
        planned.measure(images(gradient=not trains))
        limit = max(limit, between(planned, 0.3))
    planned.compute_sequence(limit)
    with plans_counted(planned) as measured:
        for trains in (True, False, True):
            planned.requires_grad_(trains)
            peak = step_peak(planned, images(gradient=not trains))
            assert recomputes(planned.sequence)
            assert 0.98 * planned.budget.peak_bytes(planned.sequence) <= peak <= limit
        for new in (10**9, limit):  # a new limit is one for kinds that wait, too
            planned.compute_sequence(new)
            for trains in (False, True):
                planned.requires_grad_(trains)
                assert step_peak(planned, images(gradient=not trains)) <= new
                assert recomputes(planned.sequence) == (new == limit)
        plain.load_state_dict(planned.state_dict())
        for trains in (True, False):
            for network in (planned, plain):
                network.requires_grad_(trains)
            assert_same_step(planned, plain, images(gradient=not trains))
    assert measured == []


def test_an_optimizer_that_is_detected_in_one_kind_counts_in_all() -> None:
    planned = Checkpointable(chain(), loss=square)
    for gradient in (True, False):
        planned.measure(images(gradient=gradient))
    limit = between(planned, 1.0)  # stores everything, as long as there is no optimizer
    planned.compute_sequence(limit)
    adam = torch.optim.Adam(planned.parameters())
    for step in range(6):
        square(planned(images(gradient=step % 2 == 0))).backward()
        if step < 4:
            adam.step()
            continue
        assert planned.budget.fixed.optimizer > 0
        assert planned.budget.peak_bytes(planned.sequence) <= limit
        assert recomputes(planned.sequence)


def test_layers_that_are_taken_out_are_freed_and_waiting_kinds_keep_no_input() -> None:
    for planned in (Checkpointable(chain(), mem_limit="1GB"), Checkpointable(residual(), mem_limit="1GB")):
        batches = [images(gradient=gradient) for gradient in (True, False)]
        alive = [weakref.ref(batch.untyped_storage()) for batch in batches]
        for batch in batches:
            square(planned(batch)).backward()
        if not planned.captured:
            alive.append(weakref.ref(planned[1][0].weight))
            planned[1] = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
            square(planned(images())).backward()
        del batch, batches
        gc.collect()
        assert {each() for each in alive} == {None}


def test_of_many_kinds_the_one_that_has_waited_longest_is_planned_again() -> None:
    planned = Checkpointable(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), mem_limit="1GB")

    def planned_for(number: int) -> bool:
        for index, layer in enumerate(planned[1:5]):
            layer.requires_grad_(bool(number >> index & 1))
        with plans_counted(planned) as measured:
            square(planned(torch.ones(2, 4, requires_grad=True))).backward()
        return bool(measured)

    assert all(planned_for(number) for number in range(1, 10))
    assert not any(planned_for(number) for number in range(1, 10))
    assert planned_for(10)
    assert not planned_for(9)
    assert planned_for(1)


class Branches(nn.ModuleList):
    def forward(self, value: Any) -> tuple[torch.Tensor, ...]:
        pair = value if isinstance(value, tuple) else (value, value)
        return tuple(layer(each).tanh() for layer, each in zip(self, pair, strict=True))


def test_outputs_without_a_gradient_in_one_kind_have_theirs_in_another() -> None:
    plain = nn.Sequential(*(Branches([nn.Linear(16, 16), nn.Linear(16, 16)]) for _ in range(5)))
    planned = Checkpointable(copy.deepcopy(plain), loss=square)
    for step in range(4):
        for block in (*planned, *plain):
            block[1].requires_grad_(step % 2 == 0)
        if step < 2:
            planned.zero_grad()
            planned.measure(torch.randn(64, 16))
            planned.mem_limit = max(planned.mem_limit or 0, between(planned, 0.1))
        assert_same_step(planned, plain, torch.randn(64, 16))


@pytest.mark.parametrize("fresh", [False, True])
def test_gradients_left_over_from_another_kind_count(fresh: bool) -> None:
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)]
    planned, batch = Checkpointable(nn.Sequential(*layers), loss=square, fresh_grads=fresh), torch.randn(256, 128)
    halves = [nn.ModuleList(layers[:4]), nn.ModuleList(layers[4:])]
    limits = []
    for step in range(6):
        for number, half in enumerate(halves):
            half.requires_grad_(number == step % 2)
        if step < 2:
            planned.measure(batch)
            limits.append(between(planned, 0.7 if fresh else 0.5))
            planned.mem_limit = max(limits)
            continue
        halves[step % 2].zero_grad(set_to_none=fresh)
        peak = step_peak(planned, batch)
        left = sum(p.grad.nbytes for p in planned.parameters() if not p.requires_grad and p.grad is not None)
        assert planned.budget.fixed.gradients >= left
        assert left > 0 or step == 2
        assert peak <= planned.budget.peak_bytes(planned.sequence) <= planned.mem_limit


def test_a_plan_is_not_saved_for_steps_of_another_kind(tmp_path):
    planned = planned_at(0.0, chain(), images())
    loss = square(planned(images()))
    planned.eval()
    planned.save_plan(tmp_path / "plan.json")  # a plan is for training
    loss.backward()
    planned.train()
    square(planned(images())).backward()
    next(planned.model.parameters()).requires_grad_(False)
    with raises(ValueError, "plan_for_other_step"):
        planned.save_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_with_gradients_is_inside_the_limit_or_goes_on_without_a_plan(kind, caplog):
    planned = planned_at(0.0, made(kind), images())
    plain = copy.deepcopy(planned.model).eval()
    planned.eval()
    assert step_peak(planned, images(), fresh_grads=True) <= planned.mem_limit
    planned.zero_grad()
    assert recomputes(planned.sequence)
    assert_same_step(planned, plain, images())
    assert not logged(caplog, "evaluation_over_limit")
    for _ in range(2):
        assert_same_step(planned, plain, torch.randn(64, 3, 16, 16))
    (told,) = logged(caplog, "evaluation_over_limit")
    assert told.numbers["mem_limit"] == planned.mem_limit < told.numbers["min_bytes"]


def test_arrays_of_numpy_are_compared_whole() -> None:
    class Scaled(nn.Linear):
        def forward(self, value: torch.Tensor, scale: Any) -> torch.Tensor:
            return super().forward(value * torch.from_numpy(scale)).relu()

    planned = Checkpointable(Scaled(8, 8), mem_limit="1GB")
    for _ in range(3):
        square(planned(torch.randn(4, 8), np.ones(8, dtype=np.float32))).backward()


# One batch that no plan fits costs nothing: what is planned stays, and as large a batch is refused at once.


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 32)


def planned_for(kind: str, count: int) -> tuple[Checkpointable, nn.Module]:
    """A model planned for `count` rows, halfway between the least limit and storing everything; and the plain one."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    model = Tower(32, 4, 0.1) if kind == "captured" else nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    return planned_at(0.5, model, rows(count), fresh_grads=True), plain


@pytest.mark.parametrize("kind", MODELS)
def test_after_an_error_or_too_large_a_batch_smaller_ones_train_and_with_room_it_is_planned(kind, caplog) -> None:
    planned, plain = planned_for(kind, 256)
    sequence, report, batch = planned.sequence, str(planned.report()), rows(8192)
    gone = weakref.ref(batch)
    with raises(InfeasibleError, "limit_below_held"):
        planned(batch)
    del batch
    gc.collect()
    assert gone() is None
    for fails in (planned, planned.measure):
        with pytest.raises(RuntimeError, match="shape"):
            fails(torch.randn(128, 31))
    assert planned.sequence is sequence
    assert str(planned.report()) == report
    with plans_counted(planned) as measured:
        for count in (256, 100):
            batch = rows(count)
            assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
        assert step_peak(planned, rows(256), fresh_grads=True) <= planned.mem_limit
        for count in (8192, 9000):
            with pytest.raises(InfeasibleError):
                planned(rows(count))
    assert measured == []
    planned.mem_limit, batch = "1GB", rows(8192)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
    assert logged(caplog, "planning_again", cause="input")
    assert planned.inspection_values.input_bytes == batch.nbytes or planned.captured
    with plans_counted(planned) as measured:
        for count in (8192, 256):
            square(planned(rows(count))).backward()
    assert measured == []


def test_after_too_large_a_batch_in_measuring_smaller_ones_train() -> None:
    planned, plain = planned_for("chain", 256)
    limit, batch = planned.mem_limit, rows(256)
    planned.measure(rows(8192))
    with pytest.raises(InfeasibleError):
        planned.compute_sequence()
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
    assert step_peak(planned, batch, fresh_grads=True) <= limit
    with plans_counted(planned) as measured, pytest.raises(InfeasibleError):
        planned(rows(8192))
    assert measured == []
