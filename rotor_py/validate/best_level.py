"""Choose the fastest hand-set checkpointing level within a limit, by real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py.by_hand.levels import LEVELS
from rotor_py.by_hand.strategy import ByHand
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InfeasibleError
from rotor_py.measure.device import limit_bytes
from rotor_py.units import exact_bytes, format_bytes
from rotor_py.validate.steps import TrainingStep, state_restored
from rotor_solver import Sequence, simulate


@dataclass(frozen=True, slots=True)
class StepCost:
    """A strategy's peak in bytes and its seconds, predicted from measured stages, and measured.

    The predicted peak includes the optimizer step; the measured one does not.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The lowest level within `mem_limit`, its cost, and the cost of the optimal plan for the limit.

    `peaks` are the predicted peaks of levels 0 to 5.
    """

    level: int
    mem_limit: int
    chosen: StepCost
    optimal: StepCost
    peaks: tuple[int, ...]


def best_level(
    model: nn.Module,
    batch: Any,
    mem_limit: float | str,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fresh_grads: bool = False,
    **options: Any,
) -> LevelChoice:
    """Find the lowest level with which a step of `model` on `batch` has a measured peak of at most `mem_limit`.

    Takes real steps without the optimizer's, then restores gradients, buffers and the random state. Calls hooks of
    parameters.

    Args:
        model: any model that `Checkpointable` takes.
        batch: a tensor, a tuple of positional or a dict of keyword arguments.
        mem_limit: the peak of a whole step: bytes, or a text such as "4GB", "512MiB", "80%".
        loss: a function of the output. Without it, the output's scalars are summed, or all of it if there are none.
        optimizer: the optimizer, whose state counts.
        fresh_grads: gradients are freed between steps.
        options: other options of `Checkpointable`.

    Raises:
        InfeasibleError: no level fits. `min_bytes` is the least peak of all levels; the optimal plan may still fit.
        ValueError: `mem_limit` is not a size.
        UnsupportedModelError: the model or the batch cannot be planned.
    """
    planned = Checkpointable(model, batch, loss=loss, optimizer=optimizer, fresh_grads=fresh_grads, **options)
    assert planned.budget is not None
    limit = limit_bytes(mem_limit, planned.device)
    step = TrainingStep(
        planned.model, batch, loss or _sum, optimizer, planned.device, fresh_grads, steps_optimizer=False
    )
    found = {level: ByHand(level=level).sequence(model, planned.budget, None) for level in LEVELS}
    peaks = {level: planned.budget.peak_bytes(sequence) for level, sequence in found.items()}
    for level, sequence in found.items():
        # Skip levels predicted not to fit: on a device, a try could run out of memory.
        if peaks[level] > limit:
            continue
        chosen = _measure_cost(planned, sequence, step)
        # Check the measurement too: a prediction may be slightly low, and the limit is about real steps.
        if chosen.measured_peak_bytes <= limit:
            optimal = _measure_cost(planned, planned.compute_sequence(limit), step)
            return LevelChoice(level, limit, chosen, optimal, tuple(peaks.values()))
    lowest = min(peaks, key=peaks.__getitem__)
    least = peaks[lowest]
    raise InfeasibleError(
        f"no level fits: the least, level {lowest}, needs {exact_bytes(least)} for a step; the limit is "
        f"{exact_bytes(limit)}. The optimal plan needs {format_bytes(planned.budget.least_bytes())} at least: leave "
        "the level out.",
        min_bytes=least,
        mem_limit=limit,
        kind="no_level_fits",
    )


def _measure_cost(planned: Checkpointable, sequence: Sequence, step: TrainingStep) -> StepCost:
    assert planned.budget is not None
    planned.sequence = sequence
    with state_restored(planned):
        with step.taken(planned) as peak:
            pass
        seconds = step.seconds(planned)
    return StepCost(
        predicted_peak_bytes=planned.budget.peak_bytes(sequence),
        measured_peak_bytes=peak,
        predicted_seconds=simulate(planned.budget.chain, sequence).makespan,
        measured_seconds=seconds,
    )


def _sum(output: Any) -> torch.Tensor:
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    losses = [tensor for tensor in tensors if tensor.dim() == 0] or tensors
    return torch.stack([tensor.sum() for tensor in losses]).sum()
