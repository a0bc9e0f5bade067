"""The measured graphs of a model, and compiled variants of the main graph: compiled as a whole, or stage by stage.

Compiled as a whole, the graph is one stage, in which Inductor fuses operators across the borders of the plan's stages.
A partitioner (`BudgetPartitioner`), not the plan, then chooses the tensors that the forward saves. It predicts the peak
of each partition before anything is compiled. The compiled stage is then measured, as any stage is. If it exceeds the
limit, or is so far below that a faster partition may fit, a second partition is compiled.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rotor_profiling import Layouts, LossCost, StageCost, bytes_like, storage_bytes, storages, tensors_in
from rotor_profiling.isolate import trained_parameters
from rotor_profiling.timing import several_processes
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.fsdp_markers import TORCH
from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import WAYS, StageCode, owned_tensors
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import Cut, joined
from rotor_py.measure.measurement import Measurement, PrefixCost
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_solver import Loss, Simulation, simulate, store_all
from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rotor_py.compile.partitioner import BudgetPartitioner

_log = logging.getLogger("rotor_py")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredGraph:
    graph: CapturedGraph
    cut: Cut
    stages: StageMeasurer
    context: PrefixCost
    loss: LossCost
    shared: tuple[Any, ...]
    # Output tensors of the last stage, as weak references, so that measuring keeps no tensor alive.
    returned: tuple[weakref.ref[torch.Tensor], ...]
    around: tuple[weakref.ref[torch.Tensor], ...] = ()  # weak references to inputs and outputs of the graph
    # For the first graph of a forward, the next two are 0.
    saved_inputs: int = 0  # bytes of tensors that earlier graphs made and this one saves for its backward
    context_bytes: int = 0  # bytes of the values that this graph's context makes for its stages

    @property
    def measurement(self) -> Measurement:
        return replace(self.stages.measurement(self.loss), prefix=self.context)

    def measured_as(self, cut: Cut, progress: Progress | None = None) -> MeasuredGraph:
        stages = self.stages.of(cut)
        stages.walk(progress)
        return replace(self, cut=cut, stages=stages)

    @property
    def saved_bytes(self) -> int:
        return sum(stage.saved_bytes for stage in self.measurement.stages)


@dataclass(slots=True)
class MeasuredGraphs:
    """All graphs of a model's forward that require a gradient, in the order in which the forward called them."""

    graphs: list[MeasuredGraph] = field(default_factory=list)
    output: Any = None
    outside_bytes: int = 0  # bytes that autograd saves for operators outside all graphs
    # Estimated bytes of gradients and scratch of these operators: four times the largest tensor that they save.
    outside_scratch: int = 0
    passed_on_bytes: int = 0  # bytes of gradients of what stages pass on, as far as no stage and no budget counts them
    returned_bytes: int = 0  # bytes of outputs of the model that the main graph has neither made nor read
    outputs_held: bool = True  # whether the caller holds the model's outputs until the end of the step
    loss: LossCost | None = None
    layouts: Layouts | None = None  # layouts of the gradients that the loss returns for the model's outputs
    # Compiled variants of the main graph, probably the fastest first; empty without a compiler, or if compiling fails.
    variants: list[MeasuredGraph] = field(default_factory=list)

    def settle(self, graph: MeasuredGraph) -> None:
        """Measure the graph again if the loss returns gradients of its outputs in other layouts than those assumed."""
        if self.layouts is not None:
            # Map by id, since `==` of tensors compares elements.
            found = {id(each): strides for each, strides in zip(tensors_in(self.output), self.layouts, strict=True)}
            graph.stages.settle_layouts(tuple(found.get(id(each())) for each in graph.returned))

    @property
    def main(self) -> MeasuredGraph:
        """The graph that is planned: of all graphs, this one saves most bytes for its backward."""
        if len(self.graphs) == 1:  # a shortcut, since adding up saved bytes is slow
            return self.graphs[0]
        return max(self.graphs, key=lambda each: each.saved_bytes)


