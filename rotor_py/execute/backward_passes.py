"""Hold a tape's values from the forward to the backward, and say which backward pass may use them.

Rules refer to the Note in `tape`.

A backward pass is identified by private functions of torch: no public function distinguishes one pass from the next or
says what it is for. They work only inside a node's backward or a hook. `ctx.needs_input_grad` is no substitute: it says
what had a gradient in the forward, whatever this pass was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch.autograd.graph import Node

from rotor_profiling import torch_compat
from rotor_py.errors import InvalidStateError
from rotor_py.execute.instructions import Instructions
from rotor_py.execute.store import ActivationStore
from rotor_py.stage.runner import AttachedStage

_NO_TASK = -1


def current_task() -> int:
    """Return the number of the pass, unique in the process."""
    return torch_compat.current_graph_task_id()


def in_backward() -> bool:
    """Whether a backward pass is running."""
    return current_task() != _NO_TASK


def retains_graph() -> bool:
    """Whether the pass retains the graph, so that another can follow."""
    return torch_compat.get_current_graph_task_keep_graph()


def goes_through(node: Node) -> bool:
    """Whether the pass runs `node`, or was asked for the gradient of the leaf that it stands for."""
    try:
        return torch_compat.will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf whose gradient `torch.autograd.grad` was asked for
        return True


@dataclass(slots=True)
class Held:
    """Inputs a_i (detached), and stages run with a graph of their own, by stage."""

    inputs: ActivationStore = field(default_factory=ActivationStore)
    attached: dict[int, AttachedStage] = field(default_factory=dict)

    def copy(self) -> Held:
        """Copy the mappings; tensors are shared."""
        return Held(self.inputs.copy(), dict(self.attached))

    def clear(self) -> None:
        self.inputs.clear()
        self.attached.clear()


@dataclass(slots=True)
class Pass:
    """One backward pass over a tape: `position` is the first operation of the replay that it has not run.

    `used` holds the stages that earlier passes have consumed.
    """

    task: int
    held: Held
    retain_graph: bool
    used: frozenset[int]
    position: int = 0


class Passes:
    """Hands the values of a forward to the backward passes that follow it."""

    def __init__(self, held: Held, instructions: Instructions) -> None:
        self._instructions = instructions
        self._held: Held | None = held
        self._current: Pass | None = None
        self._nodes: WeakValueDictionary[int, Node] = WeakValueDictionary()
        self._used: set[int] = set()
        """stages whose backward has run in a pass that did not retain the graph"""

    def know(self, stage: int, node: Node) -> None:
        """Register the node of a stage, for as long as the graph lives."""
        self._nodes[stage] = node

    @property
    def used_up(self) -> bool:
        """Whether a pass has begun that leaves nothing for another one."""
        return self._held is None

    @contextmanager
    def begin(self) -> Iterator[Held]:
        """Enter the forward, which fills the held values. Release them on an error (Rule 10)."""
        held = self._held
        assert held is not None
        try:
            yield held
        except BaseException:
            held.clear()
            raise

    @contextmanager
    def resume(self, stage: int) -> Iterator[Pass]:
        """Enter the backward pass that calls this for a stage. Release what the pass holds on an error (Rule 10).

        Raises RuntimeError if an earlier pass has consumed what the forward left.
        """
        current = self._find()
        if current is None or stage in current.used:
            raise InvalidStateError(
                "this forward was already used by a backward, which freed what it had kept; call backward with "
                "retain_graph=True the first time, or run the forward again",
                kind="second_backward",
            )
        try:
            yield current
        except BaseException:
            self._current = None
            current.held.clear()
            raise

    def concerns_nodes(self) -> bool:
        """Whether the running pass goes through the node of any stage."""
        return any(goes_through(node) for node in self._nodes.values())

    def _find(self) -> Pass | None:
        """Find the running pass by its graph task (Rule 8); None if nothing is left for it."""
        task, retain = current_task(), retains_graph()
        if self._current is None or self._current.task != task:
            if self._held is None:
                return None
            held, used = self._held, frozenset(self._used)
            if retain:
                held = held.copy()  # a pass releases inputs as it goes; the next pass must still find them
            else:
                self._held = self._left_by_this_pass(held)
            self._current = Pass(task, held, retain, used)
        return self._current

    def _left_by_this_pass(self, held: Held) -> Held | None:
        """What remains after a pass that does not retain the graph: None if it goes through all nodes."""
        self._used |= {stage for stage, node in self._nodes.items() if goes_through(node)}
        if not (others := set(self._nodes) - self._used):
            return None
        left = held.copy()
        left.inputs.drop_all_but(self._instructions.read_before_backward(others))
        return left
