"""A recomputation finds what the first run of its stage found, or is refused before it makes a number."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from rotor_profiling.torch_compat import SETTINGS, TorchDispatchMode, module_hooks, parametrize
from rotor_py import Checkpointable
from rotor_py.errors import StageChangedError
from rotor_py.measure.budget import recomputes
from tests.checkpointable.steps import planned_at, square
from tests.fields import logged, raises
from tests.training.test_any_step import Scaled

WIDTH = 16
Undo = Callable[[], object]
SCALE = 1.0
GATE: ContextVar[float] = ContextVar("gate", default=1.0)


class Flags:
    def __init__(self) -> None:
        self.offset = 0.5


class Block(nn.Module):
    """Reads attributes, an object, a global and a context variable, and draws."""

    def __init__(self, flags: Flags) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.active, self.factors, self.flags = "first", [1.0], flags
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(getattr(self, self.active)(value) + self.shift) * self.factors[0] + self.flags.offset
        return value + self.drop(self.norm(made)) * SCALE * GATE.get() + torch.linspace(0.1, 1, WIDTH).to(value.dtype)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    flags = Flags()
    return nn.Sequential(*(Block(flags) for _ in range(5)))


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def at_least(model: nn.Module) -> Checkpointable:
    """The model, planned so that it recomputes as much as it can."""
    planned = planned_at(0.0, model, batch(), fresh_grads=True)
    assert recomputes(planned.sequence)
    return planned


@cache
def planned_once() -> Checkpointable:
    return at_least(network())


def planned_network() -> Checkpointable:
    return copy.deepcopy(planned_once())


def compared(step: Callable[[nn.Module, nn.Sequential], Any], make=network, planned: Any = None) -> None:
    """Assert that `step(called, layers)` gives the outputs, gradients and buffers of plain training."""
    found = []
    planned = planned or at_least(make())
    for called, model in ((plain := make(), plain), (planned, planned.model)):
        torch.manual_seed(2)
        output = step(called, model)
        state = [each.to_dense() for each in model.buffers()]  # torch.equal knows no sparse ones
        kept = [output.detach(), torch.get_rng_state(), *state, *(p.grad for p in model.parameters())]
        found.append([tensor for tensor in kept if tensor is not None])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def step(called: nn.Module, model: nn.Sequential) -> torch.Tensor:
    output = called(batch())
    square(output).backward()
    return output


def twice(called: nn.Module, model: nn.Sequential) -> torch.Tensor:
    step(called, model)
    return step(called, model)


def hooked(model: nn.Sequential, register: str, hook: Callable[..., Any]) -> Undo:
    handles = [getattr(block.first, register)(hook) for block in model]
    return lambda: [each.remove() for each in handles]


def otherwise(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return partial(setattr, owner, name, before)


def replaced(table: Any, key: Any, value: Any) -> Undo:
    before = table[key]
    table[key] = value
    return partial(table.__setitem__, key, before)


def entered(mode: Any) -> Undo:
    mode.__enter__()
    return partial(mode.__exit__, None, None, None)


def doubles() -> Undo:
    torch.set_default_dtype(torch.float64)
    return partial(torch.set_default_dtype, torch.float32)


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 1.25 if func is torch.ops.aten.tanh.default else made


WORLDS: dict[str, Callable[[nn.Sequential], Undo]] = {
    "an attribute": lambda model: otherwise(model[1], "active", "second"),
    "a list": lambda model: replaced(model[1].factors, 0, 3.0),
    "an object": lambda model: otherwise(model[1].flags, "offset", 2.0),
    "a global": lambda model: replaced(globals(), "SCALE", 2.0),
    "a context variable": lambda model: partial(GATE.reset, GATE.set(0.5)),
    "dropout": lambda model: otherwise(model[1].drop, "p", 0.7),
    "a module": lambda model: otherwise(model[1], "drop", nn.Identity()),
    "a forward": lambda model: otherwise(model[1].first, "forward", model[1].second.forward),
    "a hook": lambda model: hooked(model, "register_forward_hook", lambda layer, given, made: made * 2),
    "a hook before": lambda model: hooked(model, "register_forward_pre_hook", lambda layer, given: (given[0] + 1,)),
    "a hook on all": lambda model: module_hooks.register_module_forward_hook(lambda layer, _, made: made * 1.5).remove,
    "a function mode": lambda model: entered(Scaled(1.25)),
    "a dispatch mode": lambda model: entered(Dispatched()),
    "a dtype": lambda model: doubles(),
    "evaluation": lambda model: model.eval().train,
}
"""Changes of what a forward reads; each returns what takes it back."""


@contextmanager
def world(name: str, model: nn.Sequential) -> Iterator[None]:
    undo = WORLDS[name](model)
    yield
    undo()


@pytest.mark.parametrize("name", WORLDS)
def test_a_recomputation_finds_what_was_around_the_forward_whatever_is_around_the_backward(name: str) -> None:
    def step(called: nn.Module, model: nn.Sequential) -> torch.Tensor:
        with world(name, model) if forward else nullcontext():
            output = called(batch())
        with nullcontext() if forward else world(name, model):
            square(output).backward()
        return output

    for forward in (True, False):
        if name not in (["evaluation"] if forward else ["a function mode", "a dispatch mode"]):
            compared(step, planned=None if forward else planned_network())


@pytest.mark.parametrize("derived", [False, True])
def test_parameters_that_functional_call_puts_in_get_the_gradients(derived: bool) -> None:
    def step(called: nn.Module, model: nn.Sequential) -> torch.Tensor:
        given = {name: each * 2 for name, each in called.named_parameters()}
        if not derived:
            given = {name: each.detach().requires_grad_() for name, each in given.items()}
        output = functional_call(called, given, (batch(),))
        square(output).backward()
        if not derived:
            for parameter, other in zip(model.parameters(), given.values(), strict=True):
                parameter.grad = other.grad
        return output

    compared(step)


def symmetric() -> nn.Sequential:
    class Symmetric(nn.Module):
        @classmethod  # another object each time it is asked for, with the same code
        def forward(cls, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).T

    model = network()
    for block in model:
        parametrize.register_parametrization(block.first, "weight", Symmetric())
    return model


def test_cached_parametrizations_get_gradients_also_where_the_model_is_planned_inside() -> None:
    cached_step = parametrize.cached()(step)
    compared(cached_step, symmetric)
    model, plain = symmetric(), symmetric()
    for called in (Checkpointable(model, mem_limit="1GB"), plain):
        torch.manual_seed(2)
        cached_step(called, plain)
    found = [[p.grad for p in each.parameters() if p.grad is not None] for each in (model, plain)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_that_are_frozen_or_thawed_between_are_as_in_plain_training(trained: bool) -> None:
    def step(called: nn.Module, model: nn.Sequential) -> torch.Tensor:
        model[1].requires_grad_(not trained)
        output = called(batch())
        model[1].requires_grad_(trained)
        square(output).backward()
        return output

    compared(step)


class Leaf(nn.Linear):
    """Freezes its weight, or makes a leaf in every run."""

    def __init__(self, freezes: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.freezes = freezes

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.weight.requires_grad_(not self.freezes)
        return torch.tanh(super().forward(value + torch.ones(WIDTH, requires_grad=not self.freezes)))


class Leaving(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.left = torch.tanh(value)
        return self.left


@pytest.mark.parametrize("freezes", [True, False])
def test_a_forward_may_freeze_its_weight_or_make_a_leaf(freezes: bool) -> None:
    leaving = Leaving()  # the modules of another model put tensors into attributes
    planned_at(0.0, nn.Sequential(leaving, nn.Linear(WIDTH, WIDTH)), batch())
    compared(step, lambda: torch.manual_seed(0) and nn.Sequential(*(Leaf(freezes) for _ in range(5))))


class Reading(nn.Module):
    """Reads the statistics that its own batch norm updates."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.layer = how, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "mean":
                read = self.norm.running_mean.clone()
            case "count":
                read = self.norm.num_batches_tracked.clone()
            case _:
                read = self.norm.eval()(value)
        return torch.tanh(self.layer(self.norm.train()(value))) * torch.tanh(value - read)


