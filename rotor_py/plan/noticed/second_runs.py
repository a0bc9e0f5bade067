"""Forwards that run again inside of a region of the caller's, beside what their first run has kept for its backward.

Rule 2 of the Note in `callers_hooks.py`: nobody goes backward through them.
"""

from __future__ import annotations

import logging

from rotor_py.errors import record_fields
from rotor_py.measure.budget import Budget
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes
from rotor_solver import Loss, Sequence, recompute_all, simulate

_log = logging.getLogger("rotor_py")


class SecondRuns:
    """The sequences of such forwards."""

    def __init__(self) -> None:
        self._known: tuple[Budget, Sequence, int] | None = None
        self._warned = False

    def sequence(self, plan: StepPlan, held_bytes: int, model: TrainedModel) -> Sequence:
        """One that keeps as little as there is; `held_bytes` are what forwards in flight hold.

        A warning is logged, once, if that is beyond the limit.
        """
        if self._known is None or self._known[0] is not plan.budget:
            sequence = recompute_all(plan.budget.chain)
            during = simulate(plan.budget.chain, sequence).during[: list(sequence).index(Loss())]
            self._known = plan.budget, sequence, max((plan.budget.chain.input_bytes, *during))
        _, sequence, needed = self._known
        if not self._warned and not plan.unlimited(model.settings):
            self._warn_above_limit(plan, held_bytes, needed, model)
        return sequence

    def _warn_above_limit(self, plan: StepPlan, held_bytes: int, needed: int, model: TrainedModel) -> None:
        device = model.device_of(plan.input_spec)
        budget = model.with_forwards(plan.budget, plan.measurement, device, max(2, plan.budget.forwards))
        peak, limit = budget.fixed.total + held_bytes + needed, model.limit_bytes(device)
        if peak <= limit:
            return
        self._warned = True
        _log.warning(
            "%s runs a second time for the backward of a region of torch.utils.checkpoint, beside %s (%d bytes) that "
            "its plan keeps for backwards to come: the step takes up to %s (%d bytes), and the limit is %s (%d bytes). "
            "Take the model out of the region, and have the operators around it in regions of their own.",
            type(model.core).__name__, format_bytes(held_bytes), held_bytes, format_bytes(peak), peak,
            format_bytes(limit), limit,
            extra=record_fields("second_run_over_limit", peak_bytes=peak, mem_limit=limit),
        )  # fmt: skip
