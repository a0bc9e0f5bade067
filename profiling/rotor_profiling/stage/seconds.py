"""The seconds of one stage, in each way in which an executor runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from rotor_profiling.stage.gradients import Layouts, gradients_at, gradients_for, leaves_of, with_graph
from rotor_profiling.stage.runner import Runner
from rotor_profiling.storage import wait_for
from rotor_profiling.timing import lap_seconds


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Median seconds of a stage, as in `StageCost`."""

    nograd_seconds: float
    forward_seconds: float
    backward_seconds: float
    skipped_output_seconds: float


def measure_seconds(
    runners: Sequence[Runner], value: Any, device: torch.device, arriving: Layouts = ()
) -> list[StageSeconds]:
    """Time the ways to run one stage: the first by itself, the others by how much longer they take, run by run.

    Two ways are compared inside a run, because from run to run a busy machine differs by more than they do.
    """
    runner = runners[0]
    with torch.no_grad():
        _, surroundings = runner.first(value)
    made = gradients_for(runner.forward(leaves_of(value)), layouts=arriving)
    gradients = [gradient for gradient in made if gradient is not None]

    def run(lap: Callable[[], None]) -> None:
        with torch.no_grad():
            runner.again(value, surroundings)
        lap()
        for each in runners:
            leaf = leaves_of(value)
            outputs = with_graph(each.forward(leaf))
            lap()
            if outputs:
                torch.autograd.backward(outputs, gradients)
                wait_for(gradients_at(leaf))
            lap()
            del outputs  # else they would be freed inside the next lap
        # One right after the other, so that caches hold about the same for both. The output is what they differ in.
        for skip_output in (True, False) if runner.can_skip_output else ():
            runner.forward(leaves_of(value), skip_output=skip_output)
            lap()

    skipping = 1 + 2 * len(runners)  # the lap that skips its output; the next one does not
    measured = lap_seconds(run, device, laps=skipping + (2 if runner.can_skip_output else 0))
    nograd, forward, backward = (median(laps[at] for laps in measured) for at in range(3))
    skipped = _difference(measured, skipping + 1, skipping) if runner.can_skip_output else 0.0
    # Noise can make the difference negative, or larger than a forward, and `Chain` refuses both.
    skipped = max(0.0, min(skipped, nograd, forward))
    found = []
    for number in range(len(runners)):
        # Stored in part, a stage does all that it does when stored whole, and more: a difference below zero is noise.
        longer_forward = max(0.0, _difference(measured, 2 * number + 1, 1))
        longer_backward = max(0.0, _difference(measured, 2 * number + 2, 2))
        found.append(StageSeconds(nograd, forward + longer_forward, backward + longer_backward, skipped))
    return found


def _difference(measured: list[list[float]], at: int, other: int) -> float:
    """The median of how much longer one lap takes than another one of the same run."""
    return median(laps[at] - laps[other] for laps in measured)