@pytest.mark.parametrize("how", ["mean", "count", "evaluation"])
def test_statistics_that_a_stage_reads_are_put_back_for_a_recomputation(how: str) -> None:
    compared(twice, lambda: torch.manual_seed(0) and nn.Sequential(*(Reading(how) for _ in range(5))))
    assert not any(traits.reads_statistics for traits in planned_once().plan().traits)


class Odd(nn.Module):
    """Has what PyTorch or Python treats specially, and swaps submodules."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.one, self.two, self.view = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), memoryview(bytearray(2))
        graph = torch.eye(64).roll(1, 0)
        self.register_buffer("graph", graph.to_sparse(layout=layout) if layout is not torch.strided else graph)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.one, self.two = self.two, self.one
        return torch.tanh(self.graph @ self.one(value))


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
def test_swapped_submodules_and_sparse_buffers_are_those_of_plain_training(layout: torch.layout) -> None:
    compared(step, lambda: torch.manual_seed(0) and nn.Sequential(*(Odd(layout) for _ in range(6))))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "data": lambda model: [setattr(each, "data", 2 * each.data) for each in model.parameters()],
    "through data": lambda model: [each.data.mul_(2) for each in model.parameters()],
    "a buffer": lambda model: [block.shift.add_(1) for block in model],
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_put_back_is_refused_and_stored_from_then_on(name: str) -> None:
    planned = planned_network()
    model = planned.model
    for _ in range(len(model)):
        output = planned(batch())
        CHANGES[name](model)
        planned.mem_limit = "1GB"
        if not recomputes(planned.sequence):
            break
        with raises(StageChangedError, "stage_changed"):
            square(output).backward()
    square(output).backward()
    assert planned.inspection_values.unrepeatable


@pytest.mark.parametrize(
    "write", [torch.Tensor.zero_, lambda given: given.data.zero_(), lambda given: given.numpy().fill(0)]
)
def test_an_input_that_is_written_to_is_refused(write: Callable[[torch.Tensor], object]) -> None:
    given = batch()
    output = planned_network()(given)
    write(given)
    with raises(StageChangedError, "stage_changed", name="0"):
        square(output).backward()


def test_a_class_with_another_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    output = planned_network()(batch())
    monkeypatch.setattr(Block, "forward", lambda self, value: 2 * value)
    with raises(StageChangedError, "stage_changed"):
        square(output).backward()


class Drawing(nn.Module):
    """Draws from a generator that no module has, or counts."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(WIDTH, WIDTH), [draw]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.layer(value)) * self.draw[0]()


