"""Choose which parts of its saved values a captured stage offers to keep: those on the lower convex hull of bytes and
prices of recomputing the rest, and the smallest part from which cheap operators alone make the rest.
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
from rotor_solver.max_flow import Network

# A part below the line that joins the bytes and prices of two parts saves more for its price than a mixture of both.
# The least cut by the line's slope finds it, and so on: the lower hull, by Eisner and Severance (1976).


@dataclass(frozen=True, slots=True)
class ValueCut:
    """The allocating nodes whose values are `kept`, and those recomputed (`again`)."""

    kept: frozenset[fx.Node] = frozenset()
    again: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class PricedCut:
    cut: ValueCut
    nbytes: int
    price: int


def hull_between(
    before: PricedCut, after: PricedCut, least: Callable[[int, int], PricedCut], depth: int
) -> list[PricedCut]:
    """Parts of the hull between two, in order of fewer bytes; divides a line at most `depth` times. `least` returns the
    part of least cost at these costs of a byte and of a unit of price; the lowest price among equals.
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
    """Keep at most `most` parts, `least_bytes` or more apart; the one that gains least goes first, `stays` never."""
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
    """How much less a part costs than a mixture of two others with the same bytes, in bytes times prices."""
    saved, apart = before.nbytes - part.nbytes, before.nbytes - after.nbytes
    return saved * (after.price - before.price) - apart * (part.price - before.price)


# Which values to keep is a minimum cut, as in torch._functorch.partitioners. Flow goes from values that cannot be
# recomputed, through those that can, to the saved ones. A cut's capacity: the bytes it keeps, and the price behind it.


def least_cut(values: SavedValues, keeping: Mapping[fx.Node, int], again: Mapping[fx.Node, int]) -> ValueCut:
    """Return the cut of least cost; of equal ones, the one that recomputes least. `keeping` is the cost of keeping each
    node's value, and `again` the cost of recomputing it, for nodes where that is possible.
    """
    # A node is two points of the network, "made" and "kept", joined by an edge with the cost of keeping as its
    # capacity. The edge from the source to "made" has the cost of recomputing. All other edges are uncuttable.
    flow = Network("source", "saved")
    own = [node for node in values.roots if values.roots[node] is node]
    for node in own:
        # An overwritten value is gone and cannot be kept.
        flow.add_edge((node, "made"), (node, "kept"), None if node in values.overwritten else keeping[node])
        if node in values.saved:
            flow.add_edge((node, "kept"), "saved")
        if node not in again:  # the cut has to pass between it and all saved values
            flow.add_edge("source", (node, "made"))
        elif again[node]:
            flow.add_edge("source", (node, "made"), again[node])
        for each in memory_read(node, values.roots):
            flow.add_edge((each, "kept"), (node, "made"))
    # This cut is nearest to the sink, "saved", so as little as possible is recomputed behind it.
    behind = flow.behind_least_cut()
    made_again = frozenset(node for node in own if (node, "made") in behind)
    return ValueCut(frozenset(node for node in own if (node, "kept") in behind) - made_again, made_again)


def memory_read(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes that allocated the memory that a node reads, also through views and numbers."""
    found, pending, seen = set(), list(node.all_input_nodes), set()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if roots.get(each) is each:
            found.add(each)
        elif each in roots and not each.all_input_nodes:  # an input that shares memory with another one
            found.add(roots[each])
        else:
            pending.extend(each.all_input_nodes)
    return found


_log = logging.getLogger("rotor_py")

IN_PART = "in part"  # the storage mode that keeps the least from which cheap operators recompute the rest
# Least share of the saved bytes by which parts must differ. A guess: closer ones are not worth measuring.
_WORTHWHILE = 0.1
# Highest price of cheap operators for a byte not kept. A guess: most cost 50 to 100, statistics of rows thousands.
_FOR_A_BYTE = 1000
# Most parts of a stage. A guess: each of them is timed.
_MOST = 5
_DEEP = 4  # how often a line is divided: at most fifteen cuts for a stage
_MODES = (torch_compat.enter_autocast, torch_compat.exit_autocast, torch_compat.set_grad_enabled)


def find_saved_parts(
    body: fx.GraphModule, shared: int, sizes: SymbolValues, arguments: Sequence[Any] | None = None
) -> dict[str, SavedPart]:
    """Return the parts that `body` can keep, by the name of the storage mode, in order of fewer bytes; none if its
    saved values are not found, in a run on `arguments` if given. All stages share the last `shared` inputs of `body`.
    """
    nodes = list(body.graph.nodes)
    outputs = set(body.graph.output_node().all_input_nodes)  # these stay in memory for the next stage
    # Whether any value may be dropped and recomputed: finding the saved values takes much longer.
    if not any(node not in outputs and (is_cheap(node) or kind_of(node) is not None) for node in nodes):
        return {}
    values = _saved_values(body, sizes, arguments)
    if values is None:
        return {}
    inputs = [node for node in nodes if node.op == "placeholder"]
    free = {*(node for node in nodes if node.op == "get_attr"), *inputs[len(inputs) - shared :]}
    # A saved output is in memory for the next stage, whether kept or not.
    free |= values.saved & {values.roots.get(node) for node in outputs}
    keeping = {node: 0 if node in free else largest_bytes(node, sizes) for node in nodes}
    own = [node for node, root in values.roots.items() if root is node and node not in values.stale]
    priced = [node for node in own if is_cheap(node) or kind_of(node) is not None]
    prices = {node: price_of(node, values.flops.get(node, 0), sizes) for node in priced}

    def least(for_bytes: int, for_prices: int, prices_of: Mapping[fx.Node, int] = prices) -> PricedCut:
        costs = {node: for_bytes * nbytes for node, nbytes in keeping.items()}
        cut = least_cut(values, costs, {node: for_prices * price for node, price in prices_of.items()})
        # Recomputed values without a reader are behind no cut.
        return PricedCut(cut, sum(keeping[node] for node in cut.kept), sum(prices[node] for node in cut.again))

    # The fewest bytes from which cheap operators alone recompute the other saved values.
    first = least(_FOR_A_BYTE, 1, {node: prices[node] for node in own if is_cheap(node)})
    whole = PricedCut(ValueCut(), sum(keeping[node] for node in values.saved), 0)
    again = PricedCut(ValueCut(), sum(keeping[node] for node in inputs), _price_of_all(values, prices))
    hull = hull_between(whole, again, least, _DEEP)
    parts = sorted({part.nbytes: part for part in (*hull, first)}.values(), key=lambda part: -part.nbytes)
    found: dict[str, SavedPart] = {}
    before = whole
    for part in thinned([whole, *parts, again], first, _WORTHWHILE * whole.nbytes, _MOST):
        # Named by the kind of values that it recomputes beyond the part before it.
        kinds = {kind_of(node) for node in part.cut.again - before.cut.again} - {None}
        most = next((kind for kind in ("products", "convolutions", "attention") if kind in kinds), None)
        name = IN_PART if most is None and part.cut == first.cut else f"{IN_PART}, {most or 'arithmetic'} again"
        names = (name, *(f"{name} {number}" for number in range(2, 9)))
        found[next(each for each in names if each not in found)] = SavedPart.of_cut(body, values, part.cut.kept)
        before = part
    return found


def _price_of_all(values: SavedValues, prices: Mapping[fx.Node, int]) -> int:
    """The price of everything before a backward, if the stage is recomputed and skips its output."""
    pending, seen = list(values.saved), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(memory_read(node, values.roots))
    return sum(prices.get(node, 0) for node in seen)


def same_parts(
    body: fx.GraphModule,
    sizes: SymbolValues,
    parts: Mapping[str, SavedPart],
    nodes: Mapping[int, fx.Node],
    arguments: Sequence[Any] | None = None,
) -> dict[str, SavedPart]:
    """The `parts` of a graph with the same operators, for other sizes; `nodes` are those of `body` by its numbers."""
    values = _saved_values(body, sizes, arguments)
    if values is None:
        return {}
    found = {}
    for name, example in parts.items():
        # A number is available in any case.
        dropped, kept = ({nodes[at] for at in places if at in nodes} for places in (example.dropped, example.kept))
        found[name] = SavedPart.of_cut(body, values, kept | (values.saved - dropped))
    return found


def _saved_values(body: fx.GraphModule, sizes: SymbolValues, arguments: Sequence[Any] | None) -> SavedValues | None:
    # A value made under a mode would be recomputed without it.
    if any(node.op == "call_module" or node.target in _MODES for node in body.graph.nodes):
        return None
    # Operators may refuse fake tensors with errors of any type.
    refusals = Exception if arguments is None else TypeError
    try:
        found = find_saved_values(body, sizes, arguments)
    except refusals as error:
        _log.debug("the values that a stage saves are unknown: %s", error, extra=record_fields("not_in_part"))
        return None
    # A node may return several tensors, one saved and another overwritten: entries are by node, not by tensor.
    return None if found.saved & found.overwritten else found
