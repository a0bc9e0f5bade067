"""Which saved values of a graph to keep: least cuts, the hull of bytes and prices, and the same bits after writes."""

import itertools
import math
from fractions import Fraction
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils.module_tracker import ModuleTracker

from rotor_py.capture.graph.graph_nodes import SymbolValues
from rotor_py.capture.graph.saved_values import CHEAP, SavedPart, find_saved_values, is_cheap
from rotor_py.capture.graph.selective_recompute import (
    PricedCut,
    ValueCut,
    find_saved_parts,
    hull_between,
    least_cut,
    memory_read,
    thinned,
)
from rotor_py.stage.partial_storage import PartialSaving


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
    found = least_cut(values, keeping, again)
    assert sum(map(keeping.__getitem__, found.kept)) + price(set(found.kept)) == least
    assert sum(again[node] for node in found.recomputed) == price(set(found.kept))


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


def part_of(nbytes: int, price: int) -> PricedCut:
    return PricedCut(ValueCut(), nbytes, price)


POINTS = st.lists(st.builds(part_of, st.integers(1, 99), st.integers(1, 99)), max_size=9)


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
    whole, again = part_of(100, 0), part_of(0, 100)
    parts = sorted({whole, again, *points}, key=lambda part: -part.nbytes)

    def least(for_bytes: int, for_prices: int) -> PricedCut:
        return min(parts, key=lambda part: (for_bytes * part.nbytes + for_prices * part.price, part.price))

    found = hull_between(whole, again, least, depth=9)
    corners = [part for part in parts[1:-1] if is_corner(part, parts)]
    assert corners == [part for part in found if is_corner(part, parts)]
    assert [part.nbytes for part in found] == sorted({part.nbytes for part in found}, reverse=True)


@given(POINTS, st.integers(0, 8), st.integers(1, 40), st.integers(1, 4))
def test_what_is_left_saves_enough_from_one_to_the_next(points, which: int, least: int, most: int) -> None:
    inner = sorted({part.nbytes: part for part in [*points, part_of(50, 50)]}.values(), key=lambda part: -part.nbytes)
    stays = inner[which % len(inner)]
    whole, again = part_of(100, 0), part_of(0, 100)
    left = [whole, *thinned([whole, *inner, again], stays, least, most), again]
    assert len(left) <= most + 2
    assert all(a.nbytes - b.nbytes >= least for a, b in pairwise(left[:-1]))
    assert set(left[1:-1]) <= set(inner)
    others = [part for part in inner if part.nbytes <= 100 - least]
    assert not others or left[1:-1]  # something that saves enough is never lost for something that does not
    assert stays in left or 100 - stays.nbytes < least
