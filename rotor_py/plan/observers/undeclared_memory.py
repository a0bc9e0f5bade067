"""Detect undeclared memory: optimizers that a trainer makes, at their first step, and gradients kept between steps.

Also detect training without a plan: its loop calls another method of the model than the forward.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotor_profiling import UnknownOptimizerError
from rotor_profiling.optimizer import with_inner
from rotor_profiling.storage import dense_parts, has_values
from rotor_py.errors import fields_of, record_fields
from rotor_py.plan.observers.watched_steps import WatchedSteps
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_plans import StepPlans
from rotor_py.plan.trained_model import TrainedModel, cost_of, late_optimizers
from rotor_py.units import exact_bytes
from rotor_solver import InfeasibleError

_log = logging.getLogger("rotor_py")


_waiting: WeakSet[StepPlans] = WeakSet()  # plans of the models whose optimizer is not declared
# Handle of the hook on all optimizers; empty before the first planner, so that importing this library hooks nothing.
_hooks: list[Any] = []


# For each model and optimizer, the model's `planned` at the optimizer's last step; None if it trains other models.
_followed: WeakKeyDictionary[TrainedModel, WeakKeyDictionary[torch.optim.Optimizer, int | None]] = WeakKeyDictionary()
_watched: WeakKeyDictionary[TrainedModel, ref[WatchedSteps]] = WeakKeyDictionary()
_told: WeakSet[TrainedModel] = WeakSet()


def wait_for_optimizers(plans: StepPlans, watched: WatchedSteps) -> None:
    """Detect every optimizer that trains the model of `plans`, before its first step allocates its state.

    If the model's optimizer is declared, only detect optimizer steps without a planned forward.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_about_to_step))
    _followed[plans.model], _watched[plans.model] = WeakKeyDictionary(), ref(watched)
    if plans.model.settings.optimizer is None:
        late_optimizers[plans.model] = WeakKeyDictionary()
        _waiting.add(plans)


def _about_to_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Do not warn of steps that this library takes itself: another planner of the model then has watch=False.
    unwatched = [model.core for model in _followed if model.settings.watch is False]
    for model in list(_followed):
        passes_by = _passes_by(optimizer, model)
        if passes_by is None:
            continue
        if (watched := _watched[model]()) is not None:
            watched.end_retained()
        if passes_by and model not in _told and not any(core is model.core for core in unwatched):
            _told.add(model)
            _log.warning(
                f"an optimizer steps {model.name} without a planned forward since its last step: other methods of the "
                "model (a loss, log_prob, encode, ...) follow no plan. Call the model itself, or wrap the part that "
                "the method calls: model.body = Checkpointable(model.body, ...).",
                extra=record_fields("plan_not_followed", name=model.name),
            )
    _detect(optimizer)


def _passes_by(optimizer: torch.optim.Optimizer, model: TrainedModel) -> bool | None:
    """Whether `optimizer` steps without a planned forward since its last step; None if it does not train `model`."""
    known, now = _followed[model], model.planned
    if optimizer not in known:
        known[optimizer] = 0 if _trained_by(optimizer, model) else None
    before = known[optimizer]
    if before is None:
        return None
    known[optimizer] = now
    if now != before or _is_inside_another(optimizer):
        return False
    return any(_has_gradient(parameter) for parameter in _trained_by(optimizer, model))


def _is_inside_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step runs inside another of the same optimizer, as where a subclass calls `super().step()`."""
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "wrapper")  # torch's
    return sum(frame.f_locals.get("self") is optimizer for frame in frames) > 1


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a gradient other than the zeros that `zero_grad(set_to_none=False)` leaves."""
    parts = [] if parameter.grad is None else dense_parts(parameter.grad)
    return any(not has_values(each) or bool(each.any()) for each in parts)


def _trained_by(optimizer: torch.optim.Optimizer, model: TrainedModel) -> list[torch.Tensor]:
    own = {id(parameter) for parameter in model.core.parameters()}
    return [each for group in optimizer.param_groups for each in group["params"] if id(each) in own]


def _detect(optimizer: torch.optim.Optimizer) -> None:
    for plans in [each for each in _waiting if optimizer not in late_optimizers[each.model]]:
        # Note the optimizer first, so that it is inspected only once even if that fails.
        late_optimizers[plans.model][optimizer] = None
        if not _trained_by(optimizer, plans.model):
            continue
        try:
            cost = cost_of(optimizer)
        except UnknownOptimizerError as error:
            _log.warning("%s", error, extra=fields_of(error))
        else:
            known = late_optimizers[plans.model]
            known.update(dict.fromkeys(with_inner(optimizer)))  # its cost includes the state of inner optimizers
            known[optimizer] = cost
            plans.optimizer_detected()


class KeptGradients:
    """Detects gradients of an earlier step before the forward, so that the first step with them fits the limit, too."""

    def __init__(self, plans: StepPlans) -> None:
        self._plans, self._model = plans, plans.model
        self._known: tuple[object, ...] = ()  # the sequence and the limit of the last check

    def notice(self, plan: StepPlan, value: Any) -> None:
        """If existing gradients take the step on `value` over the limit, warn; plan again if the plan may change."""
        if not plan.fresh_gradients or plan.unlimited(self._model.settings):
            return
        device = self._model.device_of(plan.input_spec)
        limit = self._model.limit_bytes(device)
        known, self._known = self._known, (plan.followed, limit)
        if self._known == known:
            return
        # An upper bound: counts the existing gradients, and those of the backward, though these may be added into them.
        kept = plan.budget.with_gradients_of(self._model.core, device, fresh=False, stepped=self._model.stepped())
        peak = kept.peak_bytes(plan.followed)
        if peak <= limit:
            return
        remedy = plan.why_it_stays(self._model)
        if remedy is None:
            try:
                self._plans.plan_for_kept_gradients(plan, value)
            except InfeasibleError as error:
                remedy = f"Training goes on, beyond the limit: {error}"
            else:
                remedy = "It was planned again with gradients that are kept."
        _log.warning(
            f"{self._model.name} has gradients when a step begins, despite fresh_grads=True: call zero_grad() before "
            f"the forward, or leave fresh_grads off. With them, a step may take {exact_bytes(peak)}, and the limit is "
            f"{exact_bytes(limit)}. {remedy}",
            extra=record_fields("kept_gradients", peak_bytes=peak, mem_limit=limit),
        )
