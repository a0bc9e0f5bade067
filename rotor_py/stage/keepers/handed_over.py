"""What a stage saves when it is run again, handed over to those who wait for it.

The graph of its first run stays, and holds nothing of what it saved. A later run saves the same tensors in the same
order, be it as they are or in part. Autograd calls the innermost hooks alone, so each of them hands over what it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from operator import methodcaller
from types import TracebackType
from typing import Any, Protocol

import torch

from rotor_py.stage.keepers.saved import Saved, SavedAsItIs


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
