"""The measured graphs of a model, and compiled variants of one: as a whole, or stage by stage with memory budgets.

As one stage, the graph is as fast as under `torch.compile`: it is fused and laid out across borders. The partitioner
then chooses what the forward saves, and not the plan. The joint graph predicts the bytes of every partition before
anything is compiled. Inductor's result is measured like any stage: if it takes more, or so much less that a faster
partition may fit, one other partition is compiled.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
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
    # Outputs of the last stage. Weak: measuring must not keep tensors alive.
    returned: tuple[weakref.ref[torch.Tensor], ...]
    # Inputs and outputs of the graph. Weak, too.
    around: tuple[weakref.ref[torch.Tensor], ...] = ()
    # Of a graph after others: bytes that those made and it saves for its backward, and of results of its context.
    saved_inputs: int = 0
    context_bytes: int = 0

    @property
    def measurement(self) -> Measurement:
        return replace(self.stages.measurement(self.loss), prefix=self.context)

    def measured_as(self, cut: Cut, progress: Progress | None = None) -> MeasuredGraph:
        stages = self.stages.of(cut)
        stages.walk(progress)
        stages.settle_layouts(())
        return replace(self, cut=cut, stages=stages)

    @property
    def saved_bytes(self) -> int:
        return sum(stage.saved_bytes for stage in self.measurement.stages)


@dataclass(slots=True)
class MeasuredGraphs:
    """All graphs with gradients of a model's forward, in the order in which Dynamo called them."""

    graphs: list[MeasuredGraph] = field(default_factory=list)
    output: Any = None
    outside_bytes: int = 0  # bytes that autograd saves for operators outside all graphs
    returned_bytes: int = 0  # bytes of outputs that the main graph has neither made nor read
    outputs_held: bool = True  # whether the caller holds the outputs through the step: all of them if none is a loss
    loss: LossCost | None = None
    layouts: Layouts | None = None  # layouts of the gradients that the loss gives to the model's output
    # The main graph compiled, the likely fastest first; empty if nothing is or can be compiled.
    variants: list[MeasuredGraph] = field(default_factory=list)

    def settle(self, graph: MeasuredGraph) -> None:
        """Remeasure the graph, which makes the model's output, for gradients in the layouts that the loss gives."""
        if self.layouts is not None:
            # By id: tensors compare element by element.
            pairs = zip(tensors_in(self.output), self.layouts, strict=True)
            found = {id(tensor): strides for tensor, strides in pairs}
            graph.stages.settle_layouts(tuple(found.get(id(each())) for each in graph.returned))

    @property
    def main(self) -> MeasuredGraph:
        """The planned graph: the one that saves most for its backward."""
        if len(self.graphs) == 1:  # saved bytes take long to add up
            return self.graphs[0]
        return max(self.graphs, key=lambda each: each.saved_bytes)

    @property
    def shared_gradient_bytes(self) -> int:
        """Bytes of gradients of parameters that several graphs use, and that are stepped in the backward."""
        uses: Counter[torch.Tensor] = Counter()
        stepped: set[torch.Tensor] = set()
        for graph in self.graphs:
            trained = {each for _, stage in graph.cut.stages for each in trained_parameters(stage)}
            uses.update(trained)
            stepped.update(graph.stages.stepped.among(trained))
        return bytes_like(each for each in stepped if uses[each] > 1)


# Only the main graph is planned. Everything between its forward and its backward is the loss for the plan: later graphs
# are part of it, and memory that earlier graphs save for their backward counts as kept by it.

# Whether a frame that resumes after a graph break holds its inputs: seen in torch 2.5, not in 2.11 and 2.13.
_FRAMES_HOLD = TORCH < (2, 11)


def whole_step(found: MeasuredGraphs, main: Measurement) -> Measurement:
    """Add to the `main` graph's measurement the needs of other graphs, outside operators and the loss."""
    at = found.graphs.index(found.main)
    before, after = found.graphs[:at], found.graphs[at + 1 :]
    seconds, temp, kept = main.loss.seconds, main.loss.temp_bytes, main.loss.kept_bytes + found.outside_bytes
    output_bytes = main.stages[-1].activation_bytes
    if after and _FRAMES_HOLD:
        kept += output_bytes
    # Graphs go backward one after the other: a gradient that several of them add to waits from one to the next.
    kept += found.shared_gradient_bytes
    kept += sum(_stored(other)[1] for other in before)
    returned = storages(tensors_in(found.output))
    given = storages(tensor for each in found.main.returned if (tensor := each()) is not None)
    inside = bool(after) and returned.keys().isdisjoint(given)
    # The solver counts the main graph's output in the loss. It is gone when later graphs go backward, unless returned.
    gone = main.stages[-1].output_released_bytes if inside and not _FRAMES_HOLD else 0
    gone = max(0, gone - sum(other.saved_inputs for other in after))
    # The graphs go backward one by one, each beside what those before it keep.
    behind = most = output = made = 0
    for other in after:
        measured = other.measurement
        last = found.outputs_held and other is after[-1]
        whole, saved = _stored(other, output_held=last)
        seconds, behind = seconds + whole.makespan, behind + other.context_bytes
        # The solver counts gradients made before the main graph's backward, and an output, from the start: too early.
        made += sum(measured.gradient_bytes)
        output = measured.stages[-1].activation_bytes
        counted = output if last else 0
        backward = len(whole.during) // 2  # everything is stored: forwards, the loss, and backwards
        peak = max(*whole.during[:backward], max(whole.during[backward:]) - gone)
        most = max(most, behind + peak - made - counted)
        behind += saved - counted
    kept += made
    if found.loss is not None:
        seconds, kept = seconds + found.loss.seconds, kept + found.loss.kept_bytes
        most = max(most, behind + found.loss.temp_bytes + output - made)
    # That includes the gradient of the main graph's output, which the solver counts with the loss as well.
    temp += max(0, most - output_bytes) if after else most
    return replace(
        main,
        loss=LossCost(seconds, temp, kept),
        other_outputs=found.returned_bytes,
        outputs_held=found.outputs_held,
        output_held=not after or (found.outputs_held and not inside),
    )


