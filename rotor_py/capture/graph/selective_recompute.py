"""Choose partial storage modes of a captured stage. Each keeps a part of the values that autograd saves: the parts on
the lower convex hull of kept bytes and recomputation price, and one from which cheap operators recompute the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from rotor_profiling import torch_compat
from rotor_py.capture.graph.graph_nodes import SymbolValues
from rotor_py.capture.graph.saved_values import (
    SavedPart,
    SavedValues,
    find_saved_values,
    is_cheap,
    kind_of,
    largest_bytes,
    price_of,
)
from rotor_py.errors import record_fields
from rotor_solver.max_flow import Network, reached

# Plot parts by kept bytes and price: a part below the line through two others is better than a mixture of these. A
# minimum cut, weighted by the line's slope, finds it. Repeating this gives the hull (Eisner and Severance, 1976).


@dataclass(frozen=True, slots=True)
class PricedCut:
    """Nodes whose values a part keeps, and nodes that it recomputes. All of these nodes allocate memory."""

    nbytes: int
    price: int
    kept: frozenset[fx.Node] = frozenset()
    recomputed: frozenset[fx.Node] = frozenset()


def hull_between(
    before: PricedCut, after: PricedCut, least: Callable[[int, int], PricedCut], depth: int
) -> list[PricedCut]:
    """Return the parts on the lower hull between `before` and `after`, most bytes first: at most 2 ** `depth` - 1.
    `least(a, b)` returns the part with the least `a * nbytes + b * price`; among equals, the one of lowest price.
    """
    bytes_apart, price_apart = before.nbytes - after.nbytes, after.price - before.price
    if depth == 0 or bytes_apart <= 0 or price_apart <= 0:
        return []
    part = least(price_apart, bytes_apart)
    if not after.nbytes <= part.nbytes < before.nbytes or _below_line(part, before, after) < 0:
        return []
    first, second = (hull_between(*ends, least, depth - 1) for ends in ((before, part), (part, after)))
    return [*first, part, *second]


def thinned(parts: Sequence[PricedCut], stays: PricedCut, least_bytes: float, most: int) -> list[PricedCut]:
    """Thin the inner `parts` out to `most`, `least_bytes` or more apart: drop those of least `gain`, never `stays`."""
    whole, *inner, again = parts
    left = [whole, *(part for part in inner if whole.nbytes - part.nbytes >= least_bytes), again]

    def gain(at: int) -> int:
        return _below_line(left[at], left[at - 1], left[at + 1])

    while True:
        places = range(1, len(left) - 1)
        close = {at for at in places if at > 1 and left[at - 1].nbytes - left[at].nbytes < least_bytes}
        if not close and len(places) <= most:
            return left[1:-1]
        either = close | {at - 1 for at in close}
        del left[min((at for at in either or places if left[at] is not stays), key=gain)]


def _below_line(part: PricedCut, before: PricedCut, after: PricedCut) -> int:
    """Return by how much a part's price is below the line through two others, times their difference in bytes."""
    saved, apart = before.nbytes - part.nbytes, before.nbytes - after.nbytes
    return saved * (after.price - before.price) - apart * (part.price - before.price)


# A minimum cut tells which values to keep, as in torch._functorch.partitioners. Flow goes from values that cannot be
# recomputed to saved ones. A cut costs the bytes of the values on it, which are kept, and the prices of those behind.


def least_cut(
    values: SavedValues, keeping: Mapping[fx.Node, int], again: Mapping[fx.Node, int]
) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """Return the nodes whose values the cut of least cost keeps, and those that it recomputes; of equal cuts, that with
    the fewest of the latter. `keeping` maps each node to the cost of keeping its value. `again` maps nodes that can be
    recomputed to the cost of recomputing them.
    """
    # Each node is two vertices, "made" and "kept", joined by an edge with the cost of keeping as its capacity. The edge
    # from the source to "made" has the cost of recomputing. All other edges have infinite capacity.
    flow = Network("source", "saved")
    own = [node for node in values.roots if values.roots[node] is node]
    for node in own:
        flow.add_edge((node, "made"), (node, "kept"), None if node in values.overwritten else keeping[node])
        if node in values.saved:
            flow.add_edge((node, "kept"), "saved")
        if node not in again:  # cannot be recomputed, so the cut must separate it from all saved values
            flow.add_edge("source", (node, "made"))
        elif again[node]:
            flow.add_edge("source", (node, "made"), again[node])
        for each in memory_read(node, values.roots):
            flow.add_edge((each, "kept"), (node, "made"))
    # Of all minimum cuts, take the one nearest to the sink "saved", which has the fewest recomputed nodes behind it.
    behind = flow.behind_least_cut()
    made_again = frozenset(node for node in own if (node, "made") in behind)
    return frozenset(node for node in own if (node, "kept") in behind) - made_again, made_again


def memory_read(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the nodes that allocated the memory that a node reads, directly or through views and sizes."""
    found = reached(node.all_input_nodes, lambda each: () if roots.get(each) is each else each.all_input_nodes)
    # An input of the graph may share memory with another input.
    return {roots[each] for each in found if each in roots and (roots[each] is each or not each.all_input_nodes)}


_log = logging.getLogger("rotor_py")

IN_PART = "in part"  # name of the mode that recomputes values of low price per byte, with cheap operators only
# Share of all saved bytes by which the kept bytes of two storage modes must differ. A guess: each mode is timed.
_WORTHWHILE = 0.1
# Highest price per byte of a value that `IN_PART` recomputes. A guess: most cost 50 to 100, row statistics thousands.
_FOR_A_BYTE = 1000
# Largest number of partial storage modes of a stage. A guess: each is timed, so more make measuring longer.
_MOST = 5
_DEEP = 4  # depth of the recursion of `hull_between`: at most 15 minimum cuts for a stage
_MODES = (torch_compat.enter_autocast, torch_compat.exit_autocast, torch_compat.set_grad_enabled)


def find_saved_parts(
    body: fx.GraphModule, shared: int, sizes: SymbolValues, arguments: Sequence[Any] | None = None
) -> dict[str, SavedPart]:
    """Return a dict from names of partial storage modes of the stage `body` to their parts, most bytes first; empty if
    a run on `arguments` (or fake tensors) does not show what autograd saves. All stages share the last `shared` inputs.
    """
    nodes = list(body.graph.nodes)
    outputs = set(body.graph.output_node().all_input_nodes)  # these stay in memory for the next stage
    # First check whether any value can be dropped and recomputed, since finding the saved values is slow.
    if not any(node not in outputs and (is_cheap(node) or kind_of(node) is not None) for node in nodes):
        return {}
    values = _saved_values(body, sizes, arguments)
    if values is None:
        return {}
    inputs = [node for node in nodes if node.op == "placeholder"]
    free = {*(node for node in nodes if node.op == "get_attr"), *inputs[len(inputs) - shared :]}
    # Keeping an output costs nothing: it is in memory for the next stage in any case.
    free |= values.saved & {values.roots.get(node) for node in outputs}
    keeping = {node: 0 if node in free else largest_bytes(node, sizes) for node in nodes}
    own = [node for node, root in values.roots.items() if root is node and node not in values.stale]
    priced = [node for node in own if is_cheap(node) or kind_of(node) is not None]
    prices = {node: price_of(node, values.flops.get(node, 0), sizes) for node in priced}

    def least(for_bytes: int, for_prices: int, prices_of: Mapping[fx.Node, int] = prices) -> PricedCut:
        costs = {node: for_bytes * nbytes for node, nbytes in keeping.items()}
        kept, again = least_cut(values, costs, {node: for_prices * price for node, price in prices_of.items()})
        return PricedCut(sum(keeping[node] for node in kept), sum(prices[node] for node in again), kept, again)

    # `first` keeps few bytes: with cheap operators alone, it recomputes values of prices up to `_FOR_A_BYTE` per byte.
    first = least(_FOR_A_BYTE, 1, {node: prices[node] for node in own if is_cheap(node)})
    whole = PricedCut(sum(keeping[node] for node in values.saved), 0)
    again = PricedCut(sum(keeping[node] for node in inputs), _price_of_all(values, prices))
    hull = hull_between(whole, again, least, _DEEP)
    parts = sorted({part.nbytes: part for part in (*hull, first)}.values(), key=lambda part: -part.nbytes)
    found: dict[str, SavedPart] = {}
    before = whole
    for part in thinned([whole, *parts, again], first, _WORTHWHILE * whole.nbytes, _MOST):
        # Name a part after the slowest sort of operators among those that it recomputes, and the part before does not.
        kinds = {kind_of(node) for node in part.recomputed - before.recomputed} - {None}
        most = next((kind for kind in ("products", "convolutions", "attention") if kind in kinds), None)
        name = IN_PART if most is None and part == first else f"{IN_PART}, {most or 'arithmetic'} again"
        names = (name, *(f"{name} {number}" for number in range(2, 9)))
        found[next(each for each in names if each not in found)] = SavedPart.of_cut(body, values, part.kept)
        before = part
    return found


def _price_of_all(values: SavedValues, prices: Mapping[fx.Node, int]) -> int:
    """Return the price of recomputing all saved values from the stage's inputs."""
    found = reached(values.saved, lambda node: memory_read(node, values.roots))
    return sum(prices.get(node, 0) for node in found)


def same_parts(
    body: fx.GraphModule,
    sizes: SymbolValues,
    parts: Mapping[str, SavedPart],
    nodes: Mapping[int, fx.Node],
    arguments: Sequence[Any] | None = None,
) -> dict[str, SavedPart]:
    """Convert `parts` found for other sizes. `nodes` maps indices in the graph for those sizes to nodes of `body`."""
    values = _saved_values(body, sizes, arguments)
    if values is None:
        return {}
    found = {}
    for name, example in parts.items():
        # `nodes` leaves out nodes that compute sizes. Their values need not be kept.
        dropped, kept = ({nodes[at] for at in places if at in nodes} for places in (example.dropped, example.kept))
        found[name] = SavedPart.of_cut(body, values, kept | (values.saved - dropped))
    return found


def _saved_values(body: fx.GraphModule, sizes: SymbolValues, arguments: Sequence[Any] | None) -> SavedValues | None:
    # A recomputation runs single operators, without the nodes that enter autocast or `no_grad` for them.
    if any(node.op == "call_module" or node.target in _MODES for node in body.graph.nodes):
        return None
    # Operators may reject fake tensors with exceptions of any type.
    refusals = Exception if arguments is None else TypeError
    try:
        found = find_saved_values(body, sizes, arguments)
    except refusals as error:
        _log.debug("cannot find the values that a stage saves: %s", error, extra=record_fields("not_in_part"))
        return None
    # A node that returns a saved and an overwritten tensor is in both sets: which tensor is meant is then unknown.
    return None if found.saved & found.overwritten else found
