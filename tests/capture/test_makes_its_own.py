"""Which captured stages are known, without a run, to write into nothing they are given and to make something new."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from rotor_py import Checkpointable
from rotor_py.capture import measure_graphs
from rotor_py.capture.graph.graph_nodes import written_by
from rotor_py.measure import cut as cuts
from rotor_py.measure.cut import Cut, Layer
from tests.capture.steps import compare, limits
from tests.capture.test_overwritten import HandedOn, Table, mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

Case = tuple[nn.Module, dict[str, Any]]


@torch.library.custom_op("rotor_tests::scale_quietly", mutates_args={"value"})
def scale_quietly(value: torch.Tensor) -> None:
    """Writes, and its name does not say so."""
    value.mul_(2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Stepwise(nn.Module):
    """Layers between which the graph may be cut, and something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.between = between

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = self.between(layer(value).sin().cos()).exp()
        return value


def quietly(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        noted = value.detach().clone()
        scale_quietly(noted)
    return value + noted


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: torch.Tensor) -> Any:
        return self.inner(value)


def own_in_place(value: torch.Tensor) -> torch.Tensor:
    made = value * 2
    made += value
    return F.relu(made, True)


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda value: value,
    "its own, in place": own_in_place,
    "what it is given, in place": lambda value: F.relu(value, True),
    "by a method": lambda value: value.mul_(3),
    "a view": lambda value: value.view(-1).view_as(value),
    "a copy, if needed": lambda value: value.contiguous().reshape(value.shape),
    "an operator of others": quietly,
    "a function of autograd": Doubled.apply,
}


def stepwise(name: str) -> Case:
    return Stepwise(BETWEEN[name]), {"value": torch.randn(8, 24)}


def layers_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Layer], Any]:
    """The layers of a model's graph, and what goes into the first."""
    found: list[tuple[list[Layer], Any]] = []

    def noting(layers: list[Layer], value: Any, *args: Any) -> Cut:
        found.append((layers, value))
        return cuts.cut_layers(layers, value, *args)

    monkeypatch.setattr(measure_graphs, "cut_layers", noting)
    model, inputs = case
    Checkpointable(model, loss=None, fresh_grads=True).measure(inputs)
    ((layers, value),) = found
    return layers, value


def library(name: str, **options: Any) -> Case:
    ecosystem = pytest.importorskip("ecosystem")
    pytest.importorskip("transformers")
    model, inputs, _ = getattr(ecosystem, name)(**options)
    return model.train(), inputs


CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(stepwise, name) for name in BETWEEN},
    "a table": lambda: (Table(), {"value": torch.randn(16, 32)}),
    "what was handed on": lambda: (Inside(HandedOn()), {"value": torch.randn(16, 32)}),
    "a Llama": partial(library, "llama", width=64, layers=2, length=64),
    "a ViT": partial(library, "vit", layers=2, batch=2),
    "a ResNet": partial(library, "resnet", batch=2),
}

UNKNOWN = {"an operator of others": 4, "a function of autograd": 4, "a ViT": 1}
"""How many stages have to be run. That of a ViT is a dropout of nothing, which returns its input."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_what_is_known_of_a_stage_is_what_its_run_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers, value = layers_of(CASES[name](), monkeypatch)
    known = 0
    for path, stage in layers:
        value, wrote, made_nothing = cuts._run(path, stage, value, torch.device("cpu"), {})
        assert not stage.makes_its_own or not (wrote or made_nothing), path
        known += bool(stage.makes_its_own)
    assert len(layers) - known == UNKNOWN.get(name, 0)


def test_what_follows_the_last_stage_that_has_to_be_run_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, value = layers_of(stepwise("an operator of others"), monkeypatch)
    run: list[str] = []
    first = cuts._run
    monkeypatch.setattr(cuts, "_run", lambda name, *args: (run.append(name), first(name, *args))[1])
    found = cuts.cut_layers(layers, value, torch.device("cpu"))
    names = [name for name, _ in layers]
    last = max(at for at, (_, stage) in enumerate(layers) if not stage.makes_its_own)
    assert run == names[: last + 1] != names
    for _, stage in layers:
        stage.makes_its_own = False
    assert [name for name, _ in cuts.cut_layers(layers, value, torch.device("cpu")).stages] == [
        name for name, _ in found.stages
    ]
    assert run[last + 1 :] == names


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", ["its own, in place", "an operator of others", "a copy, if needed"])
def test_stages_that_were_not_run_to_be_cut_train_as_plain_training_does(name: str, share: float) -> None:
    torch.manual_seed(0)
    model, inputs = stepwise(name)
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=mean, optimizer=None, fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    planned.compute_sequence(int(least + share * (whole - least)))
    compare(planned, plain, inputs, mean, steps=2)


@pytest.mark.parametrize(
    ("write", "overwritten"),
    [
        (lambda value: F.relu(value, True), ["value"]),
        (lambda value: F.relu(value, False), []),
        (lambda value: F.dropout(value, 0.1, True, True), ["value"]),
        (lambda value: F.hardtanh(value, inplace=True), ["value"]),
        (lambda value: torch._foreach_add_([value.neg(), value], 1), ["neg", "value"]),
        (lambda value: torch.add(torch.zeros(1), 1, out=value), ["value"]),
    ],
)
def test_what_an_operator_writes_into_shows_however_it_is_told_to(
    write: Callable[[torch.Tensor], Any], overwritten: list[str]
) -> None:
    graph = fx.symbolic_trace(write).graph
    (*_, last, _) = graph.nodes
    assert [node.name for node in written_by(last)] == overwritten
