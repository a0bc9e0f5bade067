"""A plan that was predicted for a device, compared with the first step that follows it there."""

from __future__ import annotations

import logging

from rotor_py.errors import record_fields
from rotor_py.plan.agreement import gather_objects
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes
from rotor_solver import simulate

_log = logging.getLogger("rotor_py")
MARGIN = 0.05
"""The part of a predicted peak by which a step may differ before the model is measured. A guess: transformers differ by
less than a hundredth, and convolutions by more where a library takes much memory for itself."""
_MOST_ASKED = 16
"""Forwards in which processes ask each other what they have seen. A guess: the first step shows it, and is watched."""


def compare_with_prediction(peak_bytes: int, plan: StepPlan, model: TrainedModel) -> None:
    """Note what the first step shows that follows a predicted plan; nothing for other plans and steps.

    If the peak differs by more than the margin, the model is to be measured (`disproved`), and a warning says so.
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
    when = "the next step" if model.alone else "the next step in which the batch of every process is as large"
    again = f"It is measured here, and planned again, at {when}."
    _log.warning(
        "the plan was predicted for %s, and a training step of %s takes %s (%d bytes) where %s (%d bytes) were "
        "predicted. %s",
        plan.file.predicted_for, type(model.core).__name__, format_bytes(peak_bytes), peak_bytes,
        format_bytes(expected), expected, again,
        extra=record_fields("other_than_predicted", peak_bytes=peak_bytes, predicted_bytes=expected),
    )  # fmt: skip


def disproved(plan: StepPlan, model: TrainedModel, *, as_large: bool) -> bool:
    """Whether a step has shown that the prediction does not hold here, so that the model is measured now.

    Of several processes, all measure or none. So they ask each other in the forwards that follow the first, and measure
    once any has seen it and all have a batch `as_large` as the plan is for: a larger one would be refused later.
    """
    if plan.file is None or plan.file.predicted_for is None:
        return False
    group = model.group
    if group is None or model.alone:
        return plan.prediction_holds is False
    plan.asked += 1
    if not 1 < plan.asked <= _MOST_ASKED:
        return False
    found = gather_objects((plan.prediction_holds, as_large), group, model.device_of(plan.input_spec))
    if all(holds for holds, _ in found):
        plan.asked = _MOST_ASKED
    return any(holds is False for holds, _ in found) and all(large for _, large in found)
