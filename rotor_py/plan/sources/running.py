"""Measure and run stages, for all sources."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Operations
from typing import Any, NamedTuple

from torch import nn

from rotor_profiling.backends import operators, prediction
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.distributed.sharding import is_sharded
from rotor_py.execute import regions
from rotor_py.execute.instructions import Instructions, NamedStage, Runners, read_sequence
from rotor_py.execute.oom_retry_tape import OOMRetryTape
from rotor_py.execute.single_stage_replay import single_stage_node
from rotor_py.execute.tape import replay
from rotor_py.measure.stage_measurer import MeasuringOptions
from rotor_py.measure.stepped_parameters import stepped_parameters
from rotor_py.plan.sources.source import Following, Measuring
from rotor_py.stage.storage_modes import ELSEWHERE
from rotor_solver import Sequence

_MOST_READ = 8
"""Parsed sequences to cache. A guess: each forward in flight may follow its own. Too few are parsed again in each
step."""


class _Read(NamedTuple):
    sequence: Sequence
    stages: Operations[NamedStage]
    ways: tuple[tuple[str, ...], ...]
    preserve_rng_state: bool
    instructions: Instructions
    runners: Runners


class SequenceExecutor:
    """Runs stages by sequences. Parses each sequence once while it is in use; its runners serve all forwards."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: list[_Read] = []
        """the most recently used, latest at the end"""

    def __call__(
        self,
        stages: Operations[NamedStage],
        make: Callable[[Following], Runners],
        value: Any,
        how: Following,
        context: tuple[Any, ...] = (),
    ) -> Any:
        """Run `stages` on `value`; `make` makes their runners, if this sequence has none yet."""
        # Compared as objects: comparing thousands of operations would take longer than small stages do.
        read = next(
            (
                each
                for each in self._read
                if each.sequence is how.sequence
                and each.stages is stages
                and each.ways is how.ways
                and each.preserve_rng_state == how.preserve_rng_state
            ),
            None,
        )
        if read is None:
            instructions = read_sequence(len(stages), how.sequence)
            whole = make(how)
            # A region recomputes stages whole: what a stage stored in part recomputes would be held to its end.
            runners = whole if is_sharded(self._model) else whole.by(instructions.options)
            read = _Read(how.sequence, stages, how.ways, how.preserve_rng_state, instructions, runners)
            self._read = [*self._read[1 - _MOST_READ :], read]
        instructions, runners = read.instructions, read.runners
        with operators():
            if is_sharded(self._model):
                # FSDP hooks modules and parameters; only the engine's own nodes call these hooks in their order.
                items = regions.regions(how.sequence)
                return regions.run(runners, items, value, instructions.options, context)
            if how.smaller is not None:
                return OOMRetryTape(runners, instructions, how.smaller, context).forward(value)
            return replay(runners, instructions, value, tier=how.tier, context=context)


def measuring_options(model: nn.Module, how: Measuring) -> MeasuringOptions:
    """Return the options for measuring the stages of `model`."""
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
        # Other devices work in parallel to Python, simulated ones too.
        as_node=single_stage_node if how.device.type == "cpu" and prediction() is None else None,
    )
