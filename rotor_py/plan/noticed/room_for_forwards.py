"""Another sequence for forwards in flight: more of them were seen than there is room for, or in another order."""

from __future__ import annotations

import logging

from rotor_py.errors import record_fields
from rotor_py.plan.solving import solve
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import InfeasibleError

_log = logging.getLogger("rotor_py")


def make_room_for_forwards(plan: StepPlan, model: TrainedModel) -> None:
    """Have a sequence for as many forwards in flight as were seen, and for the order in which their backwards come.

    None of them may be in flight at this moment. A line in the log says so if another sequence is found. A warning is
    logged if there is none: training then goes on with the sequence in use, beyond the limit. Where several processes
    have to plan together, they do so for what they were told, and sequences by hand or from a file stay.
    """
    if not model.alone:
        return
    order = plan.order.to_plan_for(model.settings, alone=True)
    more = plan.most_in_flight > plan.budget.forwards
    if not (more or order != plan.budget.backward_order) or not plan.found_for(model.settings):
        return
    device = model.device_of(plan.input_spec)
    plan.budget = model.with_forwards(plan.budget, plan.measurement, device, plan.most_in_flight)
    sooner = order == "reverse" and plan.budget.forwards > 1 and plan.budget.backward_order != order
    plan.budget = plan.budget.with_backward_order(order)
    assert plan.sequence is not None
    # A plan for any order holds in reverse, too, but a faster one may be found.
    if plan.budget.peak_bytes(plan.sequence) <= model.limit_bytes(device) and not sooner:
        return
    forwards, before, name = plan.budget.forwards, plan.sequence, type(model.core).__name__
    if more:
        _log.warning(
            "planning again: %d forwards of %s are in flight at once. With forwards_in_flight=%d, they have room from "
            "the first step on.",
            forwards, name, forwards,
            extra=record_fields("planning_again", cause="forwards", forwards=forwards),
        )  # fmt: skip
    try:
        solve(plan, model)
    except InfeasibleError as error:
        _log.warning(
            "with %d forwards in flight, training goes on beyond the limit: %s",
            forwards,
            error,
            extra=record_fields("forwards_over_limit", forwards=forwards),
        )
        return
    if sooner and not more and model.settings.backward_order is None and plan.sequence != before:
        _log.warning(
            "planned again: the backwards of %s come in reverse of its %d forwards in flight, for which there is a "
            "faster plan. With backward_order='reverse', it is there from the first step on.",
            name, forwards,
            extra=record_fields("planned_again", forwards=forwards),
        )  # fmt: skip
