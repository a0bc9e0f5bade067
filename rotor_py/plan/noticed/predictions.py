"""A plan that was predicted for a device, compared with the first step that follows it there."""

from __future__ import annotations

import logging

from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes
from rotor_solver import simulate

_log = logging.getLogger("rotor_py")
MARGIN = 0.05
"""The part of a predicted peak by which a step may differ before the model is measured. A guess: transformers differ by
less than a hundredth, and convolutions by more where a library takes much memory for itself."""


def compare_with_prediction(peak_bytes: int, plan: StepPlan, model: TrainedModel) -> None:
    """Note what the first step shows that follows a predicted plan; nothing for other plans and steps.

    If the peak differs by more than the margin, the model is measured at the next forward, and a warning says so.
    """
    if plan.file is None or plan.file.predicted_for is None or plan.prediction_holds is not None:
        return
    assert plan.sequence is not None
    budget = plan.budget
    expected = max(
        budget.fixed.total + budget.before_bytes,
        budget.beside_chain(plan.sequence) + simulate(budget.chain, plan.sequence).peak,
    )
    # In a first step, gradients that are kept are only made. A watch on the CPU counts the state that an optimizer will
    # make when it steps; on CUDA it is not there yet.
    on_cpu = model.device_of(plan.input_spec).type == "cpu"
    missing = budget.fixed.gradients + (0 if on_cpu else budget.fixed.optimizer)
    plan.prediction_holds = (1 - MARGIN) * expected - missing <= peak_bytes <= (1 + MARGIN) * expected
    if plan.prediction_holds:
        return
    again = "It is measured here, and planned again, at the next step." if model.alone else "Plan again here."
    _log.warning(
        "the plan was predicted for %s, and a training step of %s takes %s (%d bytes) where %s (%d bytes) were "
        "predicted. %s",
        plan.file.predicted_for, type(model.core).__name__, format_bytes(peak_bytes), peak_bytes,
        format_bytes(expected), expected, again,
    )  # fmt: skip