def _stored(graph: MeasuredGraph, *, output_held: bool = False) -> tuple[Simulation, int]:
    """Simulate a graph that stores everything; also return the bytes that it keeps from its forward to its backward."""
    measured = graph.measurement
    chain = replace(measured, outputs_held=False, output_held=output_held).chain(fresh_gradients=True)
    sequence = store_all(chain)
    whole = simulate(chain, sequence)
    carried = sum(each.nbytes for each in measured.carried)
    return whole, whole.after[sequence.index(Loss()) - 1] + carried


# Least predicted gain for compiling a second partition where the first one fits. A guess: it costs as much waiting.
_WORTH_COMPILING = 0.03
# Share of the memory left by the first partition that the second may take. A guess: with all, a Llama was 1 % over.
_CAUTION = 0.75

# Timings of each variant in a comparison. A guess: fewer let noise decide.
_TURNS = 4
# Further timings before one is rejected, after a disturbance of the machine may have passed. A guess, as above.
_MORE_TURNS = 8
# How much slower compiled code has to be for the plain graph to win. A closer choice would change a user's last digits.
_CLEARLY_SLOWER = 0.02


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
        # Of the graph only: everything after it, down to the loss, is as in the plain step.
        plain = self.budget.chain
        chain = replace(budget.chain, loss_time=plain.loss_time, loss_temp=plain.loss_temp)
        return replace(budget, chain=chain, snapshot_bytes=0).peak_bytes(store_all(chain)) - self.budget.fixed.total

    def partitioner(self, limit: int) -> BudgetPartitioner:
        """Return a partitioner of graphs within `limit`, counting all inputs and results of the compiled code."""
        from rotor_py.compile.partitioner import whole_partitioner

        return whole_partitioner(limit, self.budget.chain)


# The room that a step leaves, from its plain measurement and the graph's inputs.
CompileBudgetOf = Callable[[Measurement, Any], CompileBudget]


def compiled_whole(
    plain: MeasuredGraph, compiler: StageCompiler, room: CompileBudget, progress: Progress | None = None
) -> MeasuredGraph | None:
    """Return the graph as one compiled stage, the faster of at most two partitions inside the room. None if none fits,
    or if the plain graph also fits and is clearly faster.
    """
    if plain.cut.prefix:  # its stages need outputs of the prefix layers, which are not available
        return None
    layers = dict(plain.graph.layers)
    names = tuple(name for group in plain.cut.groups() for name in group)
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    _, whole = joined([(each, layers[each]) for each in names])
    given = storage_bytes([*owned_tensors(whole), *tensors_in(plain.shared)])

    def compiled(partitioner: BudgetPartitioner) -> MeasuredGraph | None:
        # None if nothing fits, if it cannot be compiled, or runs out of memory, unforeseen.
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
    """Whether a step with everything stored takes clearly longer than another variant. Both are timed anew, in turns: a
    busy machine disturbs one for a while and then the other, and only lengthens runs, so the shortest of each counts.
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

# How much faster a compiled stage has to be, relative to its plain time, to count as faster. A guess, about the error
# of single stages' times: with less, a plan picks stages that seemed faster by chance.
_CLEARLY_FASTER = 0.05


def with_ways(stages: Stages, compiler: StageCompiler) -> list[CompiledStage | None]:
    """Give compiled stages further storage modes, the most frequent kind first, in the compile time that stages of one
    kind save: of 32 equal blocks, there is time for all modes of one; where all differ, there is none.
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
    """Return the compiled variants of the graph: as a whole if that fits into the `room`, or else stage by stage. Only
    one of both is compiled: that takes long, and a whole graph that fits is faster, as it has no stage borders.
    """
    whole = None if room is None else compiled_whole(plain, compiler, room, progress)
    return _stage_by_stage(plain, compiler, progress, agree) if whole is None else [whole]


def _stage_by_stage(
    plain: MeasuredGraph, compiler: StageCompiler, progress: Progress | None, agree: Agree
) -> list[MeasuredGraph]:
    """Return first the graph with the faster stages compiled, then with all that can be; one where both are the same.
    The plan chooses among these and the plain graph by its limit: a faster stage may need more memory. Processes that
    wait for each other in stages measure the same graphs: `agree` returns of each number the largest in any process.
    """
    kinds, seconds = len(compiler.seconds_of), compiler.seconds
    wrapped = [CompiledStage(function, f"stage {name}", compiler) for name, function in plain.cut.stages]

    def compiling(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress(done, total, f"{name}, compiled")

    # Measuring runs the stages, and the first run compiles.
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