# Only the main graph is planned. All that runs between its forward and its backward counts as part of the loss: later
# graphs, and the code between graphs. So does the memory that earlier graphs save for their backward.

# Whether the code after a graph break holds its inputs until it returns: observed in torch 2.5, not in 2.11 and 2.13.
_FRAMES_HOLD = TORCH < (2, 11)


def whole_step(found: MeasuredGraphs, main: Measurement) -> Measurement:
    """Return the `main` graph's measurement with the costs of other graphs, code between graphs and the loss added."""
    at = found.graphs.index(found.main)
    before, after = found.graphs[:at], found.graphs[at + 1 :]
    seconds, temp, kept = main.loss.seconds, main.loss.temp_bytes, main.loss.kept_bytes + found.outside_bytes
    output_bytes = main.stages[-1].activation_bytes
    kept += output_bytes if after and _FRAMES_HOLD else 0
    # The backwards of graphs run one after another. In between, gradients to which several of them add stay in memory.
    # So do those of parameters that several graphs use, and that an optimizer updates in the backward.
    uses: Counter[torch.Tensor] = Counter()
    stepped: set[torch.Tensor] = set()
    for graph in found.graphs:
        trained = {each for _, stage in graph.cut.stages for each in trained_parameters(stage)}
        uses.update(trained)
        stepped.update(graph.stages.stepped.among(trained))
    kept += bytes_like(each for each in stepped if uses[each] > 1) + found.passed_on_bytes
    kept += sum(_stored(other)[1] for other in before)
    returned = storages(tensors_in(found.output))
    given = storages(tensor for each in found.main.returned if (tensor := each()) is not None)
    inside = bool(after) and returned.keys().isdisjoint(given)
    # The solver counts the main graph's output during the loss. The backwards of later graphs free it, if not returned.
    gone = main.stages[-1].output_released_bytes if inside and not _FRAMES_HOLD else 0
    gone = max(0, gone - sum(other.saved_inputs for other in after))
    # Each graph runs its backward while memory that the graphs before it have saved (`behind`) is still held.
    behind = most = output = made = 0
    for other in after:
        measured = other.measurement
        last = found.outputs_held and other is after[-1]
        whole, saved = _stored(other, output_held=last)
        seconds, behind = seconds + whole.makespan, behind + other.context_bytes
        # Gradients of later graphs and a held output are added below, or by the solver, so subtract them here.
        made += sum(measured.gradient_bytes)
        output = measured.stages[-1].activation_bytes
        counted = output if last else 0
        backward = len(whole.during) // 2  # index of the loss, which all forwards precede and all backwards follow
        peak = max(*whole.during[:backward], max(whole.during[backward:]) - gone)
        most = max(most, behind + peak - made - counted)
        behind += saved - counted
    kept += made
    if found.loss is not None:
        seconds, kept = seconds + found.loss.seconds, kept + found.loss.kept_bytes
        # Code after the last graph may have made the output, so its gradient may be larger than that of the graph's.
        # Only outputs that the loss reads have one.
        read = zip(tensors_in(found.output), found.layouts or (), strict=True)
        gradient = sum(storages(tensor for tensor, strides in read if strides is not None).values())
        output = max(output, gradient - (0 if after else output_bytes))
        most = max(most, behind + found.loss.temp_bytes + output - made)
    most = max(most, behind + found.outside_scratch - made)
    # `most` includes the gradient of the main graph's output, which the solver also adds to the loss.
    temp += max(0, most - output_bytes) if after else most
    return replace(
        main,
        loss=LossCost(seconds, temp, kept),
        other_outputs=found.returned_bytes,
        outputs_held=found.outputs_held,
        output_held=not after or (found.outputs_held and not inside),
    )


def _stored(graph: MeasuredGraph, *, output_held: bool = False) -> tuple[Simulation, int]:
    """Return the simulated step of a graph that stores everything, and its bytes held between forward and backward."""
    measured = graph.measurement
    chain = replace(measured, outputs_held=False, output_held=output_held).chain(fresh_gradients=True)
    sequence = store_all(chain)
    whole = simulate(chain, sequence)
    return whole, whole.after[sequence.index(Loss()) - 1] + sum(each.nbytes for each in measured.carried)


# If the first partition fits, share of a step's time that a second must promise to save. A guess: compiling is slow.
_WORTH_COMPILING = 0.03
# Share of the bytes left free by the first partition that the second may use. A guess: 1 exceeded a Llama's limit.
_CAUTION = 0.75

# Number of times that each of two variants is timed in a comparison. A guess: with fewer, noise decides.
_TURNS = 4
# Number of times that a slower variant is timed again before it is rejected: other programs may be the cause. A guess.
_MORE_TURNS = 8
# Least share of time by which a variant must be slower to be rejected. A guess: smaller differences may be noise.
_CLEARLY_SLOWER = 0.02


@dataclass(frozen=True, slots=True)
class CompileBudget:
    """Memory for a compiled graph: the `limit` of a step in bytes, and the `budget` of the step with the graph
    uncompiled. `fresh`: gradients are freed between steps.
    """

    budget: Budget
    limit: int
    fresh: bool

    @property
    def available(self) -> int:
        """Bytes for the graph: the limit minus the memory that every plan holds throughout the step."""
        return self.limit - self.budget.fixed.total

    def taken(self, measurement: Measurement) -> int:
        """Return how many of the `available` bytes a step takes if stages cost `measurement` and store everything."""
        budget = self.budget.with_found(measurement, 0, fresh_gradients=self.fresh)
        # `measurement` covers only the graph, so take seconds and scratch bytes of the loss from the uncompiled step.
        plain = self.budget.chain
        chain = replace(budget.chain, loss_time=plain.loss_time, loss_temp=plain.loss_temp)
        return replace(budget, chain=chain, snapshot_bytes=0).peak_bytes(store_all(chain)) - self.budget.fixed.total

    def partitioner(self, limit: int) -> BudgetPartitioner:
        """Return a partitioner that keeps a step within `limit` bytes, which include inputs and results of its code."""
        from rotor_py.compile.partitioner import whole_partitioner

        return whole_partitioner(limit, self.budget.chain)


# Returns the CompileBudget of a step, given its uncompiled measurement and the values that all stages share.
CompileBudgetOf = Callable[[Measurement, Any], CompileBudget]


def compiled_whole(
    plain: MeasuredGraph, compiler: StageCompiler, room: CompileBudget, progress: Progress | None = None
) -> MeasuredGraph | None:
    """Return the graph as one compiled stage, by the faster of at most two partitions that fit into `room`. Return None
    if no partition fits, or if the uncompiled graph fits, too, and is clearly faster.
    """
    if plain.cut.prefix:  # the stages read the output of the prefix layers, which `plain` does not have
        return None
    layers = dict(plain.graph.layers)
    names = tuple(name for group in plain.cut.groups() for name in group)
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    _, whole = joined([(each, layers[each]) for each in names])
    given = storage_bytes([*owned_tensors(whole), *tensors_in(plain.shared)])

    def compiled(partitioner: BudgetPartitioner) -> MeasuredGraph | None:
        if progress is not None:
            progress(0, 1, "the whole graph, compiled")
        stage = CompiledStage(whole, "the graph as a whole", compiler, partitioner=partitioner)
        with suppress(InfeasibleError, torch.OutOfMemoryError):
            if stage.prepare(plain.shared):
                return plain.measured_as(replace(plain.cut, stages=((name, stage),), members=(names,)))
        return None

    began, available = compiler.seconds, room.available
    first = room.partitioner(given + available)
    best = compiled(first)
    if best is None:
        return None
    taken, shown = room.taken(best.measurement), 0 if first.weight is None else first.weight.peak - given
    fits = taken <= available
    # Assume that measured (`taken`) and predicted (`shown`) bytes have the same ratio for the second partition.
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
    if room.taken(plain.measurement) > available:  # uncompiled, the graph would have to recompute
        return best
    # Time the uncompiled graph as one stage, too: timed one by one, stages would find their data in the CPU's caches.
    as_one = plain.measured_as(replace(plain.cut, stages=((name, whole),), members=(names,)))
    return None if slower(best, as_one) else best


