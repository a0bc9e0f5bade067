"""A measured graph with its stages compiled: all that can be, and those that are faster for it."""

from __future__ import annotations

import logging
from dataclasses import replace

from rotor_profiling import StageCost
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.compiled.compiled_stage import CompiledStage
from rotor_py.compiled.stage_compiler import StageCompiler
from rotor_py.measure.cut import Cut
from rotor_solver.progress import Progress

_log = logging.getLogger("rotor_py")


def compiled_variants(
    plain: MeasuredGraph, compiler: StageCompiler, progress: Progress | None = None
) -> list[MeasuredGraph]:
    """The graph with its stages compiled: first those that are faster so, then all that can be compiled.

    One of both where they are the same, and none where nothing can be compiled. Which of them, or the plain graph, is
    best depends on the limit, so a plan chooses: a stage that is faster may need more memory.
    """
    kinds, seconds = compiler.kinds, compiler.seconds
    wrapped = [CompiledStage(function, name, compiler) for name, function in plain.cut.stages]
    # Measuring runs them, and the first run compiles.
    _measured(plain, _with(plain.cut, wrapped), None if progress is None else _Compiling(progress))
    if not any(stage.compiled for stage in wrapped):
        return []
    _log.info("compiled %d kinds of stages in %.1f s", compiler.kinds - kinds, compiler.seconds - seconds)
    every = _measured(plain, _with(plain.cut, [each if each.compiled else None for each in wrapped]))
    costs = zip(wrapped, plain.measurement.stages, every.measurement.stages, strict=True)
    fast = [each if each.compiled and _seconds(now) < _seconds(before) else None for each, before, now in costs]
    if all((each is not None) == stage.compiled for each, stage in zip(fast, wrapped, strict=True)):
        return [every]
    if not any(fast):
        return [every]
    return [_measured(plain, _with(plain.cut, fast)), every]


def _with(cut: Cut, compiled: list[CompiledStage] | list[CompiledStage | None]) -> Cut:
    """The cut with these stages in the place of its own; None leaves one as it is."""
    pairs = zip(cut.stages, compiled, strict=True)
    return replace(cut, stages=tuple((name, plain if code is None else code) for (name, plain), code in pairs))


def _measured(plain: MeasuredGraph, cut: Cut, progress: Progress | None = None) -> MeasuredGraph:
    stages = plain.stages.of(cut)
    stages.walk(progress)
    stages.settle_layouts(())
    return replace(plain, cut=cut, stages=stages)


def _seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds


class _Compiling:
    """Tells what is compiled, by the same means by which it is told what is measured."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, done: int, total: int, name: str) -> None:
        self._progress(done, total, f"{name}, compiled")
