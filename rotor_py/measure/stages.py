"""Measuring a model that was cut into stages: the stages, and the loss after them."""

from __future__ import annotations

from collections.abc import Callable
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
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_solver.progress import Progress

_NUMBER = 8
"""Bytes of a number, at most."""


class MeasuredCut(NamedTuple):
    """A way to run the stages of a model, and what the whole step costs then."""

    cut: Cut
    measurement: Measurement


def measure(
    cut: Cut,
    value: Any,
    device: torch.device,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    loss_temp_bytes: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Measurement:
    """Measure every stage of `cut` on the input `value`, and the loss; `options` are those of `StageMeasurer`.

    Without a `loss`, the loss counts as taking no time, and `loss_temp_bytes` of memory. `progress` is called with the
    number of stages done, the number of all, and the name of the one that comes next.

    Raises UnusableLossError if the loss cannot be trained with, and ValueError for a kind of device whose memory cannot
    be measured. What a stage raises passes through, with a note that names the stage.
    """
    stages = StageMeasurer(cut, value, device, **options)
    output = stages.walk(progress)
    cost = unmeasured_loss(device, loss_temp_bytes)
    layouts: Layouts = ()
    if loss is not None:
        cost = measure_loss(loss, output, device=device, output_bytes=stages.activation_bytes)
        layouts = loss_layouts(loss, output, device)
    del output
    stages.settle_layouts(layouts)
    return stages.measurement(cost)


def unmeasured_loss(device: torch.device, temp_bytes: int) -> LossCost:
    """What a loss counts as that nobody has measured: its value, and the gradient that its backward starts with."""
    return LossCost(0.0, temp_bytes, 2 * allocated(_NUMBER, device.type))
