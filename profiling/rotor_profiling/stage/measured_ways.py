"""The ways of a stage, measured one after the other by running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rotor_profiling.clocked_meter import ClockedMeter
from rotor_profiling.instruments import memory_meter
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
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.runner import Runner
from rotor_profiling.stage.runs import (
    forget_if_fresh,
    made_by,
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
    """Measure each way once; `briefly`, in training's graph alone, where its own is known to show the same."""
    found: dict[int, WayBytes] = {}
    seconds: dict[int, Mapping[str, float]] = {}
    # Processes have to run equally often, and what another one has seen may differ.
    known = runners[0].before_first(value) if briefly else None
    surroundings, rise = run_first(runners[0], value, place) if known is None else known
    beyond: Beyond | None = None
    for number in sorted(range(len(runners)), key=stand_ins.__contains__):  # those that may be left out come last
        runner = runners[number]
        if not place.fresh_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        runner.make_ready()
        other = found.get(stand_ins.get(number, -1))
        if other and clearly_less(other.kept, _kept_by(runner, value, place, surroundings)):
            continue
        forget_if_fresh(parameters, place)
        with ClockedMeter(memory_meter(place.device), watch) as clocked:
            twins = run_in_graph(runner, value, parameters, place, clocked)
            apart = None if beyond else run_with_own_graph(runner, value, place, clocked, surroundings)
        training = in_training(clocked.phases, twins)
        if apart is None:
            assert beyond is not None
            own, gradients = beyond.add_to(clocked.phases, training), found[0].gradients
        else:
            gradients, twins = apart
            own = in_own(clocked.phases, twins, place)
        found[number] = WayBytes(training, own, gradients)
        seconds[number] = clocked.seconds
        # What a stage decides is held while it is run again, which may be where one way needs the most, or another.
        if number == 0 and known is not None and _comparable(place):
            beyond = beyond_training(clocked.phases, training, own)
    # At the very end: its output is what the stage hands on, and not held while ways are measured.
    with memory_meter(place.device) as meter:
        output = run_again(runners[0], value, surroundings, meter)
    made = made_by(output, place)
    temp = max(0, max(rise, meter.phases["again"].rise) - made.activation_bytes)
    ways = [found.get(number) for number in range(len(runners))]
    return MeasuredWays(
        tuple(None if way is None else bytes_of(way, made, place, temp) for way in ways),
        None if watch is None else _run_of(seconds),
        output,
    )


def _comparable(place: Place) -> bool:
    """Whether both graphs of a stage hold the same until a backward ends, but for gradients.

    Not where parameters are stepped, which training's graph does at once, and its own at the end. Nor in the last
    stage: its backward begins with the output in training's graph, and without in its own.
    """
    return not any(place.stepped) and not place.output_held


def _kept_by(runner: Runner, value: Any, place: Place, surroundings: Any) -> int:
    """What a graph of a stage keeps in one way."""
    with memory_meter(place.device) as meter:
        run_to_save(runner, value, surroundings, meter)
    return meter.phases["attach"].kept


def _run_of(seconds: Mapping[int, Mapping[str, float]]) -> StageRun:
    """A run of the stage, by the `seconds` of phases in each way."""
    return StageRun(tuple((way["forward"], way.get("backward", 0.0)) for _, way in sorted(seconds.items())))
