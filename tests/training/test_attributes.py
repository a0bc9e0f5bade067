"""Layers that keep something in plain attributes train as without a plan; attributes are put back after any run."""

import copy
import functools
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_profiling import isolated, tensors_in
from rotor_profiling.attributes import Attributes, attributes_kept, kept_bytes
from rotor_py import Checkpointable, CheckpointOptim
from rotor_py.execute import regions
from rotor_py.stage.replayed_routing import decided_bytes
from rotor_py.stage.runner import StageRunner
from rotor_py.validate.verification import verify
from rotor_solver import Backward, Loss, Sequence
from tests.capture.steps import assert_same_step
from tests.checkpointable.steps import CPU, Made, Residual, planned_at, square, step_peak
from tests.execute.sequences import everything_again
from tests.fields import logged, raises
from tests.training.loop import Training, differences, planned
from tests.training.test_concurrent import KINDS, made


class _Balanced(nn.Module):
    """Leaves a loss of its own in an attribute, as mixtures of experts do, or what it made of its batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.inner, self.kind = nn.LSTM(16, 16) if kind == "recurrent" else inner, kind
        self.balance: Any = []
        self.register_buffer("moving", torch.zeros(()))
        self.turn = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)[0] if self.kind == "recurrent" else self.inner(x)
        z = torch.tanh(torch.nn.functional.dropout(y, 0.1))
        loss = y.square().mean()
        if self.kind == "buffer":
            self.moving = loss
        self.balance = {
            "list": [loss, loss.detach(), {"other": z.mean()}],
            "view": y[:, :3],
            "input": x[:, :3],
            "output": z,
            "turns": [loss, y[:, :2].std()] if self.turn else [loss.detach(), None, z.mean()],
            "appended": [*tensors_in(self.balance), z.mean().detach(), loss],
            "buffer": None,
        }.get(self.kind, loss)
        return z


_KEPT = ("loss", "list", "view", "input", "output", "turns", "appended", "buffer", "recurrent")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in _KEPT),
        *((kind, {"on_oom": "replan"}) for kind in ("loss", "input", "output")),
    ],
)
def test_gradients_pass_through_tensors_in_attributes(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain = nn.Sequential(*(_Balanced(kind) for _ in range(6)))
    other, x = copy.deepcopy(plain), torch.randn(64, 16)
    planned = planned_at(0.0, copy.deepcopy(plain), x, fresh_grads=True, cache=False, **options)
    planned(x)
    assert len(list(planned.sequence)) > 2 * 6 + 1  # some layers are recomputed
    plan = tmp_path / "plan.json"
    planned.save_plan(plan)
    from_file = Checkpointable(other, plan=plan, loss=square, fresh_grads=True, **options)
    for called in (planned, from_file):
        for turn in (False, True):
            for each in (plain, called):
                torch.manual_seed(1)
                each.zero_grad()
                for layer in each:
                    layer.turn = turn
                output = each(x)
                kept = [
                    tensor
                    for layer in each.modules()
                    if isinstance(layer, _Balanced)
                    for tensor in [*tensors_in(layer.balance)[-2:], layer.moving]
                ]
                sum((tensor.sum() for tensor in kept), output.sum()).backward()
            for expected, parameter in zip(plain.parameters(), called.parameters(), strict=True):
                assert torch.equal(expected.grad, parameter.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_bits_of_plain_training_and_a_checkpoint_of_either_side_is_resumed_by_either(kind, tmp_path):
    """Also by a model that is planned only after it has read the checkpoint."""
    model, ours, theirs = made(kind), tmp_path / "ours.pt", tmp_path / "theirs.pt"
    plain = Training(copy.deepcopy(model)).run(3)
    plain.save(theirs)
    expected = plain.run(3).everything()
    assert any("running_mean" in key for key in expected)
    assert any("exp_avg_sq" in key for key in expected)
    network = planned(model)
    forwards = [each for each in network.sequence if not isinstance(each, Loss | Backward)]
    assert len(forwards) > 1.5 * len(network.names)  # at the least limit, most of it is computed twice or more
    training = Training(network).run(3)
    training.save(ours)
    assert not differences(training.run(3).everything(), expected)
    # Each has other weights, until the file is read.
    for file, other in ((ours, made(kind, 99)), (theirs, network), (theirs, Checkpointable(made(kind, 99)))):
        assert not differences(Training(other, seed=98).resume(file).run(3).everything(), expected)


# Mixtures of experts whose routers would decide otherwise in every run, as atomic additions on a GPU can make them.

WIDTH, EXPERTS, CHOSEN = 16, 4, 2
_runs = itertools.count()


@torch.library.custom_op("rotor_tests::unsteady", mutates_args=())
def unsteady(scores: torch.Tensor) -> torch.Tensor:
    """Other numbers in every run, whatever the random state."""
    generator = torch.Generator().manual_seed(next(_runs))
    return scores + torch.randn(scores.shape, generator=generator)


@unsteady.register_fake
def _(scores: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(scores)


class Mixture(nn.Module):
    """Tokens go to the experts that `choose` picks by unsteady scores; the weights of the experts are steady."""

    def __init__(self, how: str = "topk") -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.wide = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.narrow = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        scores = self.gate(value)
        weight = scores.softmax(-1) * self.choose(unsteady(scores.detach()))
        made = torch.einsum("td,edh->teh", value, self.wide).relu()
        return value + torch.einsum("teh,ehd,te->td", made, self.narrow, weight)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """1 for the experts of each token, 0 for the others."""
        if self.how == "threshold":
            return (scores > 0).float()
        if self.how == "written":
            chosen = torch.zeros(scores.shape, dtype=torch.bool)
            chosen.copy_(scores)
            return (chosen & (scores > 0)).float()
        if self.how == "counted":
            return (torch.arange(EXPERTS) < int(scores[0].sum().abs()) % EXPERTS + 1).float().expand_as(scores)
        picks = {
            "topk": lambda: scores.topk(CHOSEN).indices,
            "sort": lambda: scores.sort(descending=True).indices[:, :CHOSEN],
            "argmax": lambda: scores.argmax(-1, keepdim=True),
            "max": lambda: scores.max(-1, keepdim=True).indices,
            "sampled": lambda: torch.multinomial(scores.softmax(-1), CHOSEN),
            "rounded": lambda: scores.abs().round().long().clamp(max=EXPERTS - 1),
            "shifted": lambda: scores.topk(CHOSEN).indices.add_(1).remainder_(EXPERTS),
        }
        return torch.zeros_like(scores).scatter(-1, picks[self.how](), 1.0)


WAYS = ["topk", "sort", "argmax", "max", "sampled", "threshold", "rounded", "counted", "written", "shifted"]
AGAIN = "CF_0, Fn_1, Fn_2, L, CF_0, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"


def by_tape(layers: nn.Sequential, value: torch.Tensor) -> torch.Tensor:
    return CheckpointOptim.apply(list(layers), AGAIN, list("abc"), True, value)


def by_regions(layers: nn.Sequential, value: torch.Tensor) -> torch.Tensor:
    runners = [StageRunner(layer, name) for layer, name in zip(layers, "abc", strict=True)]
    return regions.run(runners, regions.regions(Sequence.parse(AGAIN)), value)


def gradients(layers: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    global _runs
    layers.zero_grad()
    torch.manual_seed(1)
    _runs = itertools.count()
    output = run(torch.randn(32, WIDTH))
    output.square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]


@pytest.mark.parametrize("run", [by_tape, by_regions])
@pytest.mark.parametrize("how", WAYS)
def test_gradients_are_those_of_the_experts_that_the_forward_chose(how: str, run: Callable[..., torch.Tensor]) -> None:
    layers = nn.Sequential(*(Mixture(how) for _ in range(3)))
    expected = gradients(layers, layers)
    for _ in range(2):  # what decides is known from the first time on
        found = gradients(layers, lambda value: run(layers, value))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [nn.Sequential, Residual])  # a chain, and captured
def test_a_plan_keeps_what_was_decided_and_counts_it(kind: type[nn.Module]) -> None:
    model = kind(*(Mixture() for _ in range(4)))
    batch = torch.randn(64, WIDTH)
    planned = Checkpointable(model, batch)
    one = 64 * CHOSEN * (8 + 4)  # positions, and the numbers that were there
    assert planned.budget.snapshot_bytes >= 4 * one
    planned.compute_sequence(planned.budget.least_bytes())
    expected = gradients(model, model)
    assert all(map(torch.equal, gradients(model, planned), expected))
    assert "CF_" in str(planned.sequence)
    assert step_peak(planned, batch) <= planned.budget.peak_bytes(planned.sequence)


def test_a_stage_that_decides_nothing_is_not_watched_again() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.MaxPool1d(2))
    _, surroundings = StageRunner(layer, "layer").first(torch.randn(8, 4))
    assert surroundings.decisions == ()
    assert decided_bytes(layer) == 0


def test_a_stage_that_comes_to_another_decision_is_refused() -> None:
    turns = (name for name in ("argmax", "argmin"))  # a recomputation cannot turn a generator back

    class Turning(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value) + getattr(value, next(turns))(-1)[:, None]

    runner, value = StageRunner(Turning(EXPERTS, EXPERTS), "layer"), torch.randn(3, EXPERTS)
    _, surroundings = runner.first(value)
    with raises(RuntimeError, "rerun_differs"):
        runner.again(value, surroundings)


class Refusing(dict[str, Any]):
    """A container that can be read, and not be filled, as the outputs of transformers."""

    def clear(self) -> None:
        raise TypeError("no")

    update = clear  # type: ignore[assignment]


class Everything(nn.Module):
    """A layer that changes all that an attribute can be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.output = 0, Refusing()
        self.stats: dict[str, Any] = {"shapes": []}
        self.last, self.names = deque([0], maxlen=2), {"a"}
        self.total, self.state = torch.zeros(2), torch.zeros(2)
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.state[0]
        self.calls += 1
        self.stats["shapes"].append(tuple(x.shape))
        self.stats["calls"] = self.calls
        self.last.append(self.calls)
        self.names.add(str(self.calls))
        self.total += x.detach().mean()
        self.state = self.state + x.detach().mean()
        self.output = Refusing(output=self.calls)
        self.made = self.calls
        self.act = nn.Tanh()  # another module in every forward
        if self.cache is None:
            self.cache = torch.ones(3)
        return self.act(x) * (self.calls + len(self.stats["shapes"]) / 8 + self.total[0])


