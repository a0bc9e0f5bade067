"""Captured models change what they hold as in plain training, and batches of other shapes follow the plan at once."""

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

from rotor_py import Checkpointable, InfeasibleError
from rotor_py.capture import captured_forward, tracing
from rotor_solver import store_all
from tests.capture.steps import assert_same_gradients, assert_same_step, planned_and_plain, planned_for
from tests.capture.test_odd_models import Layers
from tests.checkpointable.steps import CPU, Made, Stack, Tower, between, said_in, step_peak
from tests.execute.test_bit_for_bit import WIDTH, Block, Noisy, Scaled
from tests.fields import logged
from tests.plan.test_step_plans import plans_counted

see = torch._dynamo.disable(lambda seen: seen.add(len(seen)))


class Moving(Stack):
    """Blocks, and a mean that moves with them."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mean = nn.Buffer(torch.zeros(WIDTH))

    def move(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.mean.lerp_(value.detach().mean(0), 0.1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            self.move(value)
            value = block(value - self.mean)
        return value


class ReadBefore(Moving):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            value = block(value - self.mean)
            self.move(value)
        return value


class Statistics(Moving):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            value = block(self.norm(value)) - self.norm.running_mean
        return value


class Replaced(Moving):
    def move(self, value: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + value.detach().mean(0)


class Outside(Moving):
    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def count(self) -> None:
        self.mean.add_(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count()
        return super().forward(value)


class Apart(Moving):
    """The mean moves in a graph of its own, which returns nothing."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layers[0](value)
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.mean.data.lerp_((value * 2).detach().mean(0), 0.1)
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return self.layers[1](value - self.mean)


CASES = [(Statistics, 1), (Moving, 1), (Outside, 1), (Apart, 1), (ReadBefore, 2), (Replaced, 2)]
"""Models, and how many forwards come before their backward."""


@pytest.mark.parametrize(("make", "count"), CASES)
def test_moved_buffers_are_those_of_plain_training(make: Callable[[], nn.Module], count: int) -> None:
    model, values = make().train(), [torch.randn(16, WIDTH) for _ in range(count)]
    trained = copy.deepcopy(model)
    planned = Checkpointable(
        trained, values[0], "1GB", fresh_grads=True, cache=False, forwards_in_flight=count, watch=False
    )
    assert all(map(torch.equal, trained.buffers(), model.buffers())), "measuring moves nothing"
    for share in (0.0, 0.3):
        plain = copy.deepcopy(model)
        planned.load_state_dict(model.state_dict())
        planned.compute_sequence(between(planned, share))
        for _ in range(2):
            for network in (plain, planned):
                network.zero_grad()
                torch.stack([network(value).square().mean() for value in values]).sum().backward()
            assert_same_gradients(trained, plain)


