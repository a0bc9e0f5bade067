"""Hide measuring and planned forwards from the caller's saved-tensor hooks and checkpoint regions.

# Note [Regions of the caller]
#
# `torch.utils.checkpoint` saves no tensor of a region. When the backward needs one, it recomputes the region, and finds
# the tensor by counting. The number of saved tensors depends on the plan's storage modes, and the plan may change
# before the recompute. So a planned forward is hidden from the region:
#
#  1. The plan's saved tensors stay, as if the region ended before the model and began anew after it. If the backward
#     needs no other tensor of the region, the model is not recomputed.
#  2. Otherwise the region recomputes the model. No backward goes through that second run, so it keeps as little as
#     possible (`NestedRecompute`).
#  3. Selective checkpointing counts none of the model's operators, in the first run or in a recompute.
#  4. A reentrant region first runs under `no_grad`, without a plan. Its recompute is an ordinary planned forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rotor_py.errors import record_fields
from rotor_py.measure.budget import Budget
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.first_run import modes_aside
from rotor_py.stage.saved_tensors import hooks_aside
from rotor_py.units import exact_bytes
from rotor_solver import Loss, Sequence, recompute_all, simulate

_log = logging.getLogger("rotor_py")


_REGIONS = "torch.utils.checkpoint"


@contextmanager
def outer_regions_aside() -> Iterator[bool]:
    """Inside the context, hide the model from the caller's regions (see the Note). Yield whether one is recomputed."""
    with hooks_aside(lambda pack: pack.__module__ == _REGIONS) as hooks, modes_aside(_REGIONS):
        yield any(pack.__qualname__.startswith("_recomputation_hook") for pack in hooks)


class NestedRecompute:
    """Chooses the sequence for a planned forward in a recompute of the caller's region (Rule 2 of the Note)."""

    def __init__(self) -> None:
        self._known: tuple[Budget, Sequence, int] | None = None
        self._warned = False

    def sequence(self, plan: StepPlan, held_bytes: int, model: TrainedModel) -> Sequence:
        if self._known is None or self._known[0] is not plan.budget:
            sequence = recompute_all(plan.budget.chain)
            during = simulate(plan.budget.chain, sequence).during[: sequence.index(Loss())]
            self._known = plan.budget, sequence, max((plan.budget.chain.input_bytes, *during))
        _, sequence, needed = self._known
        if self._warned or plan.unlimited(model.settings):
            return sequence
        device = model.device_of(plan.input_spec)
        budget = model.with_forwards(plan.budget, plan.measurement, device, max(2, plan.budget.forwards))
        peak, limit = budget.fixed.total + held_bytes + needed, model.limit_bytes(device)
        if peak <= limit:
            return sequence
        self._warned = True
        _log.warning(
            f"take {model.name} out of the region of torch.utils.checkpoint: that recomputes it while its planned "
            f"forward holds {exact_bytes(held_bytes)}, so the step takes up to {exact_bytes(peak)}, and the limit is "
            f"{exact_bytes(limit)}",
            extra=record_fields("second_run_over_limit", peak_bytes=peak, mem_limit=limit),
        )
        return sequence
