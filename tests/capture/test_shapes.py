"""Batches of other shapes: they follow the plan at once, within the limit, and what is captured again is said."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

from rotor_py import Checkpointable, InfeasibleError
from rotor_py.capture import captured_forward, tracing
from tests.capture.steps import assert_same_step, planned_for
from tests.checkpointable.steps import CPU, Tower, said_in, step_peak
from tests.fields import logged
from tests.plan.test_step_plans import plans_counted

F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every graph that is captured; nothing is known from other tests."""
    made: list[object] = []
    backend = captured_forward._backend
    monkeypatch.setattr(captured_forward, "_backend", lambda *given: made.append(0) or backend(*given))
    monkeypatch.setattr(captured_forward, "_compiled", OrderedDict())
    return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(32, 3 * 32), nn.Linear(32, 32)
        self.inner, self.outer = nn.Linear(32, 4 * 32), nn.Linear(4 * 32, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, _ = value.shape
        parts = self.mixed(value).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        value = value + self.out(seen.transpose(1, 2).reshape(batch, length, 32))
        return value + self.outer(F.gelu(self.inner(value)))


class Language(nn.Module):
    """A small language model that is called with keywords and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        value = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            value = F.dropout(block(value), 0.1, self.training)
        return {"logits": self.head(value) * mask[..., None]}


def sentences(count: int, length: int) -> dict[str, Any]:
    return {"ids": torch.randint(50, (count, length)), "mask": torch.rand(count, length) < 0.9}


def planned_and_plain(model: nn.Module, batch: Any, share: float = 0.0) -> tuple[Checkpointable, nn.Module]:
    plain = copy.deepcopy(model)
    return planned_for(model, batch, share=share), plain


def assert_trains_like(planned: Checkpointable, plain: nn.Module, batch: dict[str, Any]) -> None:
    """A step has the bits of plain training, inside the limit."""
    plain.load_state_dict(planned.state_dict())
    assert_same_step(planned, plain, **batch)
    limit = planned._planner.model.limit_bytes(CPU)
    assert step_peak(planned, batch, fresh_grads=True) <= limit


def assert_follows(planned: Checkpointable, plain: nn.Module, batches: Any, *shapes: tuple[int, ...]) -> None:
    """Train on batches of these shapes, with nothing measured."""
    with plans_counted(planned) as measured:
        for shape in shapes:
            assert_trains_like(planned, plain, batches(*shape))
    assert not measured


def test_other_shapes_follow_the_plan_with_nothing_captured_but_for_a_size_of_one_and_larger_ones_are_planned_for(
    captured: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    # Planned for sizes that are equal, which says nothing about later ones.
    planned, plain = planned_and_plain(Language(), sentences(16, 16))
    assert_follows(planned, plain, sentences, (16, 16), (9, 11), (2, 2))
    assert len(captured) == 1
    assert not said_in(caplog)
    assert_follows(planned, plain, sentences, (1, 16), (1, 13))
    assert len(captured) == 2
    (record,) = logged(caplog, "captured_again")
    assert said_in(caplog) == [record.getMessage()]
    assert "[1, 16]" in record.getMessage()
    fresh = planned_for(copy.deepcopy(plain), sentences(24, 40))
    planned.mem_limit = "1GB"
    for shape in ((24, 40), (4, 8)):
        assert_trains_like(planned, plain, sentences(*shape))
    assert len(captured) == 2
    # Cut by the bytes of this batch, not by those of the one that it was captured with.
    assert planned.names == fresh.names
    assert planned.inspection_values.stages[0].saved_bytes == fresh.inspection_values.stages[0].saved_bytes


class Halves(nn.Module):
    """Its graph breaks, and what goes on has sizes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Tower(32, 5), nn.Linear(32, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.before(value)
        length = value.shape[1]
        torch._dynamo.graph_break()
        return self.after(value).sum(1) / length


def rows(count: int, length: int) -> dict[str, Any]:
    return {"value": torch.randn(count, length, 32)}


def test_what_follows_a_graph_break_serves_every_shape_too(captured: list[object]) -> None:
    planned, plain = planned_and_plain(Halves(), rows(16, 12))
    before = len(captured)
    assert_follows(planned, plain, rows, (16, 9), (7, 12))
    assert len(captured) == before


class Asking(Tower):
    """Its code asks for the very length of its input, so every length has a graph; all of them do the same."""

    def __init__(self) -> None:
        super().__init__(32, 3)
        self.factors = [1 + number / 64 for number in range(64)]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * self.factors[value.shape[1]])


@pytest.mark.parametrize("lengths", [(40, 33, 39, 33), pytest.param(range(40, 30, -1), marks=pytest.mark.slow)])
def test_lengths_with_a_graph_each_follow_the_plan_which_is_said_while_another_thread_compiles(
    lengths: Sequence[int], captured: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """TorchDynamo by itself makes eight graphs, and then runs a model as it is."""
    planned, plain = planned_and_plain(Asking(), rows(8, 40))
    # TorchDynamo calls no callbacks meanwhile: it waits until all threads are done.
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "another's"):
        assert_follows(planned, plain, rows, *((8, length) for length in lengths))
    assert len(captured) == len({*lengths})
    assert len(said_in(caplog)) == len(logged(caplog, "captured_again")) == len(captured) - 1


def test_lengths_beyond_the_most_graphs_of_a_model_are_planned_for_too(captured, monkeypatch) -> None:
    for module in (tracing, captured_forward):
        monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    planned, plain = planned_and_plain(Asking(), rows(8, 30))
    planned.mem_limit = "1GB"
    for length in range(31, 35):
        assert_trains_like(planned, plain, rows(8, length))
    assert len(captured) >= 5


class Repeating(nn.Module):
    """For short inputs it does something else, which takes more memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[1] > 16:
            return value + self.layer(value).tanh().sin()
        return value + self.layer(value.repeat(1, 8, 1)).tanh().sin().unflatten(1, (8, -1)).mean(1)


class Padding(nn.Module):
    """Stages have the same names either way."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(32, 32), nn.ModuleList(Repeating() for _ in range(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.enter(value)
        for block in self.blocks:
            value = block(value)
        return value


def test_a_model_that_does_something_else_for_small_inputs_has_a_plan_for_them_too(captured, caplog) -> None:
    planned, plain = planned_and_plain(Padding(), rows(8, 64), share=0.5)
    long = planned.sequence
    with plans_counted(planned) as measured:
        assert_trains_like(planned, plain, rows(8, 14))
    assert measured, "the costs of the long inputs say nothing about short ones"
    assert logged(caplog, "planning_again")
    assert_follows(planned, plain, rows, (8, 13), (8, 40), (8, 14), (8, 64))
    assert planned.sequence is long
    assert len(captured) == 2


def test_a_small_input_that_takes_too_much_is_refused_and_others_train_on(captured: list[object]) -> None:
    planned, plain = planned_and_plain(Padding(), rows(8, 64))
    with pytest.raises(InfeasibleError):
        planned(torch.randn(8, 16, 32))
    assert_follows(planned, plain, rows, (8, 60))


def test_a_model_that_cannot_be_traced_with_symbols_is_traced_for_its_shape(captured, caplog, monkeypatch) -> None:
    backend = captured_forward._backend

    def refuse_symbols(graph: Any, inputs: list[Any]) -> Any:
        if any(isinstance(node.meta.get("example_value"), torch.SymInt) for node in graph.graph.nodes):
            raise RuntimeError("no symbols here")
        return backend(graph, inputs)

    monkeypatch.setattr(captured_forward, "_backend", refuse_symbols)
    with caplog.at_level(logging.INFO, "rotor_py"):
        planned, plain = planned_and_plain(Asking(), rows(8, 40))
    assert logged(caplog, "graph_per_shape")
    for length in (40, 33):
        assert_trains_like(planned, plain, rows(8, length))
    assert len(captured) == 2
