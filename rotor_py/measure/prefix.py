"""The layers before the chain, which have nothing to train and get no gradient: no plan changes how they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rotor_profiling import isolated, memory_meter, storage_bytes, tensors_in
from rotor_profiling.instruments import stopwatch
from rotor_profiling.timing import seconds_of
from rotor_py.distributed.whole_parameters import gathered
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import PrefixCost


def run_prefix(cut: Cut, value: Any, device: torch.device) -> tuple[Any, PrefixCost | None]:
    """The input of the chain, and the cost of the layers before it."""
    if not cut.prefix:
        return value, None
    modules = nn.Sequential(*(module for _, module in cut.prefix))
    # A copy, since a layer may write into it.
    value = tree_map_only(torch.Tensor, torch.clone, value)
    with gathered(modules, cut.sharding), isolated(modules, device), torch.no_grad():
        modules(value)  # libraries allocate at the first call what they keep for good
        with memory_meter(device) as meter:
            output = modules(value)
        with stopwatch(device) as watch:
            seconds = seconds_of(lambda: modules(value), watch)
    (phase,) = meter.phases.values()
    return output, PrefixCost(seconds, max(0, phase.rise - storage_bytes(tensors_in(output))))
