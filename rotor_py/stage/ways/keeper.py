"""Ways to store that need nothing of the stage: what autograd saves is kept in another form, or in another place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rotor_py.stage.protocol import Run


class Trial(Protocol):
    """Tells by a run of a stage whether a way to store it pays."""

    @property
    def pays(self) -> bool:
        """Whether the way is worth measuring, as far as a run has shown."""

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that the run has saved beside parameters, input and output, but for storages smaller than a page; None
        if no run has shown it.
        """

    def watch(self, run: Run) -> Run:
        """`run`, which is watched, and saves what it saves by itself. RuntimeError where hooks are refused."""


@dataclass(frozen=True, slots=True)
class Known:
    """A trial that needs no run."""

    pays: bool
    saved_bytes: int | None = None

    def watch(self, run: Run) -> Run:
        """`run` itself."""
        return run


class Keeper(Protocol):
    """Keeps what autograd saves in the forward of any stage.

    Processes that train together have to have the same keepers.
    """

    @property
    def name(self) -> str:
        """The name of the way: what follows "stored" in a report. It is written into plans, so it must not change."""

    @property
    def keeps_the_rest(self) -> bool:
        """Whether it may be asked to keep what another keeper of the same run has left as it is."""

    def suits(self, function: Callable[..., Any]) -> bool:
        """Whether a stage can be stored in this way."""

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """`run`, a run of the stage `function`, as one whose graph has saved its tensors in this way.

        It makes the same values.
        """

    def trial(self, function: Callable[..., Any]) -> Trial:
        """What tells whether the way is worth measuring for the stage `function`."""
