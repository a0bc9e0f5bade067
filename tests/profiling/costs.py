"""Stages on inputs of one unit of memory, so that their costs can be worked out by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor_profiling import StageContext, StageCost, measure_ways, stage_layouts, storage_bytes, storages, tensors_in
from rotor_profiling.backends import stopwatch
from rotor_profiling.stage.seconds import estimate, time_ways
from rotor_py.stage.runner import StageRunner

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 128
UNIT = ROWS * WIDTH * 4
"""Bytes of one activation."""
WEIGHT = WIDTH * WIDTH * 4
"""Bytes of the weight of a square linear layer: two units."""
BIAS = WIDTH * 4
START = 8
"""The measured backward starts at a scalar, and with the gradient of a scalar: two numbers of four bytes."""

assert WEIGHT == 2 * UNIT


def unit(requires_grad: bool = True) -> torch.Tensor:
    """An input of one unit."""
    return torch.randn(ROWS, WIDTH).requires_grad_(requires_grad)


def square(bias: bool = False) -> nn.Linear:
    """A linear layer from one unit to one unit."""
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def cost(function: Callable[[Any], Any], value: Any, **options: Any) -> StageCost:
    """What `function` costs on `value`, with no random state kept, and parameters owned by the caller."""
    options = {"device": CPU, "input_bytes": storage_bytes(tensors_in(value))} | options
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    owned = [*storages(parameters), *options.pop("owned", ())]
    runner = StageRunner(function, "stage", preserve_rng_state=False)
    context = StageContext(owned=owned, **options)
    stage_layouts(runner, value, context.device)  # the first run: libraries choose algorithms
    (found,), _ = measure_ways((runner,), value, context)
    with stopwatch(context.device) as watch:
        runs = [time_ways((runner,), value, context, watch)[0] for _ in range(3)]
    return StageCost.of(found, estimate(runs)[0])
