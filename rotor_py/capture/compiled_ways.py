"""Which other ways to store compiled stages are compiled: those that a plan would use, as far as can be foreseen.

What every partition saves is known from its graph, and so is about how long it takes. So the whole curve of time over
memory is solved for before anything is compiled. Compiling takes as long as compiling the model whole, and no longer:
of 32 equal blocks, there is time for several ways of one. Where all stages are different, there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rotor_profiling import StageCost
from rotor_profiling.stage.bytes import LEAST_SHARE
from rotor_profiling.timing import several_processes
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.compiled.budgets import Foreseen
from rotor_py.compiled.compiled_stage import CompiledStage
from rotor_py.compiled.stage_code import StageCode
from rotor_py.compiled.stage_compiler import StageCompiler
from rotor_py.measure.measurement import Way
from rotor_py.measure.walks.stage_ways import worth_choosing
from rotor_solver import ForwardEnable, frontier

_SLOTS = 200
"""How finely memory is divided when the curve is solved for. A guess: the ways are a few for each kind of stage."""

Stages = Sequence[CompiledStage | None]


def may_have_ways(stages: Stages, compiler: StageCompiler) -> bool:
    """Whether there is time to compile another way of any of these stages."""
    # Clocks of several processes differ, and the n-th way has to be the same in each.
    if several_processes():
        return False
    spare = _spare_seconds(stages, compiler)
    return any(compiler.seconds_of(code) <= spare for code in _codes(stages))


def with_ways(found: MeasuredGraph, stages: Stages, compiler: StageCompiler) -> list[CompiledStage | None]:
    """The compiled stages, surveyed and measured as `found`, with the ways that are worth compiling."""
    spare = _spare_seconds(stages, compiler)
    taken: set[tuple[StageCode, str]] = set()
    for each in _wanted(found, stages):
        seconds = compiler.seconds_of(each[0])
        if seconds <= spare:
            spare -= seconds
            taken.add(each)
    made: list[CompiledStage | None] = []
    for stage in stages:
        code = None if stage is None else stage.code
        ways = () if stage is None else tuple(each.way for each in stage.foreseen if (code, each.way) in taken)
        made.append(stage.with_ways(ways) if stage is not None and ways else stage)
    return made


def _codes(stages: Stages) -> Counter[StageCode]:
    """How many stages have each code."""
    codes = (stage.code for stage in stages if stage is not None)
    return Counter(code for code in codes if code is not None)


def _spare_seconds(stages: Stages, compiler: StageCompiler) -> float:
    """How much longer it would have taken to compile every stage by itself: about as long as the model whole."""
    return sum((count - 1) * compiler.seconds_of(code) for code, count in _codes(stages).items())


def _wanted(found: MeasuredGraph, stages: Stages) -> list[tuple[StageCode, str]]:
    """The ways that a plan for some limit would use, by the code of their stages; what is used most comes first."""
    measurement = found.measurement
    foreseen = tuple(
        () if stage is None else _ways(cost, stage.foreseen)
        for cost, stage in zip(measurement.stages, stages, strict=True)
    )
    if not any(foreseen):
        return []
    used = Counter[tuple[StageCode, str]]()
    for sequence in frontier(replace(measurement, ways=foreseen).chain(fresh_gradients=True), slots=_SLOTS).sequences:
        for operation in sequence:
            if isinstance(operation, ForwardEnable) and operation.option:
                stage = stages[operation.stage]
                assert stage is not None
                assert stage.code is not None
                used[stage.code, foreseen[operation.stage][operation.option - 1].name] += 1
    return [each for each, _ in used.most_common()]


def _ways(cost: StageCost, foreseen: Sequence[Foreseen]) -> tuple[Way, ...]:
    """What else a stage would cost that costs this much with all that its code saves."""
    seconds = cost.forward_seconds + cost.backward_seconds
    ways = []
    for each in foreseen:
        less = each.usual_bytes - each.bytes
        if LEAST_SHARE * cost.saved_bytes <= less <= cost.saved_bytes:
            other = replace(
                cost,
                saved_bytes=cost.saved_bytes - less,
                backward_seconds=max(0.0, cost.backward_seconds + (each.longer - 1) * seconds),
                backward_temp_bytes=max(0, cost.backward_temp_bytes + each.temp_bytes),
                replay_temp_bytes=max(0, cost.replay_temp_bytes + each.temp_bytes),
            )
            ways.append(Way(each.way, other))
    return worth_choosing(cost, ways)
