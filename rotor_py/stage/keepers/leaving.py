"""A run of a stage whose saved memory may leave for another tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rotor_profiling.storage import tensors_in
from rotor_py.offload.offload_saved import LEAST_BYTES, LeavingMemory
from rotor_py.stage.keepers.keeper import Keeping
from rotor_py.stage.runner import StageRunner


def run_leaving(runner: StageRunner, value: Any, context: tuple[Any, ...] = ()) -> tuple[Any, LeavingMemory]:
    """Run a stage in the graph around it; returns its output, and what it saved that could leave memory.

    What goes into the stage stays, as do its parameters; and so does what comes out, as long as anybody holds it. Where
    the runner keeps something in another form, that stays as well.
    """
    leaving = LeavingMemory()
    with Keeping(leaving, _in_memory_anyway(runner, (value, context)), least_bytes=LEAST_BYTES, reads_values=False):
        output = runner.forward(value, context)
    return output, leaving


def _in_memory_anyway(runner: StageRunner, value: Any) -> Iterable[torch.Tensor]:
    yield from tensors_in(value)
    if isinstance(runner.function, torch.nn.Module):
        yield from runner.function.parameters()
        yield from runner.function.buffers()
