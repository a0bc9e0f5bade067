"""Measure the seconds and bytes of one stage, by running it exactly as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rotor_profiling.backends import memory_meter, stopwatch
from rotor_profiling.isolate import isolated
from rotor_profiling.memory import ClockedMeter
from rotor_profiling.stage.bytes import (
    Beyond,
    StageBytes,
    WayBytes,
    beyond_training,
    bytes_of,
    clearly_less,
    in_own,
    in_training,
    least,
)
from rotor_profiling.stage.runs import (
    forget_if_fresh,
    made_by,
    run_again,
    run_first,
    run_in_graph,
    run_to_save,
    run_unmeasured,
    run_with_own_graph,
)
from rotor_profiling.stage.seconds import AsNode, StageRun, StageSeconds, estimate, time_stage
from rotor_profiling.stage.stage_context import Runner, StageContext, bytes_after_replay, stand_in_steps
from rotor_profiling.timing import FEWEST_RUNS, Stopwatch, several_processes


@dataclass(frozen=True, slots=True)
class StageCost:
    """Measured seconds and bytes of a stage, named as in `rotor_solver.Option` and `rotor_solver.Stage`."""

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
    """Bytes of the storage behind each input tensor's gradient; more than the gradient's own if that is a view."""
    skipped_output_seconds: float = 0.0
    """Seconds that a forward saves by skipping its output right before its backward, less the cost of its own graph."""

    @classmethod
    def of(cls, nbytes: StageBytes, seconds: StageSeconds) -> StageCost:
        """Combine measured bytes and seconds."""
        return cls(**asdict(nbytes), **asdict(seconds))


def measure_options(runners: Sequence[Runner], value: Any, context: StageContext) -> tuple[StageCost, ...]:
    """Measure one stage in each of its `runners`' storage modes.

    Nothing of the model changes. Raises ValueError for a device type whose memory cannot be measured.

    Args:
        runners: One runner per mode, all of the same function; the first stores the stage whole.
        value: Input of the stage; tensors that need a gradient have `requires_grad`.
        context: Position of the stage in its chain.
    """
    run_before_measuring(runners, value, context)
    found = [each for each in measure_ways(runners, value, context).bytes if each is not None]  # all: no `stand_ins`
    with stopwatch(context.device) as watch:
        runs = [time_ways(runners, value, context, watch)[0] for _ in range(FEWEST_RUNS)]
    return tuple(map(StageCost.of, found, estimate(runs)))


def run_before_measuring(runners: Sequence[Runner], value: Any, context: StageContext) -> None:
    """Warm up a stage in each mode: libraries choose algorithms and allocate persistent memory."""
    with isolated(runners[0].function, context.device), torch.enable_grad():
        for runner in runners:
            run_unmeasured(runner, value)


def measure_ways(
    runners: Sequence[Runner],
    value: Any,
    context: StageContext,
    watch: Stopwatch | None = None,
    stand_ins: Mapping[int, int] = MappingProxyType({}),
) -> MeasuredWays:
    """Measure the bytes of a stage in each mode, after a warm-up; arguments and errors as in `measure_options`.

    With a `watch`, also returns the seconds of these runs, since a meter takes hardly any time. `stand_ins` maps modes
    to the mode that replaces each if it saves clearly less.
    """
    with isolated(runners[0].function, context.device) as parameters, torch.enable_grad():
        with stand_in_steps(parameters, context.stepped):
            found = measure_bytes(runners, value, parameters, context, watch, stand_ins)
        after_replay = bytes_after_replay(parameters, context.stepped)
    return found._replace(
        bytes=tuple(None if each is None else _with_room_after_replay(each, after_replay) for each in found.bytes)
    )


def _with_room_after_replay(found: StageBytes, nbytes: int) -> StageBytes:
    """Add room for the parameter steps of `nbytes` that follow a recomputed stage's backward."""
    # The solver adds these itself; both are gone when the first parameter is stepped.
    both = found.activation_bytes + found.saved_bytes
    return replace(found, replay_temp_bytes=max(found.replay_temp_bytes, nbytes - both)) if nbytes else found


def time_ways(
    runners: Sequence[Runner],
    value: Any,
    context: StageContext,
    watch: Stopwatch,
    *,
    as_node: AsNode | None = None,
    again: bool = True,
) -> tuple[StageRun, Any]:
    """Time one run of a stage in each mode; return the seconds, and its output without a graph: see `time_stage`."""
    with isolated(runners[0].function, context.device) as parameters, torch.enable_grad():
        return time_stage(
            runners,
            value,
            parameters,
            watch,
            fresh_gradients=context.fresh_gradients,
            silent=context.silent,
            arriving=context.arriving,
            as_node=as_node,
            again=again,
        )


