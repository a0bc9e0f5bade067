"""Tensors that autograd saves: who needs them in the backward, and how a recomputation hands them over."""

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
from rotor_profiling.torch_classes import is_fake
from rotor_py.errors import InvalidStateError

# What autograd holds in the place of a tensor that a stage saves: the tensor itself, or what is kept of it.
#
# Rules are those of the Note in `keeper`.


class Kept(Protocol):
    """A tensor in another form."""

    def tensor(self) -> torch.Tensor:
        """A tensor of the same elements, in their dtype and on their device, from the beginning of a storage on.

        May be called several times, or never.
        """
        ...


class Saved(Protocol):
    """What autograd saves in the place of a tensor."""

    def tensor(self) -> torch.Tensor:
        """The tensor, as it was when it was saved. RuntimeError if it was overwritten since."""
        ...


class SavedAsItIs:
    """A tensor with the number of times that it had been written to."""

    __slots__ = ("_tensor", "_writes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # Rule 7: without its history
        self._writes = tensor._version

    @property
    def overwritten(self) -> bool:
        """Whether it was written to since it was saved."""
        return self._tensor._version != self._writes

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._writes:  # overwritten
            raise InvalidStateError(
                f"a tensor of shape {tuple(self._tensor.shape)} that is needed for the backward has been modified by "
                "an in-place operation since the forward; change it after the backward",
                kind="saved_tensor_changed",
            )
        return self._tensor


class Saving(Protocol):
    """Says what autograd saves in the place of tensors."""

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """What stands for `tensor`, which autograd saves; or whoever computes with it, `for_numbers`."""
        ...

    @property
    def undecided(self) -> bool:
        """Whether a run has to go on, for it to be known what is saved."""
        ...


class AsItIs:
    """Saves every tensor as it is."""

    undecided = False

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """`tensor` itself."""
        return SavedAsItIs(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind `tensor`, in its dtype, flat and without history."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


# Who reads a saved tensor in the backward, and what of it: ReLU and its like ask where it is positive, and no more.
#
# The hook that saves a tensor is not told which node saves it. But nodes are numbered in the order in which they are
# made, and a tensor knows the node that it comes from: so a result that is saved by its own node is known at once.
# Nodes
# that save their input are found in the graph, from what is computed after them.
#
# Some bounds are no question of one bit. Of NaN, the backward of hardtanh and ReLU6 lets a gradient pass or not by
# where
# in memory it is: vector instructions do the one, and the loop over what is left after them does the other.


class Need(Enum):
    """What a backward reads of a saved tensor."""

    SHAPE = "its shape"
    POSITIVE = "which numbers are greater than 0"
    POSITIVE_OR_NAN = "which numbers are greater than 0, or NaN"
    NOT_NEGATIVE = "which numbers are 0, or greater"
    NUMBERS = "its numbers"

    def together_with(self, other: Need) -> Need:
        """What is needed if two nodes read a tensor."""
        if other in (self, Need.SHAPE):
            return self
        return other if self is Need.SHAPE else Need.NUMBERS


_MOST_NODES = 256
"""Nodes that are looked at for those that save a tensor: these have just been made, as a rule. A guess."""
_SHAPE_ALONE = ("AvgPool", "MaxPool")
"""How the names begin of nodes that save their input for its shape: where the largest of a window was, indices say."""
_SEEN = ("cpu", "cuda")
"""Devices whose kernels were read for what they need."""


def last_node() -> int:
    """The number of the node that was made last, of this thread: the one that saves, where a hook is called."""
    return torch_compat.get_sequence_nr() - 1


def own_need(tensor: torch.Tensor, number: int) -> Need | None:
    """What node `number`, which saves `tensor`, needs of it, if it is the result of that node; None if it is not."""
    node = _origin(tensor)
    return need_of(node, tensor.device) if node is not None and node._sequence_nr() == number else None


def need_of(node: Node, device: torch.device) -> Need:
    """What the backward of `node` reads of the floating tensor that it has saved."""
    name = node.name()
    if device.type not in _SEEN:
        return Need.NUMBERS
    if name.startswith(_SHAPE_ALONE):
        return Need.SHAPE
    if name == "ReluBackward0" or (name.startswith("ThresholdBackward") and _bound(node, "threshold") == 0):
        return Need.POSITIVE_OR_NAN
    if name.startswith("LeakyReluBackward"):  # whatever the slope
        return Need.POSITIVE
    if name == "ClampMinBackward0" and _bound(node, "min") == 0:
        return Need.NOT_NEGATIVE
    if name == "ClampBackward1" and _bound(node, "min") == 0 and _bound(node, "max") is None:
        return Need.NOT_NEGATIVE
    return Need.NUMBERS


def node_behind(tensors: Iterable[torch.Tensor], number: int) -> Node | None:
    """The node with this number in the graph behind `tensors`; None if it is not there."""
    return nodes_behind(tensors, {number}, most=None).get(number)


def nodes_behind(
    tensors: Iterable[torch.Tensor], numbers: Collection[int], most: int | None = _MOST_NODES
) -> dict[int, Node]:
    """The nodes with these numbers in the graph behind `tensors`, as far as `most` nodes show them."""
    found: dict[int, Node] = {}
    pending = [node for node in map(_origin, tensors) if node is not None]
    seen: set[Node] = set()
    while pending and len(found) < len(numbers) and (most is None or len(seen) < most):
        node = pending.pop()
        made_at = node._sequence_nr()
        if made_at >= min(numbers) and node not in seen:  # a node is made after those that it leads to
            seen.add(node)
            if made_at in numbers:
                found[made_at] = node
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _bound(node: Node, name: str) -> float | None:
    bound: float | None = getattr(node, f"_saved_{name}")
    return bound


def _origin(tensor: torch.Tensor) -> Node | None:
    # A view that was written to gets a new node when it is asked for it, which would change the numbers of others.
    return None if tensor._is_view() and tensor._version else tensor.grad_fn


# What a stage saves when it is run again, handed over to those who wait for it.
#
# The graph of its first run stays, and holds nothing of what it saved. A later run saves the same tensors in the same
# order, be it as they are or in part. Autograd calls the innermost hooks alone, so each of them hands over what it
# saves.


class Waiting(Protocol):
    """Those who wait for what a run saves."""

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """What stands for `tensor`, the one with this number of those that are saved. Errors if it is another one."""

    @property
    def ends_after(self) -> int | None:
        """How many tensors they wait for; None if the run has to go on to its end."""


class Complete(Exception):  # noqa: N818  # no error: it ends a run
    """All that a run was for is there: it need not go on."""

    def __init__(self, run: HandingOver) -> None:
        super().__init__()
        self.run = run

    def add_note(self, note: str) -> None:
        """Nothing: nobody reads it."""


class HandingOver:
    """A run that hands over what it saves, to be made inside of it as a context. It ends when all is there."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._handed = 0
        self._hooks: Any = None
        self._outside: Any = None

    def __enter__(self) -> HandingOver:
        self._outside = _innermost.set(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(kind, error, trace)
        _innermost.reset(self._outside)
        return isinstance(error, Complete) and error.run is self

    def hand_over(self, saved: Saved, tensor: torch.Tensor) -> None:
        """What stands for the next tensor."""
        self._waiting.receive(self._handed, saved, tensor)
        self._handed += 1

    def end_if_complete(self) -> None:
        """Leave the run, by `Complete`, if all was handed over, as nobody needs the rest of it."""
        if self._handed == self._waiting.ends_after:
            raise Complete(self)

    def _save(self, tensor: torch.Tensor) -> Saved:
        saved = SavedAsItIs(tensor)
        self.hand_over(saved, tensor)
        self.end_if_complete()
        return saved


_innermost: ContextVar[HandingOver | None] = ContextVar("handing_over", default=None)


def handing_over_now() -> HandingOver | None:
    """The run around this that hands over what it saves; None if nobody waits for that."""
    return _innermost.get()


class NobodyWaits:
    """A context in which a run hands nothing over: whoever opens it does that himself."""

    def __enter__(self) -> None:
        self._outside = _innermost.set(None)

    def __exit__(self, *error: object) -> None:
        _innermost.reset(self._outside)


tensor_of: Callable[[Saved], torch.Tensor] = methodcaller("tensor")
"""The hook by which autograd gets back a saved tensor."""


class SavedInOrder:
    """Receives what a run saves, from its beginning to its end, and holds nothing of it.

    Of every tensor there is its shape, and the sum of its bytes: to hold its numbers would take as much memory as the
    run itself.
    """

    ends_after = None

    def __init__(self) -> None:
        self.found: list[Hashable] = []

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """Note a tensor."""
        self.found.append((tensor.shape, tensor.dtype, tensor.layout, _sum_of_bytes(tensor.detach())))


def _sum_of_bytes(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or is_fake(tensor) or not tensor.numel():
        return None
    return int(tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
