"""Errors that tell a user what to do; all of them are `ValueError`s."""

from __future__ import annotations

from rotor_solver import InfeasibleError

__all__ = ["InfeasibleError", "PlanMismatchError", "UnsupportedModelError"]


class UnsupportedModelError(ValueError):
    """A model, or an input, that cannot be trained from a plan as it is."""


class PlanMismatchError(ValueError):
    """A plan that was made for something else. `field` says what differs, `planned` and `found` how."""

    def __init__(self, field: str, planned: object, found: object) -> None:
        super().__init__(
            f"the plan was made for another model or input: {field} was {planned} then and is {found} now; make a new "
            "plan with rotor-plan --save, or let Checkpointable plan by itself"
        )
        self.field = field
        self.planned = planned
        self.found = found
