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
from rotor_py.capture.graph.graph_nodes import Sizes, example_of, overwrites, owned_by, tensors_of
from rotor_py.capture.graph.saved_values import SavedPart
from rotor_py.capture.graph.selective_recompute import find_saved_parts, same_parts
from rotor_py.capture.graph.stage_graph import StageGraph
from rotor_py.stage.skipped_output import skip_output

# Skip operators at a stage's end in runs that need no output.
#
# A stage recomputed for its backward makes its output again, without a reader. If the last operator is a matrix
# product, as in a transformer's block, its backward needs its inputs and not its value, so it can be skipped. Operators
# before it cannot: autograd saves their results.

# Listed, not found from autograd's saved values: those are unknown before the stage runs.
_PRODUCTS: set[Any] = {
    F.linear,
    operator.matmul,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    "matmul",
    "mm",
    "bmm",
}
_SUMS: set[Any] = {operator.add, torch.add, "add"}
_FOLLOWING: set[Any] = {
    F.dropout,
    torch.reshape,
    torch.transpose,
    torch.permute,
    torch.flatten,
    torch.unflatten,
    torch.squeeze,
    torch.unsqueeze,
    "view",
    "reshape",
    "transpose",
    "permute",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "to",
    "float",
    "half",
    "bfloat16",
}
"""Operators that may follow a product: their backward does not read their input values."""


def skipping_output(body: fx.GraphModule) -> fx.GraphModule | None:
    """Return `body` for runs with a skipped output; None if there is nothing worth skipping.

    It has no attributes of its own: it runs on those of `body`, so that parameters exist once.
    """
    skipped = _skippable(body.graph)
    if not any(node.target in _PRODUCTS for node in skipped):  # sums and views take hardly any time
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in skipped:
        if node.target not in _FOLLOWING:  # those run on the value's substitute, and cost little or nothing
            _let_skip(copies[node])
    return StageGraph.like(body, graph, "GraphStageWithoutOutput")


def _skippable(graph: fx.Graph) -> list[fx.Node]:
    """Return the operators whose value only the stage's output depends on, and no backward."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        known = node.target in _PRODUCTS or node.target in _SUMS or node.target in _FOLLOWING
        # A product's backward needs the product's inputs, so these are not skipped.
        unused = all(user.op == "output" or (user in found and user.target not in _PRODUCTS) for user in node.users)
        called = node.op in ("call_function", "call_method")
        if called and known and unused and _is_tensor(node) and not overwrites(node):
            found[node] = None
    return list(found)


def _is_tensor(node: fx.Node) -> bool:
    found = example_of(node)
    return isinstance(found, torch.Tensor) and found.is_floating_point()


def _let_skip(node: fx.Node) -> None:
    target: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    node.op, node.target = "call_function", _skipping(target)


@cache
def _skipping(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator `target` for runs with a skipped output, named because the graph becomes code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return skip_output(target, *args, **kwargs)

    call.__name__ = call.__qualname__ = f"skipping_{target.__name__}"
    return call


@dataclass(slots=True)
class OfKind:
    """Data shared by stages of a kind: their parts, once requested, and their graphs.

    `graphs` are keyed by storage mode (None: stored whole) and by whether they skip the output.
    """

    parts: dict[str, SavedPart] | None = None
    graphs: dict[tuple[str | None, bool], fx.GraphModule | None] = field(default_factory=dict)


Known = dict[Hashable, OfKind]
"""Shared data of one graph's stages, by kind: stages that do the same with the same sizes."""


_WITH_GRAPHS = ("_graphs", "_of_kind")


class StageParts:
    """The parts of the stage whose graph is `body`, and the graphs that keep them.

    Its last `shared` inputs are shared by all stages. `signature` is equal for stages that do the same, and `known` has
    the results for earlier ones. With `own_names`, the body's attributes have names of their own, and graphs are not
    shared.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        shared: int,
        sizes: Sizes,
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
        self._arguments: Sequence[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the graphs, which have no attributes and cannot be copied; a copy makes its own."""
        return {**{name: each for name, each in self.__dict__.items() if name not in _WITH_GRAPHS}, "_known": {}}

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
        """Take over the parts of `other`, the same stage for other sizes, which its plan names.

        Call this before the parts are requested.
        """
        self._example = other

    def found_on(self, arguments: Sequence[Any]) -> dict[str, SavedPart]:
        """Return `found`, on first request by a run on `arguments`."""
        self._arguments = arguments if all(map(_is_plain, tensors_in(arguments))) else None
        try:
            return self.found
        finally:
            self._arguments = None

    @cached_property
    def found(self) -> dict[str, SavedPart]:
        """The parts by storage mode, in order of fewer bytes."""
        if self._of_kind.parts is None:
            self._of_kind.parts = self._find()
        return self._of_kind.parts

    def _find(self) -> dict[str, SavedPart]:
        example = self._example
        if example is not None:
            theirs, own = example._by_number(), self._by_number()
            if [*map(_operator, theirs.values())] == [*map(_operator, own.values())]:
                nodes = dict(zip(theirs, own.values(), strict=True))
                return same_parts(self._body, self._sizes, example.found, nodes, self._arguments)
        return find_saved_parts(self._body, self._shared, self._sizes, self._arguments)

    def _by_number(self) -> dict[int, fx.Node]:
        """Return nodes by number, as parts name them, without sizes: a graph has no symbol for a size of 1."""
        return {number: node for number, node in enumerate(self._body.graph.nodes) if not _is_size(node)}

    def graph(self, way: str, *, skip_output: bool) -> fx.GraphModule:
        """Return the graph that passes a part's values to a `PartialSaving`, its first input."""
        bare = self.bare if skip_output else None
        key: tuple[str | None, bool] = way, bare is not None
        if key not in self._graphs:
            graph = self._body.graph if bare is None else bare.graph
            self._graphs[key] = self.found[way].instrumented(self._body, graph)
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
    """Whether a node's value is a number."""
    example = example_of(node)
    return isinstance(example, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _operator(node: fx.Node) -> tuple[str, str]:
    return node.op, str(node.target) if node.op.startswith("call") else ""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory, all of it in this process."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
