"""The bytes of one stage: what it holds, and what it needs while it runs, in each way in which an executor runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rotor_profiling.instruments import memory_meter
from rotor_profiling.memory import Phase
from rotor_profiling.stage.clocked_meter import ClockedMeter
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.released import released_bytes
from rotor_profiling.stage.runner import Runner
from rotor_profiling.stage.runs import Freed, WithoutGraph, forget_if_fresh, run_again, run_first, run_with_graphs
from rotor_profiling.stage.seconds import StageRun
from rotor_profiling.stage.watched_input import WatchedInput
from rotor_profiling.timing import Stopwatch, several_processes


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
    gradient_storage_bytes: tuple[int, ...]


class MeasuredWays(NamedTuple):
    """What a stage holds and needs in each way; with a watch, the seconds of these runs as one `run` of the stage; and
    its `output`, without a graph.
    """

    bytes: tuple[StageBytes, ...]
    run: StageRun | None
    output: Any


def measure_bytes(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    place: Place,
    watch: Stopwatch | None = None,
) -> MeasuredWays:
    """Measure what a stage holds and needs in each way, by running it; `parameters` are those it trains.

    The stage has to have run before: libraries choose their algorithms and allocate what they keep for good.
    """
    # On the CPU, the profiler misses a free if a thread of the backend is the last to let go of what was sent. So what
    # is found is never less than what it is, and the least of several is closest.
    times = 3 if place.device.type == "cpu" and several_processes() else 1
    rounds: list[tuple[StageBytes, ...]] = []
    for _ in range(times):
        output = None  # not held while the stage is measured again
        found, seconds, output = _measure_once(runners, value, parameters, place, watch)
        rounds.append(found)
    least = tuple(_least(found) for found in zip(*rounds, strict=True))
    return MeasuredWays(least, None if watch is None else _run_of(seconds), output)


def _least(found: Sequence[StageBytes]) -> StageBytes:
    """The least that a stage held and needed in several runs, and the most that it freed."""
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


def _run_of(seconds: Sequence[Mapping[str, float]]) -> StageRun:
    """One run of a stage, from the seconds of its phases in each way."""
    # Not of the phase "first": what the stage decides is watched there.
    ways = tuple((each["forward"], each.get("backward", 0.0)) for each in seconds)
    return StageRun(seconds[-1]["again"], ways, None)


def _measure_once(
    runners: Sequence[Runner], value: Any, parameters: list[torch.Tensor], place: Place, watch: Stopwatch | None
) -> tuple[tuple[StageBytes, ...], list[Mapping[str, float]], Any]:
    """The bytes of a stage in each way; with a `watch`, the seconds of the phases in which it was run; its output."""
    found: list[StageBytes] = []
    meters: list[ClockedMeter] = []
    known, output = None, None
    for runner in runners:
        if not place.fresh_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        runner.make_ready()
        meter = ClockedMeter(memory_meter(place.device), watch)
        forget_if_fresh(parameters, place)
        with meter:
            known = run_first(runner, value, place, meter) if known is None else known
            rest = run_with_graphs(runner, value, parameters, place, meter, known)
            if runner is runners[-1]:
                # At the very end: its output is what the stage hands on, and not held while ways are measured.
                output = run_again(runners[0], value, known.surroundings, meter)
        found.append(_bytes_of(meter.phases, known, place, *rest))
        meters.append(meter)
    rises = (meters[0].phases["first"].rise, meters[-1].phases["again"].rise)
    temp = max(0, max(rises) - found[0].activation_bytes)
    return tuple(replace(way, nograd_temp_bytes=temp) for way in found), [each.seconds for each in meters], output


def _bytes_of(
    phases: Mapping[str, Phase],
    known: WithoutGraph,
    place: Place,
    watched: WatchedInput | None,
    gradient_sizes: tuple[int, ...],
    freed: Freed,
) -> StageBytes:
    """The bytes of a stage in one way, but those of its runs without a graph."""
    end = phases["forward"].end
    phases = {"backward": Phase(end, end, end), **phases}  # where nothing has a graph, there was none
    gradient, activation = phases["gradient"].kept, known.activation_bytes
    if watched is None:
        input_released, output_released = released_bytes(phases, place.input_bytes)
    else:
        # If the twins are not as large as the input in the chain, they are not comparable, and nothing is promised.
        input_released = freed.input if watched.nbytes == place.input_bytes else 0
        output_released = max(0, freed.output - phases["letting go"].kept)
    replay_rise = max(phases["letting go"].peak, phases["replay"].peak) - phases["letting go"].start
    # One number serves both ways to run a stage with a graph, in training's graph and in its own: the larger.
    saved = max(0, max(phases["forward"].kept, phases["attach"].kept) - known.carried_bytes)
    both = activation + place.input_bytes
    return StageBytes(
        activation_bytes=activation,
        saved_bytes=saved,
        forward_temp_bytes=max(phases["forward"].rise, phases["attach"].rise) - saved,
        nograd_temp_bytes=0,
        # From the end of the forward on: an output that the stage's own backward does not need may be gone. What the
        # solver adds by itself is taken off: the gradients of output and input, as large as these are.
        backward_temp_bytes=max(-place.input_bytes, phases["backward"].peak - phases["forward"].end - both),
        replay_temp_bytes=max(-place.input_bytes, replay_rise + gradient - both),
        input_released_bytes=input_released,
        output_released_bytes=min(output_released, activation, saved),
        gradient_storage_bytes=gradient_sizes,
    )
