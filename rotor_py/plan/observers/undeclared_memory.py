"""Detect undeclared memory: optimizers that a trainer makes, at their first step, and gradients kept between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotor_profiling import OptimizerCost, UnknownOptimizerError, optimizer_cost, together
from rotor_py.errors import fields_of, record_fields
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes
from rotor_solver import InfeasibleError

_log = logging.getLogger("rotor_py")


class Noticing(Protocol):
    """A model that counts the cost of optimizers that train its parameters."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def optimizer_noticed(self) -> None: ...


# Weak on both sides: neither a model nor an optimizer may live longer for being tracked.
_seen: WeakKeyDictionary[Noticing, WeakKeyDictionary[torch.optim.Optimizer, OptimizerCost | None]] = WeakKeyDictionary()
"""The waiting models, and the optimizers that have stepped since; None for those that cost them nothing."""
_hooks: list[Any] = []
"""The one hook on all optimizers. Registered once a model waits: importing this library changes no optimizer."""


def wait_for_optimizers(model: Noticing) -> None:
    """Call `model.optimizer_noticed()` before the first step of every optimizer that trains it.

    Before, because the first step allocates the optimizer's state.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_about_to_step))
    _seen[model] = WeakKeyDictionary()


def noticed_cost(model: Noticing) -> OptimizerCost | None:
    """Return the total cost of the detected optimizers that are still alive."""
    costs = [cost for cost in _seen.get(model, {}).values() if cost is not None]
    return together(costs) if costs else None


def _about_to_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    waiting = [(model, seen) for model, seen in _seen.items() if optimizer not in seen]
    if not waiting:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model, seen in waiting:
        seen[optimizer] = None  # before anything is found out: each optimizer is inspected in its first step only
        if not any(id(parameter) in trained for parameter in model.parameters()):
            continue
        try:
            seen[optimizer] = optimizer_cost(optimizer)
        except UnknownOptimizerError as error:
            _log.warning("%s", error, extra=fields_of(error))
        else:
            model.optimizer_noticed()


class KeptGradients:
    """Detects kept gradients before the forward, so that the first step with them stays inside the limit, too."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._known: tuple[object, ...] = ()
        """the last sequence and limit that were checked"""

    def notice(self, plan: StepPlan, plan_again: Callable[[], None]) -> None:
        """Check that a step by `plan` has room for gradients that exist when it begins.

        If not, call `plan_again`, which raises InfeasibleError if no plan fits, and log a line. If the plan must not
        change, warn, and training goes on beyond the limit.
        """
        if not plan.fresh_gradients or plan.unlimited(self._model.settings):
            return
        assert plan.sequence is not None
        device = self._model.device_of(plan.input_spec)
        limit = self._model.limit_bytes(device)
        known = plan.sequence, limit
        if self._known == known:
            return
        self._known = known
        # Together: the gradients that exist, and those that the backward makes by plan. No step takes more.
        kept = plan.budget.with_gradients_of(self._model.core, device, fresh=False, stepped=self._model.stepped())
        peak = kept.peak_bytes(plan.sequence)
        if peak <= limit:
            return
        _log.warning(
            "gradients of %s are there when a step begins, although fresh_grads=True says that they are freed between "
            "steps. Beside them a step may take %s (%d bytes), and the limit is %s (%d bytes). Call zero_grad() before "
            "the forward, or leave fresh_grads off. %s",
            type(self._model.core).__name__, format_bytes(peak), peak, format_bytes(limit), limit,
            self._remedy(plan, plan_again),
            extra=record_fields("kept_gradients", peak_bytes=peak, mem_limit=limit),
        )  # fmt: skip

    def _remedy(self, plan: StepPlan, plan_again: Callable[[], None]) -> str:
        if plan.file is not None:
            return "The plan is from a file, and stays as it is: training goes on, beyond the limit."
        if self._model.settings.by_hand is not None:
            return "The checkpoints are set by hand, and stay as they are: training goes on, beyond the limit."
        if not self._model.alone:
            return "Other processes follow the same plan, so it stays as it is: training goes on, beyond the limit."
        try:
            plan_again()
        except InfeasibleError as error:
            return f"Training goes on, beyond the limit: {error}"
        return "It was planned again with gradients that are kept."
