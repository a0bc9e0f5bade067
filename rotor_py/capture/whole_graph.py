"""Compile a measured graph whole, as one stage: of its joint graph's partitions, use the fastest that fits.

Compiled stage by stage, nothing is fused, laid out or shared across a border. As one stage, the graph is as fast as
under `torch.compile`. The partitioner then chooses what the forward saves, not the plan, which can only store the one
stage. The joint graph gives the bytes of every partition before anything is compiled, as far as they show in it.
Inductor's result is measured like any stage. If it takes more than predicted, or so much less that a faster partition
may fit, one other partition is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rotor_profiling import storage_bytes, tensors_in
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import owned_tensors
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import joined
from rotor_py.measure.measurement import Measurement
from rotor_solver import store_all
from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rotor_py.compile.partitioner import BudgetPartitioner

_log = logging.getLogger("rotor_py")

_WORTH_COMPILING = 0.03
"""Least predicted gain for compiling a second partition where the first one fits. A guess: it costs as much waiting."""
_CAUTION = 0.75
"""Share of the memory left by the first partition that the second may take: it is fused differently. A guess; with all
of it, a Llama came out 1 % over its limit.
"""

_TURNS = 4
"""Timings of each variant in a comparison. A guess: fewer let noise decide."""
_MORE_TURNS = 8
"""Further timings before one is rejected, after a disturbance of the machine may have passed. A guess, as above."""
_CLEARLY = 0.02
"""How much slower compiled code has to be for the plain graph to win. Times are known no better (`GOOD_ENOUGH`); a
closer choice would change a user's last digits from one day to the next.
"""


@dataclass(frozen=True, slots=True)
class CompileBudget:
    """The room that the `budget` of a plain step leaves within `limit`; gradients may be `fresh` in every step."""

    budget: Budget
    limit: int
    fresh: bool

    @property
    def available(self) -> int:
        """Bytes for the graph: all that is not in use throughout the step, under any plan."""
        return self.limit - self.budget.fixed.total

    def taken(self, measurement: Measurement) -> int:
        """Return the bytes of `available` that a step takes with all stages of a graph measured so stored."""
        budget = self.budget.with_found(measurement, 0, fresh_gradients=self.fresh)
        # Of the graph only: everything after it, down to the loss, is that of the plain step.
        plain = self.budget.chain
        chain = replace(budget.chain, loss_time=plain.loss_time, loss_temp=plain.loss_temp)
        return replace(budget, chain=chain, snapshot_bytes=0).peak_bytes(store_all(chain)) - self.budget.fixed.total

    def partitioner(self, limit: int) -> BudgetPartitioner:
        """Return a partitioner of graphs within `limit`, counting all inputs and results of the compiled code."""
        from rotor_py.compile.partitioner import whole_partitioner

        return whole_partitioner(limit, self.budget.chain)


CompileBudgetOf = Callable[[Measurement, Any], CompileBudget]
"""The room that a step leaves, from its plain measurement and the graph's inputs."""


def compiled_whole(
    plain: MeasuredGraph, compiler: StageCompiler, room: CompileBudget, progress: Progress | None = None
) -> MeasuredGraph | None:
    """Return the graph as one compiled stage, the fastest inside the room. Compiles at most two partitions.

    None if none of them fits, or if the plain graph also fits and is clearly faster.
    """
    if plain.cut.prefix:  # its stages need outputs of the prefix layers, which are not available
        return None
    layers = dict(plain.graph.layers)
    names = tuple(name for group in plain.cut.groups() for name in group)
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    _, whole = joined([(each, layers[each]) for each in names])
    given = storage_bytes([*owned_tensors(whole), *tensors_in(plain.shared)])

    def compiled(partitioner: BudgetPartitioner) -> MeasuredGraph | None:
        """Compile and measure; None if nothing fits, if it cannot be compiled, or runs out of memory, unforeseen."""
        if progress is not None:
            progress(0, 1, "the whole graph, compiled")
        stage = CompiledStage(whole, "the graph as a whole", compiler, partitioner=partitioner)
        try:
            if stage.prepare(plain.shared):
                return plain.measured_as(replace(plain.cut, stages=((name, stage),), members=(names,)))
        except (InfeasibleError, torch.OutOfMemoryError):
            pass
        return None

    began, available = compiler.seconds, room.available
    first = room.partitioner(given + available)
    best = compiled(first)
    if best is None:
        return None
    taken, shown = room.taken(best.measurement), 0 if first.weight is None else first.weight.peak - given
    fits = taken <= available
    # The next partition is expected to take more or less than it shows in the same proportion.
    expected = available * shown // max(1, taken)
    limit = max(available, shown)
    limit = given + (limit + int(_CAUTION * max(0, expected - limit)) if fits else min(expected, shown - 1))
    if (first.gain(limit) >= _WORTH_COMPILING) if fits else not first.found_least:
        second = compiled(room.partitioner(limit))
        if second is not None and room.taken(second.measurement) <= available and not (fits and slower(second, best)):
            best, fits = second, True
    if not fits:
        return None
    _log.info("compiled the graph as a whole in %.1f s", compiler.seconds - began, extra=record_fields("compiled"))
    if room.taken(plain.measurement) > available:  # the plain graph would have to recompute
        return best
    # Timed as one, not as the sum of its stages, which one by one find their memory in caches.
    as_one = plain.measured_as(replace(plain.cut, stages=((name, whole),), members=(names,)))
    return None if slower(best, as_one) else best


def slower(found: MeasuredGraph, other: MeasuredGraph) -> bool:
    """Whether a step with everything stored takes clearly longer than another variant.

    Both are timed anew, in turns: a busy machine disturbs one for a while and then the other. Disturbances only
    lengthen runs, so the shortest of each counts.
    """
    mine, theirs = float("inf"), float("inf")
    for turns in (_TURNS, _MORE_TURNS):
        for _ in range(turns):
            mine, theirs = min(mine, found.stages.time_again()), min(theirs, other.stages.time_again())
        if mine <= (1 + _CLEARLY) * theirs:
            return False
    return True


def compiling(progress: Progress) -> Progress:
    """Return a progress callback that reports stages as being compiled."""
    return lambda done, total, name: progress(done, total, f"{name}, compiled")
