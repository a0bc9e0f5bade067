"""Optimizers that a model was not told of: they count from their first step on."""

import copy
import gc
import itertools
import random
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_profiling import UnknownOptimizerError, optimizer_cost
from rotor_py import Checkpointable, best_batch, best_level, estimate, largest_batch, verify
from rotor_py.measure.budget import recomputes
from tests.capture.steps import adamw
from tests.checkpointable.steps import Made, planned_at, square, step_peak
from tests.execute.training import assert_same
from tests.fields import kinds, logged, raises


def network(*_: object) -> nn.Sequential:
    """As much in parameters as in activations."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(5)])


def batch() -> torch.Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(1))


def told(share: float) -> Checkpointable:
    """One that was told of its optimizer from the start, with a limit `share` of the way to storing everything."""
    model = network()
    return planned_at(share, model, batch(), optimizer=adamw(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[tuple[str, torch.Tensor]]:
    for _ in range(steps):
        optimizer.zero_grad()
        square(model(batch())).backward()
        optimizer.step()
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def unplanned() -> Checkpointable:
    return Checkpointable(network(), batch(), mem_limit="1GB", loss=square)


def bytes_of(planned: Checkpointable) -> tuple[Any, ...]:
    """What the budget says in bytes: times differ from one measurement to the next."""
    budget = planned.budget
    own = budget.before_bytes, budget.step_bytes, budget.snapshot_bytes, budget.stepping_bytes
    return (budget.fixed, *own, budget.least_bytes())


def test_every_step_stays_inside_the_limit_though_the_optimizer_comes_later() -> None:
    known = told(0.5)
    planned, plain = Checkpointable(network(), batch(), known.mem_limit, loss=square), network()
    assert known.budget.fixed.optimizer + planned.budget.peak_bytes(planned.compute_sequence()) > known.mem_limit
    optimizer = adamw(planned)
    assert step_peak(planned, batch(), optimizer) <= known.mem_limit
    assert bytes_of(planned) == bytes_of(known)
    assert recomputes(planned.sequence)
    assert step_peak(planned, batch(), optimizer) <= known.mem_limit
    found, steps = train(planned, optimizer, 1), adamw(plain)
    for _ in range(2):
        square(plain(batch())).backward()
        steps.step()
    assert_same(found, train(plain, steps, 1))


def test_where_no_plan_has_room_training_goes_on_and_a_warning_says_what_would_do(caplog) -> None:
    planned, plain = planned_at(0.0, network(), batch()), network()
    sequence = planned.sequence
    found = train(planned, adamw(planned), 2)
    (record,) = caplog.records
    least = planned.budget.least_bytes()
    assert logged(caplog, "late_optimizer", min_bytes=least, mem_limit=planned.mem_limit) == [record]
    assert least > planned.mem_limit
    assert planned.sequence is sequence
    assert_same(found, train(plain, adamw(plain), 2))


def test_an_optimizer_that_steps_before_the_first_forward_counts_in_the_first_plan() -> None:
    """One that is given a closure runs forward and backward in its step, as in Lightning."""
    known = told(0.5)
    planned = Checkpointable(network(), mem_limit=known.mem_limit, loss=square)

    def closure() -> torch.Tensor:
        value = square(planned(batch()))
        assert bytes_of(planned) == bytes_of(known)
        value.backward()
        return value

    adamw(planned).step(closure)
    assert recomputes(planned.sequence)


def test_optimizers_of_several_groups_of_parameters_add_up() -> None:
    planned = unplanned()
    parts = list(planned.parameters())
    whole = told(1.0).budget.fixed.optimizer
    optimizers = [torch.optim.AdamW(parts[:4]), torch.optim.AdamW(parts[4:])]
    square(planned(batch())).backward()
    found = []
    for optimizer in optimizers * 2:
        optimizer.step()
        found.append(planned.budget.fixed.optimizer)
    assert 0 < found[0] < whole
    assert found[1:] == [whole] * 3


def test_other_models_optimizers_do_not_count_nor_any_beside_the_one_that_was_given() -> None:
    known, other = told(1.0), network()
    planned = unplanned()
    for model in (known, other):
        square(model(batch())).backward()
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    assert planned.budget.fixed.optimizer == 0
    assert bytes_of(known) == bytes_of(told(1.0))


def test_an_optimizer_that_is_gone_counts_no_more_and_a_copy_notices_its_own() -> None:
    planned = unplanned()
    sequence = planned.compute_sequence()
    for _ in range(2):
        train(planned, adamw(planned), 1)
        gc.collect()
    assert planned.sequence is sequence  # it has room for the optimizer
    assert bytes_of(planned) == bytes_of(told(1.0))
    twin = copy.deepcopy(planned)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), 1)
    whole = planned.budget.fixed
    assert whole.parameters < twin.budget.fixed.optimizer + 1 < whole.optimizer


def test_a_second_optimizer_before_the_next_forward_leaves_the_agreed_sequence_to_fall_back_on() -> None:
    planned = unplanned()
    plan = planned._planner.in_use
    sequence = plan.agreed = plan.sequence  # as if several processes had agreed on it
    square(planned(batch())).backward()
    for layers in (planned[:2], planned[2:]):
        adamw(layers).step()
    assert (plan.sequence, plan.last_resort) == (None, sequence)


class Delegating(torch.optim.Optimizer):
    """No copy of it steps anything but the real parameters."""

    def __init__(self, parameters: Any) -> None:
        inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(inner.param_groups, {})
        self.go = lambda: inner.step()

    def step(self, closure: Any = None) -> None:
        self.go()


def test_an_optimizer_whose_memory_cannot_be_found_is_named_in_a_warning(caplog) -> None:
    planned = unplanned()
    train(planned, Delegating(planned.parameters()), 2)
    assert len(logged(caplog, "unknown_optimizer", name="Delegating")) == 1


class Decay(torch.optim.Optimizer):
    """With attributes of its own: a number, a tensor, and the optimizers that it wraps, which refer to it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rate, self.averages, self.lock = 0.9, torch.zeros(5000), threading.Lock()
        self.state["count"] = 3
        self.inner = [torch.optim.Adam([each]) for each in self.param_groups[0]["params"]]
        self.inner[0].outer = self

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                before = self.state[parameter].setdefault("before", torch.empty_like(parameter))
                before.copy_(parameter).mul_(self.rate)
        self.averages.mul_(self.rate)
        for each in self.inner:
            each.step()


