"""Measure a model that was cut into stages: the stages, and the loss after them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rotor_profiling import (
    Layouts,
    LossCost,
    loss_layouts,
    measure_loss,
)
from rotor_profiling.storage import allocated
from rotor_py.measure.cut import Cut
from rotor_py.measure.discovery_pass import LayerOffers
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import MeasuringOptions, StageMeasurer

_NUMBER = 8
"""Bytes of a scalar, at most."""


class MeasuredCut(NamedTuple):
    """A way to run the stages of a model, and its measured costs."""

    cut: Cut
    measurement: Measurement


def measure(
    cut: Cut,
    value: Any,
    device: torch.device,
    options: MeasuringOptions,
    layer_offers: LayerOffers | None = None,
) -> Measurement:
    """Measure every stage of `cut` on the input `value`, and the loss.

    Without a loss in the `options`, assumes zero time and `loss_temp_bytes` of memory.

    Raises UnusableLossError if the loss cannot be trained with, and ValueError for a device type whose memory cannot be
    measured. Errors of a stage pass through, with a note that names it.
    """
    stages = StageMeasurer(cut, value, device, options, layer_offers=layer_offers)
    output = stages.walk(options.progress)
    cost = unmeasured_loss(device, options.loss_temp_bytes)
    layouts: Layouts = ()
    if options.loss is not None:
        cost = measure_loss(options.loss, output, device=device, output_bytes=stages.activation_bytes)
        layouts = loss_layouts(options.loss, output, device)
    del output
    stages.settle_layouts(layouts)
    return stages.measurement(cost)


def unmeasured_loss(device: torch.device, temp_bytes: int) -> LossCost:
    """Return the assumed cost of an unknown loss: its value, and the gradient that starts its backward."""
    return LossCost(0.0, temp_bytes, 2 * allocated(_NUMBER, device.type))
