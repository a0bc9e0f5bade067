"""Stages that do the same share the code of their graphs, which is made when one of them is run first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from rotor_py import Checkpointable
from rotor_py.capture.graph.stage_graph import Codes, StageGraph


def graph_of(build: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node], name: str = "value") -> fx.Graph:
    """Of a function of a value that may read the attribute `weight`."""
    graph = fx.Graph()
    value = graph.placeholder(name)
    graph.output((build(graph, value, graph.get_attr("weight")),))
    return graph


def scaled(factor: float) -> Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]:
    return lambda graph, value, weight: graph.call_function(
        torch.mul, (graph.call_function(torch.mul, (value, weight)), factor)
    )


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs of which code has been generated."""
    found: list[fx.Graph] = []
    python_code = fx.Graph.python_code

    def noting(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        found.append(graph)
        return python_code(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", noting)
    return found


def test_graphs_that_do_the_same_have_one_code_and_weights_of_their_own(generated: list[fx.Graph]) -> None:
    codes = Codes()
    one, two = (
        StageGraph({"weight": torch.tensor(weight)}, graph_of(scaled(2.0), name), "Test", codes)
        for weight, name in ((3.0, "first"), (5.0, "second"))
    )
    assert not generated
    assert [graph(torch.tensor(1.0))[0].item() for graph in (one, two, one)] == [6.0, 10.0, 6.0]
    assert generated == [one.graph]
    assert two.code == one.code


@pytest.mark.parametrize(("factor", "other"), [(0.0, -0.0), (1, 1.0), (2.0, 3.0), (True, 1)])
def test_graphs_with_other_numbers_have_codes_of_their_own(
    factor: float, other: float, generated: list[fx.Graph]
) -> None:
    codes = Codes()
    weight = torch.tensor(-1.0)
    for each in (factor, other):
        (made,) = StageGraph({"weight": weight}, graph_of(scaled(each)), "Test", codes)(torch.tensor(1.0))
        expected = torch.mul(weight, each)
        assert torch.equal(torch.signbit(made), torch.signbit(expected))
        assert torch.equal(made, expected)
    assert len(generated) == 2


def test_a_graph_that_has_changed_is_made_into_code_again() -> None:
    graph = StageGraph({"weight": torch.tensor(3.0)}, graph_of(scaled(2.0)), "Test", Codes())
    assert graph(torch.tensor(1.0))[0] == 6.0
    last = next(node for node in reversed(graph.graph.nodes) if node.target is torch.mul)
    last.target = torch.add
    graph.recompile()
    assert graph(torch.tensor(1.0))[0] == 5.0


def test_a_graph_like_another_one_is_run_on_what_that_one_has() -> None:
    body = StageGraph({"weight": torch.tensor(3.0)}, graph_of(scaled(2.0)), "Test", Codes())
    other = StageGraph.like(body, graph_of(scaled(4.0)), "Other")
    assert not [*other.parameters(), *other.buffers()]
    assert type(other).forward(body, torch.tensor(1.0))[0] == 12.0


def test_a_copy_of_a_graph_runs_on_its_own_weights() -> None:
    body = StageGraph({"weight": nn.Parameter(torch.tensor(3.0))}, graph_of(scaled(2.0)), "Test", Codes())
    twin = copy.deepcopy(body)
    with torch.no_grad():
        body.weight.fill_(0)
    assert [each(torch.tensor(1.0))[0].item() for each in (body, twin)] == [0.0, 6.0]


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(count))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = value + block(value)
        return value


def test_code_is_made_for_kinds_of_stages_and_not_for_stages(generated: list[fx.Graph]) -> None:
    counts = []
    for blocks in (4, 8):
        planned = Checkpointable(Blocks(blocks), loss=torch.sum, cache=False)
        planned.measure(torch.randn(256, 16))
        counts.append(len(generated))
        generated.clear()
    assert counts[0] == counts[1] > 0


def test_blocks_that_share_code_train_as_they_are() -> None:
    torch.manual_seed(0)
    model = Blocks(4)
    plain, value = copy.deepcopy(model), torch.randn(256, 16)
    planned = Checkpointable(model, loss=torch.sum, cache=False)
    planned.measure(value)
    assert planned.budget is not None
    for limit in (planned.budget.least_bytes(), 10**9):
        for each in (plain, model):
            each.zero_grad()
        planned.compute_sequence(limit)
        torch.sum(plain(value)).backward()
        torch.sum(planned(value)).backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
