"""Stages that keep less: the least memory from which the rest can be made cheaply, and the same bits."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.backends import memory_meter
from rotor_profiling.stage.gradients import leaves_of
from rotor_py import Checkpointable
from rotor_py.capture.graph.graph_nodes import SymbolValues
from rotor_py.capture.graph.graph_stage import GraphStage
from rotor_py.capture.graph.saved_values import CHEAP, find_saved_values
from rotor_py.capture.graph.selective_recompute import IN_PART, find_saved_parts, least_cut, memory_read
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable, Sequence
from tests.capture.steps import adamw, compare, in_part, limits
from tests.fields import logged, raises

WIDTH = 32


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class NewGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.dropout(self.outer(y))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        half = q.shape[-1] // 2
        q = torch.cat((-q[..., half:], q[..., :half]), -1) * 0.5 + q
        weights = torch.softmax(q @ k.transpose(-1, -2) / 3.0, -1).square().clamp(max=0.9)
        return x + self.out(torch.relu((weights @ v).transpose(1, 2).contiguous().flatten(2)))


class LongAttention(nn.Module):
    """Attention over so many rows that it takes far longer than the products before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q * 0.5, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def captured(*layers: nn.Module, rows: int = 64) -> tuple[Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    batch = torch.randn(4, rows, WIDTH)
    model = Stack(*layers).train()
    planned = Checkpointable(model, loss=loss, optimizer=adamw(model), fresh_grads=True, granularity=len(layers))
    planned.measure({"x": batch})
    return planned, batch


def stages(planned: Checkpointable) -> list[GraphStage]:
    assert planned.captured
    found = planned.functions
    assert all(isinstance(stage, GraphStage) for stage in found)
    return found  # type: ignore[return-value]


def run(
    forward: Callable[..., Any], stage: nn.Module, values: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Outputs; gradients of inputs and parameters; the bytes that are held between forward and backward."""
    values = leaves_of(values)
    stage.zero_grad()
    torch.manual_seed(1)
    with memory_meter(torch.device("cpu")) as meter:
        output = forward(values)
        meter.mark("held")
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.full_like(tensor, 0.5) for tensor in outputs])
    kept = meter.phases[""].kept - storage_bytes(outputs)
    gradients = [tensor.grad for tensor in (*tensors_in(values), *stage.parameters()) if tensor.grad is not None]
    return [tensor.detach() for tensor in outputs], gradients, kept


@pytest.mark.parametrize(
    ("layer", "autocast"),
    [
        *((layer, False) for layer in (Gated, NewGelu, Attention, LongAttention)),
        *((layer, True) for layer in (Gated, Attention)),
        *(pytest.param(layer, True, marks=pytest.mark.slow) for layer in (NewGelu, LongAttention)),
    ],
)
def test_a_stage_stored_in_part_has_the_same_bits_and_holds_less(layer: Any, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows = 384 if layer is LongAttention else 64
        planned, batch = captured(nn.Linear(WIDTH, WIDTH), layer(), layer(), rows=rows)
        found, value = 0, (batch,)
        for stage in stages(planned):
            for way, skip_output in itertools.product(stage.ways(), (False, True)):
                forward = stage.forward_by(way, skip_output=skip_output)
                outputs, expected, whole = run(stage, stage, value)
                found_outputs, numbers, less = run(forward, stage, value)
                assert all(map(torch.equal, numbers, expected))
                assert len(numbers) == len(expected) > 1
                assert skip_output or all(map(torch.equal, found_outputs, outputs))
                assert less < 0.9 * whole
                found += 1
            value = leaves_of(stage(value))
        assert found


def test_an_input_that_shares_memory_with_another_one_is_kept_and_not_made_again() -> None:
    graph, bias, x = fx.Graph(), torch.randn(8, 8), torch.randn(8, 1, requires_grad=True)
    value, straight, turned = (graph.placeholder(name) for name in ("x", "straight", "turned"))
    biased = graph.call_function(torch.add, (graph.call_function(torch.mul, (value, straight)), turned))
    result = graph.call_function(torch.neg, (graph.call_function(torch.sin, (biased,)),))
    graph.output((result,))
    given = (x, bias, bias.t())
    for node in graph.nodes:
        node.meta["example_value"] = x if node is value else bias
    body = fx.GraphModule({}, graph)
    value, straight, turned, _, biased, *_ = nodes = list(body.graph.nodes)
    assert straight in memory_read(biased, find_saved_values(body, SymbolValues(), given).roots)
    (part,) = find_saved_parts(body, 2, SymbolValues(), given).values()
    assert nodes.index(biased) in part.dropped
    assert {nodes.index(each) for each in (value, straight, turned)} == part.kept
    assert {nodes[number].op for number in part.recipe.calls} == {"call_function"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_as_little_is_kept_as_an_exhaustive_search_finds(data: st.DataObject) -> None:
    body = data.draw(graphs())
    values = find_saved_values(body, SymbolValues())
    own = [node for node in body.graph.nodes if values.roots.get(node) is node]
    again = {node: data.draw(st.integers(0, 200)) for node in own if node.target in CHEAP and data.draw(st.booleans())}
    reads = {node: memory_read(node, values.roots) for node in own}

    def price(kept: set[fx.Node]) -> float:
        pending, made = list(values.saved - kept), set[fx.Node]()
        while pending:
            node = pending.pop()
            if node not in again:
                return math.inf
            if node not in made:
                made.add(node)
                pending.extend(reads[node] - kept)
        return sum(again[node] for node in made)

    keeping = {node: 0 if node.op == "get_attr" else node.meta["example_value"].nbytes for node in own}
    choices = (set(each) for n in range(len(own) + 1) for each in itertools.combinations(own, n))
    least = min(sum(map(keeping.__getitem__, kept)) + price(kept) for kept in choices)
    found = least_cut(values, keeping, again)
    assert sum(map(keeping.__getitem__, found.kept)) + price(set(found.kept)) == least
    assert sum(again[node] for node in found.again) == price(set(found.kept))


@st.composite
def graphs(draw: st.DrawFn) -> fx.GraphModule:
    """A few operators, cheap ones and products, with sizes that differ."""
    graph = fx.Graph()
    attributes = {"weight": nn.Parameter(torch.randn(4, 4)), "wide": nn.Parameter(torch.randn(4, 12))}
    weight, wide = graph.get_attr("weight"), graph.get_attr("wide")
    first = graph.placeholder("x")
    first.meta["example_value"] = torch.randn(4, 4, requires_grad=True)
    values = [first]
    for _ in range(draw(st.integers(2, 7))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["tanh", "exp", "square", "mul", "add", "matmul", "wide", "view", "narrow"]))
        shape = a.meta["example_value"].shape
        if kind == "matmul":
            node = graph.call_function(torch.matmul, (weight, a))
        elif kind == "wide" and shape[-1] == 4:
            node = graph.call_function(torch.matmul, (a, wide))
        elif kind == "view":
            node = graph.call_method("view", (a, shape[0], -1))
        elif kind == "narrow":
            node = graph.call_function(torch.narrow, (a, 1, 0, 4))
        elif kind in ("mul", "add") and b.meta["example_value"].shape == shape:
            node = graph.call_function(getattr(torch, kind), (a, b))
        else:
            node = graph.call_function(getattr(torch, kind if kind in ("tanh", "exp", "square") else "tanh"), (a,))
        arguments = fx.node.map_arg(node.args, lambda each: each.meta.get("example_value", attributes.get(each.target)))
        function = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
        node.meta["example_value"] = function(*arguments)
        values.append(node)
    graph.output((values[-1], draw(st.sampled_from(values))))
    return fx.GraphModule(attributes, graph)


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_options_of_any_plan_have_the_same_bits_and_the_peak_that_is_predicted(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))
    planned, batch = captured(*(kind() for kind in (Gated, NewGelu, LongAttention, Attention) * 2), rows=320)
    plain = Stack(*planned.model.layers)
    least, whole = limits(planned)
    solved = planned.compute_sequence(int(least + share * (whole - least)))
    assert planned.budget is not None
    chain = planned.budget.chain
    assert sum(len(stage.options) >= 2 for stage in chain.stages) >= 4
    assert any("products again" in option.name for stage in chain.stages for option in stage.options)
    for which in (1, 2):  # all that have other options by the last of them, and every second one
        changed = [
            replace(each, option=(each.stage % which == 0) * (len(chain.stages[each.stage].options) - 1))
            if isinstance(each, ForwardEnable)
            else each
            for each in solved
        ]
        planned.sequence = Sequence(tuple(changed))
        assert any(isinstance(each, ForwardEnable) and each.option for each in planned.sequence)
        predicted = planned.budget.peak_bytes(planned.sequence)
        measured = compare(planned, plain, {"x": batch}, loss)
        assert 0.97 * predicted <= measured <= predicted


def total(output: Any) -> torch.Tensor:
    return sum((tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad), torch.zeros(()))


def lean_run(rows: int = 64) -> tuple[GraphStage, Any, torch.Tensor]:
    """A stage with a gated layer, its input, and the sum of its output."""
    planned, batch = captured(nn.Linear(WIDTH, WIDTH), Gated(), Gated(), rows=rows)
    value: Any = (batch,)
    for stage in stages(planned):
        if stage.ways() and len(list(stage.parameters())) >= 4:
            return stage, value, total(stage.forward_by(IN_PART)(value))
        value = leaves_of(stage(value))
    raise AssertionError("no stage can be stored in part")


class Squashed(nn.Module):
    """Operators that save what they make: autograd hands it over before they return it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(torch.sigmoid(torch.tanh(self.inner(x)))))


def test_what_an_operator_saves_of_its_own_output_is_dropped_as_well() -> None:
    planned, batch = captured(Squashed())
    (stage,) = stages(planned)
    _, expected, whole = run(stage, stage, (batch,))
    _, found, less = run(stage.forward_by(IN_PART), stage, (batch,))
    assert all(map(torch.equal, found, expected))
    inner = batch.numel() * 4 * 4
    assert whole - less >= 2 * inner  # of tanh, sigmoid and relu, one is left, or what goes into them


def test_a_second_backward_through_a_retained_graph_is_the_same() -> None:
    stage, _, output = lean_run()
    found = []
    for retain in (True, False):
        stage.zero_grad()
        output.backward(retain_graph=retain)
        found.append([parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None])
    assert len(found[0]) >= 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_gradients_are_refused() -> None:
    stage, _, output = lean_run()
    with raises(RuntimeError, "create_graph"):
        torch.autograd.grad(output, list(stage.parameters()), create_graph=True, allow_unused=True)


def test_what_is_kept_and_changed_before_the_backward_is_refused_as_autograd_does() -> None:
    stage, _, output = lean_run()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(2)
    with raises(RuntimeError, "saved_tensor_changed"):
        output.backward()


def test_nothing_is_held_once_the_output_is_gone_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        stage, value, output = lean_run()
        for backward in (True, False):
            with memory_meter(torch.device("cpu")) as meter:
                forward = stage.forward_by(IN_PART)
                output = total(forward(value))
                if backward:
                    torch.autograd.grad(output, list(stage.parameters()), allow_unused=True)
                del output, forward
                meter.mark("after")
            assert meter.phases[""].peak > 0
            assert meter.phases["after"].start == 0
    finally:
        gc.enable()


def test_an_option_that_a_stage_does_not_have_is_refused_by_name() -> None:
    with raises(ValueError, "unknown_way", name="a.b", option=1):
        StageRunner(nn.Linear(2, 2), "a.b").by(1)
    stage, *_ = lean_run()
    assert StageRunner(stage, "a").by(1).option == 1
    with raises(ValueError, "unknown_way", option=9):
        StageRunner(stage, "a").by(9)
    with raises(ValueError, "unknown_way", option=2):
        StageRunner(stage, "a", ways=("in part", "packed")).by(2)
    assert StageRunner(stage, "a", ways=("packed", "in part")).by(2).option == 2


def test_a_plan_from_a_file_runs_the_options_that_it_names(tmp_path: Path) -> None:
    planned, batch = captured(Gated(), NewGelu(), Gated(), NewGelu())
    planned.sequence = in_part(planned)  # one or two parts, whatever times say
    planned.save_plan(tmp_path / "plan.json")
    other = Stack(*copy.deepcopy(planned.model).layers)
    loaded = Checkpointable(
        other.train(), loss=loss, optimizer=adamw(other), fresh_grads=True, granularity=4, plan=tmp_path / "plan.json"
    )
    assert loaded.sequence == planned.sequence
    assert "stored in part" in str(loaded.report())
    compare(loaded, Stack(*copy.deepcopy(planned.model).layers), {"x": batch}, loss)
    assert loaded.sequence == planned.sequence


def test_a_plan_serves_smaller_inputs_for_which_its_ways_would_not_have_been_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For few rows attention costs little, so that nobody would make the products before it again to keep it."""
    planned, batch = captured(LongAttention(), LongAttention(), LongAttention(), rows=384)
    planned.mem_limit = 10**9
    planned.sequence = in_part(planned)
    before = planned.sequence
    names = {way for stage in stages(planned) for way in stage.ways()}
    assert any("products again" in name for name in names)
    plain = Stack(*planned.model.layers)
    with caplog.at_level("WARNING", "rotor_py"):
        for rows in (384, 24, 12):
            compare(planned, plain, {"x": batch[:, :rows]}, loss)
    assert planned.sequence == before
    assert not logged(caplog, "planning_again")


def test_finding_out_what_to_keep_draws_no_random_numbers() -> None:
    planned, _ = captured(nn.Linear(WIDTH, WIDTH), NewGelu(), NewGelu())
    dropping = [each for each in stages(planned) if any(node.target is F.dropout for node in each.body.graph.nodes)]
    before = torch.get_rng_state()
    assert dropping
    assert all(stage.ways() for stage in dropping)
    assert torch.equal(torch.get_rng_state(), before)


@torch.library.custom_op("rotor_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def test_a_graph_that_cannot_be_run_without_memory_has_no_other_option() -> None:
    """An operator nobody said the shape of."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.randn(4, 4, requires_grad=True)
    y = graph.call_function(torch.ops.rotor_tests.halved.default, (graph.call_function(torch.tanh, (x,)),))
    graph.output((y,))
    assert find_saved_parts(fx.GraphModule({}, graph), 0, SymbolValues()) == {}
