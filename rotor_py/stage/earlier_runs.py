"""What must not change from a run of a stage to a later one: a later run would have other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rotor_py.errors import InvalidStateError


class EarlierRuns:
    """Modes and parameters of the stage `function` in its earlier runs of one forward, the first of which is over.

    It is called `name` in errors.
    """

    __slots__ = ("_modes", "_module", "_name", "_written")

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._module = function if isinstance(function, nn.Module) else None
        self._name = name
        self._modes = self._modes_now()
        """of its modules in the first run"""
        self._written = self._written_now()
        """how often each parameter had been written to when the stage ran last"""

    def note(self) -> None:
        """The stage has run, and may run again."""
        self._written = self._written_now()

    @property
    def switched(self) -> bool:
        """Whether a module of the stage was switched between training and evaluation since its first run."""
        return self._modes_now() != self._modes

    def refuse_changes(self) -> None:
        """RuntimeError if a module was switched between training and evaluation, or if a parameter was written to."""
        if self.switched:
            raise InvalidStateError(
                f"stage {self._name!r} was switched between training and evaluation after its forward, and has to be "
                "run again for the backward; call train() and eval() before the forward or after the backward",
                kind="mode_switched",
                name=self._name,
            )
        if self._written != self._written_now():
            raise InvalidStateError(
                f"a parameter of stage {self._name!r} was changed between its forward and its backward, for which the "
                "stage has to be run again; call optimizer.step() after the backward, and with step_in_backward use no "
                "parameter detached in one stage that is trained in a later one",
                kind="parameter_changed",
                name=self._name,
            )

    def _modes_now(self) -> list[bool]:
        return [] if self._module is None else [each.training for each in self._module.modules()]

    def _written_now(self) -> list[int]:
        return [] if self._module is None else [each._version for each in self._module.parameters()]
