"""Costs of stages whose memory can be worked out by hand, in units of one activation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import StageBytes, StageCost, storages
from rotor_profiling.stage import runs
from rotor_profiling.stage.runs import WatchedInput, can_be_watched
from rotor_py.stage.protocol import StageOffers
from tests.profiling.costs import BIAS, START, UNIT, WEIGHT, cost, square, unit


class Exp(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.exp()


class Scratch(nn.Module):
    """Needs three units while it runs without a graph or with one, and keeps none of them."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.cat([value, value, value])
        return value.exp()


class Slow(nn.Module, StageOffers):
    """Takes ten milliseconds, all of them for its output's values."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return value.exp()

    def forward_skipping_output(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.exp


def units(found: StageCost) -> dict[str, int]:
    names = ("activation", "saved", "forward_temp", "nograd_temp", "backward_temp", "replay_temp")
    return {name: getattr(found, f"{name}_bytes") // UNIT for name in names}


def test_a_layer_that_saves_its_output() -> None:
    # Backward: δ_{i+1} and δ_i, which the solver adds by itself, and nothing else.
    assert units(cost(Exp(), unit())) == {
        "activation": 1, "saved": 1, "forward_temp": 0, "nograd_temp": 0, "backward_temp": 0, "replay_temp": 0,
    }  # fmt: skip


def test_the_time_that_goes_into_the_output_alone_is_a_part_of_the_forward() -> None:
    found = cost(Slow(), unit())
    assert 0.005 < found.skipped_output_seconds <= min(found.forward_seconds, found.nograd_seconds)
    assert cost(Exp(), unit()).skipped_output_seconds < 0.005  # noise


def test_a_stage_that_saves_something_in_the_middle() -> None:
    found = units(cost(nn.Sequential(Exp(), Exp()), unit()))
    assert found["saved"] == 2  # both outputs; without a graph the first is scratch
    assert (found["forward_temp"], found["nograd_temp"]) == (0, 1)


def test_scratch_memory_is_seen_in_every_way_to_run() -> None:
    found = units(cost(Scratch(), unit()))
    assert (found["saved"], found["forward_temp"], found["nograd_temp"]) == (1, 2, 2)


def test_parameters_are_not_saved_and_their_gradients_are_scratch_where_gradients_are_kept() -> None:
    found = cost(square(bias=True), unit(), output_held=True)
    assert (found.activation_bytes, found.saved_bytes) == (UNIT, UNIT)
    # The solver adds δ_{i+1} and δ_i; beyond them new gradients of the parameters, before they are added to the old.
    assert found.backward_temp_bytes == WEIGHT + BIAS + START


def test_an_output_that_its_own_backward_does_not_need_is_gone_by_then() -> None:
    """A linear layer saves its input: ā holds an output that nobody needs once the next stage is done with it."""
    held, gone = (cost(square(), unit(), output_held=held).backward_temp_bytes for held in (True, False))
    assert (held, gone) == (WEIGHT + START, WEIGHT - UNIT + START)


def test_views_hold_nothing_of_their_own() -> None:
    found = units(cost(nn.Flatten(), unit()))
    assert (found["saved"], found["forward_temp"], found["nograd_temp"]) == (0, 0, 0)
    assert cost(nn.Flatten(), unit()).backward_temp_bytes == START - UNIT  # δ_i is δ_{i+1}, seen in another shape


def test_what_is_passed_on_and_belongs_to_the_caller_is_not_counted() -> None:
    batch = unit()

    class PassOn(nn.Module):
        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return value, value.exp()

    assert cost(PassOn(), batch).activation_bytes == 2 * UNIT
    assert cost(PassOn(), batch, owned=storages([batch])).activation_bytes == UNIT


def test_two_outputs_in_one_memory_count_once() -> None:
    class Halves(nn.Module):
        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return value.exp().chunk(2, dim=1)

    assert units(cost(Halves(), unit()))["activation"] == 1


def test_an_in_place_layer_inside_a_stage_costs_nothing() -> None:
    assert units(cost(nn.Sequential(square(), nn.ReLU(inplace=True)), unit()))["saved"] == 1


def test_an_input_without_gradient_has_no_gradient() -> None:
    found = cost(square(), unit(requires_grad=False), output_held=True)
    assert found.backward_temp_bytes == WEIGHT - UNIT + START  # the solver will add a δ_i that there is not


def test_a_stage_without_any_gradient_has_no_backward() -> None:
    found = cost(square().requires_grad_(False), unit(requires_grad=False))
    assert found.saved_bytes == UNIT
    assert found.backward_temp_bytes <= 0


def test_nothing_of_the_stage_is_changed() -> None:
    stage = nn.Sequential(square(), nn.BatchNorm1d(128), nn.Dropout(0.5))
    value = unit()
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    tensors = [*stage.parameters(), *(p.grad for p in stage.parameters()), *stage.buffers(), value]
    before = [(t._version, t.clone()) for t in tensors]
    state = torch.get_rng_state()
    cost(stage, value)
    assert value.grad is None
    assert torch.equal(state, torch.get_rng_state())
    for tensor, (version, old) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, old)


@pytest.mark.timed
def test_times_are_positive_and_a_larger_stage_takes_longer() -> None:
    small, large = cost(square(), unit()), cost(nn.Sequential(*[square() for _ in range(60)]), unit())
    for name in ("forward_seconds", "nograd_seconds", "backward_seconds"):
        assert 0 < getattr(small, name) < getattr(large, name)


@pytest.mark.gpu
def test_on_cuda_a_stage_costs_whole_blocks(cuda: torch.device) -> None:
    stage, value = Exp(), unit().detach().to(cuda).requires_grad_()
    found = cost(stage, value, device=cuda)
    assert (found.activation_bytes, found.saved_bytes) == (UNIT, UNIT)
    assert found.forward_seconds > 0


class InTwo(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = pair
        return first, first * second


FUNCTIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], Callable[[], Any]]] = {
    "saves its input": (square, unit),
    "saves its output": (nn.Sigmoid, unit),
    "saves neither": (lambda: lambda value: value + 1, unit),
    "a view": (lambda: lambda value: value.view(-1), unit),
    "the input itself": (nn.Identity, unit),
    "hands one on": (InTwo, lambda: (unit(), unit())),
    "of one memory": (InTwo, lambda: (unit(),) * 2),
    "channels last": (
        lambda: nn.Conv2d(4, 4, 1),
        lambda: torch.randn(8, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_(),
    ),
    "sides of length one": (nn.Tanh, lambda: torch.randn(64, 1, 32)[:, :, ::2].requires_grad_()),
    "without a gradient": (square, lambda: unit(requires_grad=False)),
    "indices": (lambda: nn.Embedding(16, 64), lambda: torch.randint(16, (64, 64))),
}


@pytest.mark.parametrize("which", FUNCTIONS)
def test_bytes_are_those_that_a_copy_shows(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, value = FUNCTIONS[which]
    function, given = make(), value()
    names = list(StageBytes.__dataclass_fields__)
    watched = cost(function, given)
    monkeypatch.setattr(runs, "can_be_watched", lambda value: False)
    copied = cost(function, given)
    assert [getattr(watched, name) for name in names] == [getattr(copied, name) for name in names]


def test_what_is_not_held_is_seen_and_what_is_held_is_not() -> None:
    assert cost(nn.Sigmoid(), unit()).input_released_bytes == UNIT
    assert cost(square(), unit()).input_released_bytes == 0
    assert cost(square(), unit()).output_released_bytes == UNIT
    assert cost(nn.Sigmoid(), unit()).output_released_bytes == 0


def test_a_twin_is_the_same_memory_and_takes_none() -> None:
    value = torch.randn(4, BIAS).requires_grad_()
    watched = WatchedInput(value, frozenset())
    assert watched.value.data_ptr() == value.data_ptr()
    assert watched.value.requires_grad
    assert watched.value.stride() == value.stride()
    held = watched.value.detach()
    assert watched.let_go() == 0
    del held
    assert watched.freed() == value.nbytes
    assert watched.freed() == 0


def test_only_plain_memory_is_watched() -> None:
    class Other(torch.Tensor):
        pass

    assert can_be_watched([torch.zeros(1), 2, torch.zeros(1, dtype=torch.bool)])
    assert not can_be_watched(torch.zeros(1).as_subclass(Other))
    assert not can_be_watched(torch.zeros(1, device="meta"))
    assert not can_be_watched(torch.zeros(1, dtype=torch.complex64))
    assert not can_be_watched(torch.zeros(2, 2).to_sparse())