class NoisyWith(Stack):
    """Draws from its own generator, and from one that a batch brings."""

    def forward(self, value: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        return super().forward(value) * torch.rand(WIDTH, generator=noise)


def test_measuring_leaves_generators_of_the_model_and_of_the_batch_as_they_were() -> None:
    model, noise = NoisyWith(Noisy(), Noisy()), torch.Generator()
    for block in model.layers:
        block.noise = torch.Generator().manual_seed(1)
    streams = [*(block.noise for block in model.layers), noise]
    before = [each.get_state() for each in streams]
    planned = Checkpointable(model, (torch.randn(16, WIDTH), noise), "1GB", cache=False)
    assert all(map(torch.equal, (each.get_state() for each in streams), before))
    planned(torch.randn(1, WIDTH), noise)  # another shape: the model is captured, and may start, again
    noise.set_state(before[-1])


class Observed(Block):
    """Keeps the largest values, in a buffer that the first batch gives its size."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = nn.Buffer(torch.empty(0))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        now = value.detach().amax(0)
        if not len(self.largest):
            self.largest.resize_(now.shape).fill_(0)
        self.largest.copy_(torch.maximum(self.largest, now))
        return super().forward(value) - self.largest


class Weighed(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * torch.from_numpy(np.random.uniform(size=WIDTH)).to(value))


class Jittered(Stack):
    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.stream = random.Random(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * torch.full((), self.stream.random()))


ODD: dict[str, Callable[[], nn.Module]] = {
    "a buffer that the first forward resizes": lambda: Stack(Observed(), Observed()),
    # Graphs of layers with a number that was drawn are made while training, since each has another one in it.
    "arrays that numpy draws, and layers traced alike": lambda: Stack(Weighed(), Scaled(), Scaled()),
    # TorchDynamo would put the trace's number into the graph.
    "a stream of the model's own": Jittered,
}


@pytest.mark.parametrize("what", ODD)
def test_what_differs_from_step_to_step_is_that_of_plain_training(what: str) -> None:
    planned, plain = planned_and_plain(ODD[what](), torch.randn(16, WIDTH), cache=False, watch=False)
    for _ in range(3):
        assert_same_step(planned, plain, torch.randn(16, WIDTH), seed=np.random.seed)


class Counter(nn.Module):
    """A block that counts its calls, which change what it computes; so does a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.calls, self.temperature, self.width = 0, 1.0, WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.outer(torch.relu(self.inner(x.reshape(-1, self.width))))
        return x + torch.softmax(y / self.temperature, -1) * (1 + 0.1 * self.calls)


class Counting(Stack):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(value)


def test_changing_numbers_are_those_of_plain_training_and_tracing_ends(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Counting(Counter(), Counter()), torch.randn(128, WIDTH)
    model.steps = 0
    planned, plain = planned_and_plain(model, x, share=0.5)
    for step in range(6):
        if step == 3:
            caplog.clear()
        for block in (*plain.layers, *model.layers):
            block.temperature = 1 / (1 + step)
        assert_same_step(planned, plain, x)
        assert model.steps == plain.steps == step + 1
        assert [each.calls for each in model.layers] == [step + 1] * 2
    assert not logged(caplog, "captured_again")
    assert planned.sequence != store_all(planned.budget.chain)  # something was recomputed


def test_batch_norms_that_come_to_average_over_all_batches_train_as_in_plain_training() -> None:
    model, x = Stack(*(nn.Sequential(nn.BatchNorm1d(WIDTH), Block()) for _ in range(2))), torch.randn(16, WIDTH)
    planned, plain = planned_and_plain(model, x, watch=False)
    for momentum in (0.1, 0.1, None, None, 0.1):
        for block in (*plain.layers, *model.layers):
            block[0].momentum = momentum
        assert_same_step(planned, plain, x)


class Branching(Stack):
    """Draws, and moves what it holds; then its data decide, after a graph break, which of two graphs it has."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.calls, self.spread = [0], nn.Buffer(torch.zeros(WIDTH))

    def forward(self, value: torch.Tensor, seen: set[int]) -> torch.Tensor:
        self.calls.append(len(self.calls))
        see(seen)
        hidden = nn.functional.dropout(self.layers[0](value * random.random()), np.random.rand())
        self.spread.data.copy_(hidden.detach().std(0))
        return super().forward(hidden) if bool(value[0, 0] > 0) else self.layers[1](hidden)


class BranchingBySize(Branching):
    """No graph break comes before."""

    def forward(self, value: torch.Tensor, seen: set[int]) -> torch.Tensor:
        hidden = value * random.uniform(0, 1)
        return Stack.forward(self, hidden) if len(value) > 12 else self.layers[1](hidden)


@pytest.mark.parametrize(("make", "unplanned"), [(Branching, 1), (BranchingBySize, 0)])
def test_a_forward_that_comes_to_another_graph_does_nothing_twice(make: Any, unplanned: int, caplog: Any) -> None:
    model = make()
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, mem_limit="1GB", fresh_grads=True, cache=False, watch=False)
    batches = [torch.full((rows, WIDTH), rows - 12.0) for rows in (16, 11, 11, 16)]
    found: list[list[Any]] = []
    for network, own in ((planned, model), (plain, plain)):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        seen = set[int]()
        losses = [network(batch, seen).square().mean() for batch in batches]
        torch.stack(losses).sum().backward()
        found.append([*losses, random.random(), np.random.rand(), torch.rand(()), own.calls, seen])
    assert found[0] == found[1]
    assert_same_gradients(model, plain)
    assert len(logged(caplog, "unplanned_graph")) == unplanned
    assert len(planned._planner.plans._waiting) == 1  # both graphs are planned


def test_cached_parametrizations_have_their_gradients_in_the_step_that_is_measured() -> None:
    model = Stack(*(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    plain = copy.deepcopy(model)
    planned, batch = Checkpointable(model, mem_limit="1GB", cache=False), torch.randn(4, WIDTH)
    for network in (planned, plain):
        with nn.utils.parametrize.cached():
            network(batch).square().mean().backward()
    assert_same_gradients(planned, plain)


F = nn.functional


class Attending(nn.Module):
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
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        value = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            value = F.dropout(block(value), 0.1, self.training)
        return {"logits": self.head(value) * mask[..., None]}


def sentences(count: int, length: int) -> dict[str, Any]:
    return {"ids": torch.randint(50, (count, length)), "mask": torch.rand(count, length) < 0.9}


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


def test_other_shapes_follow_the_plan_uncaptured_but_for_one_and_larger_ones_are_planned(captured, caplog) -> None:
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


class Halves(Made):
    """Its graph breaks, and what goes on has sizes of its own."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.before(value)
        length = value.shape[1]
        torch._dynamo.graph_break()
        return self.after(value).sum(1) / length


def rows(count: int, length: int) -> dict[str, Any]:
    return {"value": torch.randn(count, length, 32)}


def test_what_follows_a_graph_break_serves_every_shape_too(captured: list[object]) -> None:
    planned, plain = planned_and_plain(Halves(before=Tower(32, 5), after=nn.Linear(32, 8)), rows(16, 12))
    before = len(captured)
    assert_follows(planned, plain, rows, (16, 9), (7, 12))
    assert len(captured) == before


class Asking(Tower):
    """Its code asks for the very length of its input, so every length has a graph; all of them do the same."""

    factors = tuple(1 + number / 64 for number in range(64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * self.factors[value.shape[1]])


@pytest.mark.parametrize("lengths", [(40, 33, 39, 33), pytest.param(range(40, 30, -1), marks=pytest.mark.slow)])
def test_lengths_with_a_graph_each_follow_the_plan_and_a_thread_compiles_as_said(lengths, captured, caplog) -> None:
    """TorchDynamo by itself makes eight graphs, and then runs a model as it is."""
    planned, plain = planned_and_plain(Asking(32, 3), rows(8, 40))
    # TorchDynamo calls no callbacks meanwhile: it waits until all threads are done.
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "another's"):
        assert_follows(planned, plain, rows, *((8, length) for length in lengths))
    assert len(captured) == len({*lengths})
    assert len(said_in(caplog)) == len(logged(caplog, "captured_again")) == len(captured) - 1


def test_lengths_beyond_the_most_graphs_of_a_model_are_planned_for_too(captured, monkeypatch) -> None:
    for module in (tracing, captured_forward):
        monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    planned, plain = planned_and_plain(Asking(32, 3), rows(8, 30))
    planned.mem_limit = "1GB"
    for length in range(31, 34):
        assert_trains_like(planned, plain, rows(8, length))
    assert len(captured) >= 4


class Repeating(nn.Linear):
    """For short inputs it does something else, which takes more memory."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[1] > 16:
            return value + super().forward(value).tanh().sin()
        return value + super().forward(value.repeat(1, 8, 1)).tanh().sin().unflatten(1, (8, -1)).mean(1)


def padding() -> nn.Module:
    """Stages have the same names either way."""
    return Layers(nn.Linear(32, 32), *(Repeating(32, 32) for _ in range(4)))


def test_a_model_that_does_something_else_for_small_inputs_has_a_plan_for_them_too(captured, caplog) -> None:
    planned, plain = planned_and_plain(padding(), rows(8, 64), share=0.5)
    long = planned.sequence
    with plans_counted(planned) as measured:
        assert_trains_like(planned, plain, rows(8, 14))
    assert measured, "the costs of the long inputs say nothing about short ones"
    assert logged(caplog, "planning_again")
    assert_follows(planned, plain, rows, (8, 13), (8, 40), (8, 14), (8, 64))
    assert planned.sequence is long
    assert len(captured) == 2


def test_a_small_input_that_takes_too_much_is_refused_and_others_train_on(captured: list[object]) -> None:
    planned, plain = planned_and_plain(padding(), rows(8, 64))
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
        planned, plain = planned_and_plain(Asking(32, 3), rows(8, 40))
    assert logged(caplog, "graph_per_shape")
    for length in (40, 33):
        assert_trains_like(planned, plain, rows(8, length))
    assert len(captured) == 2