def present(layer: Everything) -> dict[str, Any]:
    names = ("calls", "stats", "last", "names", "total", "state", "output", "cache")
    return {name: str(getattr(layer, name)) for name in names} | {"made": getattr(layer, "made", None)}


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(Residual(nn.Linear(16, 16), Everything()) for _ in range(count)))


def all_present(model: nn.Module) -> list[dict[str, Any]]:
    return [present(each) for each in model.modules() if isinstance(each, Everything)]


@pytest.mark.parametrize("options", [{}, {"on_oom": "replan"}])
def test_numbers_and_attributes_are_those_of_plain_training(options: dict[str, Any]) -> None:
    plain, x = blocks(5), torch.randn(64, 16)
    model = copy.deepcopy(plain)
    planned = planned_at(1.0, model, x, fresh_grads=True, cache=False, **options)
    planned.sequence = everything_again(5)
    for step in range(4):
        assert_same_step(planned, plain, x)
        assert all_present(model) == all_present(plain), step


class Counting(Made):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


def test_layers_that_count_are_of_one_kind_and_verification_moves_no_attribute() -> None:
    model, x = nn.Sequential(*(Counting(inner=nn.Linear(16, 16), calls=0) for _ in range(6))), torch.randn(64, 16)
    planned = planned_at(0.5, model, x, fresh_grads=True, cache=False)
    planned(x).sum().backward()
    assert len(set(planned.report().measurement.stages[1:-1])) == 1
    before = [each.calls for each in model]
    (found,) = verify(planned, torch.randn(64, 16), loss=square)
    assert found.max_grad_difference == 0
    assert [each.calls for each in model] == before


