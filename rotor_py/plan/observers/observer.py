"""Define the interface of observers of planned forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import Sequence


@dataclass(frozen=True, slots=True)
class PlannedForward:
    """A forward of `model` on `value` by a plan.

    Attributes:
        sequence: the sequence that it follows: the plan's, unless other forwards are in flight.
        in_flight: how many other forwards are in flight when it begins.
    """

    model: TrainedModel
    plan: StepPlan
    sequence: Sequence
    value: Any
    in_flight: int


class Observer(Protocol):
    """Observes planned forwards and what follows. Must not hold a forward's inputs or outputs."""

    def forward_begins(self, forward: PlannedForward) -> None:
        """Prepare for a forward that is about to run."""

    def forward_failed(self, forward: PlannedForward) -> None:
        """Release everything that belongs to a forward that has raised an error."""

    def forward_returned(self, forward: PlannedForward, output: Any) -> None:
        """Observe the rest of the step: hooks belong to the graph of `output`, and go with it."""
