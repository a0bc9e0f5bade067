"""What a model is given: inputs of any class, samples to measure with, and settings, of which some exclude others."""

import logging
import weakref
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter, itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError
from rotor_py.plan.settings import EXCLUSIONS, SEVERAL_PROCESSES, SHARDED
from rotor_py.plan.trained_model import TrainedModel
from tests.checkpointable.steps import CPU, Applies, Made, Residual, Stack, between, same_gradients, square, step_peak
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


class Inside(Made):
    """From object to object."""

    def forward(self, batch: Any) -> Any:
        return self.make(self.block(batch.x))


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, batch: Any, *others: Any) -> torch.Tensor:
        value = batch.x
        for other in others:
            value = value + other.x
        return self.blocks(value)


def block() -> nn.Module:
    return Residual(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def train(model: nn.Module, *batch: Any) -> None:
    model.zero_grad()
    output = model(*batch)
    output.mean().backward()


@pytest.mark.parametrize("chain", [True, False])
def test_objects_are_planned_for_like_the_tensors_in_them(chain: bool, caplog) -> None:
    """A chain hands them from layer to layer; a captured model takes one of each."""
    inside = [make for kind, make in BATCHES.items() if kind != "ring"]  # garbage until it is collected
    unpack = Applies(function=attrgetter("x"))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Inside(block=block(), make=make) for make in inside), unpack) if chain else Captured()

    def given(x: torch.Tensor) -> tuple[Any, ...]:
        others = [] if chain else [make(x.detach().clone()) for make in inside]
        return Ring(x), *others

    x = torch.randn(256, 32, requires_grad=True)
    assert all(tensors_in([make(x)]) == [x] for make in BATCHES.values())
    plain, planned = network(), Checkpointable(network(), given(x), "1GB", loss=torch.mean, fresh_grads=True)
    limit = planned.budget.least_bytes()
    assert limit < planned.budget.peak_bytes(planned.sequence)
    planned.compute_sequence(limit)
    for _ in range(2):
        train(plain, *given(x))
        wanted, x.grad = x.grad, None
        train(planned, *given(x))
        assert same_gradients(planned, plain)
        assert torch.equal(x.grad, wanted)
        x.grad = None
    planned.zero_grad()
    batches = given(x)
    peak = measured_peak(lambda: train(planned, *batches), [*planned.parameters(), *tensors_in(batches)], CPU)
    assert 0.9 * limit < peak <= limit
    assert kinds(caplog) == []  # neither planned nor captured again
    with pytest.raises(InfeasibleError) as refused:
        planned(*given(torch.randn(2048, 32, requires_grad=True)))
    assert refused.value.mem_limit == limit


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


class Adding(Made):
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
        layers = [Adding(block=block(), key=key) for key in "abc"]
        return nn.Sequential(*layers, last()) if chain else Popping()

    plain, planned = network(), Checkpointable(network(), ({"x": torch.ones(256, 32)},), "1GB", fresh_grads=True)
    planned.compute_sequence(planned.budget.least_bytes() + 2**17)
    batch = {"x": torch.ones(256, 32)}
    train(planned, batch)
    train(plain, {"x": torch.ones(256, 32)})
    assert same_gradients(planned, plain)
    assert len(logged(caplog, "input_changed", name="0")) == chain
    assert ("x" in batch) == chain


last = partial(Applies, function=itemgetter("x"))
ADDING = torch._dynamo.disable(lambda state: float(state.add_(1)[0]))
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "object": (lambda: SimpleNamespace(n=0), lambda state: setattr(state, "n", state.n + 1) or state.n),
    "array": (lambda: np.zeros(1), lambda state: float(np.add(state, 1, out=state)[0])),
    "large array": (lambda: np.zeros(1024), lambda state: float(np.add(state, 1, out=state)[0])),
    "counter": (Counter, lambda state: state.update("a") or state["a"]),
    "iterator": (lambda: [2, 3, 4, 5], next),
    "tensor": (lambda: torch.zeros(1), ADDING),
    "large tensor": (lambda: torch.zeros(2048), ADDING),
    "generator": (lambda: (2 for _ in range(9)), next),
    "generator inside": (lambda: map(float, (2 for _ in range(9))), next),
}


class Dividing(Captured):
    def __init__(self, change: Callable[[Any], float], chain: bool) -> None:
        super().__init__()
        self.change, self.chain = change, chain

    def forward(self, batch: dict[str, Any]) -> Any:
        made = self.blocks(batch["x"]) / self.change(batch["state"])
        return {**batch, "x": made} if self.chain else made


