"""Stages that are stored whole run as one function, and what is done for every step is not done more than once."""

from __future__ import annotations

import contextvars
import copy
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.plan.step_spec import ModelState, StepSpec, spec_of
from rotor_py.stage.error_context import watched
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from tests.capture.steps import compare
from tests.capture.test_graph_facts import planned_tower, tower_loss
from tests.checkpointable.steps import between, square

_seen: list[weakref.ref[torch.UntypedStorage]] = []
_there: list[bool] = []


class Mixed(nn.Module):
    """Tied weights, a recurrent layer, dropout, a batch norm, a region of autocast, and numbers between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(24, 24) for _ in range(3))
        self.third.weight = self.first.weight
        self.recurrent = nn.GRU(24, 24, batch_first=True)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).relu_()) * scale
        rows = x.shape[1]
        x = self.recurrent(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(x).sin()
        x = self.norm(x.float().transpose(1, 2)).transpose(1, 2)
        return self.third(x).sum(1) / rows


def mixed(**options: Any) -> tuple[Checkpointable, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Mixed()
    inputs = {"x": torch.randn(16, 12, 24), "scale": torch.rand(16, 12, 24)}
    planned = Checkpointable(model, loss=square, fresh_grads=True, **options)
    planned.measure(inputs)
    return planned, copy.deepcopy(model), inputs


def stages_called(monkeypatch: Any) -> list[str]:
    """The names of the stages that are run one by one in the graph around them."""
    found: list[str] = []
    run = StageRunner.forward

    def noted(self: StageRunner, *given: Any, **options: Any) -> Any:
        found.append(self.name)
        return run(self, *given, **options)

    monkeypatch.setattr(StageRunner, "forward", noted)
    return found


def test_stages_that_are_stored_run_as_one_and_as_in_plain_training(monkeypatch: Any) -> None:
    planned, plain, inputs = mixed()
    called = stages_called(monkeypatch)
    # The optimizer comes with the first step: a limit without room for it would be planned for anew.
    for share in (None, 0.4):
        planned.compute_sequence(10**9 if share is None else between(planned, share))
        assert planned.budget is not None
        peak = compare(planned, plain, inputs, square)
        assert planned.sequence is not None
        assert peak <= planned.budget.peak_bytes(planned.sequence)
        assert bool(called) == (share is not None)


def test_layers_that_do_nothing_are_run_too() -> None:
    network = Checkpointable(nn.Sequential(nn.Sequential(), nn.Sequential(), nn.Linear(4, 4)), mem_limit="1GB")
    network(torch.randn(2, 4)).sum().backward()


def test_another_tensor_in_the_place_of_a_parameter_is_used() -> None:
    planned, plain, inputs = mixed(mem_limit="1GB")
    compare(planned, plain, inputs, square, steps=1)
    for network in (planned.model, plain):
        torch.manual_seed(1)
        network.second.weight = nn.Parameter(torch.randn(24, 24))
    compare(planned, plain, inputs, square)


def test_whoever_watches_stages_is_told_of_each() -> None:
    planned, _, inputs = planned_tower(mem_limit="1GB")
    told: list[str] = []
    with watched(lambda doing, name, begins: told.append(name) if begins and doing == "forward" else None):
        tower_loss(planned(**inputs)).backward()
    assert told == planned.names


class Refusing(nn.Module):
    """Its third layer takes no batch of another size than 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 2:
                x = x.index_select(0, index)
        return x


def test_an_error_names_the_stage_that_it_comes_from_and_the_line() -> None:
    network = Checkpointable(Refusing(), mem_limit="1GB")
    inputs = {"x": torch.randn(8, 16), "index": torch.arange(8)}
    square(network(**inputs)).backward()
    found = []
    # The second time, somebody watches, so that the stages run one by one.
    for around in (nullcontext(), watched(lambda *_: None)):
        with pytest.raises(IndexError) as caught, around:
            network(**{**inputs, "index": torch.arange(8) + 3})
        found.append(caught.value.__notes__)
    assert "x = x.index_select(0, index)" in found[0][0]
    assert found[0][1].startswith("in the forward of stage")
    assert found[0] == found[1]


def note(value: torch.Tensor) -> torch.Tensor:
    """Double a value, and remember its memory."""
    _seen.append(weakref.ref(value.untyped_storage()))
    return value * 2


def look(value: torch.Tensor) -> torch.Tensor:
    """Double a value, and see whether what was remembered is still there."""
    _there.append(any(each() is not None for each in _seen))
    return value * 2


class Letting(nn.Module):
    """No backward needs what comes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return look(note(self.layer(x)) + 1)


def test_what_goes_into_a_run_is_freed_as_soon_as_it_was_used() -> None:
    torch.compiler.allow_in_graph(note)
    torch.compiler.allow_in_graph(look)
    network = Checkpointable(Letting(), fresh_grads=True, loss=square)
    network.measure(torch.randn(4, 8))
    assert len(network.names) == 4
    # The first stage is run again, so that the run of the others begins with what it has returned.
    network.sequence = Sequence.parse("CF_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, Fe_0, B_0")
    _seen.clear()
    _there.clear()
    network(torch.randn(4, 8)).sum().backward()
    assert _there == [False]


def test_only_steps_that_are_equal_in_all_are_equal_at_sight() -> None:
    state = ModelState.of(nn.Linear(1, 1))

    def spec(value: Any, number: int = 2, rest: Any = (None, "a"), **others: Any) -> StepSpec:
        return StepSpec(state, spec_of(((value, number, rest), {"mask": torch.ones(3), **others})))

    known, ones = spec(torch.ones(4, 5)), torch.ones(4, 5)
    assert known.identical(spec(torch.zeros(4, 5)))
    for other in (
        spec(torch.ones(4, 6)),
        spec(ones.double()),
        spec(torch.ones(4, 5, requires_grad=True)),
        spec(ones, mask=torch.ones(3, 1)),
        spec(ones, more=1),
        spec(ones, number=1),
        spec(ones, rest=[None, "a"]),
    ):
        assert not known.identical(other)
    assert not spec(np.ones(3)).identical(spec(np.ones(3)))  # their elements would be compared


def test_a_step_leaves_nothing_behind_in_the_context_of_the_thread() -> None:
    planned, _, inputs = planned_tower(mem_limit="1GB")

    def variables() -> int:
        tower_loss(planned(**inputs)).backward()
        return len(contextvars.copy_context())

    variables()
    assert len({variables() for _ in range(2)}) == 1
