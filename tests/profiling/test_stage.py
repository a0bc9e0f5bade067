"""Costs of stages whose memory can be worked out by hand, in units of one activation."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import leaves_of, memory_meter, storages, tensors_in
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.stage.protocol import StageOffers
from tests.profiling.costs import BIAS, CPU, START, UNIT, WEIGHT, cost, square, unit


class Exp(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.exp()


class Scratch(nn.Module):
    """Needs three units while it runs without a graph or with one, and keeps none of them."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.cat([value, value, value])
        return value.exp()


class Halves(nn.Module):
    """Two outputs in one memory."""

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return value.exp().chunk(2, dim=1)


class Slow(nn.Module, StageOffers):
    """Takes ten milliseconds, all of them for its output's values."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return value.exp()

    def forward_skipping_output(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.exp


# Of a backward, the solver adds δ_{i+1} and δ_i itself.
UNITS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "saves its output": (Exp, {"activation": 1, "saved": 1, "forward_temp": 0, "nograd_temp": 0, "backward_temp": 0}),
    "saves in the middle": (lambda: nn.Sequential(Exp(), Exp()), {"saved": 2, "forward_temp": 0, "nograd_temp": 1}),
    "scratch": (Scratch, {"saved": 1, "forward_temp": 2, "nograd_temp": 2}),
    "a view": (nn.Flatten, {"saved": 0, "forward_temp": 0, "nograd_temp": 0}),
    "one memory": (Halves, {"activation": 1}),
    "in place": (lambda: nn.Sequential(square(), nn.ReLU(inplace=True)), {"saved": 1}),
}


@pytest.mark.parametrize("which", UNITS)
def test_bytes_of_a_stage_are_those_worked_out_by_hand(which: str) -> None:
    make, expected = UNITS[which]
    found = cost(make(), unit())
    assert {name: getattr(found, f"{name}_bytes") // UNIT for name in expected} == expected


@pytest.mark.parametrize(
    ("stage", "value", "held", "expected"),
    [
        # New gradients of the parameters, before they are added to the old ones.
        (square(bias=True), unit(), True, WEIGHT + BIAS + START),
        (square(), unit(), True, WEIGHT + START),
        # A linear layer saves its input: ā holds an output that the backward does not need.
        (square(), unit(), False, WEIGHT - UNIT + START),
        (nn.Flatten(), unit(), False, START - UNIT),  # δ_i is δ_{i+1}, seen in another shape
        (square(), unit(requires_grad=False), True, WEIGHT - UNIT + START),  # the solver adds a δ_i that there is not
    ],
)
def test_scratch_of_a_backward_counts_beside_the_gradients_of_input_and_output(stage, value, held, expected) -> None:
    assert cost(stage, value, output_held=held).backward_temp_bytes == expected


def test_parameters_are_not_saved_and_tensors_of_the_caller_that_a_stage_hands_on_do_not_count() -> None:
    found = cost(square(bias=True).requires_grad_(False), unit(requires_grad=False))
    assert (found.activation_bytes, found.saved_bytes) == (UNIT, UNIT)
    assert found.backward_temp_bytes <= 0, "without any gradient, it has no backward"
    batch, hand_on = unit(), lambda value: (value, value.exp())
    assert cost(hand_on, batch).activation_bytes == 2 * UNIT
    assert cost(hand_on, batch, owned=storages([batch])).activation_bytes == UNIT


def test_measuring_changes_nothing_of_a_stage() -> None:
    stage = nn.Sequential(square(), nn.BatchNorm1d(128), nn.Dropout(0.5))
    value = unit()
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    tensors = [*stage.parameters(), *(p.grad for p in stage.parameters()), *stage.buffers(), value]
    before, state = [(t._version, t.clone()) for t in tensors], torch.get_rng_state()
    cost(stage, value)
    assert value.grad is None
    assert torch.equal(state, torch.get_rng_state())
    assert all(t._version == version and torch.equal(t, old) for t, (version, old) in zip(tensors, before, strict=True))


@pytest.mark.timed
def test_times_are_positive_and_time_for_the_output_is_a_part_of_the_forward() -> None:
    small, large = cost(square(), unit()), cost(nn.Sequential(*[square() for _ in range(60)]), unit())
    for name in ("forward_seconds", "nograd_seconds", "backward_seconds"):
        assert 0 < getattr(small, name) < getattr(large, name)
    assert small.skipped_output_seconds < 0.005  # noise
    slow = cost(Slow(), unit())
    assert 0.005 < slow.skipped_output_seconds <= min(slow.forward_seconds, slow.nograd_seconds)


@pytest.mark.gpu
def test_on_cuda_a_stage_costs_whole_blocks(cuda: torch.device) -> None:
    stage, value = Exp(), unit().detach().to(cuda).requires_grad_()
    found = cost(stage, value, device=cuda)
    assert (found.activation_bytes, found.saved_bytes) == (UNIT, UNIT)
    assert (found.input_released_bytes, found.output_released_bytes) == (UNIT, 0)
    assert found.forward_seconds > 0


class InTwo(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair[0], pair[0] * pair[1]


class Subclass(torch.Tensor):
    pass


FUNCTIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], Callable[[], Any]]] = {
    "saves its input": (square, unit),
    "saves its output": (nn.Sigmoid, unit),
    "saves neither": (lambda: lambda value: value + 1, unit),
    "a view": (lambda: lambda value: value.view(-1), unit),
    "hands one on": (InTwo, lambda: (unit(), unit())),
    "of one memory": (InTwo, lambda: (unit(),) * 2),
    "a view of more": (nn.Tanh, lambda: torch.randn(64, 1, 32)[:, :, ::2].requires_grad_()),
    "without a gradient": (square, lambda: unit(requires_grad=False)),
    "indices": (lambda: nn.Embedding(16, 64), lambda: torch.randint(16, (64, 64))),
    "a subclass": (nn.Sigmoid, lambda: unit().detach().as_subclass(Subclass).requires_grad_()),
}


def freed_of_a_copy(function: Callable[[Any], Any], value: Any, input_bytes: int) -> tuple[int, int]:
    """Bytes that a run frees of a copy of its input: when the input is dropped, and when the output is."""
    with memory_meter(CPU) as meter:
        meter.mark("copy")
        copy = tree_map_only(torch.Tensor, torch.clone, leaves_of(value))
        meter.mark("run")
        output = function(copy)
        graph = [each.grad_fn for each in tensors_in(output)]
        meter.mark("input")
        del copy
        meter.mark("output")
        del output
        meter.mark("between")
        del graph
    known = meter.phases["copy"].kept == input_bytes
    return max(0, -meter.phases["input"].kept) if known else 0, max(0, -meter.phases["output"].kept)


@pytest.mark.parametrize("which", FUNCTIONS)
def test_bytes_that_a_run_frees_are_those_that_a_copy_of_its_input_shows(which: str) -> None:
    make, value = FUNCTIONS[which]
    function, given = make(), value()
    input_bytes = sum(storages(tensors_in(given)).values())
    found = cost(function, given)
    freed, freed_with_output = freed_of_a_copy(function, given, input_bytes)
    assert found.input_released_bytes == freed
    assert found.output_released_bytes == min(freed_with_output, found.activation_bytes, found.saved_bytes)
