"""A measured graph compiled: as a whole if that fits, or else stage by stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rotor_profiling import StageCost
from rotor_py.capture.compiled_ways import may_have_ways, with_ways
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.capture.whole_graph import Room, compiled_whole, compiling
from rotor_py.compiled.compiled_stage import CompiledStage
from rotor_py.compiled.stage_compiler import StageCompiler
from rotor_py.measure.cut import Cut
from rotor_solver.progress import Progress

Agree = Callable[[Sequence[int]], list[int]]

_log = logging.getLogger("rotor_py")

_CLEARLY = 0.05
"""By which part of its time a stage has to be faster compiled to count as faster. Times of single stages are known no
better: of many stages that are as fast either way, those that seemed faster would be taken, and the plan promise time
that is not there. A guess."""


def compiled_variants(
    plain: MeasuredGraph,
    compiler: StageCompiler,
    progress: Progress | None = None,
    room: Room | None = None,
    agree: Agree = list,
) -> list[MeasuredGraph]:
    """The ways to run the graph compiled: as a whole if that fits into the `room`, or else stage by stage.

    Only one of both is compiled, since that takes long, and where the whole fits it is faster: nothing ends at the
    border of a stage.
    """
    whole = None if room is None else compiled_whole(plain, compiler, room, progress)
    return _stage_by_stage(plain, compiler, progress, agree) if whole is None else [whole]


def _stage_by_stage(
    plain: MeasuredGraph, compiler: StageCompiler, progress: Progress | None, agree: Agree
) -> list[MeasuredGraph]:
    """The graph with its stages compiled: first those that are faster so, then all that can be compiled.

    One of both where they are the same, and none where nothing can be compiled. Which of them, or the plain graph, is
    best depends on the limit, so a plan chooses: a stage that is faster may need more memory. Processes that wait for
    each other in stages measure the same graphs: `agree` returns of each number the largest in any of them.
    """
    kinds, seconds = compiler.kinds, compiler.seconds
    wrapped = [CompiledStage(function, f"stage {name}", compiler) for name, function in plain.cut.stages]
    # Measuring runs them, and the first run compiles.
    plain.measured_as(_with(plain.cut, wrapped), None if progress is None else compiling(progress))
    can = [not plain_somewhere for plain_somewhere in agree([not stage.compiled for stage in wrapped])]
    if not any(can):
        return []
    _log.info("compiled %d kinds of stages in %.1f s", compiler.kinds - kinds, compiler.seconds - seconds)
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
    """The cut with these stages in the place of its own; None leaves one as it is."""
    pairs = zip(cut.stages, compiled, strict=True)
    return replace(cut, stages=tuple((name, plain if code is None else code) for (name, plain), code in pairs))


def _seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds
