"""How a graph is read and cut, how its stages are called, which saved values are kept: least cuts, the same bits."""

import contextvars
import copy
import itertools
import math
import weakref
from contextlib import nullcontext
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils.module_tracker import ModuleTracker

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture.graph import selective_recompute
from rotor_py.capture.graph.graph_nodes import SymbolValues
from rotor_py.capture.graph.saved_values import CHEAP, SavedPart, find_saved_values, is_cheap
from rotor_py.capture.graph.selective_recompute import PricedCut, find_saved_parts, least_cut, memory_read, thinned
from rotor_py.plan.step_spec import ModelState, StepSpec, spec_of
from rotor_py.stage.error_context import watched
from rotor_py.stage.partial_storage import PartialSaving
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from tests.capture.steps import assert_same_step, assert_trains_inside, compare, planned_and_plain
from tests.checkpointable.steps import Tower as Skips
from tests.checkpointable.steps import between, planned_at, square, step_peak
from tests.fields import raises

F = nn.functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = 1 / (1 + torch.arange(4.0).mean())
        with torch.autocast("cpu", enabled=False):
            inner = self.norm(value)
        inner = F.dropout(self.narrow(F.gelu(self.wide(inner))), 0.1, self.training).relu_()
        return value + inner * mask * scale


