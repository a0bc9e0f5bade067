"""Measure the bytes of one stage in every storage mode, by running it exactly as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rotor_profiling.backends import memory_meter
from rotor_profiling.isolate import isolated
from rotor_profiling.memory import Phase
from rotor_profiling.stage.runs import forget_if_fresh, run_first, run_in_graph, run_with_own_graph
from rotor_profiling.stage.seconds import StageRun, StageSeconds
from rotor_profiling.stage.stage_context import Runner, StageContext, bytes_after_replay, stand_in_steps
from rotor_profiling.storage import storage_bytes, storages, tensors_in
from rotor_profiling.timing import Stopwatch, several_processes

LEAST_SHARE = 0.05
"""Minimum share of the saved bytes that a mode must spare: its cost in time is known only up to clock noise."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Measured bytes of a stage, as in `StageCost`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost(StageBytes):
    """Measured seconds and bytes of a stage, named as in `rotor_solver.Option` and `rotor_solver.Stage`."""

    forward_seconds: float
    nograd_seconds: float
    backward_seconds: float
    skipped_output_seconds: float = 0.0
    """Seconds that a forward saves by skipping its output right before its backward, less the cost of its own graph."""

    @classmethod
    def of(cls, nbytes: StageBytes, seconds: StageSeconds) -> StageCost:
        """Combine measured bytes and seconds."""
        return cls(**asdict(nbytes), **asdict(seconds))


def clearly_less(saved: int, than: int) -> bool:
    """Whether a mode saves enough less than a faster one to be worth planning with."""
    return saved <= (1 - LEAST_SHARE) * than and saved < than


def measure_ways(
    runners: Sequence[Runner], value: Any, context: StageContext, watch: Stopwatch | None = None
) -> tuple[tuple[StageBytes, ...], StageRun | None]:
    """Measure the bytes of one stage in each of its `runners`' storage modes. Nothing of the model changes.

    The stage must have run before: libraries choose algorithms and allocate persistent memory in its first run. With a
    `watch`, also returns the seconds of these runs, since a meter takes hardly any time. Raises ValueError for a device
    type whose memory cannot be measured.

    Args:
        runners: One runner per mode, all of the same function; the first stores the stage whole.
        value: Input of the stage; tensors that need a gradient have `requires_grad`.
        context: Position of the stage in its chain.
        watch: Times the runs.
    """
    # With several processes on the CPU, the profiler misses a free if a backend thread is the last holder of sent
    # memory. So results are never too small, and the least is closest.
    repeats = 3 if several_processes() and context.device.type == "cpu" else 1
    with isolated(runners[0].function, context.device) as parameters, torch.enable_grad():
        with stand_in_steps(parameters, context.stepped):
            rounds = [_measure_once(runners, value, parameters, context, watch) for _ in range(repeats)]
        after_replay = bytes_after_replay(parameters, context.stepped)
    ways = map(_least, zip(*(each for each, _ in rounds), strict=True))
    return tuple(_with_room_after_replay(each, after_replay) for each in ways), rounds[-1][1]


def _measure_once(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    context: StageContext,
    watch: Stopwatch | None,
) -> tuple[tuple[StageBytes, ...], StageRun | None]:
    # Processes must run equally often, and their findings may differ.
    known = None if several_processes() else runners[0].before_first(value)
    surroundings, rise = run_first(runners[0], value, context) if known is None else known
    seconds, shown = [], []
    for runner in runners:
        if not context.fresh_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        runner.make_ready()
        forget_if_fresh(parameters, context)
        with memory_meter(context.device) as meter:
            seconds.append(run_in_graph(runner, value, parameters, context, meter, watch))
            gradients, freed = run_with_own_graph(runner, value, context, meter, surroundings)
        shown.append((meter.phases, gradients, freed))
    # Last, so that this output is not held while modes are measured.
    with memory_meter(context.device) as meter:
        meter.mark("again")
        with torch.no_grad():
            output = runners[0].again(value, surroundings)
        meter.mark("between")
    carried = storages(tensors_in(output)[position] for position in context.carried)
    activation = storage_bytes(tensors_in(output), [*context.owned, *carried])
    carried_bytes = sum(size for address, size in carried.items() if address not in context.owned)
    nograd_temp = max(0, max(rise, meter.phases["again"].rise) - activation)
    found = tuple(_bytes_of(*each, activation, carried_bytes, nograd_temp, context) for each in shown)
    return found, None if watch is None else StageRun(tuple(seconds))


def _bytes_of(
    phases: Mapping[str, Phase],
    gradients: tuple[int, ...],
    freed: tuple[int, int] | None,
    activation: int,
    carried_bytes: int,
    nograd_temp: int,
    context: StageContext,
) -> StageBytes:
    """Combine the phases of a mode's runs in training's graph and in its own; see `run_with_own_graph`.

    One number serves both graphs: the larger.
    """
    forward, attach, release = phases["forward"], phases["attach"], phases["letting go"]
    # After the forward: an output that the stage's own backward does not need may be gone.
    training = max((phases[name].peak for name in ("gradients", "backward") if name in phases), default=forward.end)
    own = max(release.peak, phases["replay"].peak) - release.start + phases["gradient"].kept
    if freed is not None:
        input_freed, output_freed = freed[0], max(0, freed[1] - release.kept)
    else:  # A copy of another size than the chain's input is not comparable, so nothing is promised.
        input_freed = max(0, -phases["input"].kept) if phases["copy"].kept == context.input_bytes else 0
        output_freed = max(0, -phases["output"].kept)
    saved = max(0, max(forward.kept, attach.kept) - carried_bytes)
    # The gradients of output and input, of the same sizes, which the solver adds.
    both = activation + context.input_bytes
    return StageBytes(
        activation_bytes=activation,
        saved_bytes=saved,
        forward_temp_bytes=max(forward.rise, attach.rise) - saved,
        nograd_temp_bytes=nograd_temp,
        backward_temp_bytes=max(-context.input_bytes, training - forward.end - both),
        replay_temp_bytes=max(-context.input_bytes, own - both),
        input_released_bytes=input_freed,
        output_released_bytes=min(output_freed, activation, saved),
        gradient_storage_bytes=gradients,
    )


def _least(found: Sequence[StageBytes]) -> StageBytes:
    """Return the least bytes held and needed over several runs, and the most freed."""
    saved = min(each.saved_bytes for each in found)
    return replace(
        found[0],
        saved_bytes=saved,
        forward_temp_bytes=min(each.saved_bytes + each.forward_temp_bytes for each in found) - saved,
        nograd_temp_bytes=min(each.nograd_temp_bytes for each in found),
        backward_temp_bytes=min(each.backward_temp_bytes for each in found),
        replay_temp_bytes=min(each.replay_temp_bytes for each in found),
        input_released_bytes=max(each.input_released_bytes for each in found),
        output_released_bytes=min(saved, max(each.output_released_bytes for each in found)),
    )


def _with_room_after_replay(found: StageBytes, nbytes: int) -> StageBytes:
    """Add room for the parameter steps of `nbytes` that follow a recomputed stage's backward."""
    # The solver adds these itself; both are gone when the first parameter is stepped.
    both = found.activation_bytes + found.saved_bytes
    return replace(found, replay_temp_bytes=max(found.replay_temp_bytes, nbytes - both)) if nbytes else found