@pytest.mark.parametrize(
    ("name", "chain"), [each for each in product(STATES, (True, False)) if "tensor" not in each[0] or not each[1]]
)
def test_what_a_forward_changes_in_its_input_changes_once_a_step(name: str, chain: bool, caplog) -> None:
    make, change = STATES[name]

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Dividing(change, True) for _ in range(3)), last()) if chain else Dividing(change, False)

    def given(state: Any) -> dict[str, Any]:
        return {"x": torch.ones(256, 32), "state": iter(state) if isinstance(state, list) else state}

    plain, planned = network(), Checkpointable(network(), mem_limit="1GB", fresh_grads=True)
    states = [make(), make()]
    if "generator" in name or name == "large tensor":
        with raises(UnsupportedModelError, "input_changed"):
            planned(given(states[1]))
        return
    for _ in range(2):  # the first step measures, and the second one recomputes
        for model, state in zip((plain, planned), states, strict=True):
            train(model, given(state))
        assert same_gradients(planned, plain)
        if logged(caplog, "input_changed", name="input"):
            assert name == "large array"
            return
        planned.compute_sequence(between(planned, 0.1))
    assert not planned.inspection_values.unrepeatable
    assert repr(states[0]) == repr(states[1])


def test_ctrl_c_while_measuring_ends_training_though_a_generator_is_used_up() -> None:
    def change(state: Any) -> float:
        next(state)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpointable(Dividing(change, False))({"x": torch.ones(256, 32), "state": (each for each in (1.0, 2.0))})


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(5, 32)], layout=torch.jagged)
    planned = Checkpointable(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), mem_limit="1GB")
    with raises(UnsupportedModelError, "nested_tensor", name="input"):
        planned(nested)


@pytest.mark.parametrize(("chain", "dropout"), [(True, False), (False, True)])
def test_lazy_layers_have_the_parameters_and_statistics_of_plain_training(chain: bool, dropout: bool, caplog) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(32), nn.Dropout(0.5 * dropout)
        return nn.Sequential(*layers) if chain else Stack(*layers)

    models = []
    for wrap in (lambda model: model, lambda model: Checkpointable(model, mem_limit="1GB", fresh_grads=True)):
        models.append(wrap(network()))
        train(models[-1], torch.ones(8, 16))
    assert same_gradients(models[1], models[0]) or dropout
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])
    assert len(logged(caplog, "lazy_layers")) == dropout


CHAIN = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
DATA = torch.randn(12, 8)


class Product(nn.Linear):
    """Takes one or two tensors."""

    def forward(self, value: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        value = super().forward(value).tanh()
        return value if factor is None else value * factor


def loader(*columns: torch.Tensor) -> Any:
    return DataLoader(TensorDataset(*columns), batch_size=4, shuffle=True)


@pytest.mark.parametrize("model", [CHAIN, Product(8, 8)], ids=["chain", "captured"])
def test_the_first_batch_of_a_loader_is_taken_and_no_random_number_is_drawn(model: nn.Module) -> None:
    planned = Checkpointable(model, mem_limit="1GB")
    before = torch.get_rng_state()
    planned.measure(loader(DATA))
    assert torch.equal(torch.get_rng_state(), before)
    assert planned(DATA[:4]).shape == (4, 8)
    assert planned.sequence is not None


def test_samples_that_are_none_are_told_in_one_sentence_and_a_limit_may_be_a_float() -> None:
    for sample in ((DATA[:4], DATA[:4]), loader(DATA, DATA)):
        with raises(UnsupportedModelError, "too_many_arguments", got=2):  # targets beside the input
            Checkpointable(CHAIN, sample, mem_limit="1GB")
        Checkpointable(Product(8, 8), sample, mem_limit="1GB")  # takes two
    for limit in ("1GB", 1e9, 10**9):
        with raises(UnsupportedModelError, "not_a_sample"):
            Checkpointable(CHAIN, limit)
    with raises(UnsupportedModelError, "empty_loader"):
        Checkpointable(CHAIN, DataLoader(TensorDataset(DATA[:0])), mem_limit="1GB")
    found = Checkpointable(CHAIN, DATA[:4], mem_limit=1e9)
    assert found.mem_limit == 10**9
    assert found.sequence is not None


def messages(caplog, **options: Any) -> list[tuple[int, str]]:
    """Levels and lines that a first step of four layers logs."""
    model = Checkpointable(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), mem_limit="1GB", **options)
    with caplog.at_level(logging.INFO, "rotor_py"):
        model(torch.randn(4, 8)).sum().backward()
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "rotor_py"]


def test_measuring_begins_and_ends_with_a_line(caplog) -> None:
    for options in ({"progress": False}, {}):
        caplog.clear()
        assert [level for level, _ in messages(caplog, **options)] == [logging.INFO] * 3
    assert kinds(caplog) == ["planning", "measuring", "measured"]
    assert logged(caplog, "planning", name="Sequential")
    assert logged(caplog, "measured", stages=4)
    for options in ({"progress": True}, {"verbosity": 1}):  # shown without setting up logging
        caplog.clear()
        assert [level for level, _ in messages(caplog, **options)][:3] == [logging.WARNING] * 3


