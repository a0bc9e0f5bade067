"""What a run with a graph does not hold of its input and output, found with a copy of the input.

For inputs that cannot be watched (`watched_input.py`): tensors of subclasses, and those without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.stage.gradients import leaves_of, scalar_after
from rotor_profiling.stage.runner import Runner
from rotor_profiling.storage import storages


def run_to_release(runner: Runner, value: Any, owned: frozenset[int], meter: MemoryMeter) -> None:
    """Phases "copy" of the input, "run", and "input" and "output", in which these are let go of.

    Tensors whose storages are `owned` are not copied.
    """
    leaf = leaves_of(value)
    meter.mark("copy")
    # A copy, as if another layer had made it: the input itself has other holders, so nothing would ever be freed.
    copy = tree_map_only(torch.Tensor, partial(_copied, owned), leaf)
    meter.mark("run")
    output = runner.forward(copy)
    source = scalar_after(output)
    meter.mark("input")
    del copy
    meter.mark("output")
    del output
    meter.mark("between")
    del source


def released_bytes(phases: Mapping[str, Phase], input_bytes: int) -> tuple[int, int]:
    """Bytes of the input, and of the output, that a run with a graph does not hold on to."""
    # If the copy is not as large as the input in the chain, they are not comparable, and nothing is promised.
    whole = phases["copy"].kept == input_bytes
    return max(0, -phases["input"].kept) if whole else 0, max(0, -phases["output"].kept)


def _copied(owned: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor if owned.issuperset(storages([tensor])) else tensor.clone()
