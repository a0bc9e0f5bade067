"""What one stage costs: its times and bytes, measured by running it the very ways in which it is run in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from rotor_profiling.instruments import stopwatch
from rotor_profiling.isolate import isolated
from rotor_profiling.stage.bytes import StageBytes
from rotor_profiling.stage.measured_ways import MeasuredWays, measure_bytes
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.runner import Runner
from rotor_profiling.stage.runs import run_unmeasured
from rotor_profiling.stage.seconds import StageRun, StageSeconds, estimate
from rotor_profiling.stage.stepping import bytes_after_replay, stand_in_steps
from rotor_profiling.stage.timed_stage import AsNode, time_stage
from rotor_profiling.timing import FEWEST_RUNS, Stopwatch


@dataclass(frozen=True, slots=True)
class StageCost:
    """Measured seconds and bytes of a stage, in the words of `rotor_solver.Option` and `rotor_solver.Stage`."""

    forward_seconds: float
    nograd_seconds: float
    backward_seconds: float
    activation_bytes: int
    saved_bytes: int
    forward_temp_bytes: int
    nograd_temp_bytes: int
    backward_temp_bytes: int
    replay_temp_bytes: int
    input_released_bytes: int
    output_released_bytes: int
    gradient_storage_bytes: tuple[int, ...] = ()
    """Bytes of the storage behind the gradient of every tensor of the input: more than its own where it is a view."""
    skipped_output_seconds: float = 0.0
    """What a forward saves if its backward follows at once and it skips its output, less what its own graph costs."""

    @classmethod
    def of(cls, nbytes: StageBytes, seconds: StageSeconds) -> StageCost:
        """The cost of a stage of which both were measured."""
        return cls(**asdict(nbytes), **asdict(seconds))


def measure_options(runners: Sequence[Runner], value: Any, place: Place) -> tuple[StageCost, ...]:
    """Measure the ways to run one stage on the input `value`, whose tensors that need a gradient have `requires_grad`.

    `runners` has one runner for each way, all of the same function. Nothing of the model is changed. ValueError for a
    kind of device whose memory cannot be measured.
    """
    run_before_measuring(runners, value, place)
    found = [each for each in measure_ways(runners, value, place).bytes if each is not None]  # all: none stands in
    with stopwatch(place.device) as watch:
        runs = [time_ways(runners, value, place, watch)[0] for _ in range(FEWEST_RUNS)]
    return tuple(map(StageCost.of, found, estimate(runs)))


def run_before_measuring(runners: Sequence[Runner], value: Any, place: Place) -> None:
    """Run a stage once in each way: libraries choose their algorithms and allocate what they keep for good."""
    with isolated(runners[0].function, place.device), torch.enable_grad():
        for runner in runners:
            run_unmeasured(runner, value)


def measure_ways(
    runners: Sequence[Runner],
    value: Any,
    place: Place,
    watch: Stopwatch | None = None,
    stand_ins: Mapping[int, int] = MappingProxyType({}),
) -> MeasuredWays:
    """The bytes of a stage in each way, once it has run before; arguments and errors are those of `measure_options`.

    With a `watch`, the seconds of its runs as well: next to those of `time_ways`, since a meter takes hardly any time.
    `stand_ins` says, of some ways, which other one makes them needless if it saves clearly less.
    """
    with isolated(runners[0].function, place.device) as parameters, torch.enable_grad():
        with stand_in_steps(parameters, place.stepped):
            found = measure_bytes(runners, value, parameters, place, watch, stand_ins)
        after_replay = bytes_after_replay(parameters, place.stepped)
    return found._replace(
        bytes=tuple(None if each is None else _with_room_after_replay(each, after_replay) for each in found.bytes)
    )


def _with_room_after_replay(found: StageBytes, nbytes: int) -> StageBytes:
    """The bytes of a stage whose backward, where it was run again, is followed by steps that need `nbytes`."""
    # The solver adds these by itself; when the first parameter is stepped, both are gone.
    both = found.activation_bytes + found.saved_bytes
    return replace(found, replay_temp_bytes=max(found.replay_temp_bytes, nbytes - both)) if nbytes else found


def time_ways(
    runners: Sequence[Runner],
    value: Any,
    place: Place,
    watch: Stopwatch,
    *,
    as_node: AsNode | None = None,
    again: bool = True,
) -> tuple[StageRun, Any]:
    """The seconds of one run of a stage in each way, and its output without a graph: see `time_stage`."""
    with isolated(runners[0].function, place.device) as parameters, torch.enable_grad():
        return time_stage(
            runners,
            value,
            parameters,
            watch,
            fresh_gradients=place.fresh_gradients,
            silent=place.silent,
            arriving=place.arriving,
            as_node=as_node,
            again=again,
        )
