"""What an optimizer will need, against what the real one takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import UnknownOptimizerError, measured_peak, memory_meter, storage_bytes, tensors_in
from rotor_profiling.optimizer import optimizer_cost, scratch_alone, step_bytes_without
from tests.fields import raises
from tests.profiling.costs import CPU

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30), nn.BatchNorm1d(30))


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return tensors_in([list(entry.values()) for entry in optimizer.state.values()])


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_scratch_are_those_of_real_steps_and_nothing_is_touched(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = len(optimizer.state)
    predicted = optimizer_cost(optimizer)
    assert len(optimizer.state) == before
    step(optimizer, model)
    state = storage_bytes(state_of(optimizer))
    assert predicted.state_bytes == state
    with memory_meter(CPU) as meter:
        optimizer.step()
    assert meter.phases[""].peak <= predicted.step_bytes <= meter.phases[""].peak + 256
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state_of(optimizer)]
    old = [(t._version, t.clone()) for t in tensors]
    assert optimizer_cost(optimizer).present_bytes == state
    assert all(t._version == v and torch.equal(t, values) for t, (v, values) in zip(tensors, old, strict=True))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_step_copies_parameters_that_are_not_contiguous(make: Any) -> None:
    layers = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Conv2d(64, 16, 3), nn.Linear(9, 9))
    model = layers.to(memory_format=torch.channels_last)
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    predicted = optimizer_cost(optimizer)
    step(optimizer, model)
    with memory_meter(CPU) as meter:
        optimizer.step()
    assert 0 < meter.phases[""].peak <= predicted.step_bytes


def test_an_optimizer_that_reads_values_is_tried_on_zeros_and_one_that_cannot_be_tried_is_refused() -> None:
    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if float(p.grad.sum()) >= 0:
                        self.state[p]["kept"] = p.clone()

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("mine")

    model = network()
    found = optimizer_cost(Reading(model.parameters(), lr=0.1))
    assert found.state_bytes == storage_bytes(model.parameters())
    with raises(UnknownOptimizerError, "unknown_optimizer", name="Broken"):
        optimizer_cost(Broken(model.parameters(), lr=0.1))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size, size)) for size in (100, 150)] + [nn.Parameter(torch.ones(9), False)]


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW, amsgrad"], OPTIMIZERS["SGD"], lambda p: torch.optim.Adafactor(p)])
def test_scratch_of_one_parameter_is_that_of_its_own_step_and_the_others_need_theirs(make) -> None:
    given = parameters()
    found = scratch_alone(make(given))
    assert set(found) == {id(each) for each in given[:2]}
    for each in given[:2]:
        alone = make([each])
        each.grad = torch.randn_like(each)
        alone.step()
        measured = measured_peak(alone.step, [], CPU)
        assert measured <= found[id(each)] <= measured + 128
    optimizer = make(given)
    assert step_bytes_without(optimizer, set()) >= max(found.values())
    assert step_bytes_without(optimizer, {id(given[1])}) == found[id(given[0])]
    assert step_bytes_without(optimizer, {id(given[0]), id(given[1])}) == 0
    assert not optimizer.state