def test_optimizers_with_attributes_of_their_own_count_and_step_nothing_before_they_are_asked_to(caplog) -> None:
    planned = unplanned()
    optimizer, before = Decay(planned.parameters()), copy.deepcopy(planned.state_dict())
    optimizer.models = SimpleNamespace(teacher=planned, lock=threading.Lock())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a `step` of its own on the optimizer
    square(planned(batch())).backward()
    gradients = [parameter.grad for parameter in planned.parameters()]
    cost = optimizer_cost(optimizer)
    averages, counters = 4 * 5000, 4 * len(gradients)
    assert cost.state_bytes == 3 * planned.budget.fixed.parameters + averages + counters
    assert cost.present_bytes == averages
    assert kinds(caplog) == []  # neither a copy of the model nor that of the optimizer is taken for another
    assert all(each is parameter.grad for each, parameter in zip(gradients, planned.parameters(), strict=True))
    for name, value in planned.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer.step()
    assert planned.budget.fixed.optimizer == cost.state_bytes  # what it wraps steps, too, and counts once
    for unknown in (Delegating(planned.parameters()), torch.optim.LBFGS(planned.parameters())):
        with raises(UnknownOptimizerError, "unknown_optimizer", name=type(unknown).__name__):
            optimizer_cost(unknown)
        assert not unknown.state
    words = nn.Embedding(100, 8, sparse=True)
    assert optimizer_cost(torch.optim.SparseAdam(words.parameters())).state_bytes == 2 * words.weight.nbytes


def test_an_interrupt_at_any_line_of_the_search_for_an_optimizers_memory_leaves_the_gradients() -> None:
    model = nn.Linear(2, 2)
    optimizer, gradients = torch.optim.SGD(model.parameters(), 0.1), [torch.ones(2, 2), torch.ones(2)]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for at in itertools.count(1):
        left = at

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code.co_name not in ("optimizer_cost", "undoing", "_undo"):
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return trace

        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            optimizer_cost(optimizer)
        sys.settrace(None)
        assert all(each.grad is mine for each, mine in zip(model.parameters(), gradients, strict=True)), at
        if left:
            break


class Langevin(torch.optim.SGD):
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        Langevin.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn(parameter.shape), alpha=random.random() * np.random.rand())


class Critic(nn.Module):
    """A loss with parameters, statistics, a list and a stream of its own, and a penalty on the model's parameters."""

    def __init__(self, trained: list[nn.Parameter]) -> None:
        super().__init__()
        self.norm, self.layer, self.free = nn.BatchNorm1d(64), nn.Linear(64, 1), nn.Parameter(torch.ones(1))
        self.penalty = lambda: sum(each.square().sum() for each in trained)
        self.seen, self.stream = list[float](), torch.Generator().manual_seed(1)
        self.note, self.turn, self.draw = self.seen.append, itertools.count(1).__next__, random.Random(1).random

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(1, generator=self.stream) * self.turn() * self.draw()
        loss = (self.layer(self.norm(output)) * self.free * noise).square().mean() + 0.01 * self.penalty()
        self.note(loss.item())
        return loss


class Counting:
    """Counts its calls: a hook, or a loss."""

    def __init__(self, loss: Any = None) -> None:
        self.loss, self.calls = loss, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return None if self.loss is None else self.loss(*given)


