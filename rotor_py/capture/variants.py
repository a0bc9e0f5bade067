"""Compiled variants of a measured graph: as a whole, or stage by stage with memory budgets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rotor_profiling import StageCost
from rotor_profiling.timing import several_processes
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.capture.whole_graph import CompileBudget, compiled_whole, compiling
from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import WAYS, StageCode
from rotor_py.errors import record_fields
from rotor_py.measure.cut import Cut
from rotor_solver.watching import Progress

Agree = Callable[[Sequence[int]], list[int]]
Stages = Sequence[CompiledStage | None]

_log = logging.getLogger("rotor_py")

_CLEARLY = 0.05
"""How much faster a compiled stage has to be, relative to its plain time, to count as faster. A guess, about the error
of single stages' times: with less, a plan picks stages that seemed faster by chance, and promises time that is not
there.
"""


def with_ways(stages: Stages, compiler: StageCompiler) -> list[CompiledStage | None]:
    """Give compiled stages further storage modes, as many as there is time to compile, the most frequent kind first.

    Compiling stages may take as long as compiling the model whole: of 32 equal blocks, there is time for all modes of
    one; where all stages differ, there is none.
    """
    codes = Counter(stage.code for stage in stages if stage is not None)
    # Clocks of several processes differ, and the n-th mode has to be the same in each.
    counts = [(code, count) for code, count in codes.most_common() if code is not None and not several_processes()]
    spare = sum((count - 1) * compiler.seconds_of[code] for code, count in counts)
    ways: dict[StageCode | None, tuple[str, ...]] = {}
    for code, _ in counts:
        seconds = compiler.seconds_of[code]
        ways[code] = tuple(WAYS)[: int(spare // max(seconds, 1e-12))]
        spare -= len(ways[code]) * seconds
    return [
        stage.with_ways(ways[stage.code]) if stage is not None and ways.get(stage.code) else stage for stage in stages
    ]


def compiled_variants(
    plain: MeasuredGraph,
    compiler: StageCompiler,
    progress: Progress | None = None,
    room: CompileBudget | None = None,
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
    kinds, seconds = len(compiler.seconds_of), compiler.seconds
    wrapped = [CompiledStage(function, f"stage {name}", compiler) for name, function in plain.cut.stages]
    # Measuring runs the stages, and the first run compiles.
    plain.measured_as(_with(plain.cut, wrapped), None if progress is None else compiling(progress))
    can = [not plain_somewhere for plain_somewhere in agree([not stage.compiled for stage in wrapped])]
    if not any(can):
        return []
    kinds, seconds = len(compiler.seconds_of) - kinds, compiler.seconds - seconds
    _log.info("compiled %d kinds of stages in %.1f s", kinds, seconds, extra=record_fields("compiled", kinds=kinds))
    compiled = _chosen(wrapped, can)
    compiled = with_ways(compiled, compiler)
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
