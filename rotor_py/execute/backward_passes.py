"""Hold a tape's values from the forward to the backward, and decide which backward pass may use them.

Rules are those of the Note in `tape.py`.

Private functions of torch identify a backward pass. They work only inside a node's backward or a hook.
`ctx.needs_input_grad` cannot replace them: the forward sets it, so it does not show which gradients a pass computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from rotor_profiling import storage_bytes, tensors_in, torch_compat
from rotor_profiling.storage import detached
from rotor_profiling.value_tree import tree_map_only
from rotor_py.errors import InvalidStateError
from rotor_py.execute.instructions import Instructions
from rotor_py.stage.compression import Converted
from rotor_py.stage.runner import AttachedStage
from rotor_solver import Backward, Loss

current_task: Callable[[], int] = torch_compat.current_graph_task_id
"""Return the number that torch gives to the running backward pass; -1 outside of a backward."""
retains_graph: Callable[[], bool] = torch_compat.get_current_graph_task_keep_graph
"""Whether the running backward pass retains the graph, so that another pass through it can follow."""


def goes_through(node: Node) -> bool:
    """Whether the running backward pass executes `node`, or `autograd.grad` wants the gradient of the node's leaf."""
    try:
        return torch_compat.will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf whose gradient `torch.autograd.grad` was asked for
        return True


def goes_through_any(nodes: Iterable[Node | None]) -> bool:
    return any(node is not None and goes_through(node) for node in nodes)


class ActivationStore:
    """Stores values (tensors, or nested structures of them) by index, detached, so that they hold no graph.

    With a `storage_dtype`, rounds wider floating-point tensors to it, and returns them in their own dtype. A tensor
    with finite values that would overflow in `storage_dtype` (float16 ends at 65504) is stored in its own dtype.
    """

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        self.storage_dtype = storage_dtype
        self._held: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, index: object) -> bool:
        return index in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __getitem__(self, index: int) -> Any:
        value = self._held[index]
        return value if self.storage_dtype is None else tree_map_only(Converted, Converted.tensor, value)

    def keep(self, index: int, value: Any) -> None:
        value = tree_map_only(torch.Tensor, detached, value)
        self._held[index] = value if self.storage_dtype is None else tree_map_only(torch.Tensor, self._packed, value)

    def adopt(self, index: int, other: ActivationStore, there: int) -> None:
        """Store, without a copy, the value that the store `other` has at the index `there`."""
        self._held[index] = other._held[there]

    def clear(self) -> None:
        self._held.clear()

    def drop_all_but(self, live: Iterable[int]) -> None:
        for index in self._held.keys() - live:
            del self._held[index]

    def copy(self) -> ActivationStore:
        twin = ActivationStore(self.storage_dtype)
        twin._held = dict(self._held)
        return twin

    def held_tensors(self, index: int | None = None) -> list[torch.Tensor]:
        values = list(self._held.values()) if index is None else self._held[index]
        return tensors_in(
            values if self.storage_dtype is None else tree_map_only(Converted, lambda each: each.values, values)
        )

    @property
    def nbytes(self) -> int:
        return storage_bytes(self.held_tensors())

    def _packed(self, tensor: torch.Tensor) -> Any:
        dtype = self.storage_dtype
        assert dtype is not None
        if not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize:
            return tensor
        small = tensor.to(dtype)
        # An infinity that the tensor had before rounding is no overflow.
        overflown = bool((small.isinf() != tensor.isinf()).any())
        return tensor if overflown else Converted(small, tensor.dtype)


@dataclass(slots=True)
class Held:
    """Values that a tape holds, by stage index: detached stage inputs, and recomputed stages with their graphs."""

    inputs: ActivationStore = field(default_factory=ActivationStore)
    attached: dict[int, AttachedStage] = field(default_factory=dict)

    def copy(self) -> Held:
        return Held(self.inputs.copy(), dict(self.attached))

    def clear(self) -> None:
        self.inputs.clear()
        self.attached.clear()


@dataclass(slots=True)
class Pass:
    """A backward pass. `position`: index of its next operation in the replay; `used`: stages consumed before it."""

    task: int
    held: Held
    retain_graph: bool
    used: frozenset[int]
    position: int = 0


