"""The node that stands in the caller's graph for a stage without one of its own (Rule 2 of the Note in `tape`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rotor_py.errors import InvalidStateError
from rotor_py.execute.graph_task import goes_through, retains_graph
from rotor_py.execute.unclaimed import Unclaimed
from rotor_py.stage.runner import StageRunner

_TENSOR = object()
"""Stands in a frame where a tensor belongs. None would not do: a value may have that, too."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A value without its tensors: autograd follows only those that it is given one by one."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    tensors: int
    """how many of its leaves are tensors"""

    @classmethod
    def of(cls, value: Any) -> tuple[Frame, list[torch.Tensor]]:
        """The frame of `value`, and the tensors in it, in order."""
        flat, spec = tree_flatten(value)
        leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        return cls(spec, leaves, len(tensors)), tensors

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The value with these tensors in it."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


class Owner(Protocol):
    """The tape that a node belongs to."""

    runners: Sequence[StageRunner]
    hidden_because: str
    """Why a stage is a node, and what to do to have its operators in the caller's graph: the middle of a sentence."""

    def run_first(self, stage: int, value: Any) -> tuple[Any, list[torch.Tensor]]:
        """Run a stage for the first time, so that it can be run again.

        Returns its output, without a graph, and the tensors of it that have no gradient in plain training either.
        Autograd would otherwise give one to every floating output of a node, if any of its inputs has one.
        """

    def leave_frame(self, stage: int, frame: Frame) -> None:
        """Take the frame of a stage's output: a node can return nothing but tensors."""

    def know(self, stage: int, node: Node) -> None:
        """Know the node of a stage, as long as the graph is there."""

    def backward(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the stage's input and parameters, for those of its output."""


class StageNode(torch.autograd.Function):
    """One stage, run without a graph in the forward, and by its tape in the backward."""

    @staticmethod
    def forward(ctx: Any, owner: Owner, stage: int, frame: Frame, *tensors: torch.Tensor) -> Any:
        """`tensors` are those of the input, and then the parameters, so that the engine knows of both."""
        ctx.owner, ctx.stage, ctx.unclaimed = owner, stage, Unclaimed()
        owner.know(stage, ctx)
        ctx.set_materialize_grads(False)  # a gradient that does not exist is not made, as in plain training
        value = frame.filled(tensors)
        ctx.input_tensors = frame.tensors
        output, without_gradient = owner.run_first(stage, value)
        ctx.mark_non_differentiable(*without_gradient)
        output_frame, made = Frame.of(output)
        owner.leave_frame(stage, output_frame)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # The engine has gradients on here only for create_graph=True. The graph of a stage that is run again is not
        # part of the caller's, so second derivatives would be wrong without a word.
        if torch.is_grad_enabled():
            raise InvalidStateError(
                f"create_graph=True cannot go through stage {ctx.owner.runners[ctx.stage].name!r}, "
                f"{ctx.owner.hidden_because}, or train this loss without Checkpointable",
                kind="create_graph",
                stage=ctx.stage,
                name=ctx.owner.runners[ctx.stage].name,
            )
        return None, None, None, *_gradients(ctx, gradients)


def _gradients(ctx: Any, arrived: tuple[torch.Tensor | None, ...]) -> Sequence[torch.Tensor | None]:
    """Gradients of a stage's input and parameters for those that arrived; those of parameters are computed once.

    A pass may want those of inputs or of parameters alone, and leave the graph for another one (see `Unclaimed`).
    """
    sources = [node for node, _ in ctx.next_functions]
    if all(gradient is None for gradient in arrived):
        return [None] * len(sources)
    inputs: int = ctx.input_tensors
    kept = ctx.unclaimed.take(arrived, leave=retains_graph())
    if kept is not None and not _any_wanted(sources[:inputs]):
        return [None] * inputs + list(kept)
    found: list[torch.Tensor | None] = ctx.owner.backward(ctx.stage, arrived)
    if len(sources) > inputs and retains_graph() and not _any_wanted(sources[inputs:]):
        ctx.unclaimed.keep(arrived, found[inputs:])
    return found


def _any_wanted(sources: Iterable[Node | None]) -> bool:
    """Whether the pass that runs now wants a gradient of any of these."""
    return any(node is not None and goes_through(node) for node in sources)