def test_all_is_put_back_and_containers_and_tensors_are_the_same_objects() -> None:
    layer = Everything()

    def objects() -> list[Any]:
        return [layer.stats, layer.stats["shapes"], layer.total, layer.output]

    layer.stats["all"] = layer.stats  # a container in itself
    before, same = present(layer), objects()
    with attributes_kept(nn.Sequential(layer)):
        layer(torch.ones(2))
        layer(torch.ones(2))
    assert present(layer) == before
    assert all(a is b for a, b in zip(objects(), same, strict=True))


def test_kept_bytes_are_those_of_tensors_that_change() -> None:
    layer = Everything()
    with attributes_kept(layer):
        layer(torch.ones(2))
    assert kept_bytes(layer) == 2 * 8 + 8  # what is written into twice; what is replaced once


def test_a_recomputation_finds_everything_as_the_run_before_it_found_it() -> None:
    layer = Everything()
    layer(torch.ones(2))
    before, first, after = Attributes(layer), layer(torch.ones(2)), present(layer)
    changes = before.changes()
    for _ in range(2):  # as often as it is recomputed
        with attributes_kept(layer):
            for change in changes:
                change.restore_for_recompute({})
            assert torch.equal(layer(torch.ones(2)), first)
            assert present(layer) == after
        assert present(layer) == after


@pytest.mark.parametrize("around", [False, True])
def test_measuring_restores_everything_except_a_cache(around: bool) -> None:
    layer = Everything()
    before = present(layer)
    with attributes_kept(layer, caches=False) if around else nullcontext():
        for _ in range(3):
            with isolated(layer, CPU):
                layer(torch.ones(2))
            if around:
                layer.made += 1  # the next run finds other than this one made
    # What is made where nothing was stays while the layer is measured: only the next run shows whether it is a state.
    # Then all that the layer has made goes, the cache as well: its forward may make both if one is not there.
    assert (layer.cache is None) == around
    layer.cache = None
    assert getattr(layer, "made", None) == (None if around else 1)
    assert {**present(layer), "made": None} == before


