"""Find the parts in which a captured stage can be stored, on first request: that takes time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from rotor_profiling.storage import local, tensors_in
from rotor_py.capture.graph.graph_nodes import SymbolValues, example_of, overwrites, owned_by, tensors_of
from rotor_py.capture.graph.saved_values import KINDS, SavedPart, named
from rotor_py.capture.graph.selective_recompute import find_saved_parts, same_parts
from rotor_py.capture.graph.stage_graph import graph_on
from rotor_py.stage.skipped_output import skip_output

# A stage recomputed for its backward makes its output again, without a reader. If the last operator is a matrix
# product, its backward needs its inputs and not its value, so it can be skipped. Operators before it cannot.

# Listed, not found from autograd's saved values: those are unknown before the stage runs.
_PRODUCTS = {*KINDS["products"], *KINDS["convolutions"]}
_SUMS: set[Any] = {operator.add, torch.add, "add"}
# Operators that may follow a product: their backward does not read their input values.
_RESHAPING = ("reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "view", "contiguous")
_FOLLOWING = {F.dropout, *named((*_RESHAPING, "to", "float", "half", "bfloat16"), torch)}


def skipping_output(body: fx.GraphModule) -> fx.GraphModule | None:
    skipped = _skippable(body.graph)
    if not any(node.target in _PRODUCTS for node in skipped):  # sums and views take hardly any time
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in skipped:
        if node.target not in _FOLLOWING:  # those run on the value's substitute, and cost little or nothing
            copy, target = copies[node], node.target
            function: Any = getattr(torch.Tensor, target) if isinstance(target, str) else target
            copy.op, copy.target = "call_function", _skipping(function)
    return graph_on(body, graph, "GraphStageWithoutOutput")


def _skippable(graph: fx.Graph) -> list[fx.Node]:
    """The operators whose value only the stage's output depends on, and no backward."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        known = node.target in _PRODUCTS or node.target in _SUMS or node.target in _FOLLOWING
        # A product's backward needs the product's inputs, so these are not skipped.
        unused = all(user.op == "output" or (user in found and user.target not in _PRODUCTS) for user in node.users)
        called = node.op in ("call_function", "call_method")
        made = example_of(node)
        is_tensor = isinstance(made, torch.Tensor) and made.is_floating_point()
        if called and known and unused and is_tensor and not overwrites(node):
            found[node] = None
    return list(found)


@cache
def _skipping(target: Callable[..., Any]) -> Callable[..., Any]:
    """The operator `target` for runs with a skipped output, named because the graph becomes code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return skip_output(target, *args, **kwargs)

    call.__name__ = call.__qualname__ = f"skipping_{target.__name__}"
    return call


@dataclass(slots=True)
class OfKind:
    """Data shared by stages of a kind, which do the same with the same sizes: their parts, once requested, and graphs.

    `graphs` are keyed by storage mode (None: stored whole) and by whether they skip the output.
    """

    parts: dict[str, SavedPart] | None = None
    graphs: dict[tuple[str | None, bool], fx.GraphModule | None] = field(default_factory=dict)


Known = dict[Hashable, OfKind]


class StageParts:
    """The parts of the stage whose graph is `body`, whose last `shared` inputs all stages share.

    With `own_names`, the body's attributes have names of their own, so its graphs are not shared in `known`.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        shared: int,
        sizes: SymbolValues,
        signature: Hashable,
        known: Known,
        *,
        own_names: bool = False,
    ) -> None:
        self._body = body
        self._shared = shared
        self._sizes = sizes
        self._signature = signature
        self._known = known
        self._own_names = own_names
        self._example: StageParts | None = None
        self._found: dict[str, SavedPart] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The graphs have no attributes and cannot be copied; a copy makes its own."""
        kept = {name: each for name, each in self.__dict__.items() if name not in ("_graphs", "_of_kind")}
        return {**kept, "_known": {}}

    @cached_property
    def _of_kind(self) -> OfKind:
        return self._known.setdefault(self._kind(), OfKind())

    @cached_property
    def _graphs(self) -> dict[tuple[str | None, bool], fx.GraphModule | None]:
        return {} if self._own_names else self._of_kind.graphs

    @property
    def bare(self) -> fx.GraphModule | None:
        """The graph that skips the output, if there is one."""
        if (None, True) not in self._graphs:
            self._graphs[None, True] = skipping_output(self._body)
        return self._graphs[None, True]

    def follow(self, other: StageParts) -> None:
        """Take over the parts of `other`, the same stage for other sizes, before any are requested."""
        self._example = other

    def found(self, arguments: Sequence[Any] | None = None) -> dict[str, SavedPart]:
        """The parts by storage mode, in order of fewer bytes; found by a run on `arguments`, or on fake tensors."""
        if self._found is None:
            if self._of_kind.parts is None:
                plain = arguments is not None and all(map(_is_plain, tensors_in(arguments)))
                self._of_kind.parts = self._find(arguments if plain else None)
            self._found = self._of_kind.parts
        return self._found

    def _find(self, arguments: Sequence[Any] | None) -> dict[str, SavedPart]:
        example = self._example
        if example is not None:
            # Without sizes: a graph has no symbol for a size of 1.
            theirs, own = (
                {number: node for number, node in enumerate(each._body.graph.nodes) if not _is_size(node)}
                for each in (example, self)
            )
            if [*map(_operator, theirs.values())] == [*map(_operator, own.values())]:
                nodes = dict(zip(theirs, own.values(), strict=True))
                return same_parts(self._body, self._sizes, example.found(), nodes, arguments)
        return find_saved_parts(self._body, self._shared, self._sizes, arguments)

    def graph(self, way: str, *, skip_output: bool) -> fx.GraphModule:
        """The graph that passes a part's values to a `PartialSaving`, its first input."""
        bare = self.bare if skip_output else None
        key: tuple[str | None, bool] = way, bare is not None
        if key not in self._graphs:
            graph = self._body.graph if bare is None else bare.graph
            self._graphs[key] = self.found()[way].instrumented(self._body, graph)
        found = self._graphs[key]
        assert found is not None
        return found

    def _kind(self) -> Hashable:
        nodes = self._body.graph.nodes
        given = [tensors_of(node) for node in nodes if node.op == "placeholder"]
        owned = [owned_by(self._body, node) for node in nodes if node.op == "get_attr"]
        tensors = (each for each in (*chain.from_iterable(given), *owned) if isinstance(each, torch.Tensor))
        # Nodes as well: the signature does not say where autocast regions end.
        return self._signature, tuple(node.op for node in nodes), tuple(map(self._layout, tensors))

    def _layout(self, tensor: torch.Tensor) -> Hashable:
        number, here = self._sizes.number, local(tensor)
        shape: tuple[Any, ...] = tuple(map(number, here.shape))
        return type(tensor), shape, tuple(map(number, here.stride())), here.dtype, here.device, tensor.requires_grad


def _is_size(node: fx.Node) -> bool:
    return isinstance(example_of(node), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _operator(node: fx.Node) -> tuple[str, str]:
    return node.op, str(node.target) if node.op.startswith("call") else ""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory, all of it in this process."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
