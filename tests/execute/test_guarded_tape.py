"""Out of memory anywhere in a step: it is undone, and runs again with the numbers of plain training."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import memory_meter
from rotor_py import Checkpointable
from rotor_py.stage.error_context import watched
from rotor_solver import Sequence
from tests.checkpointable.steps import between, square
from tests.execute.starved import AtOperators, Capacity
from tests.execute.undone import Gated, assert_exact_wherever_it_runs_out, moving, planned, state, step
from tests.fields import raises
from tests.training.loop import differences, rows
from tests.training.tripping import chain as dropping

F = nn.functional
Kind = Callable[[], nn.Module]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it
KINDS = [dropping, moving, pytest.param(Gated, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_at_any_operator_leaves_the_numbers_of_plain_training(kind: Kind) -> None:
    torch.manual_seed(0)
    start = kind()
    assert_exact_wherever_it_runs_out(planned(start, 0.7), start, every=13)
    assert_exact_wherever_it_runs_out(planned(start, 1.0), start, every=17, times=3)  # three times in a row


def test_stages_that_are_stored_in_part_are_as_exact() -> None:
    torch.manual_seed(0)
    start = Gated()
    network = planned(start, granularity=4)
    text = str(network.sequence)
    for stage, ways in enumerate(network.inspection_values.ways):
        text = text.replace(f"Fe_{stage},", f"Fe_{stage}^1,") if ways else text
    assert "^1" in text
    assert_exact_wherever_it_runs_out(network, start, every=9, sequence=Sequence.parse(text))


class Twice(nn.Linear):
    """One weight, used twice: autocast casts it once, and the gradients of both uses are added in its precision."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(super().forward(value)), self.weight)


def test_so_is_autocast() -> None:
    def train(network: nn.Module) -> None:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(network(rows()))
        loss.backward()

    torch.manual_seed(0)
    start = nn.Sequential(Twice(12, 12), *dropping())
    with torch.autocast("cpu", torch.bfloat16):
        network = planned(start, 0.8)
    assert_exact_wherever_it_runs_out(network, start, train, every=13)


def test_gradients_that_were_there_before_are_added_to_once() -> None:
    def train(network: nn.Module) -> None:
        for seed in (3, 4):
            step(network, seed)

    torch.manual_seed(0)
    start = dropping()
    assert_exact_wherever_it_runs_out(planned(start, 0.8), start, train, every=29)


@pytest.mark.parametrize("kind", [pytest.param(dropping, marks=pytest.mark.slow), moving])
def test_several_forwards_in_flight_are_undone_one_by_one(kind: Kind) -> None:
    def train(network: nn.Module) -> None:
        torch.manual_seed(3)
        (square(network(rows())) + square(network(rows(1))) * 2).backward()

    torch.manual_seed(0)
    start = kind()
    logging.getLogger("rotor_py").setLevel(logging.ERROR)
    try:
        network = planned(start, 0.9, forwards_in_flight=2, backward_order="any")
        assert_exact_wherever_it_runs_out(network, start, train, every=37)
    finally:
        logging.getLogger("rotor_py").setLevel(logging.NOTSET)


def test_a_retained_graph_can_be_gone_through_again() -> None:
    def train(network: nn.Module) -> None:
        torch.manual_seed(3)
        loss = square(network(rows()))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    torch.manual_seed(0)
    start = dropping()
    network = planned(start, 0.8)
    assert_exact_wherever_it_runs_out(network, start, train, every=29)
    loss = network(rows()).sum()
    with AtOperators(5).inside_stages():
        loss.backward()
    with raises(RuntimeError, "second_backward"):
        loss.backward()


def test_layers_around_and_hooks_on_parameters_see_one_backward() -> None:
    """The optimizer steps in the backward, as soon as a gradient is there: weights of later stages have changed."""
    torch.manual_seed(0)
    before, start, after = nn.Linear(12, 12), dropping(), nn.Linear(32, 3)
    calls: list[int] = []

    def stepping(parameter: torch.Tensor) -> None:
        calls.append(1)
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad

    def train(network: nn.Module) -> None:
        calls.clear()
        torch.manual_seed(3)
        hooks = [p.register_post_accumulate_grad_hook(stepping) for p in network.parameters()]
        square(after(network(before(rows())))).backward()
        for hook in hooks:
            hook.remove()
        assert len(calls) == len(list(network.parameters()))
        outer = [p.grad for layer in (before, after) for p in layer.parameters()]
        for layer in (before, after):
            layer.zero_grad()
        torch.manual_seed(int(sum(grad.double().sum().item() for grad in outer) * 1e9) % 2**31)  # compared by `state`

    network = Checkpointable(copy.deepcopy(start), loss=square, on_oom="replan")
    network.measure(before(rows()).detach().requires_grad_())
    network.compute_sequence(between(network, 0.8))
    assert_exact_wherever_it_runs_out(network, start, train, every=37)


def test_the_random_state_before_a_backward_is_put_back() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * torch.rand(gradient.shape)

    class Layer(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Noisy.apply(super().forward(Noisy.apply(value)))

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(12, 32), *[Layer(32, 32) for _ in range(4)])
    assert_exact_wherever_it_runs_out(planned(start), start, every=2)


def test_a_buffer_that_an_earlier_forward_has_saved_is_put_back_unnoticed() -> None:
    """Autograd refuses a backward whose saved tensors were written to; batch norm's own kernel is exempt."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.GELU())
    network = planned(start, forwards_in_flight=2)

    def train(model: nn.Module) -> None:
        torch.manual_seed(3)
        (square(model(rows())) + square(model(rows(1)))).backward()

    train(network)
    plain = copy.deepcopy(start)
    train(plain)
    for at in range(1, 6):
        network.zero_grad()
        network.load_state_dict(start.state_dict())
        network.compute_sequence(network.mem_limit)
        torch.manual_seed(3)
        failing = AtOperators(at)
        first = square(network(rows()))
        with watched(lambda doing, name, begins, mode=failing: mode.turn(begins) if name == "1" else None):
            second = square(network(rows(1)))
        assert failing.errors == 1
        (first + second).backward()
        assert not differences(state(network), state(plain))


def test_the_input_is_let_go_of_with_the_backward() -> None:
    network = planned(dropping())
    with Capacity() as device:
        batch = rows().clone()
        loss = square(network(batch))
        loss.backward()
        held, size = device.held, batch.nbytes
        del batch
        assert device.held == held - size
    del loss


def test_steps_that_were_undone_leave_no_bytes_behind() -> None:
    """Reference counts alone let everything go: the collector of cycles is off."""
    torch.manual_seed(0)
    network = planned(dropping())
    limit = network.mem_limit
    step(network)
    with AtOperators().inside_stages() as count:
        step(network)
    gc.collect()
    gc.disable()
    try:
        for at in range(1, count.calls, 9):
            network.compute_sequence(limit)
            network.zero_grad()
            with memory_meter(torch.device("cpu")) as meter:
                with AtOperators(at).inside_stages() as mode:
                    step(network)
                network.zero_grad()
            assert mode.errors == 1
            assert meter.phases[""].end == 0, at
    finally:
        gc.enable()
