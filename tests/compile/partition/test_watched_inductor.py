"""What Inductor's code takes is watched: above the budget, the graph is compiled again, or it is said."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from rotor_profiling import watch_step
from rotor_py import memory_budget
from rotor_py.compile.memory_budget import GraphWatch, WatchedGraph
from rotor_py.compile.partitioner import BudgetPartitioner
from tests.checkpointable.steps import CPU
from tests.compile.partition.compiled_steps import Block, Loss, take_step
from tests.fields import logged

UNIT = 4 * 2**16
SCALARS = 100
BUDGET = 4 * UNIT + SCALARS


class Code(torch.autograd.Function):
    """Stands for compiled code: it doubles a tensor, and needs so many more of its size in forward and backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, more: tuple[int, int]) -> torch.Tensor:
        context.more = more
        return _doubled(value, more[0])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return _doubled(gradients[0], context.more[1]), None


def _doubled(value: torch.Tensor, more: int) -> torch.Tensor:
    held = [torch.empty_like(value) for _ in range(more)]
    made = value * 2
    del held
    return made


def step(run: Callable[..., Any]) -> None:
    value = torch.ones(2**16, requires_grad=True)
    beside = torch.empty(2**20)  # what the caller does is not the graph's
    (made,) = run(value)
    del beside
    made.backward(torch.ones_like(made))
    assert value.grad is not None


@pytest.mark.parametrize(("more", "units"), [((0, 0), 4), ((3, 0), 5), ((0, 3), 7)])
def test_the_peak_is_that_of_the_graph(more: tuple[int, int], units: int) -> None:
    watches = []

    def watched(value: torch.Tensor) -> list[torch.Tensor]:
        watches.append(GraphWatch(watch_step(CPU, 0, 0), UNIT))
        made = Code.apply(value, more)
        watches[0].forward_returned([made])
        return [made]

    step(watched)
    # The input, the output, its gradient, that of the input, and more; and some numbers.
    assert 0 <= watches[0].peak - units * UNIT < SCALARS


class Compilations:
    """Code that takes so many units more with each compilation; notes the reserve and the fusions of each."""

    def __init__(self, *more: int) -> None:
        self.more = list(more)
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, partitioner: BudgetPartitioner, *, narrow: bool) -> Callable[..., Any]:
        self.asked.append((round(partitioner.reserve / UNIT), narrow))
        more = self.more[len(self.asked) - 1]
        return lambda value: [Code.apply(value, (0, more))]


def test_a_graph_is_compiled_again_only_if_it_takes_more_than_its_budget(caplog: pytest.LogCaptureFixture) -> None:
    for more, asked in ((0,), [(0, False)]), ((3, 0), [(0, False), (3, True)]):
        compilations = Compilations(*more)
        graph = WatchedGraph(compilations, BudgetPartitioner(BUDGET))
        with caplog.at_level(logging.INFO, logger="rotor_py"):
            for _ in range(4):
                step(graph)
        assert compilations.asked == asked
    assert len(logged(caplog, "compiled_again")) == 1


def test_forwards_in_flight_together_are_not_judged() -> None:
    compilations = Compilations(3, 0)
    graph = WatchedGraph(compilations, BudgetPartitioner(BUDGET))
    made = [graph(torch.ones(2**16, requires_grad=True))[0] for _ in range(2)]
    sum(made).sum().backward()
    del made
    step(graph)
    assert compilations.asked == [(0, False)]
    step(graph)
    assert compilations.asked == [(0, False), (3, True)]


def test_where_nothing_helps_it_is_said_once_the_best_is_kept_and_none_listens_without_a_backward(caplog) -> None:
    compilations = Compilations(1, 3)
    graph = WatchedGraph(compilations, BudgetPartitioner(BUDGET))
    for _ in range(6):
        step(graph)
    assert len(compilations.asked) == 2
    (record,) = logged(caplog, "graph_over_budget", mem_limit=BUDGET)
    assert caplog.records == [record]
    value = torch.ones(2**16, requires_grad=True)
    watch = GraphWatch(watch_step(CPU, 0, 0), UNIT)
    (made,) = graph(value)
    watch.forward_returned([made])
    made.backward(torch.ones_like(made))
    del made
    gc.collect()
    assert 0 <= watch.peak - 5 * UNIT < SCALARS
    watch = GraphWatch(watch_step(CPU, 0, 0), UNIT)
    made = Code.apply(torch.ones(2**16, requires_grad=True), (0, 0))
    watch.forward_returned([made])
    assert torch.autograd._profiler_enabled()
    del made
    assert not torch.autograd._profiler_enabled()
    assert watch.peak is None


@pytest.mark.slow  # Inductor compiles a Llama twice, or three times: by the times of its operators, it is cut otherwise
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_comes_to_stay_within_the_budget_or_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model, value = Loss(nn.Sequential(*(Block(64) for _ in range(3)))), torch.randn(4, 128, 64)
    with memory_budget("6MB"):
        run = torch.compile(model)
    with fresh_cache(), caplog.at_level(logging.INFO, "rotor_py"):  # what Inductor finds on disk is not divided again
        for _ in range(4):  # it is compiled so often at most
            run(value).backward()
            model.zero_grad()
        peak = take_step(model, run, value).peak
    assert logged(caplog, "compiled_again")
    told = [record.__dict__["numbers"]["peak_bytes"] for record in logged(caplog, "graph_over_budget")]
    assert peak <= max([6_000_000, *told])