class MeasuredWays(NamedTuple):
    """Measurements of a stage in all modes.

    `bytes`: of each mode, None if another replaces it. `run`: with a watch, seconds of the stage stored whole or in all
    modes with bytes. `output`: without a graph.
    """

    bytes: tuple[StageBytes | None, ...]
    run: StageRun | None
    output: Any


def measure_bytes(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    context: StageContext,
    watch: Stopwatch | None = None,
    stand_ins: Mapping[int, int] = MappingProxyType({}),
) -> MeasuredWays:
    """Run a stage to measure its bytes in each mode; `parameters` are those it trains.

    The first mode stores it whole. A mode is skipped if its replacement in `stand_ins` saves clearly less. The stage
    must be warmed up: libraries choose algorithms and allocate persistent memory in its first run.
    """
    if not several_processes():
        return _measure_once(runners, value, parameters, context, watch, stand_ins, briefly=True)
    # Processes must run equally often, so no finding decides what runs. On the CPU, the profiler misses a free if a
    # backend thread is the last holder of sent memory. So results are never too small, and the least is closest.
    rounds: list[tuple[StageBytes, ...]] = []
    for _ in range(3 if context.device.type == "cpu" else 1):
        found = None  # release the output before measuring again
        found = _measure_once(runners, value, parameters, context, watch, {}, briefly=False)
        rounds.append(tuple(each for each in found.bytes if each is not None))
    assert found is not None
    return found._replace(bytes=tuple(map(least, zip(*rounds, strict=True))))


def _measure_once(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    context: StageContext,
    watch: Stopwatch | None,
    stand_ins: Mapping[int, int],
    *,
    briefly: bool,
) -> MeasuredWays:
    """Measure each mode once; `briefly`, only in training's graph where its own is predictable."""
    found: dict[int, WayBytes] = {}
    seconds: dict[int, Mapping[str, float]] = {}
    # Processes must run equally often, and their findings may differ.
    known = runners[0].before_first(value) if briefly else None
    surroundings, rise = run_first(runners[0], value, context) if known is None else known
    beyond: Beyond | None = None
    for number in sorted(range(len(runners)), key=stand_ins.__contains__):  # replaceable modes last
        runner = runners[number]
        if not context.fresh_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        runner.make_ready()
        other = found.get(stand_ins.get(number, -1))
        if other and clearly_less(other.kept, _kept_by(runner, value, context, surroundings)):
            continue
        forget_if_fresh(parameters, context)
        with ClockedMeter(memory_meter(context.device), watch) as clocked:
            twins = run_in_graph(runner, value, parameters, context, clocked)
            apart = None if beyond else run_with_own_graph(runner, value, context, clocked, surroundings)
        training = in_training(clocked.phases, twins)
        if apart is None:
            assert beyond is not None
            own, gradients = beyond.add_to(clocked.phases, training), found[0].gradients
        else:
            gradients, twins = apart
            own = in_own(clocked.phases, twins, context)
        found[number] = WayBytes(training, own, gradients)
        seconds[number] = clocked.seconds
        # A stage's recorded decisions are held during its recomputation, when one mode or another may peak.
        if number == 0 and known is not None and _comparable(context):
            beyond = beyond_training(clocked.phases, training, own)
    # Last: the stage hands on this output, which must not be held while modes are measured.
    with memory_meter(context.device) as meter:
        output = run_again(runners[0], value, surroundings, meter)
    made = made_by(output, context)
    temp = max(0, max(rise, meter.phases["again"].rise) - made.activation_bytes)
    ways = [found.get(number) for number in range(len(runners))]
    return MeasuredWays(
        tuple(None if way is None else bytes_of(way, made, context, temp) for way in ways),
        None if watch is None else _run_of(seconds),
        output,
    )


def _comparable(context: StageContext) -> bool:
    """Whether both graphs of a stage hold the same until a backward ends, except for gradients.

    Not if parameters are stepped, at once in training's graph and at the end in its own. Nor in the last stage: its
    backward begins with the output in training's graph, and without it in its own.
    """
    return not any(context.stepped) and not context.output_held


def _kept_by(runner: Runner, value: Any, context: StageContext, surroundings: Any) -> int:
    with memory_meter(context.device) as meter:
        run_to_save(runner, value, surroundings, meter)
    return meter.phases["attach"].kept


def _run_of(seconds: Mapping[int, Mapping[str, float]]) -> StageRun:
    return StageRun(tuple((way["forward"], way.get("backward", 0.0)) for _, way in sorted(seconds.items())))
