"""Which parts a captured stage offers to keep: few bytes and little to make again, at rising prices.

One part is the least from which cheap operators alone make the rest. For the others, all operators that make the same
bits again count, with a price: they are on the lower convex hull of bytes and prices. Its ends are to store
the stage whole, and to run it again from its input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import fx

from rotor_profiling import torch_compat
from rotor_py.capture.graph.graph_nodes import Sizes, tensors_of
from rotor_py.capture.graph.saved_values import SavedPart, SavedValues, find_saved_values, is_cheap, kind_of, price_of
from rotor_py.errors import record_fields
from rotor_solver.max_flow import Network

# Parts on the lower convex hull of what they keep and what they cost, and the few of them that are worth offering.
#
# Of two parts, a line joins their bytes and prices; a part below it saves more for its price than a mixture of both.
# The least cut by the line's own slope finds it if there is one, and so on between the new part and each of the two:
# all parts on the lower convex hull, by Eisner and Severance (1976).


class Point(Protocol):
    """A part: the bytes that it keeps, and the price of what it makes again."""

    @property
    def nbytes(self) -> int: ...

    @property
    def price(self) -> int: ...


Part = TypeVar("Part", bound=Point)


def hull_between(before: Part, after: Part, least: Callable[[int, int], Part], depth: int) -> list[Part]:
    """The parts of the hull between two, which keep less from one to the next; a line is divided `depth` times at most.

    `least(for_bytes, for_prices)` is the part of least cost where a byte and a unit of price cost so much; of equal
    ones, that of the lowest price.
    """
    bytes_apart, price_apart = before.nbytes - after.nbytes, after.price - before.price
    if depth == 0 or bytes_apart <= 0 or price_apart <= 0:
        return []
    part = least(price_apart, bytes_apart)
    if not after.nbytes <= part.nbytes < before.nbytes or _below_line(part, before, after) < 0:
        return []
    first, second = (hull_between(*ends, least, depth - 1) for ends in ((before, part), (part, after)))
    return [*first, part, *second]


def thinned(parts: Sequence[Part], stays: Part, least_bytes: float, most: int) -> list[Part]:
    """At most so many of the parts between the first and the last, with at least so many bytes from one to the next.

    `parts` keep less from one to the next. Of those that are too close, or too many, what costs hardly less than a
    mixture of its neighbours goes first, and `stays` never.
    """
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


def _below_line(part: Point, before: Point, after: Point) -> int:
    """How much less a part costs than a mixture of two others that keeps the same bytes, in bytes times prices."""
    saved, apart = before.nbytes - part.nbytes, before.nbytes - after.nbytes
    return saved * (after.price - before.price) - apart * (part.price - before.price)


# The fewest bytes from which what autograd saves can be made again, at a price.
#
# Which values to keep is a minimum cut. Memory flows from what cannot be made again, through what can, to what autograd
# saves. A cut through the values separates the two, and its capacity is the bytes of the values that it cuts, and the
# price of all that lies behind it and has to be made again. The cut of least capacity is the least memory from which
# all that autograd saves can be made. PyTorch's compiler decides in the same way what a backward recomputes
# (torch._functorch.partitioners).


@dataclass(frozen=True, slots=True)
class Cut:
    """The nodes whose values are `kept`, and those whose values are made `again`, of nodes that allocate memory."""

    kept: frozenset[fx.Node]
    again: frozenset[fx.Node]


def least_cut(values: SavedValues, keeping: Mapping[fx.Node, int], again: Mapping[fx.Node, int]) -> Cut:
    """The cut of least cost; of equal ones, that which makes least again.

    `keeping` is what it costs to keep the value of each node, and `again` what it costs to make it again, of those that
    can be.

    A node is two points of the network, "made" and "kept", and what it costs to keep is the capacity between them. What
    it costs to make again is that between the source and "made". All other edges have no capacity: a cut never goes
    through them.
    """
    flow = Network("source", "saved")
    own = [node for node in values.roots if values.roots[node] is node]
    for node in own:
        if node in values.overwritten:  # nothing is left of it to keep
            flow.add_edge((node, "made"), (node, "kept"))
        else:
            flow.add_edge((node, "made"), (node, "kept"), keeping[node])
        if node in values.saved:
            flow.add_edge((node, "kept"), "saved")
        if node not in again:  # the cut has to pass between it and all that is saved
            flow.add_edge("source", (node, "made"))
        elif again[node]:
            flow.add_edge("source", (node, "made"), again[node])
        for each in memory_read(node, values.roots):
            flow.add_edge((each, "kept"), (node, "made"))
    # It is the cut nearest to the sink, "saved", so as little as possible has to be made again behind it.
    behind = flow.behind_least_cut()
    made_again = frozenset(node for node in own if (node, "made") in behind)
    return Cut(frozenset(node for node in own if (node, "kept") in behind) - made_again, made_again)


def memory_read(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes that allocated the memory that a node reads, be it through views and numbers."""
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

IN_PART = "in part"
"""The way in which a stage keeps the least from which cheap operators make the rest again."""
_WORTHWHILE = 0.1
"""The least part of the saved bytes that has to be dropped more. A guess: for less, another way to run the stage is not
worth measuring, and would only make the solver slower.
"""
_FOR_A_BYTE = 1000
"""The most that cheap operators may cost for a byte that is not kept. A guess: most cost 50 to 100, and to make the
statistics of rows again, which are hardly any bytes, costs thousands.
"""
_MOST = 5
"""Parts of a stage. A guess: each of them is timed."""
_DEEP = 4
"""How often a line is divided: at most fifteen cuts for a stage."""
_MODES = (
    torch_compat.enter_autocast,
    torch_compat.exit_autocast,
    torch_compat.set_grad_enabled,
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A cut, the bytes that it keeps, and the price of what it makes again."""

    cut: Cut
    nbytes: int
    price: int


def find_saved_parts(
    body: fx.GraphModule, shared: int, sizes: Sizes, arguments: Sequence[Any] | None = None
) -> dict[str, SavedPart]:
    """What `body` keeps in each way to be stored in part, by the way's name; each keeps less than the one before.

    Each saves a tenth more at least. There is none if that cannot be found. The last `shared` inputs of `body` are
    those that all stages share, and in memory in any case. `sizes` says what its symbols stand for. With `arguments`,
    `body` is run on these to find out.
    """
    if not _may_make_again(body):
        return {}
    nodes = list(body.graph.nodes)
    values = _saved_values(body, sizes, arguments)
    if values is None:
        return {}
    inputs = [node for node in nodes if node.op == "placeholder"]
    free = {*(node for node in nodes if node.op == "get_attr"), *inputs[len(inputs) - shared :]}
    # What is saved and handed on is there for the next stage, whether it is kept or not.
    free |= values.saved & {values.roots.get(node) for node in body.graph.output_node().all_input_nodes}
    choice = _Choice(values, {node: 0 if node in free else _size(node, sizes) for node in nodes}, sizes)
    return {name: SavedPart.of_cut(body, values, part.cut.kept) for name, part in choice.named().items()}


def same_parts(
    body: fx.GraphModule,
    sizes: Sizes,
    parts: Mapping[str, SavedPart],
    nodes: Mapping[int, fx.Node],
    arguments: Sequence[Any] | None = None,
) -> dict[str, SavedPart]:
    """The `parts` of a graph with the same operators, for tensors of other sizes; none if they cannot be found.

    By the numbers of its nodes, `nodes` are those of `body` that do the same. With `arguments`, `body` is run on these
    to find out.
    """
    values = _saved_values(body, sizes, arguments)

    def part(example: SavedPart, values: SavedValues) -> SavedPart:
        # A number is there in any case.
        dropped, kept = (
            {nodes[number] for number in numbers if number in nodes} for numbers in (example.dropped, example.kept)
        )
        return SavedPart.of_cut(body, values, kept | (values.saved - dropped))

    return {} if values is None else {name: part(each, values) for name, each in parts.items()}


def _may_make_again(body: fx.GraphModule) -> bool:
    """Whether there is a value that may be dropped and made again. To find out what is saved takes much longer."""
    handed_on = set(body.graph.output_node().all_input_nodes)  # so it is there for the next stage
    return any(node not in handed_on and (is_cheap(node) or kind_of(node) is not None) for node in body.graph.nodes)


def _saved_values(body: fx.GraphModule, sizes: Sizes, arguments: Sequence[Any] | None) -> SavedValues | None:
    # A value that was made under a mode would be made again without it.
    if any(node.op == "call_module" or node.target in _MODES for node in body.graph.nodes):
        return None
    # An operator may refuse tensors without memory, in ways of its own.
    refusals = Exception if arguments is None else TypeError
    try:
        found = find_saved_values(body, sizes, arguments)
    except refusals as error:
        _log.debug(
            "a stage is stored whole or not at all, since nobody can say what its graph saves: %s",
            error,
            extra=record_fields("not_in_part"),
        )
        return None
    # A node may return several tensors, of which one is saved and another one written over. What is kept of a node, and
    # what can be made from it, would be told apart by tensor then.
    return None if found.saved & found.overwritten else found


class _Choice:
    """The parts among which a stage's `values` leave a choice; `keeping` are the bytes of each."""

    def __init__(self, values: SavedValues, keeping: Mapping[fx.Node, int], sizes: Sizes) -> None:
        self._values = values
        self._keeping = keeping
        own = [node for node, root in values.roots.items() if root is node and node not in values.stale]
        self._cheap = [node for node in own if is_cheap(node)]
        self._prices = {
            node: price_of(node, values.flops.get(node, 0), sizes)
            for node in own
            if is_cheap(node) or kind_of(node) is not None
        }
        self._first = self._part(self._least(_FOR_A_BYTE, 1, {node: self._prices[node] for node in self._cheap}))

    def named(self) -> dict[str, _Part]:
        """The parts to offer, by name."""
        whole = self._without_cut(sum(self._keeping[node] for node in self._values.saved), 0)
        inputs = sum(nbytes for node, nbytes in self._keeping.items() if node.op == "placeholder")
        run_again = self._without_cut(inputs, self._price_of_all())
        hull = hull_between(whole, run_again, self._cheapest, _DEEP)
        parts = sorted({part.nbytes: part for part in (*hull, self._first)}.values(), key=lambda part: -part.nbytes)
        found: dict[str, _Part] = {}
        last = whole
        for part in thinned([whole, *parts, run_again], self._first, _WORTHWHILE * whole.nbytes, _MOST):
            found[self._name(part, last, found)] = part
            last = part
        return found

    def _name(self, part: _Part, before: _Part, taken: Mapping[str, object]) -> str:
        """By what it makes again in addition to the part before it."""
        kinds = {kind_of(node) for node in part.cut.again - before.cut.again} - {None}
        most = next((kind for kind in ("products", "convolutions", "attention") if kind in kinds), None)
        if most is None and part.cut == self._first.cut:
            return IN_PART
        name = f"{IN_PART}, {most or 'arithmetic'} again"
        return next(each for each in (name, *(f"{name} {number}" for number in range(2, 9))) if each not in taken)

    def _cheapest(self, for_bytes: int, for_prices: int) -> _Part:
        return self._part(self._least(for_bytes, for_prices, self._prices))

    def _least(self, for_bytes: int, for_prices: int, prices: Mapping[fx.Node, int]) -> Cut:
        keeping = {node: for_bytes * nbytes for node, nbytes in self._keeping.items()}
        return least_cut(self._values, keeping, {node: for_prices * price for node, price in prices.items()})

    def _part(self, cut: Cut) -> _Part:
        # What is made again for nobody is behind no cut.
        return _Part(cut, sum(map(self._keeping.__getitem__, cut.kept)), sum(map(self._prices.__getitem__, cut.again)))

    def _without_cut(self, nbytes: int, price: int) -> _Part:
        return _Part(Cut(frozenset(), frozenset()), nbytes, price)

    def _price_of_all(self) -> int:
        """The price of all that has to run before a backward, where the stage is run again and skips its output."""
        pending, seen = list(self._values.saved), set[fx.Node]()
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending.extend(memory_read(node, self._values.roots))
        return sum(self._prices.get(node, 0) for node in seen)


def _size(node: fx.Node, sizes: Sizes) -> int:
    return max(map(sizes.bytes_of, tensors_of(node)), default=0)
