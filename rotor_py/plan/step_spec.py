"""Which step a plan is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rotor_py.plan.input_spec import gradients_of, same_kind
from rotor_py.plan.model_state import ModelState


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A step of the model in this state on an input of this spec (`input_spec.spec_of`)."""

    model: ModelState
    input: Any

    def same_step(self, other: StepSpec) -> bool:
        """Whether one plan serves both, as far as sizes allow it: the same state, and gradients in the same places."""
        return self.model == other.model and same_kind(self.input, other.input)

    def same_gradients(self, other: StepSpec) -> bool:
        """Whether the same tensors of the input get a gradient."""
        return gradients_of(self.input) == gradients_of(other.input)
