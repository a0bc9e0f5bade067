"""Errors that tell a user what to do; all of them are `ValueError`s."""

from __future__ import annotations

from rotor_solver import InfeasibleError

__all__ = ["InfeasibleError", "PlanMismatchError", "UnsupportedModelError"]


_LONGEST = 240


class UnsupportedModelError(ValueError):
    """A model, or an input, that cannot be trained from a plan as it is."""


class PlanMismatchError(ValueError):
    """A plan that was made for something else. `field` says what differs, `planned` and `found` how."""

    def __init__(self, field: str, planned: object, found: object) -> None:
        super().__init__(
            f"the plan was made for another model or input: {shortened(field)} was {shortened(planned)} then and is "
            f"{shortened(found)} now; make a new plan with rotor-plan --save, or let Checkpointable plan by itself"
        )
        self.field = field
        self.planned = planned
        self.found = found


def shortened(value: object) -> str:
    """`str(value)` on one line, with its middle left out where it is long."""
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return text if text.isprintable() else repr(text)[1:-1]