class Late(Made):
    """Writes into a tensor from its second run on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            self.total.add_(1)
        return x


def test_a_tensor_that_is_written_to_for_the_first_time_is_refused_once() -> None:
    layer = Late(total=torch.zeros(1), calls=0)

    def run() -> Attributes:
        found, _ = Attributes(layer), layer(torch.ones(1))
        return found

    run().changes()
    with raises(RuntimeError, "attribute_changed", name="total"):
        run().changes()
    (change,) = [each for each in run().changes() if each.name == "total"]
    change.put_back()
    assert layer.total.item() == 1


CALLS = {"n": 0}


class Slots:
    __slots__ = ("inner", "n")

    def __init__(self, inner: Any = None) -> None:
        self.n, self.inner = 0, inner


def counting(owner: Any, name: str = "n") -> int:
    setattr(owner, name, getattr(owner, name) + 1)
    return getattr(owner, name)


def in_default(calls: dict[str, int] = CALLS) -> int:
    calls["n"] += 1
    return calls["n"]


def with_itself(kept: Any) -> int:
    return counting(with_itself)


def held() -> nn.Module:
    module = nn.Module()
    module.n = 0
    return module


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a tensor in a dict": (lambda: {"sum": torch.zeros(1)}, lambda kept: kept["sum"].add_(1).clone()),
    "a namespace": (lambda: SimpleNamespace(n=0), counting),
    "slots inside slots": (lambda: Slots([Slots()]), lambda kept: counting(kept.inner[0])),
    "a module in a list": (lambda: [held()], lambda kept: counting(kept[0])),
    "an array": (lambda: np.zeros(2), lambda kept: float(np.add(kept, 1, out=kept)[0])),
    "a count": (lambda: itertools.count(1), next),
    "a method of a count": (lambda: itertools.count(1).__next__, lambda kept: kept()),
    "a method of a stream": (lambda: random.Random(3).random, lambda kept: kept()),
    "a method of a list": (lambda: [0].append, lambda kept: (kept(0), len(kept.__self__))[1]),
    "a cycle in a list": (lambda: [itertools.cycle([1, 2, 3])], lambda kept: next(kept[0])),
    "iterators in another": (lambda: enumerate(itertools.chain([3, 1, 4, 1, 5])), lambda kept: sum(next(kept))),
    "a default argument": (lambda: CALLS.update(n=0), lambda kept: in_default()),
    "a function": (lambda: setattr(with_itself, "n", 0), with_itself),
    "a mode": (nn.Dropout, lambda kept: (kept(torch.ones(1)), kept.eval())[0]),
}


class Keeping(nn.Module):
    """Changes what it keeps, by a method of its own, and makes two things of random numbers in its first forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.kept, self.kind, self.scale = KEPT[kind][0](), kind, None

    @functools.cached_property
    def shift(self) -> torch.Tensor:
        return torch.rand(16)

    def turn(self) -> Any:
        return KEPT[self.kind][1](self.kept)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.rand(16)
        return value + self.layer(value * self.scale + self.shift) * (1 + self.turn() / 10)


@pytest.mark.parametrize("limit", ["least", "1GB"])
@pytest.mark.parametrize("kind", KEPT)
def test_what_a_forward_keeps_changes_as_in_plain_training(kind: str, limit: str) -> None:
    found, batch = [], torch.ones(64, 16)
    for plans in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Keeping(kind) for _ in range(3)))
        called: Any = model
        if plans:
            called = Checkpointable(model, batch, "1GB", loss=square, fresh_grads=True, cache=False)
            if limit == "least":
                called.compute_sequence(called.budget.least_bytes() + 1000)  # without its dropout, it needs more
        losses = []
        for _ in range(3):
            model.zero_grad()
            losses.append(square(called(batch)))
            losses[-1].backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append([*losses, *gradients, torch.rand(1), torch.tensor([float(each.turn()) for each in model])])
    assert all(map(torch.equal, *found))


def test_a_cache_that_takes_no_random_numbers_stays_beside_a_dropout() -> None:
    class Masking(nn.Dropout):
        mask: torch.Tensor | None = None

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.ones(16)
            return super().forward(value) * self.mask

    model = nn.Sequential(nn.Linear(16, 16), Masking(), nn.Linear(16, 16))
    Checkpointable(model, torch.ones(64, 16), "1GB", loss=square)
    assert model[1].mask is not None


def test_a_generator_that_measuring_advances_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Taking(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.last = next(self.numbers)
            return super().forward(value)

    model = nn.Sequential(Taking(16, 16), nn.Linear(16, 16))
    model[0].numbers = (each for each in range(1000))
    with caplog.at_level(logging.WARNING, "rotor_py"):
        Checkpointable(model, torch.ones(64, 16), "1GB", loss=square)
    assert [each.subject for each in logged(caplog, "writes_elsewhere")] == ["0.numbers"]
