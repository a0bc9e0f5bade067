"""Steps that no plan fits: a later one that is as large is refused at once, and not measured again."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from rotor_py.plan.sources.source import Source
from rotor_py.plan.steps.step_spec import StepSpec
from rotor_solver import InfeasibleError

_MOST = 16
"""Refusals that are remembered, the oldest going first. A guess: a data set has few shapes that are too large."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    spec: StepSpec
    error: InfeasibleError


class Refusals:
    """Measuring takes seconds. A data set with a few batches that are too large is not to pay them each time."""

    def __init__(self) -> None:
        self._known: list[_Refusal] = []

    def remember(self, spec: StepSpec, error: InfeasibleError) -> None:
        """No plan fits for steps like `spec`."""
        # A copy has no traceback, which would keep the frames of the step, and their tensors.
        self._known = [*self._known, _Refusal(spec, copy(error))][-_MOST:]

    def raise_if_refused(self, spec: StepSpec, limit_bytes: int, source: Source) -> None:
        """InfeasibleError for a step that needs at least as much as one that was refused for as large a limit."""
        for each in self._known:
            alike = each.spec.model == spec.model and source.covers(spec.input, each.spec.input)
            if alike and _least(each.spec, spec) and limit_bytes <= each.error.mem_limit:
                raise copy(each.error)


def _least(refused: StepSpec, spec: StepSpec) -> bool:
    """Whether the data of `spec` need no less than those that were refused. A batch that masks nothing needs least."""
    return all(refused.answers or ()) or refused.answers == spec.answers
