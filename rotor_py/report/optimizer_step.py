"""What is in memory while the optimizer steps, by owner. It comes after the last operation, and is often the peak."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.report.facts import ReportFacts
from rotor_py.units import format_bytes

NAME = "optimizer step"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Bytes. `fixed` has the optimizer's state, and gradients where they are kept; `scratch` is what the step needs."""

    fixed: int
    input: int
    output: int
    gradients: int
    scratch: int

    @property
    def total(self) -> int:
        """The peak of the optimizer's step."""
        return self.fixed + self.input + self.output + self.gradients + self.scratch

    @property
    def sentence(self) -> str:
        """The step in the words of a report."""
        return f"{NAME}: {format_bytes(self.total)} while it runs"


def optimizer_step(facts: ReportFacts) -> OptimizerStep | None:
    """The optimizer's step in the plan of `facts`; None where no optimizer is known."""
    budget, measurement = facts.budget, facts.measurement
    if budget.step_bytes is None:
        return None
    # A training loop holds the whole output to the end of its step, tensors without a gradient included.
    output = budget.forwards * (measurement.stages[-1].activation_bytes + measurement.held_bytes)
    given = budget.forwards * measurement.input_bytes
    return OptimizerStep(
        fixed=budget.fixed.total,
        input=given,
        output=output,
        gradients=budget.stepping_bytes - given - output,
        scratch=budget.step_bytes,
    )
