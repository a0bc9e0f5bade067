"""Inputs of any class: their tensors count and are kept apart by shape, whatever object holds them."""

import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, InfeasibleError
from rotor_py.errors import UnsupportedModelError
from tests.checkpointable.steps import CPU, Residual, same_gradients
from tests.fields import kinds, logged, raises


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "one"


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Graph:
    """Like a graph of PyG: attributes are in a store, which refers back to the graph."""

    def __init__(self, x: torch.Tensor) -> None:
        self.__dict__["store"] = SimpleNamespace(graph=weakref.ref(self), values={})
        self.x = x

    def __setattr__(self, name: str, value: Any) -> None:
        self.store.values[name] = value

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["store"].values[name]


class Words(UserDict[str, Any]):
    @property
    def x(self) -> torch.Tensor:
        return self.data["x"]


class Own(dict[str, Any]):
    @property
    def x(self) -> torch.Tensor:
        return self["x"]


class Store:
    """Empty: as a class that looks its attributes up in a dict, it raises KeyError for any."""

    def __getattr__(self, name: str) -> Any:
        return {}[name]


class Ring:
    """Equals only itself, refers to itself and to a function of its own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.ring, self.how = x, [self, Store()], lambda: x


BATCHES: dict[str, Callable[[torch.Tensor], Any]] = {
    "frozen": Frozen, "slots": Slotted, "graph": Graph, "userdict": lambda x: Words(x=x), "dict": lambda x: Own(x=x),
    "ring": Ring, "namespace": lambda x: SimpleNamespace(x=x),
}  # fmt: skip


class Unpack(nn.Module):
    def forward(self, batch: Any) -> torch.Tensor:
        return batch.x


class Inside(nn.Module):
    """From object to object."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.block, self.make = block(), make

    def forward(self, batch: Any) -> Any:
        return self.make(self.block(batch.x))


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.blocks(batch.x)


def block() -> nn.Module:
    return Residual(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def train(model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    output = model(batch)
    output.mean().backward()


FAST = ("graph", "dict", "ring")  # what is captured takes a second each
CAPTURED = [pytest.param(False, kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in BATCHES]


@pytest.mark.parametrize(("chain", "kind"), [*((True, kind) for kind in BATCHES), *CAPTURED])
def test_objects_are_planned_for_like_the_tensors_in_them(kind: str, chain: bool, caplog) -> None:
    make, x = BATCHES[kind], torch.randn(256, 32, requires_grad=True)

    def network() -> nn.Module:
        torch.manual_seed(0)
        if chain and kind != "ring":  # rings are garbage until they are collected
            return nn.Sequential(*(Inside(make) for _ in range(3)), Unpack())
        return nn.Sequential(Unpack(), *(block() for _ in range(3))) if chain else Captured()

    assert tensors_in([make(x)]) == [x]
    plain, planned = network(), Checkpointable(network(), (make(x),), "1GB", loss=torch.mean, fresh_grads=True)
    limit = planned.budget.least_bytes()
    assert limit < planned.budget.peak_bytes(planned.sequence)
    planned.compute_sequence(limit)
    for _ in range(2):
        train(plain, make(x))
        wanted, x.grad = x.grad, None
        train(planned, make(x))
        assert same_gradients(planned, plain)
        assert torch.equal(x.grad, wanted)
        x.grad = None
    planned.zero_grad()
    peak = measured_peak(lambda: train(planned, make(x)), [*planned.parameters(), x], CPU)
    assert 0.9 * limit < peak <= limit
    assert kinds(caplog) == []  # neither planned nor captured again
    with raises(InfeasibleError, "limit_too_small", mem_limit=limit):
        planned(make(torch.randn(2048, 32, requires_grad=True)))


class Switching(Captured):
    def forward(self, batch: Any) -> torch.Tensor:
        found = self.blocks(batch.x)
        return found * 2 if batch.name == "double" else found


def test_texts_that_differ_in_each_batch_are_planned_for_once_unless_the_graph_depends_on_them(caplog) -> None:
    planned, x = Checkpointable(Captured(), mem_limit="1GB"), torch.randn(8, 32)
    for name in "abc":
        train(planned, Frozen(x, name))
    assert kinds(caplog) == []
    planned, plain = Checkpointable(Switching(), mem_limit="1GB"), Switching()
    plain.load_state_dict(planned.state_dict())
    for name in ("single", "double", "single", "double", "other"):
        for network in (plain, planned):
            train(network, Frozen(x, name))
        assert same_gradients(planned, plain)
    assert len(logged(caplog, "planning_again")) <= 2


class Adding(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.block, self.key = block(), key

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch[self.key] = self.block(batch.pop("x"))
        batch["x"] = batch[self.key] * 2
        return batch


class Popping(Captured):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.blocks(batch.pop("x"))


@pytest.mark.parametrize("chain", [True, False])
def test_a_dict_that_layers_change_is_planned_for_and_told_of_where_a_copy_is_changed(chain: bool, caplog) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = [Adding(key) for key in "abc"]
        return nn.Sequential(*layers, Last()) if chain else Popping()

    plain, planned = network(), Checkpointable(network(), mem_limit="1GB", fresh_grads=True)
    planned.measure(({"x": torch.ones(256, 32)},))
    planned.compute_sequence(planned.budget.least_bytes() + 2**17)
    batch = {"x": torch.ones(256, 32)}
    train(planned, batch)
    train(plain, {"x": torch.ones(256, 32)})
    assert same_gradients(planned, plain)
    assert len(logged(caplog, "input_changed", name="0")) == chain
    assert ("x" in batch) == chain


class Last(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["x"]


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(5, 32)], layout=torch.jagged)
    planned = Checkpointable(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), mem_limit="1GB")
    with raises(UnsupportedModelError, "nested_tensor", name="input"):
        planned(nested)


class Lazy(Captured):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) * 2


@pytest.mark.parametrize(("chain", "dropout"), [(True, False), (False, True)])
def test_lazy_layers_have_the_parameters_and_statistics_of_plain_training(chain: bool, dropout: bool, caplog) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        found = Lazy()
        found.blocks.append(nn.Dropout(0.5 * dropout))
        return found.blocks if chain else found

    models = []
    for wrap in (lambda model: model, lambda model: Checkpointable(model, mem_limit="1GB", fresh_grads=True)):
        models.append(wrap(network()))
        train(models[-1], torch.ones(8, 16))
    assert same_gradients(models[1], models[0]) or dropout
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])
    assert len(logged(caplog, "lazy_layers")) == dropout