def test_generators_of_others_draw_the_same_and_measuring_does_not_move_them() -> None:
    def drawing() -> nn.Sequential:
        torch.manual_seed(0)
        generator, source = np.random.default_rng(0), SimpleNamespace(old=np.random.RandomState(0))
        draws = [lambda: float(generator.uniform(0.5, 1.5)), lambda: float(source.old.uniform(0.5, 1.5))]
        return nn.Sequential(*(Drawing(draws[each % 2]) for each in range(6)))

    compared(twice, drawing)


def test_a_stage_that_does_something_else_every_time_is_stored_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    counts = itertools.count(1)
    model = nn.Sequential(*(Drawing(lambda: 1 / next(counts)) for _ in range(2)), *network())
    planned = planned_at(0.0, model, batch(), fresh_grads=True)
    assert planned.inspection_values.unrepeatable == (0, 1)
    (told,) = logged(caplog, "not_reproducible")
    assert told.subject == "0"
    assert str(planned.sequence).startswith("Fe_0, Fe_1, ")


def test_hooks_see_nothing_of_measuring_and_a_recomputation_that_writes_elsewhere_is_told_of(caplog) -> None:
    model, features = network(), list[torch.Tensor]()
    model[1].register_forward_hook(lambda layer, given, made: features.append(made))
    planned = at_least(model)
    assert not features
    square(planned(batch())).backward()
    assert logged(caplog, "writes_elsewhere")[0].subject == "1"


@pytest.mark.parametrize("name", ["register_hook", "retain_grad"])
def test_a_hook_that_needs_a_gradient_sees_the_one_of_plain_training(name: str) -> None:
    """Such a hook fails without a graph: the stage is always stored."""
    seen: list[torch.Tensor] = []

    def hooked_inside() -> nn.Sequential:
        def see(layer: nn.Module, given: Any, made: torch.Tensor) -> None:
            if name == "register_hook":
                made.register_hook(lambda gradient: seen.append(gradient))
            else:
                made.retain_grad()
                seen.append(made)

        model = network()
        model[2].first.register_forward_hook(see)
        return model

    compared(step, hooked_inside)
    found = [tensor if name == "register_hook" else tensor.grad for tensor in seen]
    assert len(found) == 2
    assert torch.equal(*found)


def test_every_setting_that_chooses_kernels_can_be_set_to_what_it_is() -> None:
    for each in SETTINGS:
        before = each.get()
        each.set(before)
        assert each.get() == before


def test_a_step_leaves_everything_as_the_user_left_it() -> None:
    planned = at_least(network())
    model = planned.model
    with contextlib.ExitStack() as changed:
        for name in ("an attribute", "a hook", "an object", "a global", "a context variable", "a dtype"):
            changed.callback(WORLDS[name](model))
        output = planned(batch().float())
    before = copy.copy(vars(model[1])), dict(model[1]._modules), SCALE, GATE.get(), torch.get_default_dtype()
    square(output).backward()
    assert before == (vars(model[1]), model[1]._modules, SCALE, GATE.get(), torch.get_default_dtype())