class Passes:
    def __init__(self, held: Held, instructions: Instructions) -> None:
        # values for the next pass; None once a pass has begun that leaves none to others
        self.left: Held | None = held
        # nodes by stage; the caller's graph holds them, not the tape
        self.nodes: WeakValueDictionary[int, Node] = WeakValueDictionary()
        self._instructions = instructions
        self._current: Pass | None = None
        self._used: set[int] = set()  # stages whose node a pass without retain_graph has gone, or goes, through

    @contextmanager
    def resume(self, stage: int) -> Iterator[Pass]:
        """Yield the pass that has reached the node of `stage`. InvalidStateError if an earlier pass has consumed it."""
        current = self._current
        if current is None or current.task != current_task():  # Rule 8
            current = None if self.left is None else self._begin()
        if current is None or stage in current.used:
            text = "this forward was already used by a backward: give that retain_graph=True, or run the forward again"
            raise InvalidStateError(text, kind="second_backward")
        try:
            yield current
        except BaseException:  # Rule 10
            self._current = None
            current.held.clear()
            raise

    def _begin(self) -> Pass:
        held, used, retain = self.left, frozenset(self._used), retains_graph()
        assert held is not None
        if retain:
            held = held.copy()  # this pass releases inputs while it runs, and the next one needs them again
        else:
            self.left = self._left_by_this_pass(held)
        self._current = Pass(current_task(), held, retain, used)
        return self._current

    def _left_by_this_pass(self, held: Held) -> Held | None:
        """Return the values that this pass, without retain_graph, leaves to later ones; None if it leaves no node."""
        self._used |= {stage for stage, node in self.nodes.items() if goes_through(node)}
        if not (others := set(self.nodes) - self._used):
            return None
        left = held.copy()
        # Keep the stage inputs that the replay reads before the last backward of the other nodes.
        last = max(self._instructions.backward_at[stage] for stage in others)
        before = (step.operation for step in self._instructions.replay[:last])
        left.inputs.drop_all_but({each.stage for each in before if not isinstance(each, Loss | Backward)})
        return left


Gradients = Sequence[torch.Tensor | None]
# Whether `torch.distributed.pipelining` passes a new tensor to a node in the second pass: the sum of the gradients of
# all outputs, as the gradient of the first output. torch 2.11 does, 2.13 does not.
_ADDED_UP = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class Unclaimed:
    """Parameter gradients of one stage for Rule 11, keyed by the output gradients that they were computed from.

    An entry exists as long as something holds the first of these output gradients. A pipeline does, for the second
    pass, which uses the entry if these are unchanged. After an ordinary backward, nothing holds them.
    """

    def __init__(self) -> None:
        # maps the first output gradient to: the others, the version counters of all, and the parameter gradients
        self._computed: Any = WeakTensorKeyDictionary()

    def keep(self, arrived: Gradients, parameters: Gradients) -> None:
        first, others = _split(arrived)
        self._computed[first] = others, _versions(first, others), parameters

    def take(self, arrived: Gradients, *, leave: bool) -> Gradients | None:
        key = self._key_of(*_split(arrived))
        if key is None:
            return None
        _, _, parameters = self._computed[key] if leave else self._computed.pop(key)
        return parameters  # type: ignore[no-any-return]  # a dictionary of torch's

    def _key_of(self, first: torch.Tensor, others: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        if (found := self._computed.get(first)) is not None:
            known, versions, _ = found
            same = all(a is b for a, b in zip(others, known, strict=True))
            return first if same and versions == _versions(first, others) else None
        if _ADDED_UP and all(other is None for other in others):
            for key, (known, versions, _) in self._computed.items():
                if versions == _versions(key, known) and _add_up_to(first, [key, *known]):
                    return key  # type: ignore[no-any-return]  # a dictionary of torch's
        return None


def _split(arrived: Gradients) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    at, first = next((i, gradient) for i, gradient in enumerate(arrived) if gradient is not None)
    return first, (*arrived[:at], *arrived[at + 1 :])


def _versions(first: torch.Tensor, others: Gradients) -> tuple[int | None, ...]:
    return tuple(None if gradient is None else gradient._version for gradient in (first, *others))


def _add_up_to(total: torch.Tensor, gradients: Gradients) -> bool:
    terms = [gradient for gradient in gradients if gradient is not None]
    return all(term.shape == total.shape for term in terms) and torch.equal(sum(terms[1:], terms[0]), total)