@pytest.mark.parametrize("kind", ["module", "function", "object"])
def test_measuring_a_loss_and_an_optimizer_changes_nothing_that_they_reach(kind: str) -> None:
    found = []
    for planned in (False, True):
        model, heard = network(), []
        critic = Critic(list(model.parameters()))
        of_function = lambda output, critic=critic: critic(output)  # noqa: E731  # its default is restored
        loss = {"module": critic, "function": of_function, "object": Counting(critic)}[kind]
        Langevin.steps, hook = 0, Counting()
        model[1].register_forward_hook(hook)
        trained = [*model.parameters(), *critic.parameters()]
        for each in trained:
            each.register_hook(lambda gradient, heard=heard: heard.append(gradient.sum().item()))
        optimizer = Langevin(trained, lr=0.1)
        called = (
            Checkpointable(model, mem_limit="1GB", loss=loss, optimizer=optimizer, cache=False) if planned else model
        )
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        for _ in range(2):
            loss(called(batch())).backward()
            optimizer.step()
        state = [*(each.grad for each in trained), *trained, *critic.buffers()]
        calls = hook.calls, getattr(loss, "calls", 0), Langevin.steps
        found.append([calls, critic.seen, heard, random.random(), np.random.rand(), *(each.tolist() for each in state)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "asks",
    [
        lambda model, **told: verify(model, batch(), mem_limit="10MB", **told),
        lambda model, **told: best_level(model, batch(), "10MB", **told),
        lambda model, **told: best_batch(model, lambda rows: torch.randn(rows, 64), "1MB", most=64, **told),
        lambda model, **told: largest_batch(model, lambda rows: torch.randn(rows, 64), most=8, device="h100", **told),
        lambda model, **told: estimate(model, batch(), **told),
        lambda model, loss, optimizer: estimate(
            lambda: network(random.random()), batch(), loss=loss, optimizer=lambda given: type(optimizer)(given, 0.1)
        ),
    ],
)
def test_questions_leave_nothing_in_losses_hooks_optimizers_and_random_streams_and_every_step_finds_the_same(asks):
    model, heard, total, ones = network(), [0.0], torch.ones(()), torch.ones(1).expand(2)

    def hear(*given: Any) -> None:
        heard.append(random.random() + np.random.rand())

    def loss(output: torch.Tensor) -> torch.Tensor:
        hear()
        return square(output) * len(heard) * heard[-1] * total.add_(1) * ones.sum()

    Langevin.steps, optimizer = 0, Langevin(model.parameters(), lr=0.1)
    optimizer.heard = optimizer.param_groups[0]["heard"] = heard
    model[1].register_forward_hook(hear)
    model[1][0].weight.register_hook(hear)
    optimizer.register_step_post_hook(lambda stepped, *_: vars(stepped).update(late=stepped.heard.append(1)))

    def state() -> Any:
        numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return numbers, list(heard), total.item(), Langevin.steps, dict(vars(optimizer)), dict(optimizer.state)

    before = state()
    found = asks(model, loss=loss, optimizer=optimizer)
    assert state() == before
    if isinstance(found, tuple):
        assert found[0].max_grad_difference == found[0].noise == 0


class Flow(Made):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * 2

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        return -square(self.body(x))


@pytest.mark.parametrize("declared", [True, False])
def test_training_that_calls_another_method_than_the_model_is_told_of_once(declared: bool, caplog) -> None:
    model = Flow(body=network())
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), network()
    planned = Checkpointable(model, mem_limit="1GB", optimizer=optimizer if declared else None)
    square(planned(batch())).backward()
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        square(other(batch())).backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
        optimizer.step()  # without gradients there is nothing to tell
    for number in range(3):
        (-planned.log_prob(batch())).backward()
        optimizer.step()
        assert len(logged(caplog, "plan_not_followed", name="Flow")) == 1, number
    caplog.clear()
    model.body = Checkpointable(model.body, mem_limit="1GB")  # as the line says
    for _ in range(2):
        (-planned.log_prob(batch())).backward()
        optimizer.step()
    assert logged(caplog, "plan_not_followed") == []


def test_optimizers_that_share_a_planned_forward_follow_its_plan_and_so_does_one_that_calls_it(caplog) -> None:
    planned = unplanned()
    parts = list(planned.parameters())
    first, second = Langevin(parts[:4], 0.1), torch.optim.SGD(parts[4:], 0.1)  # the step of one calls the other's

    def closure() -> torch.Tensor:
        value = square(planned(batch()))
        value.backward()
        return value

    for _ in range(2):
        first.step(closure)
        second.step()
    assert logged(caplog, "plan_not_followed") == []
    second.step()  # with the gradients of the step before
    assert len(logged(caplog, "plan_not_followed")) == 1