def test_a_profiler_that_measuring_ends_is_told_of(caplog) -> None:
    model = Checkpointable(CHAIN, loss=torch.sum)
    with torch.profiler.profile():
        model.measure(DATA)
    assert logged(caplog, "profiler_lost")
    caplog.clear()
    with torch.profiler.profile() as profile:
        model(DATA).sum().backward()
    assert not logged(caplog, "profiler_lost")
    assert any("addmm" in event.key for event in profile.key_averages())


def test_hooks_see_nothing_of_planning_and_all_that_comes_after_it() -> None:
    seen: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: seen.append(name) or tensor, lambda tensor: tensor)

    value, planned = torch.ones(2, requires_grad=True), Checkpointable(CHAIN)
    with hooks("outer"):
        with hooks("inner"):
            planned.measure(DATA)
            with pytest.raises(RuntimeError, match="shape"):
                planned.measure(DATA[:, :3])
            assert seen == []
            value.exp()
        value.exp()
    assert seen == ["inner", "outer"]


PAGE = Path(__file__).parents[2] / "docs" / "training.md"
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
ASKED: dict[str, dict[str, Any]] = {
    "another optimizer": {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
    "compile": {"compile": True},
    "forwards_in_flight > 1": {"forwards_in_flight": 2},
    "keep": {"keep": "bf16"},
    "level or every_n_layers": {"every_n_layers": 1},
    "offload": {"offload": "file:/tmp"},
    "on_oom='replan'": {"on_oom": "replan"},
    "plan": {"plan": "a file that nobody reads"},
    "preserve_rng_state=False": {"preserve_rng_state": False},
    "step_in_backward": {"step_in_backward": torch.optim.SGD(MODEL.parameters(), 0.1)},
}
EXPECTED = [(each.first, each.second, each.why.format(given="it")) for each in EXCLUSIONS]
OF_SETTINGS = [each for each in EXCLUSIONS if each.second not in (SEVERAL_PROCESSES, SHARDED)]


@pytest.mark.parametrize("row", OF_SETTINGS, ids=lambda each: f"{each.first}, {each.second}")
def test_every_row_of_the_table_is_refused(row: Any) -> None:
    with raises(ValueError, "excluded_together", name=row.first.partition("=")[0], other=row.second):
        Checkpointable(MODEL, **ASKED[row.first], **ASKED[row.second])


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("`", "")
    rows = [tuple(line.strip("| ").split(" | ")) for line in text.splitlines() if line.startswith("|")]
    assert [row for row in rows if row in EXPECTED] == EXPECTED


def test_an_unknown_value_is_refused() -> None:
    for name, value in (("backward_order", "odd"), ("keep", "fp4"), ("keep", torch.bfloat16), ("on_oom", "odd")):
        with raises(ValueError, "unknown_value", name=name):
            Checkpointable(MODEL, **{name: value})


BATCH = torch.randn(4, 4)


@pytest.mark.parametrize("option", ["step_in_backward", "on_oom='replan'"])
def test_what_is_for_one_process_is_refused_once_there_are_several(option: str, monkeypatch) -> None:
    plain = Checkpointable(MODEL, BATCH, "1GB")
    planned = Checkpointable(MODEL, BATCH, "1GB", **ASKED[option])
    planned(BATCH)
    monkeypatch.setattr(TrainedModel, "alone", False)
    for refused in (planned, planned.measure):
        with raises(UnsupportedModelError, "one_process_only", name=option):
            refused(BATCH)
    plain(BATCH).sum().backward()
    monkeypatch.undo()
    MODEL.zero_grad()
    planned(BATCH)


def test_sums_of_the_gradients_of_repeated_layers_are_inside_the_limit_and_count_once_for_all_in_flight() -> None:
    blocks = [Residual(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64)) for _ in range(3)]
    batch = torch.randn(256, 64)
    planned = Checkpointable(nn.Sequential(*blocks * 3), batch, loss=square, watch=False)
    for share in (0.0, 1.0):
        sequence = planned.compute_sequence(between(planned, share))
        step_peak(planned, batch)
        present = [*planned.parameters(), batch, *(each.grad for each in planned.parameters())]
        measured = measured_peak(lambda: square(planned(batch)).backward(), present, CPU)  # the output goes at once
        assert 0.95 * planned.budget.peak_bytes(sequence) <= measured <= planned.budget.peak_bytes(sequence)
        planned.zero_grad()
    assert any(stage.gradient for stage in planned.chain)
    together = Checkpointable(nn.Sequential(*blocks * 3), batch, loss=square, forwards_in_flight=2)
    assert not any(stage.gradient for stage in together.chain)
