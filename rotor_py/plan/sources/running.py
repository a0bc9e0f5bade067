"""Measuring stages and running them, as it is done wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence as Operations
from typing import Any

from torch import nn

from rotor_profiling.backends import operators, prediction
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.distributed.whole_parameters import is_sharded
from rotor_py.execute import regions
from rotor_py.execute.guarded_tape import GuardedTape
from rotor_py.execute.lone_node import lone_node
from rotor_py.execute.program import Program, program
from rotor_py.execute.tape import replay
from rotor_py.measure.stage_measurer import MeasuringOptions
from rotor_py.measure.stepped_parameters import stepped_parameters
from rotor_py.plan.sources.source import Following, Measuring
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.ways.elsewhere import ELSEWHERE
from rotor_solver import Sequence

_MOST_READ = 8
"""Sequences that are remembered as they were read. A guess: each forward in flight may follow one of its own."""


class Replay:
    """Runs stages by sequences, each of which it reads once while it is in use."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: list[tuple[Sequence, Program]] = []
        """those that were followed last, the latest at the end"""

    def __call__(self, runners: Operations[StageRunner], value: Any, how: Following) -> Any:
        sequence = how.sequence
        # Sequences are compared as objects: comparing thousands of operations would take longer than small stages do.
        read = next((each for each in self._read if each[0] is sequence), None)
        if read is None:
            read = sequence, program(len(runners), sequence)
            self._read = [*self._read[1 - _MOST_READ :], read]
        with operators():
            if is_sharded(self._model):
                # FSDP hooks modules and parameters; only the engine's own nodes call these hooks in their order.
                return regions.run(runners, regions.regions(sequence), value, read[1].options)
            if how.smaller is not None:
                return GuardedTape(runners, read[1], how.smaller).forward(value)
            return replay(runners, read[1], value, tier=how.tier)


def measuring_options(model: nn.Module, how: Measuring) -> MeasuringOptions:
    """How the stages of `model` are measured."""
    settings = how.settings
    return MeasuringOptions(
        loss=settings.loss,
        progress=how.progress,
        group=meeting_in_stages(model),
        preserve_rng_state=settings.preserve_rng_state,
        fresh_gradients=settings.fresh_grads,
        loss_temp_bytes=settings.loss_tmp_memory_usage,
        cache=settings.cache,
        keepers=tuple(keeper for keeper in settings.keepers if keeper is not ELSEWHERE),
        elsewhere=ELSEWHERE in settings.keepers,
        closely=how.closely,
        stepped=stepped_parameters(model, settings.step_in_backward),
        # Elsewhere the device works meanwhile, also where it is predicted.
        as_node=lone_node if how.device.type == "cpu" and prediction() is None else None,
    )
