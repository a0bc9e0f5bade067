"""What observers see of a planned forward: one small interface for all of them."""

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
        sequence: the sequence that it follows; that of the plan, unless other forwards are in flight.
        in_flight: how many other forwards are in flight when it begins.
    """

    model: TrainedModel
    plan: StepPlan
    sequence: Sequence
    value: Any
    in_flight: int


class Observer(Protocol):
    """Observes planned forwards and what follows them. It must not hold what a forward takes or returns."""

    def forward_begins(self, forward: PlannedForward) -> None:
        """Prepare for a forward that is about to run."""

    def forward_failed(self, forward: PlannedForward) -> None:
        """Let go of what belongs to a forward that has raised an error."""

    def forward_returned(self, forward: PlannedForward, output: Any) -> None:
        """Observe what follows a forward: hooks belong to the graph of `output`, and go with it."""
