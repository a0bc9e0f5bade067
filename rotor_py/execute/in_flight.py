"""What a tape keeps from a forward to its backward, and which backward pass may use it (Rules 8 and 10)."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rotor_py.execute.store import ActivationStore
from rotor_py.stage.attached_stage import AttachedStage


@dataclass(slots=True)
class Held:
    """Inputs a_i (detached), and stages that were run with a graph of their own, by stage."""

    inputs: ActivationStore = field(default_factory=ActivationStore)
    attached: dict[int, AttachedStage] = field(default_factory=dict)

    def copy(self) -> Held:
        """Another one, of the same tensors."""
        return Held(self.inputs.copy(), dict(self.attached))

    def release(self, live: Set[int]) -> None:
        """Let go of every input that no later operation reads (Rule 6)."""
        self.inputs.drop_all_but(live)

    def clear(self) -> None:
        """Let go of everything."""
        self.inputs.clear()
        self.attached.clear()


@dataclass(slots=True)
class Pass:
    """One backward pass over a tape: `position` is the first operation of the replay that it has not run."""

    task: int
    held: Held
    retain_graph: bool
    position: int = 0


class Passes:
    """Hands what a forward left to the backward passes that follow it."""

    def __init__(self, held: Held) -> None:
        self._held: Held | None = held
        self._current: Pass | None = None

    @property
    def used_up(self) -> bool:
        """Whether a pass has begun that leaves nothing for another one."""
        return self._held is None

    @contextmanager
    def begin(self) -> Iterator[Held]:
        """The forward, which fills what is held. If it ends in an error, that is let go of (Rule 10)."""
        held = self._held
        assert held is not None
        try:
            yield held
        except BaseException:
            held.clear()
            raise

    @contextmanager
    def resume(self) -> Iterator[Pass]:
        """The backward pass that calls this. If it ends in an error, what it holds is let go of (Rule 10).

        RuntimeError if an earlier pass has used up what the forward left.
        """
        current = self._find()
        try:
            yield current
        except BaseException:
            self._current = None
            current.held.clear()
            raise

    def _find(self) -> Pass:
        """The pass that is running, known by its graph task (Rule 8)."""
        # Private functions of torch: nothing public tells one backward from the next, nor whether it retains the graph.
        task = torch._C._current_graph_task_id()
        if self._current is None or self._current.task != task:
            if self._held is None:
                raise RuntimeError(
                    "this forward was already used by a backward, which freed what it had kept; call backward with "
                    "retain_graph=True the first time, or run the forward again"
                )
            retain = torch._C._autograd._get_current_graph_task_keep_graph()
            held = self._held
            if retain:
                held = held.copy()  # a pass lets go of inputs as it goes, and another one is to find them
            else:
                self._held = None
            self._current = Pass(task, held, retain)
        return self._current
