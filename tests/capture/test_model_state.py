"""What a captured model holds and changes: buffers, numbers and generators are those of plain training."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.capture.steps import assert_same_gradients, assert_same_step, planned_for
from tests.capture.test_partial_saving import Stack
from tests.checkpointable.steps import between
from tests.execute.test_bit_for_bit import WIDTH, Block, Noisy, Scaled
from tests.fields import logged

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


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


def test_measuring_leaves_a_generator_of_the_model_as_it_was() -> None:
    model = Stack(Noisy(), Noisy())
    for block in model.layers:
        block.noise = torch.Generator().manual_seed(1)
    before = [block.noise.get_state() for block in model.layers]
    Checkpointable(model, torch.randn(16, WIDTH), "1GB", cache=False)
    assert all(map(torch.equal, (block.noise.get_state() for block in model.layers), before))


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


def test_a_buffer_that_the_first_forward_resizes_is_that_of_plain_training() -> None:
    model = Stack(Observed(), Observed())
    plain = copy.deepcopy(model)
    planned = planned_for(model, torch.randn(16, WIDTH), cache=False, watch=False)
    for _ in range(3):
        assert_same_step(planned, plain, torch.randn(16, WIDTH))


class Weighed(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * torch.from_numpy(np.random.uniform(size=WIDTH)).to(value))


def test_arrays_that_numpy_draws_are_those_of_plain_training_and_layers_traced_alike_keep_their_parameters() -> None:
    """Graphs of layers with a number that was drawn are made while training, since each has another one in it."""
    model, value = Stack(Weighed(), Scaled(), Scaled()), torch.randn(16, WIDTH)
    plain = copy.deepcopy(model)
    planned = planned_for(model, value, cache=False, watch=False)
    assert_same_step(planned, plain, value, seed=np.random.seed)


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
    def __init__(self) -> None:
        super().__init__(Counter(), Counter())
        self.steps = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(value)


def test_changing_numbers_are_those_of_plain_training_and_tracing_ends(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Counting(), torch.randn(128, WIDTH)
    plain = copy.deepcopy(model)
    planned = planned_for(model, x, share=0.5)
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


class Averaging(Block):
    """A block with a batch norm, which may come to average over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.insert(0, nn.BatchNorm1d(WIDTH))


def test_batch_norms_that_come_to_average_over_all_batches_train_as_in_plain_training() -> None:
    model, x = Stack(Averaging(), Averaging()), torch.randn(16, WIDTH)
    plain = copy.deepcopy(model)
    planned = planned_for(model, x, watch=False)
    for momentum in (0.1, 0.1, None, None, 0.1):
        for block in (*plain.layers, *model.layers):
            block[0].momentum = momentum
        assert_same_step(planned, plain, x)


class Branching(Stack):
    """Draws, and moves what it holds; then its data decide, after a graph break, which of two graphs it has."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.calls, self.spread = [0], nn.Buffer(torch.zeros(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        hidden = nn.functional.dropout(self.layers[0](value * random.random()), np.random.rand())
        self.spread.data.copy_(hidden.detach().std(0))
        return super().forward(hidden) if bool(value[0, 0] > 0) else self.layers[1](hidden)


class BranchingBySize(Branching):
    """No graph break comes before."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
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
        losses = [network(batch).square().mean() for batch in batches]
        torch.stack(losses).sum().backward()
        found.append([*losses, random.random(), np.random.rand(), torch.rand(()), own.calls])
    assert found[0] == found[1]
    assert_same_gradients(model, plain)
    assert len(logged(caplog, "unplanned_graph")) == unplanned
    assert len(planned._planner.plans._waiting) == 1  # both graphs are planned


def test_a_hook_on_all_modules_that_comes_after_the_plan_is_called_as_in_plain_training() -> None:
    model = Stack(Block(), Block(), Block())
    batch = torch.randn(4, WIDTH)
    plain = copy.deepcopy(model)
    planned = planned_for(model, batch)
    assert_same_step(planned, plain, batch)
    hook = nn.modules.module.register_module_forward_hook(lambda module, arguments, output: 1.5 * output)
    try:
        assert_same_step(planned, plain, batch)
    finally:
        hook.remove()
    assert_same_step(planned, plain, batch)


def test_cached_parametrizations_have_their_gradients_in_the_step_that_is_measured() -> None:
    model = Stack(*(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    plain = copy.deepcopy(model)
    planned, batch = Checkpointable(model, mem_limit="1GB", cache=False), torch.randn(4, WIDTH)
    for network in (planned, plain):
        with nn.utils.parametrize.cached():
            network(batch).square().mean().backward()
    assert_same_gradients(planned, plain)
