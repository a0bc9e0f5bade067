"""The sizes of a graph's tensors in numbers: one graph serves many shapes, and has symbols for what may differ.

Cuts and what stages keep are decided by bytes. A symbol has a size that TorchDynamo saw when it traced the graph, but
that may have been for another input, or for another model that is built alike. What counts is what comes in now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy  # torch needs it for its symbols
import torch
from torch import fx
from torch.distributed.tensor import DTensor

from rotor_profiling.storage import local

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Sizes:
    """Numbers for the symbols of a graph whose `placeholders` are called with `arguments`."""

    def __init__(self, placeholders: Iterable[fx.Node] = (), arguments: Iterable[Any] = ()) -> None:
        self._known: dict[Any, sympy.Integer] = {}
        for node, argument in zip(placeholders, arguments, strict=True):
            example = example_of(node)
            if isinstance(example, torch.Tensor) and isinstance(argument, torch.Tensor):
                # The part that this process has of a `DTensor` has symbols of its own.
                for seen, given in ((example, argument), (local(example), local(argument))):
                    for size, found in zip(seen.shape, given.shape, strict=False):
                        self._learn(size, found)
            else:
                self._learn(example, argument)

    def _learn(self, size: Any, found: Any) -> None:
        expression = getattr(size.node, "expr", None) if isinstance(size, torch.SymInt) else None
        if expression is not None and expression.is_Symbol:
            self._known[expression] = sympy.Integer(int(found))

    def number(self, value: Any) -> Any:
        """A size, stride or other number of the graph, without symbols. Of unknown ones, what TorchDynamo saw counts.

        What is no symbolic number is returned as it is; None for a number that nobody knows before the graph runs.
        """
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = getattr(value.node, "expr", None)
        found = None if expression is None else expression.xreplace(self._known)
        if found is None or not found.is_number:
            return value.node.hint
        kind: type = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
        return kind(found)

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor in this process; a dimension that nobody knows counts as one.

        Of a `DTensor` in parts of several sizes, it is the largest part: all processes have to decide alike.
        """
        count = tensor.element_size()
        for size in self._largest_part(tensor):
            count *= 1 if size is None else size
        return count

    def _largest_part(self, tensor: torch.Tensor) -> list[int | None]:
        if not isinstance(tensor, DTensor):
            return list(map(self.number, local(tensor).shape))
        sizes: list[int | None] = list(map(self.number, tensor.shape))
        for number, placement in enumerate(tensor.placements):
            divided = getattr(placement, "dim", None)  # of shards of any kind
            if divided is not None and (whole := sizes[divided]) is not None:
                sizes[divided] = -(-whole // tensor.device_mesh.size(number))
        return sizes


def example_of(node: fx.Node) -> Any:
    """The node's value as Dynamo saw it, with fake tensors, which have no data."""
    # Dynamo writes "example_value"; graphs from torch's other tracers have "val".
    return node.meta.get("example_value", node.meta.get("val"))
