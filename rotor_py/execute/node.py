"""Represent a stage without its own graph as one node of the caller's graph (Rule 2 of the Note in `tape`).

`Unclaimed` keeps parameter gradients for the second pass of a split backward. A zero-bubble pipeline first asks for the
gradients of a stage's input, which the previous rank waits for, with the graph retained. Later it passes the same
gradients again, node by node, for the parameters. A stage that must be recomputed is recomputed for the first pass
only, which computes both: recomputing twice costs time, keeping the graph costs the memory that the plan saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from rotor_profiling.torch_compat import TreeSpec, tree_flatten, tree_unflatten
from rotor_py.errors import InvalidStateError
from rotor_py.execute.backward_passes import goes_through, retains_graph
from rotor_py.stage.runner import StageRunner

Gradients = Sequence[torch.Tensor | None]
_ADDED_UP = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether `torch.distributed.pipelining` starts the second pass of a node from one new tensor, the sum of the gradients
that arrived at all outputs, as the gradient of the first output. Seen in torch 2.11, not in 2.13."""


@dataclass(frozen=True, slots=True)
class _KeptGradients:
    others: tuple[torch.Tensor | None, ...]
    """the other gradients that arrived with the one used as key"""
    versions: tuple[int | None, ...]
    """versions of the key gradient and of the others"""
    parameters: Gradients


class Unclaimed:
    """Parameter gradients of one stage, keyed by the output gradients that they were computed from.

    An entry lives as long as the caller holds those output gradients, the same tensors and unchanged, to start the
    second pass. After an ordinary pass, the entry goes at once.
    """

    def __init__(self) -> None:
        self._found: Any = None  # made on demand: almost no step needs it

    def keep(self, arrived: Gradients, parameters: Gradients) -> None:
        """Keep parameter gradients for the gradients that `arrived` at the output."""
        if self._found is None:
            self._found = WeakTensorKeyDictionary()
        first, others = _split(arrived)
        self._found[first] = _KeptGradients(others, _versions(first, others), parameters)

    def take(self, arrived: Gradients, *, leave: bool) -> Gradients | None:
        """Return the parameter gradients kept for the gradients that `arrived`, if any; `leave` keeps the entry."""
        if not self._found:
            return None
        first = self._kept_for(*_split(arrived))
        if first is None:
            return None
        found: _KeptGradients = self._found[first]
        if not leave:
            del self._found[first]
        return found.parameters

    def _kept_for(self, first: torch.Tensor, others: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        """Find the key tensor for these gradients, if they arrived before and are unchanged."""
        found: _KeptGradients | None = self._found.get(first)
        if found is not None:
            same = all(a is b for a, b in zip(others, found.others, strict=True))
            return first if same and found.versions == _versions(first, others) else None
        if _ADDED_UP and all(other is None for other in others):
            return next((each for each, found in self._found.items() if _adds_up(each, found, first)), None)
        return None


def _split(arrived: Gradients) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    at = next(i for i, gradient in enumerate(arrived) if gradient is not None)
    first = arrived[at]
    assert first is not None
    return first, (*arrived[:at], *arrived[at + 1 :])


def _versions(first: torch.Tensor, others: Gradients) -> tuple[int | None, ...]:
    return tuple(None if gradient is None else gradient._version for gradient in (first, *others))


def _adds_up(first: torch.Tensor, found: _KeptGradients, total: torch.Tensor) -> bool:
    """Whether `total` is the sum of the gradients that arrived, which are unchanged."""
    if found.versions != _versions(first, found.others):
        return False
    terms = [first, *(gradient for gradient in found.others if gradient is not None)]
    return all(term.shape == total.shape for term in terms) and torch.equal(sum(terms[1:], terms[0]), total)


_TENSOR = object()
"""Marks a tensor's position in a frame. None would not do: a value may contain None."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A value without its tensors: autograd tracks only tensors passed one by one."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    tensors: int
    """number of leaves that are tensors"""

    @classmethod
    def of(cls, value: Any) -> tuple[Frame, list[torch.Tensor]]:
        """Split `value` into its frame and its tensors, in order."""
        flat, spec = tree_flatten(value)
        leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        return cls(spec, leaves, len(tensors)), tensors

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Rebuild the value with these tensors."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


class Owner(Protocol):
    """The tape that a node belongs to."""

    runners: Sequence[StageRunner]
    hidden_because: str
    """Why a stage is a node, and how to get its operators into the caller's graph: the middle of a sentence."""

    def run_first(self, stage: int, value: Any) -> tuple[Any, list[torch.Tensor]]:
        """Run a stage for the first time, so that it can be recomputed.

        Returns its output, without a graph, and the output tensors that have no gradient in plain training. Autograd
        would otherwise give every floating output of a node a gradient if any of its inputs has one.
        """

    def leave_frame(self, stage: int, frame: Frame) -> None:
        """Receive the frame of a stage's output: a node can return only tensors."""

    def know(self, stage: int, node: Node) -> None:
        """Register the node of a stage, for as long as the graph lives."""

    def backward(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the stage's input and parameters, given those of its output."""


class StageNode(torch.autograd.Function):
    """One stage, run without a graph in the forward, and by its tape in the backward."""

    @staticmethod
    def forward(ctx: Any, owner: Owner, stage: int, frame: Frame, *tensors: torch.Tensor) -> Any:
        """Run the stage. `tensors` are those of the input, then the parameters, so that the engine knows both."""
        ctx.owner, ctx.stage, ctx.unclaimed = owner, stage, Unclaimed()
        owner.know(stage, ctx)
        ctx.set_materialize_grads(False)  # missing gradients stay None, as in plain training
        value = frame.filled(tensors)
        ctx.input_tensors = frame.tensors
        output, without_gradient = owner.run_first(stage, value)
        ctx.mark_non_differentiable(*without_gradient)
        output_frame, made = Frame.of(output)
        owner.leave_frame(stage, output_frame)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # The engine has gradients on here only for create_graph=True. The graph of a recomputed stage is not part of
        # the caller's, so second derivatives would be silently wrong.
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
    """Return the gradients of a stage's input and parameters; compute those of parameters only once.

    A pass may ask for inputs or parameters only, and leave the graph for another one (see `Unclaimed`).
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
    return any(node is not None and goes_through(node) for node in sources)
