"""The measurement of a whole step, where only the main graph is planned: the others count as a part of the loss.

To a plan, all that runs between the main graph's forward and its backward is the loss. So are the graphs that follow.
What earlier graphs keep for their backward is in memory throughout, and counts as kept by the loss.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rotor_profiling import LossCost
from rotor_py.capture.measured_graphs import MeasuredGraphs
from rotor_py.measure.measurement import Measurement
from rotor_solver import simulate, store_all

_FRAMES_HOLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""Whether a frame that resumes after a graph break holds on to its inputs: seen in torch 2.5, not in 2.11 and 2.13."""


def whole_step(found: MeasuredGraphs, main: Measurement) -> Measurement:
    """The measurement of the `main` graph, with what other graphs, operators outside all graphs and the loss need."""
    seconds, temp, kept = main.loss.seconds, main.loss.temp_bytes, main.loss.kept_bytes + found.outside_bytes
    output_bytes = main.stages[-1].activation_bytes
    if found.after and _FRAMES_HOLD:
        kept += output_bytes
    # Graphs go backward one after the other: a gradient that several of them add to waits from one to another.
    kept += found.shared_gradient_bytes
    for other in found.after:
        # They run unplanned, which stores everything.
        chain = other.measurement.chain(fresh_gradients=True)
        whole = simulate(chain, store_all(chain))
        seconds, temp = seconds + whole.makespan, temp + whole.peak
        # Made before the main graph's backward, and held through it. The peak has them already, but not what the model
        # returned: to a chain, that ends with its backward.
        made = sum(other.measurement.gradient_bytes)
        kept, temp = kept + made, max(0, temp - made)
    kept += found.returned_bytes
    if found.after:
        # Their peaks include the gradient of the main graph's output, and the solver counts it beside the loss, too.
        temp = max(0, temp - output_bytes)
    kept += sum(other.saved_bytes for other in found.before)
    if found.loss is not None:
        seconds, temp = seconds + found.loss.seconds, temp + found.loss.temp_bytes
        kept += found.loss.kept_bytes
    return replace(main, loss=LossCost(seconds, temp, kept))
