"""Shapes, graph breaks, plans as files, the backend, and what measuring leaves alone."""

import copy
import pickle
import re
import traceback
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, PlanMismatchError, UnsupportedModelError
from rotor_py.capture import captured_forward, tracing
from tests.capture.steps import assert_same_gradients, assert_same_step, compare, everything, limits, planned_for
from tests.capture.test_graph_facts import Tower, planned_tower, tower_loss
from tests.checkpointable.steps import Tower as Skips
from tests.fields import logged, raises


def train(network: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    network.zero_grad()
    torch.manual_seed(3)
    tower_loss(network(ids=ids)).backward()
    return [p.grad.clone() for p in network.parameters()]


class Unchanged(TorchFunctionMode):
    """Calls every function as it is; TorchDynamo would leave out one that changes a result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_smaller_inputs_use_the_plan_larger_ones_are_planned_and_wrong_or_too_many_are_refused(caplog: Any) -> None:
    planned, plain, _ = planned_tower(mem_limit="1GB")
    plain.train()
    for mode in (FlopCounterMode(display=False), Unchanged()):
        with mode, raises(UnsupportedModelError, "capture_suspended", name=type(mode).__name__):
            planned(ids=torch.randint(20, (16, 40)))
    with FlopCounterMode(display=False) as counter:
        planned.model(ids=torch.randint(20, (16, 40)))
    assert counter.get_total_flops() > 0
    for shape in ((16, 40), (7, 23), (3, 5)):
        ids = torch.randint(20, shape)
        assert all(map(torch.equal, train(planned, ids), train(plain, ids)))
    assert not logged(caplog, "planning_again")
    train(planned, torch.randint(20, (20, 40)))
    assert logged(caplog, "planning_again", cause="input")
    wrong = torch.randn(4, 40)
    before, state = copy.deepcopy(planned.state_dict()), torch.get_rng_state()
    for start in (planned, Checkpointable(planned.model)):
        with pytest.raises(RuntimeError, match="indices") as caught:
            start(ids=wrong)
        assert type(caught.value) is RuntimeError
        assert "torch/_dynamo/symbolic_convert" not in "".join(traceback.format_exception(caught.value))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in planned.state_dict().items())
    planned._planner.plans._grown = 16
    train(planned, torch.randint(20, (40, 40)))
    assert logged(caplog, "many_plans", plans=16)


def test_measuring_changes_nothing_and_eval_is_the_model_itself() -> None:
    model = Tower()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ids = torch.randint(20, (4, 10), generator=torch.Generator().manual_seed(0))
    planned = Checkpointable(model.eval(), {"ids": ids})
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(planned(ids)["value"], model(ids)["value"])


def test_the_backend_keeps_a_limit_of_its_own() -> None:
    model, ids = Tower(), torch.randint(20, (16, 40))
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="rotor", options={"mem_limit": "4MB", "fresh_grads": True})
    assert all(map(torch.equal, train(compiled, ids), train(plain, ids)))
    small, pairs = Tower(depth=1, width=8), torch.randint(20, (2, 2))
    for options, kind, fields in (
        ({"limit": "4MB"}, "unknown_option", {"name": "limit"}),
        ({"forwards_in_flight": 0}, "not_a_count", {"name": "forwards_in_flight"}),
        ({"mem_limit": 10_000}, "limit_too_small", {"mem_limit": 10_000}),
    ):
        torch._dynamo.reset()
        with raises(Exception, kind, **fields):
            train(torch.compile(small, backend="rotor", options=options), pairs)
    torch._dynamo.reset()
    train(torch.compile(small, backend="rotor", options={"mem_limit": "80%"}), pairs)


def test_the_backend_leaves_room_for_several_forwards_in_flight(caplog: Any) -> None:
    plain, pair = Skips(64, dropout=0.1), (torch.randn(512, 64), torch.randn(512, 64))
    model, limit = copy.deepcopy(plain), 3_000_000
    compiled = torch.compile(model, backend="rotor", options={"mem_limit": limit})

    def siamese(network: nn.Module) -> None:
        torch.manual_seed(1)
        (network(pair[0]) - network(pair[1])).square().mean().backward()

    for network in (model, plain):  # gradients are kept
        network(pair[0]).sum().backward()
        network.zero_grad(set_to_none=False)
    for attempt in range(3):
        peak = measured_peak(partial(siamese, compiled), [*everything(model), *pair], torch.device("cpu"))
        siamese(plain)
        if attempt:  # the first step measures, or shows it
            assert peak <= limit
    assert logged(caplog, "planning_again", cause="forwards", forwards=2)
    assert_same_gradients(model, plain)


def library(function: Any) -> Any:
    """As a library wraps the forwards of all its models: in one code object, in which the graph breaks."""

    def wrapper(self: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return function(self, **inputs)

    return wrapper


class Scaled(Skips):
    def __init__(self) -> None:
        super().__init__(16, 4)
        self.register_buffer("scale", torch.ones(16))

    @library
    def forward(self, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(value * self.scale) * other


class Unscaled(Skips):
    @library
    def forward(self, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(value) * other


@pytest.mark.skipif(not captured_forward._extra, reason="needs a torch with isolate_recompiles")
def test_models_of_other_kinds_that_share_functions_are_captured_one_after_the_other() -> None:
    value = torch.randn(4, 16)
    for other in (torch.randn(4, 16), torch.randn(4, 16).double()):
        Checkpointable(Scaled(), {"value": value, "other": other})
    planned = Checkpointable(Unscaled(16, 4), {"value": value, "other": value})
    planned(value=value, other=value).sum().backward()


def test_models_built_alike_are_captured_once_and_train_side_by_side(captured: list[object]) -> None:
    models = [Tower(depth=2, width=40) for _ in range(2)]
    plains = [copy.deepcopy(model) for model in models]
    ids = torch.randint(20, (6, 12))
    planned = [Checkpointable(model, {"ids": ids}, loss=tower_loss) for model in models]
    assert len(captured) == 1
    for each in planned:
        each.compute_sequence(limits(each)[0])
    losses = [[], []]
    for found, networks in zip(losses, (planned, plains), strict=True):
        torch.manual_seed(5)
        found += [tower_loss(network(ids)) for network in networks]
        for value in reversed(found):
            value.backward()
    assert losses[0] == losses[1]
    for network, plain in zip(planned, plains, strict=True):
        assert_same_gradients(network, plain)
    with patch("rotor_py.stage.replayed_routing.named_objects", side_effect=AssertionError):
        tower_loss(planned[0](ids)).backward()  # a steady step looks for no state that code names


class Tempered(Skips):
    def forward(self, value: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(value / temperature)


def test_a_number_given_as_a_tensor_may_change_at_every_step_and_hooks_that_come_and_go_are_seen(caplog: Any) -> None:
    plain, batch = Tempered(64, 4), torch.randn(32, 64)
    planned = planned_for(copy.deepcopy(plain), (batch, torch.tensor(1.0)), loss=None)
    for step in range(4):
        assert_same_step(planned, plain, batch, torch.tensor(1.0 - step / 20))
    assert not logged(caplog, "planning_again")
    planned.mem_limit = "1GB"
    layers = [each.layers[1] for each in (planned.model, plain)]
    handles = [each.register_forward_hook(lambda _, __, output: 2 * output) for each in layers]
    assert_same_step(planned, plain, batch, torch.tensor(1.0))
    for handle in handles:
        handle.remove()
    assert_same_step(planned, plain, batch, torch.tensor(1.0))
    on_all = nn.modules.module.register_module_forward_hook(lambda _, __, output: 1.5 * output)
    try:
        assert_same_step(planned, plain, batch, torch.tensor(1.0))
    finally:
        on_all.remove()
    assert_same_step(planned, plain, batch, torch.tensor(1.0))
    alike = copy.deepcopy(plain)
    alike.layers[1].register_full_backward_hook(lambda *_: None)  # breaks the graph, in a loop
    with raises(UnsupportedModelError, "outside_graphs"):
        Checkpointable(alike, (batch, torch.tensor(1.0)), "1GB")
    assert_same_step(planned, plain, batch, torch.tensor(1.0))
    Checkpointable(copy.deepcopy(plain), (batch, torch.tensor(1.0)), "1GB", cache=False)
    assert not logged(caplog, "unplanned_graph")


def test_plans_from_files_and_of_copies_train_the_same_without_measuring(tmp_path: Path, caplog: Any) -> None:
    planned, plain, inputs = planned_tower()
    planned.compute_sequence(10**9)
    planned.save_plan(tmp_path / "plan.json")
    loaded = Checkpointable(copy.deepcopy(planned.model), plan=tmp_path / "plan.json")
    assert loaded.sequence == planned.sequence
    compare(loaded, plain, inputs, tower_loss)
    for network in (planned, loaded, plain.train()):
        network.load_state_dict(loaded.state_dict())
        train(network, ids := inputs["ids"][:4])
    settings = planned._planner.settings
    settings.loss = settings.optimizer = None  # of this file; they need not be picklable
    for original, twin in ((planned, copy.deepcopy(planned)), (loaded, pickle.loads(pickle.dumps(loaded)))):
        before = [p.grad.clone() for p in original.parameters()]
        assert all(map(torch.equal, train(twin, ids), train(plain, ids)))
        assert twin.sequence == original.sequence
        assert all(torch.equal(p.grad, grad) for p, grad in zip(original.parameters(), before, strict=True))
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in original.parameters()}
    train(planned, ids)  # the original still follows its plan
    assert not logged(caplog, "planning_again")
    with pytest.raises(PlanMismatchError):
        Checkpointable(Tower(depth=3), plan=tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError):
        loaded(ids=torch.randint(20, (17, 40)))


class Writing(Skips):
    """Writes into what it is called with, at its beginning or in the middle."""

    def __init__(self, at: int) -> None:
        super().__init__(16, 4)
        self.at = at

    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = value
        for number, layer in enumerate(self.layers):
            if number == self.at:
                value.mul_(0.5)
            hidden = hidden + layer(hidden).tanh()
        return hidden


class WritingLate(Writing):
    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.layers[0](value)
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]  # torch has no types for it
        value.mul_(0.5)
        return super().forward(hidden)


def test_a_model_that_writes_into_its_input_is_refused_with_the_line_and_writes_nothing() -> None:
    value = torch.randn(8, 16)
    before = value.clone()
    for model in (Writing(0), Writing(2), WritingLate(9)):
        with raises(UnsupportedModelError, "in_place_input") as caught:
            Checkpointable(model).measure(value)
        assert re.search(r"test_session\.py:\d+ \(value\.mul_\(0\.5\)\)", str(caught.value.name))
        assert torch.equal(value, before)


class Unsized(tuple[int, ...]):
    def __len__(self) -> int:
        raise AttributeError("no length")


class OfKinds(Skips):
    kinds = Unsized((1, 2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(value) * self.kinds[1]


def test_a_model_that_fails_in_torchdynamo_itself_is_refused_with_the_line() -> None:
    OfKinds(16, 4)(torch.randn(8, 16)).sum().backward()
    with raises(UnsupportedModelError, "not_captured") as caught:
        Checkpointable(OfKinds(16, 4)).measure(torch.randn(8, 16))
    assert re.search(r"test_session\.py:\d+", str(caught.value.name))


class Counting(Skips):
    """Asks about its data, and computes with another number at every call: each needs a graph of its own."""

    factors: tuple[float, ...] = (1.0,)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        assert value.isfinite().all()
        return self.scaled(value)

    def scaled(self, value: torch.Tensor) -> torch.Tensor:
        self.factors = (*self.factors, 1.0)
        return super().forward(value * sum(self.factors))


def test_a_model_that_needs_more_graphs_than_there_may_be_trains_on_with_one_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(tracing, "MOST_GRAPHS", 3)
    planned = Checkpointable(Counting(16, 4), mem_limit="1GB")
    for _ in range(6):
        planned(torch.randn(8, 16)).sum().backward()
    (record,) = logged(caplog, "unplanned_graph")
    assert re.search(r"test_session.py:\d+ \(assert value.isfinite", str(record.subject))