def slower(found: MeasuredGraph, other: MeasuredGraph) -> bool:
    """Whether a step that stores everything takes clearly longer as `found` than as `other`. Times both in turns, so
    that other programs disturb both alike, and compares the shortest times, since disturbances only lengthen a run.
    """
    mine, theirs = float("inf"), float("inf")
    for turns in (_TURNS, _MORE_TURNS):
        for _ in range(turns):
            mine, theirs = min(mine, found.stages.time_again()), min(theirs, other.stages.time_again())
        if mine <= (1 + _CLEARLY_SLOWER) * theirs:
            return False
    return True


Agree = Callable[[Sequence[int]], list[int]]
Stages = Sequence[CompiledStage | None]

# Share of its uncompiled time that a compiled stage must save to count as faster. A guess, about the error of a stage's
# measured time: with less, stages would be compiled that seem faster by chance.
_CLEARLY_FASTER = 0.05


def with_ways(stages: Stages, compiler: StageCompiler) -> list[CompiledStage | None]:
    """Add storage modes to stages, first to those whose code most stages share. Compiling them may take as long as
    sharing code has saved: 32 equal blocks, compiled once, get all modes; blocks that all differ get none.
    """
    codes = Counter(stage.code for stage in stages if stage is not None)
    # With several processes, add no modes: all must have the same, but compiling takes another time in each.
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
    """Return the compiled variants of the graph: compiled as a whole if that fits into `room`, else stage by stage. To
    compile both would be slow, and the whole graph, fused across the borders of stages, is mostly faster.
    """
    whole = None if room is None else compiled_whole(plain, compiler, room, progress)
    return _stage_by_stage(plain, compiler, progress, agree) if whole is None else [whole]


def _stage_by_stage(
    plain: MeasuredGraph, compiler: StageCompiler, progress: Progress | None, agree: Agree
) -> list[MeasuredGraph]:
    """Return two variants: in the first, the stages are compiled that get faster; in the second, all that can be.
    Return only the second if all or none get faster, and no variant if no stage can be compiled. A plan then uses one
    of these, or the uncompiled graph, whichever is faster within its limit. `agree` takes maxima over processes.
    """
    kinds, seconds = len(compiler.seconds_of), compiler.seconds
    wrapped = [CompiledStage(function, f"stage {name}", compiler) for name, function in plain.cut.stages]

    def compiling(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress(done, total, f"{name}, compiled")

    plain.measured_as(_with(plain.cut, wrapped), compiling)
    can = [not plain_somewhere for plain_somewhere in agree([not stage.compiled for stage in wrapped])]
    if not any(can):
        return []
    kinds, seconds = len(compiler.seconds_of) - kinds, compiler.seconds - seconds
    _log.info("compiled %d kinds of stages in %.1f s", kinds, seconds, extra=record_fields("compiled", kinds=kinds))
    compiled = with_ways(_chosen(wrapped, can), compiler)
    every = plain.measured_as(_with(plain.cut, compiled), compiling)
    costs = zip(plain.measurement.stages, every.measurement.stages, strict=True)
    slow = agree([_seconds(now) > (1 - _CLEARLY_FASTER) * _seconds(before) for before, now in costs])
    fast = [possible and not slower for possible, slower in zip(can, slow, strict=True)]
    if fast == can or not any(fast):
        return [every]
    return [plain.measured_as(_with(plain.cut, _chosen(compiled, fast))), every]


def _chosen(wrapped: Sequence[CompiledStage | None], chosen: Sequence[bool]) -> list[CompiledStage | None]:
    return [stage if taken else None for stage, taken in zip(wrapped, chosen, strict=True)]


def _with(cut: Cut, compiled: Sequence[CompiledStage | None]) -> Cut:
    pairs = zip(cut.stages, compiled, strict=True)
    return replace(cut, stages=tuple((name, plain if code is None else code) for (name, plain), code in pairs))


def _seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds
