"""Which parts a captured stage offers to keep: few bytes and little to make again, at rising prices.

The first part is the least from which cheap operators alone make the rest. For the others, all operators that make the
same bits again count, with a price. Of two parts, a line joins their bytes and prices; a part below it saves more for
its price than a mixture of both. The least cut by the line's own slope finds it if there is one, and so on between
the new part and each of the two: all parts on the lower convex hull, by Eisner and Severance (1976).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rotor_py.capture.graph.graph_nodes import tensors_of
from rotor_py.capture.graph.parts.min_cut import Cut, least_cut, memory_read
from rotor_py.capture.graph.parts.prices import is_cheap, kind_of, price_of
from rotor_py.capture.graph.parts.saved_part import SavedPart
from rotor_py.capture.graph.parts.saved_values import SavedValues, find_saved_values
from rotor_py.capture.graph.sizes import Sizes

_log = logging.getLogger("rotor_py")

IN_PART = "in part"
"""The way in which a stage keeps the least from which cheap operators make the rest again."""
_WORTHWHILE = 0.1
"""The least part of the saved bytes that has to be dropped more. A guess: for less, another way to run the stage is not
worth measuring, and would only make the solver slower.
"""
_BELOW_A_MIXTURE = 0.7
"""The most that a part may cost of what a mixture does that keeps the same bytes: some stages of a kind with the part
before it, and others with the one after it, or run again whole, for which no other way is needed. A guess: prices are
not exact, and to make values one by one takes some time beside.
"""
_MOST = 4
"""Parts of a stage. A guess: each of them is timed."""
_MODES = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A cut, the bytes that it keeps, and the price of what it makes again."""

    cut: Cut
    nbytes: int
    price: int

    def beats_mixture(self, before: _Part, nbytes: int, price: int) -> bool:
        """Whether it costs clearly less than a mixture of `before` and another part, of `nbytes` and a `price`."""
        if self.nbytes >= before.nbytes or self.nbytes < nbytes:
            return False
        share = (before.nbytes - self.nbytes) / (before.nbytes - nbytes)
        return self.price - before.price <= _BELOW_A_MIXTURE * share * (price - before.price)


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
    body: fx.GraphModule, sizes: Sizes, parts: Mapping[str, SavedPart], arguments: Sequence[Any] | None = None
) -> dict[str, SavedPart]:
    """The `parts` of a graph with the same nodes, for tensors of other sizes; none if they cannot be found.

    With `arguments`, `body` is run on these to find out.
    """
    values = _saved_values(body, sizes, arguments)
    nodes = list(body.graph.nodes)

    def part(example: SavedPart, values: SavedValues) -> SavedPart:
        dropped, kept = ({nodes[number] for number in numbers} for numbers in (example.dropped, example.kept))
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
        _log.debug("a stage is stored whole or not at all, since nobody can say what its graph saves: %s", error)
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
        self._cheap = {node: 0 for node in own if is_cheap(node)}
        self._prices = {
            node: price_of(node, values.flops.get(node, 0), sizes)
            for node in own
            if is_cheap(node) or kind_of(node) is not None
        }

        self._first = self._part(least_cut(values, keeping, self._cheap))

    def named(self) -> dict[str, _Part]:
        """The parts to offer, by name."""
        whole = sum(self._keeping[node] for node in self._values.saved)
        found: dict[str, _Part] = {}
        last = _Part(Cut(frozenset(), frozenset()), whole, 0)
        for part in self._hull(whole):
            if last.nbytes - part.nbytes >= _WORTHWHILE * whole and len(found) < _MOST:
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

    def _hull(self, whole: int) -> Iterable[_Part]:
        nothing_again = _Part(Cut(frozenset(), frozenset()), whole, 0)
        first = self._first
        cheap = {node: price for node, price in self._prices.items() if node in self._cheap}
        yield from self._between(nothing_again, first, cheap, depth=1)
        yield first
        if not any(kind_of(node) is not None for node in self._prices):
            return
        # The fewest bytes, and of equally few, the least price.
        least = self._part(self._least(1 + sum(self._prices.values()), 1, self._prices))
        if first.nbytes - least.nbytes < _WORTHWHILE * whole:
            return
        before, run_again = first, self._price_of_all()
        for part in (*self._between(first, least, self._prices, depth=2), least):
            if part.beats_mixture(before, 0, run_again):
                yield part
                before = part

    def _between(self, first: _Part, last: _Part, prices: Mapping[fx.Node, int], depth: int) -> list[_Part]:
        """The parts of the hull between two, which keep less from one to the next; at most one for a depth of one."""
        bytes_apart, price_apart = first.nbytes - last.nbytes, last.price - first.price
        if depth == 0 or bytes_apart <= 0 or price_apart <= 0:
            return []
        part = self._part(self._least(price_apart, bytes_apart, prices))
        if not part.beats_mixture(first, last.nbytes, last.price):
            return []
        before, after = (self._between(*ends, prices, depth - 1) for ends in ((first, part), (part, last)))
        return [*before, part, *after]

    def _least(self, for_bytes: int, for_prices: int, prices: Mapping[fx.Node, int]) -> Cut:
        keeping = {node: for_bytes * nbytes for node, nbytes in self._keeping.items()}
        return least_cut(self._values, keeping, {node: for_prices * price for node, price in prices.items()})

    def _part(self, cut: Cut) -> _Part:
        # What is made again for nobody is behind no cut.
        return _Part(cut, sum(map(self._keeping.__getitem__, cut.kept)), sum(map(self._prices.__getitem__, cut.again)))

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
