"""Compare a step's measured peak with its plan, and solve again after an overrun.

Memory outside the model, above all the loss, shows only in a watched step. Predicted plans are compared with their
first step on the device.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rotor_profiling import LossCost, Phase
from rotor_py.errors import record_fields
from rotor_py.plan.agreement import gather_objects
from rotor_py.plan.solving import solve
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes
from rotor_solver import InfeasibleError, simulate

_log = logging.getLogger("rotor_py")


_WORTH_SAYING = 10
"""Share of an overrun from which a cause is named. A guess: a wrong one only changes the text of a warning."""


def account_for(loss: Phase, peak_bytes: int, limit: int, plan: StepPlan, model: TrainedModel) -> None:
    """Count the measured bytes of a step by `plan`: its peak, and `loss`, the phase that follows its forward.

    If the limit has no room for them, solve again, once per plan, and log the result. If no plan has room, or the plan
    must not change, warn, and training goes on beyond the limit.
    """
    planned = plan.measurement.loss
    found = _cost(loss, planned, plan.budget.chain.activation[-1])
    if found == planned and peak_bytes <= limit:
        return
    assert plan.sequence is not None
    limit = max(limit, plan.budget.peak_bytes(plan.sequence))  # a plan may exceed it, as its warning said
    measurement = replace(plan.measurement, loss=found)
    kept = found.kept_bytes - planned.kept_bytes
    budget = plan.budget.with_found(measurement, kept, fresh_gradients=plan.fresh_gradients)
    # Bytes that the loss does not explain count as held throughout the step.
    other = max(0, peak_bytes - budget.peak_bytes(plan.sequence)) if peak_bytes > limit else 0
    budget = budget.with_found(measurement, other, fresh_gradients=plan.fresh_gradients)
    peak = budget.peak_bytes(plan.sequence)
    if plan.file is None:
        plan.budget, plan.measurement = budget, measurement
    if peak > limit:
        least = (peak - limit) / _WORTH_SAYING
        more = found.temp_bytes - planned.temp_bytes + kept
        causes = _of_loss(found, planned) if more > least else "", _of_others(other, limit) if other > least else ""
        remedy = _plan_again(plan, model)
        _log.warning(
            "a training step of %s takes %s (%d bytes), and the limit is %s (%d bytes).%s%s %s",
            type(model.core).__name__, format_bytes(peak), peak, format_bytes(limit), limit, *causes, remedy,
            extra=record_fields(
                "over_limit", name=type(model.core).__name__, peak_bytes=peak, mem_limit=limit,
                loss_bytes=found.temp_bytes if causes[0] else 0, other_bytes=other if causes[1] else 0,
                goes_on=budget.peak_bytes(plan.sequence) > limit,
            ),
        )  # fmt: skip


def tell_of_several_plans(peak_bytes: int, limit: int, plan: StepPlan, model: TrainedModel) -> None:
    """Warn of a step over its limit whose forwards follow several plans: nothing says which one to change."""
    plan.overruns += 1
    _log.warning(
        "a training step of %s takes %s (%d bytes), and the limit is %s (%d bytes). Its forwards follow several plans, "
        "so these stay as they are: training goes on, beyond the limit. Write mem_limit=%d.",
        type(model.core).__name__, format_bytes(peak_bytes), peak_bytes, format_bytes(limit), limit,
        max(1, 2 * limit - peak_bytes),
        extra=record_fields("over_limit", name=type(model.core).__name__, peak_bytes=peak_bytes, mem_limit=limit),
    )  # fmt: skip


def _cost(loss: Phase, planned: LossCost, gradient_bytes: int) -> LossCost:
    """Return the loss cost as `measure_loss` counts it: the gradient of the output is part of the chain."""
    return replace(
        planned,
        temp_bytes=max(planned.temp_bytes, loss.rise - gradient_bytes),
        kept_bytes=max(planned.kept_bytes, loss.kept - gradient_bytes),
    )


def _of_loss(found: LossCost, planned: LossCost) -> str:
    need, room = found.temp_bytes, planned.temp_bytes
    return (
        f" Its loss needs {format_bytes(need)} beyond the gradient of the output, where {format_bytes(room)} were "
        f"planned for: pass it as loss=, or loss_tmp_memory_usage={need}, so that it counts from the start."
    )


def _of_others(size: int, limit: int) -> str:
    return (
        f" {format_bytes(size)} more are held than was known, such as other inputs and outputs: let go of them, or "
        f"write mem_limit={limit - size}."
    )


def _plan_again(plan: StepPlan, model: TrainedModel) -> str:
    """Solve again, where allowed; return the outcome in words."""
    plan.overruns += 1
    if plan.file is not None:
        return "The plan is from a file, and stays as it is: training goes on, beyond the limit."
    if model.settings.by_hand is not None:
        return "The checkpoints are set by hand, and stay as they are: training goes on, beyond the limit."
    if not model.alone:
        # Other processes may have found nothing, would not join the solve, and all would wait.
        return "Other processes follow the same plan, so it stays as it is: training goes on, beyond the limit."
    if plan.overruns > 1:
        return "It was planned again before, and the plan stays: training goes on, beyond the limit."
    try:
        sequence = solve(plan, model)
    except InfeasibleError as error:
        return f"Training goes on, beyond the limit: {error}"
    peak = plan.budget.peak_bytes(sequence)
    return f"It was planned again with that, and takes {format_bytes(peak)} ({peak} bytes) from now on."


MARGIN = 0.05
"""Share of a predicted peak by which a step may differ before the model is measured. A guess: transformers differ by
less than a hundredth, convolutions by more where a library takes much memory for itself. Too small costs a needless
measurement, too large hides a wrong prediction."""
_MOST_ASKED = 16
"""Forwards in which processes exchange what they have seen. A guess: the first step is watched and shows it. Too few,
and a wrong prediction stays in use."""


def compare_with_prediction(peak_bytes: int, plan: StepPlan, model: TrainedModel) -> None:
    """Compare the first step by a predicted plan with its prediction; do nothing for other plans and steps.

    If the peak differs by more than the margin, mark the model for measuring (`disproved`), and warn.
    """
    if plan.file is None or plan.file.predicted_for is None or plan.prediction_holds is not None:
        return
    assert plan.sequence is not None
    budget = plan.budget
    expected = max(
        budget.fixed.total + budget.before_bytes,
        budget.beside_chain(plan.sequence) + simulate(budget.chain, plan.sequence).peak,
    )
    # In a first step, kept gradients are only made then. A watch on the CPU counts the state that an optimizer will
    # make when it steps; on CUDA that state is not there yet.
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
    """Whether a step has disproved the prediction, so that the model is measured now.

    Either all processes measure or none. They exchange results in the forwards after the first, and measure once any
    has a wrong prediction and all have a batch `as_large` as the plan's: a larger one would be refused later.
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
