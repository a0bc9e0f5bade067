"""Find what a backward reads of a saved tensor (values, signs, shape), and hand over what a recomputation saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from operator import methodcaller
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from rotor_profiling import tensors_in, torch_compat
from rotor_profiling.torch_compat import c_autograd, is_fake
from rotor_py.errors import InvalidStateError


class Saved(Protocol):
    """Object that autograd saves in place of a tensor, and which keeps the tensor in some form, or recomputes it."""

    def tensor(self) -> torch.Tensor:
        """Return the tensor, with its dtype and device. Raises RuntimeError if it was written to since it was saved."""


class SavedAsItIs:
    """A tensor that is saved unchanged, and its version counter at that time."""

    __slots__ = ("_tensor", "_writes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # does not refer to the graph: Rule 7 of the Note in `compressing_hooks`
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
    """Return a flat, detached tensor of all elements of the storage of `tensor`, in the same dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def hook_gradients(value: Any, hook: Callable[[Any], object]) -> None:
    """Have each gradient of a tensor in `value` passed to `hook`. The graph holds the hook, which is freed with it."""
    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(hook)


# The backward of ReLU and similar nodes reads only the signs of a saved tensor. A saved-tensor hook gets no node. But
# autograd numbers nodes as it makes them, and a tensor's `grad_fn` is the node that made it: if this has the last
# number, it saves its own result. A node that saves an input is found later, in the graph of tensors computed from it.
#
# Of tensors that Hardtanh and ReLU6 save, values are kept. At a NaN, whether their backward passes the gradient on
# depends on the NaN's position in memory, since vector instructions and the loop over remaining elements differ.


class Need(Enum):
    SHAPE = "its shape"
    POSITIVE = "which numbers are greater than 0"
    POSITIVE_OR_NAN = "which numbers are greater than 0, or NaN"
    NOT_NEGATIVE = "which numbers are 0, or greater"
    NUMBERS = "its numbers"

    def together_with(self, other: Need) -> Need:
        """Return what must be kept of a tensor that two nodes read, one with this need and one with the `other`."""
        if other in (self, Need.SHAPE):
            return self
        return other if self is Need.SHAPE else Need.NUMBERS


# Maximum number of nodes to search for a saving node. A guess: with fewer, values are kept where signs suffice.
_MOST_NODES = 256
# Beginnings of the names of nodes that read only the shape of a floating-point input. Max pooling also saves indices.
_SHAPE_ALONE = ("AvgPool", "MaxPool")
_SEEN = ("cpu", "cuda")  # device types whose kernels read only what `need_of` says, according to their source


def last_node() -> int:
    """Return the number of the last node that this thread made: in a saved-tensor hook, of the node that saves."""
    return torch_compat.get_sequence_nr() - 1


def own_need(tensor: torch.Tensor, number: int) -> Need | None:
    node = _origin(tensor)
    return need_of(node, tensor.device) if node is not None and node._sequence_nr() == number else None


def need_of(node: Node, device: torch.device) -> Need:
    """Return whether the backward of `node` reads values, signs or the shape of its saved floating-point tensor."""
    name = node.name()
    if device.type not in _SEEN:
        return Need.NUMBERS
    if name.startswith(_SHAPE_ALONE):
        return Need.SHAPE
    if name == "ReluBackward0" or (name.startswith("ThresholdBackward") and _bound(node, "threshold") == 0):
        return Need.POSITIVE_OR_NAN
    if name.startswith("LeakyReluBackward"):  # of any slope
        return Need.POSITIVE
    one_sided = name == "ClampMinBackward0" or (name == "ClampBackward1" and _bound(node, "max") is None)
    return Need.NOT_NEGATIVE if one_sided and _bound(node, "min") == 0 else Need.NUMBERS


def nodes_behind(
    tensors: Iterable[torch.Tensor], numbers: Collection[int], most: int | None = _MOST_NODES
) -> dict[int, Node]:
    """Map sequence `numbers` to nodes in the graph behind `tensors`; drop those not among the first `most` nodes."""
    found: dict[int, Node] = {}
    pending = [node for node in map(_origin, tensors) if node is not None]
    seen: set[Node] = set()
    while pending and len(found) < len(numbers) and (most is None or len(seen) < most):
        node = pending.pop()
        made_at = node._sequence_nr()
        if made_at >= min(numbers) and node not in seen:  # nodes behind a node have lower numbers
            seen.add(node)
            if made_at in numbers:
                found[made_at] = node
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _bound(node: Node, name: str) -> float | None:
    return getattr(node, f"_saved_{name}")  # type: ignore[no-any-return]  # untyped in torch


def _origin(tensor: torch.Tensor) -> Node | None:
    # Reading `grad_fn` of a view that was written to makes a new node, which takes the next number.
    return None if tensor._is_view() and tensor._version else tensor.grad_fn


# In a recomputed region's first run, a hook gives autograd an empty handle for each tensor (`execute/regions.py`). A
# recomputation saves the tensors in the same order, and fills the handles. Autograd calls only the innermost hooks, so
# all hooks of this project do this.


class Waiting(Protocol):
    """Receives the tensors that autograd saves in a run, in the order in which it saves them."""

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """Receive `saved`, which replaces the `number`-th saved `tensor`. Raises if the first run saved another one."""

    @property
    def ends_after(self) -> int | None:
        """Number of saved tensors after which the run may end early; None if it may not."""


class Complete(Exception):  # noqa: N818  # no error: it ends a run
    """Raised to end `run` early, once it has handed over all tensors that its receiver needs."""

    def __init__(self, run: HandingOver) -> None:
        super().__init__()
        self.run = run


class HandingOver:
    """Context for a run that hands its saved tensors to `waiting`, and ends early once `waiting` has all it needs."""

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


innermost_run: ContextVar[HandingOver | None] = ContextVar("rotor_py.innermost_run", default=None)


tensor_of: Callable[[Saved], torch.Tensor] = methodcaller("tensor")  # unpack hook for saved tensors


class SavedInOrder:
    """Records shape, dtype, layout and the sum of all bytes of each tensor that a run saves, to compare runs."""

    ends_after = None

    def __init__(self) -> None:
        self.found: list[Hashable] = []

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        self.found.append((tensor.shape, tensor.dtype, tensor.layout, _sum_of_bytes(tensor.detach())))


def _sum_of_bytes(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or is_fake(tensor) or not tensor.numel():
        return None
    return int(tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


_Hook = Callable[[Any], Any]
innermost_hooks: Callable[[bool], tuple[_Hook, _Hook] | None] = getattr(
    c_autograd, "_top_saved_tensors_default_hooks", lambda _: None
)
"""Return the innermost saved-tensor hooks, with True even disabled ones; None without hooks, and before torch 2.8."""


@contextmanager
def hooks_aside(which: Callable[[_Hook], bool] = lambda pack: True) -> Iterator[list[_Hook]]:
    """Inside the context, remove the innermost hooks, while `which` is true of their pack functions; yield these."""
    hooks: list[tuple[_Hook, _Hook]] = []
    # With True, hooks that tracing disables count, too.
    while (found := innermost_hooks(True)) is not None and which(found[0]):
        c_autograd._pop_saved_tensors_default_hooks()
        hooks.append(found)
    try:
        yield [pack for pack, _ in hooks]
    finally:
        for pack, unpack in reversed(hooks):
            c_autograd._push_saved_tensors_default_hooks(pack, unpack)
