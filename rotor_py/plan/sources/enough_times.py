"""When stages have been timed enough for the limit that is set: when better times would hardly change the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor_profiling import OptimizerCost
from rotor_profiling.timing import several_processes
from rotor_py.measure.certified.possible_times import PossibleTimes
from rotor_py.measure.certified.regret import GOOD_ENOUGH, MOST_STAGES, most_regret
from rotor_py.plan.sources.source import Enough
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import Persistent


def enough_for_limit(
    model: TrainedModel, device: torch.device, noticed: Callable[[], OptimizerCost | None]
) -> Enough | None:
    """Whether times are good enough for a plan of one forward within the limit that is set (`measure.certified`).

    None where that is not the question, or has no certificate: no limit is set, the plan is by hand, activations may
    move, a plan within less may be needed, stages may run compiled, or other processes would have to decide alike.
    `noticed` says what optimizers cost that nobody named.
    """
    settings = model.settings
    if settings.mem_limit is None or settings.by_hand is not None or settings.inductor is not None:
        return None
    if settings.replans or model.offload is not None or settings.forwards_in_flight > 1:
        return None
    if several_processes() or not model.alone:
        return None

    hopeless = False

    def enough(times: PossibleTimes, sample: Any) -> bool:
        nonlocal hopeless
        if hopeless or len(times.found.stages) > MOST_STAGES:
            return False
        budget = model.with_communication(model.budget(times.found, sample, device, noticed()))
        regret = most_regret(times, budget, model.limit_bytes(device), Persistent(slots=settings.mem_slots))
        # Intervals get shorter with the root of the number of runs, which are never four times as many.
        hopeless = regret > 2 * GOOD_ENOUGH
        return regret <= GOOD_ENOUGH

    return enough
