"""The ways of a stage, measured one after the other by running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rotor_profiling.instruments import memory_meter
from rotor_profiling.stage.bytes import StageBytes, bytes_of, clearly_less, least, more_in_training
from rotor_profiling.stage.clocked_meter import ClockedMeter
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.runner import Runner
from rotor_profiling.stage.runs import (
    WithoutGraph,
    forget_if_fresh,
    run_again,
    run_first,
    run_in_graph,
    run_to_save,
    run_with_own_graph,
)
from rotor_profiling.stage.seconds import StageRun
from rotor_profiling.timing import Stopwatch, several_processes


class MeasuredWays(NamedTuple):
    """What a stage holds and needs in each way, None where another way stands in for it; with a watch, the seconds of
    these runs, as one `run` of the stage stored whole or in all ways that have bytes; its `output`, without a graph.
    """

    bytes: tuple[StageBytes | None, ...]
    run: StageRun | None
    output: Any


def measure_bytes(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    place: Place,
    watch: Stopwatch | None = None,
    stand_ins: Mapping[int, int] = MappingProxyType({}),
) -> MeasuredWays:
    """Measure what a stage holds and needs in each way, by running it; `parameters` are those it trains.

    The first way stores it whole. By `stand_ins`, a way is left out if another one saves clearly less. The stage has to
    have run before: libraries choose their algorithms and allocate what they keep for good.
    """
    if not several_processes():
        return _measure_once(runners, value, parameters, place, watch, stand_ins, briefly=True)
    # Processes have to run equally often, so nothing that is found decides what is run. On the CPU, the profiler misses
    # a free if a thread of the backend is the last to let go of what was sent. So what is found is never less than what
    # it is, and the least of several is closest.
    rounds: list[tuple[StageBytes, ...]] = []
    for _ in range(3 if place.device.type == "cpu" else 1):
        found = None  # its output is not held while the stage is measured again
        found = _measure_once(runners, value, parameters, place, watch, {}, briefly=False)
        rounds.append(tuple(each for each in found.bytes if each is not None))
    assert found is not None
    return found._replace(bytes=tuple(map(least, zip(*rounds, strict=True))))


def _measure_once(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    place: Place,
    watch: Stopwatch | None,
    stand_ins: Mapping[int, int],
    *,
    briefly: bool,
) -> MeasuredWays:
    """Measure each way once; `briefly`, in a graph of its own alone, where training's graph shows the same."""
    found: dict[int, StageBytes] = {}
    seconds: dict[int, Mapping[str, float]] = {}
    known, more, rise = None, None, 0
    for number in sorted(range(len(runners)), key=stand_ins.__contains__):  # those that may be left out come last
        runner = runners[number]
        if not place.fresh_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        runner.make_ready()
        other = found.get(stand_ins.get(number, -1))
        if other and known and clearly_less(other.saved_bytes, _saved_by(runner, value, place, known)):
            continue
        forget_if_fresh(parameters, place)
        with ClockedMeter(memory_meter(place.device), watch, place.between_bytes) as meter:
            known = run_first(runner, value, place, meter) if known is None else known
            if more is None:
                run_in_graph(runner, value, parameters, place, meter)
            rest = run_with_own_graph(runner, value, place, meter, known)
        found[number] = bytes_of(meter.phases, known, place, *rest, more)
        seconds[number] = meter.seconds
        if number == 0:
            rise = meter.phases["first"].rise
            # Not of the last stage: training's graph begins its backward with the output, and its own without.
            like_others = not place.output_held and not any(place.stepped)
            more = more_in_training(meter.phases) if briefly and like_others else None
    assert known is not None
    # At the very end: its output is what the stage hands on, and not held while ways are measured.
    with ClockedMeter(memory_meter(place.device), watch) as meter:
        output = run_again(runners[0], value, known.surroundings, meter)
    temp = max(0, max(rise, meter.phases["again"].rise) - found[0].activation_bytes)
    ways = [found.get(number) for number in range(len(runners))]
    # Training skips an output where it can, and adds gradients to those that are there. Measuring does neither.
    as_in_training = not runners[0].can_skip_output and (place.fresh_gradients or not parameters)
    return MeasuredWays(
        tuple(None if way is None else replace(way, nograd_temp_bytes=temp) for way in ways),
        # Not of the phase "first": what the stage decides is watched there.
        None if watch is None else _run_of(meter.seconds["again"], seconds, again=as_in_training),
        output,
    )


def _saved_by(runner: Runner, value: Any, place: Place, known: WithoutGraph) -> int:
    """What a stage saves in one way."""
    with memory_meter(place.device) as meter:
        run_to_save(runner, value, known, meter)
    return meter.phases["attach"].kept - known.carried_bytes


def _run_of(nograd: float, seconds: Mapping[int, Mapping[str, float]], *, again: bool) -> StageRun:
    """A run of the stage by the `seconds` of phases in each way, where training's graph was run for all of them; else
    stored whole alone. With `again`, its run with a graph of its own is as in training.
    """
    ways = tuple((way["forward"], way.get("backward", 0.0)) for _, way in sorted(seconds.items()) if "forward" in way)
    whole = seconds[0]
    return StageRun(
        nograd,
        ways if len(ways) == len(seconds) else ways[:1],
        whole["attach"] if again else None,
        whole["replay"] if again and "backward" in whole else None,
    )
