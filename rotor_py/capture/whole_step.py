"""The measurement of a whole step, where only the main graph is planned: the others count as a part of the loss.

To a plan, all that runs between the main graph's forward and its backward is the loss. So are the graphs that follow.
What earlier graphs keep for their backward is in memory throughout, and counts as kept by the loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rotor_profiling import LossCost, storage_bytes, tensors_in
from rotor_py.capture.measure_graphs import MeasuredGraphs
from rotor_py.measure.measurement import Measurement
from rotor_solver import simulate, store_all

_FRAMES_HOLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""Whether a frame that resumes after a graph break holds on to its inputs: seen in torch 2.5, not in 2.11 and 2.13."""


def with_other_graphs(found: MeasuredGraphs) -> Measurement:
    """The measurement of the main graph, with what other graphs and operators outside graphs keep and need."""
    main = found.main.measurement
    seconds, temp, kept = main.loss.seconds, main.loss.temp_bytes, main.loss.kept_bytes + found.outside_bytes
    output_bytes = main.stages[-1].activation_bytes
    if found.after and _FRAMES_HOLD:
        kept += output_bytes
    for other in found.after:
        # They run unplanned, which stores everything.
        chain = other.measurement.chain(fresh_gradients=True)
        whole = simulate(chain, store_all(chain))
        seconds, temp = seconds + whole.makespan, temp + whole.peak
        kept += sum(other.measurement.gradient_bytes)  # made before the main graph's backward, and held through it
    if found.after:
        # Their peaks include the gradient of the main graph's output, and the solver counts it beside the loss, too.
        temp = max(0, temp - output_bytes)
    kept += sum(other.saved_bytes for other in found.before)
    return replace(main, loss=LossCost(seconds, temp, kept))


def with_loss(measurement: Measurement, cost: LossCost) -> Measurement:
    """The measurement with the cost of the loss added to what counts as the loss already."""
    before = measurement.loss
    total = LossCost(
        before.seconds + cost.seconds, before.temp_bytes + cost.temp_bytes, before.kept_bytes + cost.kept_bytes
    )
    return replace(measurement, loss=total)


def trained_bytes(output: Any) -> int:
    """Bytes of the tensors in a model's output that get a gradient."""
    return storage_bytes(tensor for tensor in tensors_in(output) if tensor.requires_grad)
