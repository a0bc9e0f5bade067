"""A stage that was run again with a graph of its own, and the two ends of that graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rotor_profiling.storage import tensors_in
from rotor_py.errors import InvalidStateError
from rotor_py.stage.activity import During

Edges = list[GradientEdge | None]
"""The edges of tensors into their graph, in order; None for a tensor that needs no gradient."""


class AttachedStage:
    """A stage with a graph of its own, which ends at its input and at aliases of its parameters.

    It knows the ends of the graph as edges, and holds no tensors: what the backward does not need is freed. `owners`
    keep the graph alive instead.
    """

    def __init__(
        self, outputs: Edges, inputs: Edges, parameters: Sequence[torch.Tensor], owners: list[Any], name: str
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.parameters = parameters
        self.owners = owners
        self.name = name

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, retain_graph: bool = False
    ) -> list[torch.Tensor | None]:
        """Gradients of the input's tensors, then of the parameters, for the `gradients` of the outputs.

        None stands for a gradient that does not exist, on both sides. RuntimeError if the stage returned another number
        of tensors than in its first run.
        """
        if len(gradients) != len(self.outputs):
            raise InvalidStateError(
                f"stage {self.name!r} returned {len(gradients)} tensors in the forward and {len(self.outputs)} when it "
                "was run again; a stage has to do the same thing every time",
                kind="rerun_differs",
                name=self.name,
                forward=len(gradients),
                again=len(self.outputs),
            )
        sources = [*self.inputs, *self.parameters]
        given = [(y, g) for y, g in zip(self.outputs, gradients, strict=True) if y is not None and g is not None]
        wanted: list[Any] = [source for source in sources if source is not None]
        if not given or not wanted:  # torch.autograd.grad refuses both
            return [None] * len(sources)
        roots, arriving = [y for y, _ in given], [g for _, g in given]
        with During("backward", self.name):
            found = iter(torch.autograd.grad(roots, wanted, arriving, retain_graph=retain_graph, allow_unused=True))
        return [None if source is None else next(found) for source in sources]

    def refuse_other_leaves(self, origin: torch.Tensor) -> None:
        """RuntimeError if the graph reaches a parameter that is not the stage's own: its gradient would be lost.

        `origin` is the leaf at which the input's side of the graph ends (see `enter_graph`).
        """
        known = {id(tensor) for tensor in (origin, *self.parameters)}
        for leaf in leaves_behind(self.outputs):
            if id(leaf) not in known:
                raise InvalidStateError(
                    f"stage {self.name!r} uses a parameter of shape {tuple(leaf.shape)} that it does not own, whose "
                    "gradient would be lost; pass the torch.nn.Module that owns it as the stage",
                    kind="foreign_parameter",
                    name=self.name,
                )


def leaves_behind(edges: Edges) -> Iterator[torch.Tensor]:
    """The tensors at which the graph behind `edges` ends, each once."""
    pending = [edge.node for edge in edges if edge is not None]
    seen = set()
    # A loop and no recursion: a graph can be deeper than Python's stack.
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # an AccumulateGrad has it
        if leaf is not None:
            yield leaf
        pending.extend(following for following, _ in node.next_functions if following is not None)


def owners_of(value: Any) -> list[Any]:
    """What keeps the graph behind `value` alive. An edge alone does not, if its node is written in Python."""
    # The node of a view, which holds the node before it, and no tensor. Newer releases of torch do the same in
    # `get_gradient_edge`.
    with torch.enable_grad():
        return [tensor.view_as(tensor).grad_fn for tensor in tensors_in(value) if tensor.requires_grad]


def edges_of(value: Any) -> Edges:
    """The edges of the tensors in `value` into their graph."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors_in(value)]