class Tower(nn.Module):
    """Blocks with a mask that is made from the input, and normalisation by hand."""

    def __init__(self, depth: int = 4, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("table", torch.linspace(0, 1, width))

    def forward(self, ids: torch.Tensor, *, weight: torch.Tensor | None = None) -> dict[str, Any]:
        mask = (ids > 2).float()[..., None] * self.table
        value = self.embed(ids)
        for block in self.blocks:
            value = block(value, mask if weight is None else mask * weight)
        value = self.norm(value.transpose(1, 2)).transpose(1, 2)
        return {"value": value, "mask": mask, "nested": [value.mean(), (ids, 7)]}


def tower_loss(output: dict[str, Any]) -> torch.Tensor:
    return output["value"].square().mean()


def planned_tower(**options: Any) -> tuple[Checkpointable, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Tower()
    inputs = {"ids": torch.randint(20, (16, 40))}
    planned = Checkpointable(model, inputs, loss=tower_loss, fresh_grads=True, **options)
    return planned, copy.deepcopy(model), inputs


def test_modes_random_numbers_buffers_and_in_place_operators_are_as_in_plain_training() -> None:
    assert_trains_inside(Tower(), {"ids": torch.randint(20, (16, 40))}, tower_loss, shares=(0.0, 0.3))


def test_stages_are_named_after_modules_share_what_has_no_gradient_and_return_the_models_output() -> None:
    """Whoever watches them is told of each, and a step leaves nothing in the context of the thread."""
    planned, plain, inputs = planned_tower(mem_limit="1GB")
    at = planned.names.index("blocks.2")
    assert planned.names[-1] == "norm"
    costs = dict(zip(planned.names, planned.inspection_values.stages, strict=True))
    assert costs["blocks.1"] is costs["blocks.2"], "equal stages are measured once"
    assert planned.functions[at].shared >= 1
    assert planned.chain.stages[at].activation == 16 * 40 * 48 * 4, "the mask is no part of a checkpoint"
    found, expected = (network(**inputs) for network in (planned, plain))
    assert found.keys() == expected.keys()
    assert found["nested"][1][1] == 7
    assert torch.equal(found["mask"], expected["mask"])
    assert found["value"].requires_grad
    assert planned.table is planned.model.table
    assert planned.state_dict().keys() == plain.state_dict().keys()
    assert len(planned_tower(granularity=3)[0].names) <= 3
    told: list[str] = []
    with watched(lambda doing, name, begins: told.append(name) if begins and doing == "forward" else None):
        tower_loss(planned(**inputs)).backward()
    assert told == planned.names

    def variables() -> int:
        tower_loss(planned(**inputs)).backward()
        return len(contextvars.copy_context())

    variables()
    assert len({variables() for _ in range(2)}) == 1


class Partly(nn.Module):
    def __init__(self, captured: int, outside: int) -> None:
        super().__init__()
        self.captured = nn.Sequential(*(nn.Linear(32, 32) for _ in range(captured)))
        self.outside = nn.Sequential(*(nn.Linear(32, 32) for _ in range(outside)))

    @torch._dynamo.disable
    def apart(self, value: torch.Tensor) -> torch.Tensor:
        return self.outside(value)  # the line to be named

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.apart(self.captured(value))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.count = nn.Linear(32, 32), nn.Linear(32, 32), torch.zeros(())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.first(value).tanh()
        self.count += 1
        return self.last(value * self.count).tanh()


def test_a_tensor_that_a_forward_writes_to_has_to_be_a_buffer_and_then_is_restored() -> None:
    plain, batch = Counting(), torch.randn(64, 32)
    with raises(UnsupportedModelError, "written_outside") as caught:
        Checkpointable(copy.deepcopy(plain), batch)
    assert "self.count += 1" in str(caught.value.name)
    plain.register_buffer("count", vars(plain).pop("count"))  # as the error says
    planned = planned_at(0.0, copy.deepcopy(plain), batch)
    for step in range(2):
        assert_same_step(planned, plain, batch)
        assert planned.model.count == plain.count == step + 1


def test_a_model_of_which_much_is_not_captured_is_refused_and_the_line_is_named() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "the line to be named" in text)
    for model in (Partly(0, 1), Partly(8, 2)):
        with raises(UnsupportedModelError, "outside_graphs") as caught:
            Checkpointable(model, torch.ones(64, 32))
        assert f"test_graph_facts.py:{line}" in str(caught.value.name)
    with raises(UnsupportedModelError, "no_graph", name="Partly"):  # nothing in any graph has a gradient
        Checkpointable(Partly(1, 0).requires_grad_(False), torch.ones(3, 32))


def test_a_model_of_which_less_than_a_fifth_is_not_captured_is_planned_inside_the_limit() -> None:
    wide = Partly(12, 0)  # returns a larger tensor than its graph
    wide.outside.append(nn.Linear(32, 128))
    for model in (Partly(12, 2), wide):
        batch = torch.randn(512, 32)
        planned, plain = planned_and_plain(model, batch)
        assert_same_step(planned, plain, batch)
        limit = planned.mem_limit
        assert step_peak(planned, batch, fresh_grads=True) <= limit < step_peak(plain, batch, fresh_grads=True)


_seen: list[weakref.ref[torch.UntypedStorage]] = []
_there: list[bool] = []


class Mixed(nn.Module):
    """Tied weights, a recurrent layer, dropout, a batch norm, a region of autocast, and numbers between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(24, 24) for _ in range(3))
        self.third.weight = self.first.weight
        self.recurrent = nn.GRU(24, 24, batch_first=True)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).relu_()) * scale
        rows = x.shape[1]
        x = self.recurrent(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(x).sin()
        x = self.norm(x.float().transpose(1, 2)).transpose(1, 2)
        return self.third(x).sum(1) / rows


def test_stages_that_are_stored_run_as_one_as_in_plain_training_with_tensors_put_in_place_of_parameters(monkeypatch):
    model, inputs = Mixed(), {"x": torch.randn(64, 3, 24), "scale": torch.rand(64, 3, 24)}
    planned, plain = planned_and_plain(model, inputs)
    called, run = list[str](), StageRunner.forward  # the stages that are run one by one in the graph around them
    monkeypatch.setattr(StageRunner, "forward", lambda self, *given: called.append(self.name) or run(self, *given))
    # The optimizer comes with the first step: a limit without room for it would be planned for anew.
    for share in (None, 0.4):
        planned.compute_sequence(10**9 if share is None else between(planned, share))
        peak = compare(planned, plain, inputs, square)
        assert peak <= planned.budget.peak_bytes(planned.sequence)
        assert share is not None or not called
    planned.mem_limit = "1GB"
    with watched(lambda *_: None):  # only a watcher is told of each
        compare(planned, plain, inputs, square)
    assert called
    for network in (planned.model, plain):
        torch.manual_seed(1)
        network.second.weight = nn.Parameter(torch.randn(24, 24))
    compare(planned, plain, inputs, square)


def test_layers_that_do_nothing_are_run_too() -> None:
    network = Checkpointable(nn.Sequential(nn.Sequential(), nn.Sequential(), nn.Linear(4, 4)), mem_limit="1GB")
    network(torch.randn(2, 4)).sum().backward()


class Refusing(Skips):
    """In its middle, it takes no index beyond the size of its batch."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        x = x.index_select(0, index)
        return super().forward(x)


def test_an_error_names_the_stage_that_it_comes_from_and_the_line() -> None:
    network = Checkpointable(Refusing(16, 3), mem_limit="1GB")
    inputs = {"x": torch.randn(8, 16), "index": torch.arange(8)}
    square(network(**inputs)).backward()
    found = []
    # The second time, somebody watches, so that the stages run one by one.
    for around in (nullcontext(), watched(lambda *_: None)):
        with pytest.raises(IndexError) as caught, around:
            network(**{**inputs, "index": torch.arange(8) + 3})
        found.append(caught.value.__notes__)
    assert "x = x.index_select(0, index)" in found[0][0]
    assert found[0][1].startswith("in the forward of stage")
    assert found[0] == found[1]


def note(value: torch.Tensor) -> torch.Tensor:
    """Double a value, and remember its memory."""
    _seen.append(weakref.ref(value.untyped_storage()))
    return value * 2


def look(value: torch.Tensor) -> torch.Tensor:
    """Double a value, and see whether what was remembered is still there."""
    _there.append(any(each() is not None for each in _seen))
    return value * 2


class Letting(nn.Linear):
    """No backward needs what comes in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return look(note(super().forward(x)) + 1)


def test_what_goes_into_a_run_is_freed_as_soon_as_it_was_used() -> None:
    torch.compiler.allow_in_graph(note)
    torch.compiler.allow_in_graph(look)
    network = Checkpointable(Letting(8, 8), torch.randn(4, 8), fresh_grads=True, loss=square)
    assert len(network.names) == 4
    # The first stage is run again, so that the run of the others begins with what it has returned.
    network.sequence = Sequence.parse("CF_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, Fe_0, B_0")
    _seen.clear()
    _there.clear()
    network(torch.randn(4, 8)).sum().backward()
    assert _there == [False]


def test_only_steps_that_are_equal_in_all_are_equal_at_sight() -> None:
    state = ModelState.of(nn.Linear(1, 1))

    def spec(value: Any, number: int = 2, rest: Any = (None, "a"), **others: Any) -> StepSpec:
        return StepSpec(state, spec_of(((value, number, rest), {"mask": torch.ones(3), **others})))

    known, ones = spec(torch.ones(4, 5)), torch.ones(4, 5)
    assert known.identical(spec(torch.zeros(4, 5)))
    for value in (torch.ones(4, 6), ones.double(), torch.ones(4, 5, requires_grad=True)):
        assert not known.identical(spec(value))
    for change in ({"mask": torch.ones(3, 1)}, {"more": 1}, {"number": 1}, {"rest": [None, "a"]}):
        assert not known.identical(spec(ones, **change))
    assert not spec(np.ones(3)).identical(spec(np.ones(3)))  # their elements would be compared


class Logging(Skips):
    """Layers that each leave a number: a logged mean, or an auxiliary loss."""

    kind = "none"

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = []
        for layer in self.layers:
            value = value + layer(value).tanh()
            found += [value.detach().mean()] * (self.kind == "logged") + [value.square().mean()] * (self.kind == "loss")
        return value, found


def test_a_number_of_each_layer_forbids_no_cut() -> None:
    def loss(output: Any) -> torch.Tensor:
        value, found = output
        return value.square().mean() + sum(each for each in found if each.requires_grad)

    batch, least = {"value": torch.randn(512, 32)}, {}
    for each in ("none", "logged", "loss"):
        model = Logging(32, 6)
        model.kind = each
        planned, plain = planned_and_plain(model, batch, loss)
        least[each] = planned.mem_limit
        compare(planned, plain, batch, loss)
    assert max(least["logged"], least["loss"]) <= 1.2 * least["none"]


class Reshaping(Skips):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            shape = value.size()[:-1] + (32,)  # noqa: RUF005  # a `torch.Size`
            value = value + layer(value.reshape(-1, 32)).tanh().reshape(shape)
        return value


def test_stages_compute_sizes_again_from_those_of_the_input_instead_of_handing_on_each() -> None:
    batch = {"value": torch.randn(32, 16, 32)}
    planned, plain = planned_and_plain(Reshaping(32, 6), batch)
    assert max(stage.shared for stage in planned.functions) <= 4, "not a shape of each layer"
    for shape in ((32, 16, 32), (7, 9, 32)):
        compare(planned, plain, {"value": torch.randn(shape)}, square)


@st.composite
def programs(draw: st.DrawFn, *, writes: bool) -> fx.GraphModule:
    """A few operators on tensors of several sizes; some may write to what others have made, or to a view of it."""
    torch.manual_seed(0)
    graph = fx.Graph()
    attributes = {"weight": nn.Parameter(torch.randn(4, 4)), "wide": nn.Parameter(torch.randn(4, 12))}
    first, weight, wide = graph.placeholder("x"), graph.get_attr("weight"), graph.get_attr("wide")
    first.meta["example_value"] = torch.randn(4, 4, requires_grad=True)
    examples = {first: first.meta["example_value"], weight: attributes["weight"], wide: attributes["wide"]}
    values: list[fx.Node] = [] if writes else [first]

    def call(function: Any, *args: Any) -> None:
        node = graph.call_function(function, args)
        with torch.enable_grad():
            node.meta["example_value"] = examples[node] = function(*fx.node.map_arg(args, examples.__getitem__))
        values.append(node)

    call(torch.mul, first, 1.5)
    kinds = ["tanh", "exp", "mul", "add", "matmul", "wide", "view", "narrow", *["relu_", "mul_", "iadd"] * writes]
    for _ in range(draw(st.integers(2, 7))):
        a, b, kind = draw(st.sampled_from(values)), draw(st.sampled_from(values)), draw(st.sampled_from(kinds))
        shape, alike = examples[a].shape, examples[a].shape == examples[b].shape
        if kind in ("matmul", "wide") and shape[-1] == 4:
            call(torch.matmul, a, weight if kind == "matmul" else wide)
        elif kind == "view":
            call(torch.flatten, a, 0)
        elif kind == "narrow":
            call(torch.narrow, a, 0, 0, 2)
        elif kind in ("relu_", "mul_"):
            call(getattr(torch.Tensor, kind), a, *[0.5] * (kind == "mul_"))
        elif kind == "iadd" and alike and a is not b:
            call(torch.Tensor.add_, a, b)
        elif kind in ("mul", "add") and alike:
            call(getattr(torch, kind), a, b)
        else:
            call(torch.exp if kind == "exp" else torch.tanh, a)
    graph.output((values[-1], draw(st.sampled_from(values))))
    return fx.GraphModule(attributes, graph)


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


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_as_little_is_kept_as_an_exhaustive_search_finds(data: st.DataObject) -> None:
    body = data.draw(programs(writes=False))
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
    kept, recomputed = least_cut(values, keeping, again)
    assert sum(map(keeping.__getitem__, kept)) + price(set(kept)) == least
    assert sum(again[node] for node in recomputed) == price(set(kept))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_made_again_beside_writes_has_the_same_bits(data: st.DataObject) -> None:
    body, seed = data.draw(programs(writes=True)), data.draw(st.integers(0, 6))
    example = body.graph.find_nodes(op="placeholder")[0].meta["example_value"]
    try:
        expected = _gradients(body, body, example)
    except RuntimeError:  # autograd refuses it in plain training, too
        assume(False)
    values = find_saved_values(body, SymbolValues())
    with patch.object(ModuleTracker, "__enter__", side_effect=AssertionError):  # it hooks what other threads train
        assert find_saved_values(body, SymbolValues(), [example.detach().requires_grad_()]) == values
    own = [node for node, root in values.roots.items() if root is node]
    again = {node: 0 for node in own if is_cheap(node) and node not in values.stale}
    keeping = {node: 1 + (3 * number + seed) % 7 for number, node in enumerate(own)}
    part = SavedPart.of_cut(body, values, least_cut(values, keeping, again)[0])
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
    gradients = [each.grad for each in (x, *body.parameters()) if each.grad is not None]
    return [*(each.detach() for each in made), *gradients]


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


POINTS = st.lists(st.builds(PricedCut, st.integers(1, 99), st.integers(1, 99)), max_size=9)


def is_corner(part: PricedCut, parts: list[PricedCut]) -> bool:
    """Whether no mixture of two others keeps as few bytes at that price or less."""
    for a, b in itertools.product(parts, parts):
        if part not in (a, b) and min(a.nbytes, b.nbytes) <= part.nbytes <= max(a.nbytes, b.nbytes):
            share = Fraction(part.nbytes - a.nbytes, b.nbytes - a.nbytes) if a.nbytes != b.nbytes else Fraction(0)
            if a.price + share * (b.price - a.price) <= part.price:
                return False
    return True


@given(POINTS)
def test_all_corners_of_the_hull_are_found(points: list[PricedCut]) -> None:
    whole, again = PricedCut(100, 0), PricedCut(0, 100)
    parts = sorted({whole, again, *points}, key=lambda part: -part.nbytes)

    def least(for_bytes: int, for_prices: int) -> PricedCut:
        return min(parts, key=lambda part: (for_bytes * part.nbytes + for_prices * part.price, part.price))

    found = selective_recompute.hull_between(whole, again, least, depth=9)
    corners = [part for part in parts[1:-1] if is_corner(part, parts)]
    assert corners == [part for part in found if is_corner(part, parts)]
    assert [part.nbytes for part in found] == sorted({part.nbytes for part in found}, reverse=True)


@given(POINTS, st.integers(0, 8), st.integers(1, 40), st.integers(1, 4))
def test_what_is_left_saves_enough_from_one_to_the_next(points, which: int, least: int, most: int) -> None:
    inner = sorted({part.nbytes: part for part in [*points, PricedCut(50, 50)]}.values(), key=lambda part: -part.nbytes)
    stays = inner[which % len(inner)]
    whole, again = PricedCut(100, 0), PricedCut(0, 100)
    left = [whole, *thinned([whole, *inner, again], stays, least, most), again]
    assert len(left) <= most + 2
    assert all(a.nbytes - b.nbytes >= least for a, b in pairwise(left[:-1]))
    assert set(left[1:-1]) <= set(inner)
    others = [part for part in inner if part.nbytes <= 100 - least]
    assert not others or left[1:-1]  # something that saves enough is never lost for something that does not
    assert stays in left or 100 - stays.nbytes < least
