"""Saved tensors: whether the backward reads their values, signs or shape, and how a recomputation hands them over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from contextvars import ContextVar
from enum import Enum
from operator import methodcaller
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import is_fake
from rotor_py.errors import InvalidStateError


class Saved(Protocol):
    """An object that autograd holds in place of a saved tensor: it keeps the tensor in some form, or recomputes it."""

    def tensor(self) -> torch.Tensor:
        """Return the tensor, with its dtype and device, any number of times. RuntimeError if it was overwritten."""
        ...


class SavedAsItIs:
    """A tensor, saved unchanged with its version."""

    __slots__ = ("_tensor", "_writes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # without history: Rule 7 of the Note in `compressing_hooks`
        self._writes = tensor._version

    @property
    def overwritten(self) -> bool:
        return self._tensor._version != self._writes

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._writes:
            raise InvalidStateError(
                f"write to the tensor of shape {tuple(self._tensor.shape)} after the backward, which reads it: it was "
                "modified by an in-place operation since the forward",
                kind="saved_tensor_changed",
            )
        return self._tensor


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the storage behind `tensor`, in its dtype, flat and without history."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


# The backward of ReLU and similar nodes reads only the sign of a saved tensor. A saved-tensor hook does not get the
# node that saves. But nodes are numbered in creation order, and a tensor knows the node that made it: if this node has
# the last number, it saves its own result. A node that saves an input is found in the graph behind later tensors.
#
# Hardtanh and ReLU6 need the values. Whether their backward lets a gradient pass at a NaN depends on its position in
# memory: vector instructions and the remainder loop differ. One bit per element cannot record this.


class Need(Enum):
    SHAPE = "its shape"
    POSITIVE = "which numbers are greater than 0"
    POSITIVE_OR_NAN = "which numbers are greater than 0, or NaN"
    NOT_NEGATIVE = "which numbers are 0, or greater"
    NUMBERS = "its numbers"

    def together_with(self, other: Need) -> Need:
        """Return what two nodes, one of this need and one of the other, need of a tensor that both read."""
        if other in (self, Need.SHAPE):
            return self
        return other if self is Need.SHAPE else Need.NUMBERS


# Maximum number of nodes to search for a saving node. A guess: with fewer, values are kept where signs would do.
_MOST_NODES = 256
# Beginnings of the names of nodes that read only the shape of their input. Max pooling saves indices, too.
_SHAPE_ALONE = ("AvgPool", "MaxPool")
_SEEN = ("cpu", "cuda")  # devices on which `need_of` holds, by the source of their kernels


def last_node() -> int:
    """Return the sequence number of this thread's latest node: inside a hook, the node that saves."""
    return torch_compat.get_sequence_nr() - 1


def own_need(tensor: torch.Tensor, number: int) -> Need | None:
    node = _origin(tensor)
    return need_of(node, tensor.device) if node is not None and node._sequence_nr() == number else None


def need_of(node: Node, device: torch.device) -> Need:
    """Return whether the backward of `node` reads values, signs or only the shape of its saved floating tensor."""
    name = node.name()
    if device.type not in _SEEN:
        return Need.NUMBERS
    if name.startswith(_SHAPE_ALONE):
        return Need.SHAPE
    if name == "ReluBackward0" or (name.startswith("ThresholdBackward") and _bound(node, "threshold") == 0):
        return Need.POSITIVE_OR_NAN
    if name.startswith("LeakyReluBackward"):  # any slope
        return Need.POSITIVE
    one_sided = name == "ClampMinBackward0" or (name == "ClampBackward1" and _bound(node, "max") is None)
    return Need.NOT_NEGATIVE if one_sided and _bound(node, "min") == 0 else Need.NUMBERS


def nodes_behind(
    tensors: Iterable[torch.Tensor], numbers: Collection[int], most: int | None = _MOST_NODES
) -> dict[int, Node]:
    """Return the nodes with these sequence numbers in the graph behind `tensors`, searching at most `most` nodes."""
    found: dict[int, Node] = {}
    pending = [node for node in map(_origin, tensors) if node is not None]
    seen: set[Node] = set()
    while pending and len(found) < len(numbers) and (most is None or len(seen) < most):
        node = pending.pop()
        made_at = node._sequence_nr()
        if made_at >= min(numbers) and node not in seen:  # a node is newer than the nodes behind it
            seen.add(node)
            if made_at in numbers:
                found[made_at] = node
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _bound(node: Node, name: str) -> float | None:
    return getattr(node, f"_saved_{name}")  # type: ignore[no-any-return]


def _origin(tensor: torch.Tensor) -> Node | None:
    # Reading `grad_fn` of a view that was written to makes a new node, which would renumber others.
    return None if tensor._is_view() and tensor._version else tensor.grad_fn


# In a recomputed region, the graph of the first run holds no saved tensors. A recomputation saves the same tensors in
# the same order, and hands them over to it. Autograd calls only the innermost hooks, so all of this project's do this.


class Waiting(Protocol):
    """Receives the tensors that autograd saves in a run, one after the other."""

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """Receive `saved`, which stands for the `number`-th saved `tensor`. Raises if the first run saved another."""

    @property
    def ends_after(self) -> int | None:
        """Number of saved tensors after which the run may end; None if it must go to its end."""


class Complete(Exception):  # noqa: N818  # no error: it ends a run
    """Raised to end a run early, when it has handed over all saved tensors."""

    def __init__(self, run: HandingOver) -> None:
        super().__init__()
        self.run = run

    def add_note(self, note: str) -> None:
        """Ignore the note: it is never shown."""


class HandingOver:
    """Context for a run that hands its saved tensors to `waiting`, and ends early when this has all that it needs."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._handed = 0
        self._hooks: Any = None
        self._outside: Any = None

    def __enter__(self) -> HandingOver:
        self._outside = innermost_run.set(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(kind, error, trace)
        innermost_run.reset(self._outside)
        return isinstance(error, Complete) and error.run is self

    def hand_over(self, saved: Saved, tensor: torch.Tensor) -> None:
        self._waiting.receive(self._handed, saved, tensor)
        self._handed += 1

    def end_if_complete(self) -> None:
        if self._handed == self._waiting.ends_after:
            raise Complete(self)

    def _save(self, tensor: torch.Tensor) -> Saved:
        saved = SavedAsItIs(tensor)
        self.hand_over(saved, tensor)
        self.end_if_complete()
        return saved


# The innermost run in progress that hands over its saved tensors, or None.
innermost_run: ContextVar[HandingOver | None] = ContextVar("rotor_py.innermost_run", default=None)


class NoReceiver:
    """Context in which runs hand over no saved tensors by themselves: the caller hands them over."""

    def __enter__(self) -> None:
        self._outside = innermost_run.set(None)

    def __exit__(self, *error: object) -> None:
        innermost_run.reset(self._outside)


tensor_of: Callable[[Saved], torch.Tensor] = methodcaller("tensor")  # unpack hook of saved tensors


class SavedInOrder:
    """Records shape, dtype, layout and sum of the bytes of each tensor that a complete run saves, to compare runs."""

    ends_after = None

    def __init__(self) -> None:
        self.found: list[Hashable] = []

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        self.found.append((tensor.shape, tensor.dtype, tensor.layout, _sum_of_bytes(tensor.detach())))


def _sum_of_bytes(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or is_fake(tensor) or not tensor.numel():
        return None
    return int(tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
