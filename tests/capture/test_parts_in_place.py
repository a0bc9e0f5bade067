"""Stages with operators that work in place, stored in part: what is overwritten is gone, the rest can be dropped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

from rotor_profiling.stage.gradients import leaves_of
from rotor_py.capture.graph.graph_nodes import SymbolValues
from rotor_py.capture.graph.saved_values import SavedPart, find_saved_values, is_cheap
from rotor_py.capture.graph.selective_recompute import find_saved_parts, least_cut
from rotor_py.stage.partial_storage import PartialSaving
from tests.capture.steps import compare, in_part
from tests.capture.test_partial_saving import WIDTH, captured, loss, run, stages


class Residual(nn.Module):
    """Sums and an activation in place, as people write them to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.inner(x), inplace=True)
        z = y * torch.sigmoid(y)
        z += 0.5
        z = torch.tanh(z).pow(3)
        made = self.outer(z)
        made += x
        return made


class Normed(nn.Module):
    """A batch norm counts its batches in place, and moves its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.act = nn.BatchNorm1d(4 * WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.inner(x.flatten(0, 1))))
        return x + self.outer(F.mish(y).exp().tanh()).view(x.shape)


class Routed(nn.Module):
    """As in a mixture of experts: of the two tensors of `topk`, one is written over, and the other one saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest, where = torch.topk(torch.sigmoid(x), 3)
        largest /= largest.detach().sum(-1, keepdim=True) + 1
        return x + torch.tanh(torch.gather(x, -1, where) * largest).sum(-1, keepdim=True)


def test_a_node_that_is_saved_and_written_over_leaves_no_choice() -> None:
    planned, batch = captured(nn.Linear(WIDTH, WIDTH), Routed(), nn.Linear(WIDTH, WIDTH))
    planned.mem_limit = "1GB"
    compare(planned, copy.deepcopy(planned.model), {"x": batch}, loss)


@pytest.mark.parametrize("layer", [Residual, Normed])
def test_a_stage_that_works_in_place_is_stored_in_part(layer: Any) -> None:
    planned, batch = captured(nn.Linear(WIDTH, WIDTH), layer(), layer())
    value: Any = (batch,)
    found = 0
    for stage in stages(planned):
        for way in stage.ways():
            before = copy.deepcopy(list(stage.buffers()))
            outputs, expected, whole = run(stage, stage, value)
            moved = copy.deepcopy(list(stage.buffers()))
            for buffer, old in zip(stage.buffers(), before, strict=True):
                buffer.copy_(old)
            found_outputs, gradients, less = run(stage.forward_by(way), stage, value)
            for numbers, others in ((found_outputs, outputs), (gradients, expected), (list(stage.buffers()), moved)):
                assert all(map(torch.equal, numbers, others))
            assert less < 0.9 * whole
            found += 1
        value = leaves_of(stage(value))
    assert found
    planned.sequence = in_part(planned, again=1)
    assert planned.budget is not None
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert 0.97 * predicted <= compare(planned, copy.deepcopy(planned.model), {"x": batch}, loss) <= predicted


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_made_again_beside_writes_has_the_same_bits(data: st.DataObject) -> None:
    body, seed = data.draw(programs()), data.draw(st.integers(0, 6))
    example = body.graph.find_nodes(op="placeholder")[0].meta["example_value"]
    try:
        expected = _gradients(body, body, example)
    except RuntimeError:  # autograd refuses it in plain training, too
        assume(False)
    values = find_saved_values(body, SymbolValues())
    assert find_saved_values(body, SymbolValues(), [example.detach().requires_grad_()]) == values
    own = [node for node, root in values.roots.items() if root is node]
    again = {node: 0 for node in own if is_cheap(node) and node not in values.stale}
    keeping = {node: 1 + (3 * number + seed) % 7 for number, node in enumerate(own)}
    part = SavedPart.of_cut(body, values, least_cut(values, keeping, again).kept)
    graph = part.instrumented(body, body.graph)

    def forward(x: torch.Tensor) -> Any:
        with PartialSaving(part.recipe, ()) as saving:
            return type(graph).forward(body, saving, x)

    found = _gradients(body, forward, example)
    assert all(map(torch.equal, (each.nan_to_num() for each in found), (each.nan_to_num() for each in expected)))
    assert find_saved_parts(body, 0, SymbolValues()) is not None


def _gradients(body: fx.GraphModule, forward: Any, example: torch.Tensor) -> list[torch.Tensor]:
    x = example.detach().clone().requires_grad_()
    body.zero_grad()
    made = forward(x)
    sum((each.square().sum() for each in made if each.requires_grad), torch.zeros(())).backward()
    return [
        *(each.detach() for each in made),
        *(each.grad for each in (x, *body.parameters()) if each.grad is not None),
    ]


@st.composite
def programs(draw: st.DrawFn) -> fx.GraphModule:
    """A few operators, some of which write to what others have made, or to a view of it."""
    torch.manual_seed(0)
    graph = fx.Graph()
    weight = nn.Parameter(torch.randn(4, 4))
    first = graph.placeholder("x")
    first.meta["example_value"] = torch.randn(4, 4, requires_grad=True)
    table = graph.get_attr("weight")
    examples: dict[fx.Node, torch.Tensor] = {first: first.meta["example_value"], table: weight}
    values: list[fx.Node] = []

    def call(function: Any, *args: Any) -> fx.Node:
        node = graph.call_function(function, args)
        with torch.enable_grad():
            examples[node] = function(*fx.node.map_arg(args, examples.__getitem__))
        node.meta["example_value"] = examples[node]
        values.append(node)
        return node

    call(torch.mul, first, 1.5)
    for _ in range(draw(st.integers(3, 9))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["tanh", "exp", "mul", "add", "matmul", "relu_", "relu_", "mul_", "iadd", "half"]))
        alike = examples[a].shape == examples[b].shape
        if kind == "matmul" and examples[a].shape == (4, 4):
            call(torch.matmul, a, table)
        elif kind == "relu_":
            call(torch.relu_, a)
        elif kind == "mul_":
            call(torch.Tensor.mul_, a, 0.5)
        elif kind == "iadd" and alike and a is not b:
            call(torch.Tensor.add_, a, b)
        elif kind == "half" and examples[a].shape == (4, 4):
            call(torch.narrow, a, 0, 0, 2)
        elif kind in ("mul", "add") and alike:
            call(getattr(torch, kind), a, b)
        else:
            call(torch.exp if kind == "exp" else torch.tanh, a)
    graph.output((values[-1], draw(st.sampled_from(values))))
    return fx.GraphModule({"weight": weight}, graph)
