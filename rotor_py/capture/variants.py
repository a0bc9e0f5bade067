"""Compiled variants of a measured graph: as a whole, or stage by stage with memory budgets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rotor_profiling import StageCost
from rotor_profiling.stage.cost import LEAST_SHARE
from rotor_profiling.timing import several_processes
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.capture.whole_graph import Room, compiled_whole, compiling
from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import Foreseen, StageCode
from rotor_py.errors import record_fields
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Way
from rotor_py.measure.stage_ways import worth_choosing
from rotor_solver import ForwardEnable, frontier
from rotor_solver.watching import Progress

# Choose which other storage modes of compiled stages to compile: those that a plan is expected to use.
#
# The graph of each partition gives the bytes it saves, and roughly its time. So the curve of time over memory is solved
# before anything is compiled. Compiling stages may take as long as compiling the model whole: of 32 equal blocks, there
# is time for several modes of one; where all stages differ, there is none.

_SLOTS = 200
"""Slots of memory for solving the curve. A guess: each kind of stage has only a few modes."""

Stages = Sequence[CompiledStage | None]


def may_have_ways(stages: Stages, compiler: StageCompiler) -> bool:
    """Whether there is time to compile another storage mode of any of these stages."""
    # Clocks of several processes differ, and the n-th mode has to be the same in each.
    if several_processes():
        return False
    spare = _spare_seconds(stages, compiler)
    return any(compiler.seconds_of(code) <= spare for code in _codes(stages))


def with_ways(found: MeasuredGraph, stages: Stages, compiler: StageCompiler) -> list[CompiledStage | None]:
    """Return the compiled stages, surveyed and measured as `found`, with the storage modes worth compiling."""
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
    """Count the stages of each code."""
    codes = (stage.code for stage in stages if stage is not None)
    return Counter(code for code in codes if code is not None)


def _spare_seconds(stages: Stages, compiler: StageCompiler) -> float:
    """Seconds saved by compiling equal stages once, compared with compiling every stage."""
    return sum((count - 1) * compiler.seconds_of(code) for code, count in _codes(stages).items())


def _wanted(found: MeasuredGraph, stages: Stages) -> list[tuple[StageCode, str]]:
    """Return (code, storage mode) pairs that a plan for some limit would use, the most used first."""
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
    """Predict the costs of a stage's other storage modes, from its cost with everything saved."""
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


# Compile a measured graph: as a whole if that fits, or else stage by stage.

Agree = Callable[[Sequence[int]], list[int]]

_log = logging.getLogger("rotor_py")

_CLEARLY = 0.05
"""How much faster a compiled stage has to be, relative to its plain time, to count as faster. A guess, about the error
of single stages' times: with less, a plan picks stages that seemed faster by chance, and promises time that is not
there.
"""


def compiled_variants(
    plain: MeasuredGraph,
    compiler: StageCompiler,
    progress: Progress | None = None,
    room: Room | None = None,
    agree: Agree = list,
) -> list[MeasuredGraph]:
    """Return the compiled variants of the graph: as a whole if that fits into the `room`, or else stage by stage.

    Only one of both is compiled, since compiling takes long, and a whole graph that fits is faster: it has no stage
    borders.
    """
    whole = None if room is None else compiled_whole(plain, compiler, room, progress)
    return _stage_by_stage(plain, compiler, progress, agree) if whole is None else [whole]


def _stage_by_stage(
    plain: MeasuredGraph, compiler: StageCompiler, progress: Progress | None, agree: Agree
) -> list[MeasuredGraph]:
    """Compile the stages: return first the graph with the faster ones compiled, then with all that can be.

    Returns one variant where both are the same, and none where nothing can be compiled. The plan chooses among these
    and the plain graph by its limit: a faster stage may need more memory. Processes that wait for each other in stages
    measure the same graphs: `agree` returns of each number the largest in any process.
    """
    kinds, seconds = compiler.kinds, compiler.seconds
    wrapped = [CompiledStage(function, f"stage {name}", compiler) for name, function in plain.cut.stages]
    # Measuring runs the stages, and the first run compiles.
    plain.measured_as(_with(plain.cut, wrapped), None if progress is None else compiling(progress))
    can = [not plain_somewhere for plain_somewhere in agree([not stage.compiled for stage in wrapped])]
    if not any(can):
        return []
    _log.info(
        "compiled %d kinds of stages in %.1f s",
        compiler.kinds - kinds,
        compiler.seconds - seconds,
        extra=record_fields("compiled", kinds=compiler.kinds - kinds),
    )
    compiled = _chosen(wrapped, can)
    if surveyed := may_have_ways(compiled, compiler):
        for stage in compiled:
            if stage is not None:
                stage.survey()
    every = plain.measured_as(_with(plain.cut, compiled))
    if surveyed and (stored := with_ways(every, compiled, compiler)) != compiled:
        compiled = stored
        every = plain.measured_as(_with(plain.cut, compiled), None if progress is None else compiling(progress))
    costs = zip(plain.measurement.stages, every.measurement.stages, strict=True)
    slow = agree([_seconds(now) > (1 - _CLEARLY) * _seconds(before) for before, now in costs])
    fast = [possible and not slower for possible, slower in zip(can, slow, strict=True)]
    if fast == can or not any(fast):
        return [every]
    return [plain.measured_as(_with(plain.cut, _chosen(compiled, fast))), every]


def _chosen(wrapped: Sequence[CompiledStage | None], chosen: Sequence[bool]) -> list[CompiledStage | None]:
    return [stage if taken else None for stage, taken in zip(wrapped, chosen, strict=True)]


def _with(cut: Cut, compiled: Sequence[CompiledStage | None]) -> Cut:
    """Replace the stages of a cut; None keeps one."""
    pairs = zip(cut.stages, compiled, strict=True)
    return replace(cut, stages=tuple((name, plain if code is None else code) for (name, plain), code in pairs))


def _seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds
