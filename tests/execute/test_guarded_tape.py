"""Out of memory anywhere in a step: it is undone, and runs again with the numbers of plain training."""

import copy
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import memory_meter
from rotor_solver import Sequence
from tests.checkpointable.steps import planned_at, square, without_collector
from tests.execute.starved import AtOperators, Gated, Train, assert_exact_wherever_it_runs_out, moving, planned, step
from tests.fields import raises
from tests.training.loop import rows
from tests.training.tripping import chain as dropping

F = nn.functional


@pytest.mark.parametrize(
    ("kind", "share", "times"),
    [(moving, 0.7, 1), (dropping, 1.0, 3), pytest.param(Gated, 0.7, 3, marks=pytest.mark.slow)],
)
def test_out_of_memory_at_any_operator_leaves_the_numbers_of_plain_training(kind, share, times) -> None:
    start = kind()
    assert_exact_wherever_it_runs_out(planned(start, share), start, times=times)  # so many times in a row


def test_stages_that_are_stored_in_part_are_as_exact() -> None:
    start = Gated()
    network = planned(start, granularity=4)
    stored = {f"Fe_{stage},": f"Fe_{stage}^1," for stage, ways in enumerate(network.inspection_values.ways) if ways}
    text = " ".join(stored.get(each, each) for each in str(network.sequence).split())
    assert "^1" in text
    assert_exact_wherever_it_runs_out(network, start, points=3, sequence=Sequence.parse(text))


class Twice(nn.Linear):
    """One weight, used twice: autocast casts it once, and the gradients of both uses are added in its precision."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(super().forward(value)), self.weight)


def with_autocast(network: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(network(rows()))
    loss.backward()


def several_in_flight(network: nn.Module) -> None:
    torch.manual_seed(3)
    (square(network(rows())) + square(network(rows(1))) * 2).backward()


def retaining(network: nn.Module) -> None:
    torch.manual_seed(3)
    loss = square(network(rows()))
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("train", "kind", "options"),
    [
        (with_autocast, lambda: nn.Sequential(Twice(12, 12), *dropping()), {}),
        (lambda network: [step(network, seed) for seed in (3, 4)], dropping, {}),
        (several_in_flight, moving, {"forwards_in_flight": 2, "backward_order": "any"}),
        (retaining, dropping, {}),
    ],
)
def test_other_ways_to_train_are_as_exact(train: Train, kind: Any, options: dict[str, Any], caplog: Any) -> None:
    caplog.set_level(logging.ERROR, "rotor_py")
    start = kind()
    with torch.autocast("cpu", torch.bfloat16, enabled=train is with_autocast):
        network = planned(start, 0.8, **options)
    assert_exact_wherever_it_runs_out(network, start, train, points=2)


def test_after_an_error_a_second_backward_is_still_refused() -> None:
    loss = planned(dropping(), 0.8)(rows()).sum()
    with AtOperators(5).inside_stages():
        loss.backward()
    with raises(RuntimeError, "second_backward"):
        loss.backward()


def test_layers_around_and_hooks_on_parameters_see_one_backward() -> None:
    before, start, after = nn.Linear(12, 12), dropping(), nn.Linear(32, 3)
    calls: list[int] = []

    def stepping(parameter: torch.Tensor) -> None:  # in the backward: weights of later stages have changed
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
        around = nn.Sequential(before, after)
        outer = sum(p.grad.double().sum().item() for p in around.parameters())
        around.zero_grad()
        torch.manual_seed(int(outer * 1e9) % 2**31)  # compared by `state`

    sample = before(rows()).detach().requires_grad_()
    network = planned_at(0.8, copy.deepcopy(start), sample, on_oom="replan")
    assert_exact_wherever_it_runs_out(network, start, train)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand(gradient.shape)


class NoisyLinear(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Noisy.apply(super().forward(Noisy.apply(value)))


def test_the_random_state_before_a_backward_is_put_back() -> None:
    start = nn.Sequential(nn.Linear(12, 32), *[NoisyLinear(32, 32) for _ in range(3)])
    assert_exact_wherever_it_runs_out(planned(start), start)


def test_a_buffer_that_an_earlier_forward_has_saved_is_put_back_unnoticed() -> None:
    layers = [nn.Linear(12, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.BatchNorm1d(32)]
    start = nn.Sequential(*layers)
    network = planned(start, forwards_in_flight=2, backward_order="any")
    assert_exact_wherever_it_runs_out(network, start, several_in_flight, points=6)


def test_steps_that_were_undone_leave_no_bytes_behind_and_the_input_goes_with_the_backward() -> None:
    network = planned(dropping())
    limit = network.mem_limit
    step(network)
    with AtOperators().inside_stages() as count:
        step(network)
    with without_collector():
        for at in range(3, count.calls, count.calls // 4):
            network.compute_sequence(limit)
            network.zero_grad()
            with memory_meter(torch.device("cpu")) as meter:
                with AtOperators(at).inside_stages() as mode:
                    step(network)
                network.zero_grad()
            assert mode.errors == 1
            assert meter.phases[""].end == 0, at
    batch = rows().clone()
    held = weakref.ref(batch.untyped_storage())
    loss = square(network(batch))
    loss.backward()
    del batch
    assert held() is None
