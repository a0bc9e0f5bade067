"""The plan for one kind of step: what it is for, what it costs, and the sequence, as far as that is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py.compiled.compiled_stage import is_compiled, partitioned_freely
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stages import MeasuredCut
from rotor_py.plan.noticed.backward_order import BackwardOrder
from rotor_py.plan.saved.fingerprint import input_fingerprint, model_fingerprint
from rotor_py.plan.saved.plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.plan.sources.source import Source
from rotor_py.plan.steps.step_spec import StepSpec
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.graph_effects import GraphEffects, recall_effects, remember_effects
from rotor_py.stage.undo import undo_bytes
from rotor_solver import Sequence


class PlanState(Enum):
    """How far a plan is made. The Note in `planner.py` says what leads from one to another."""

    UNMEASURED = "nothing is known about the step"
    MEASURED = "costs are known, and no sequence"
    SOLVED = "there is a sequence, which this process may follow"
    AGREED = "all processes that train together follow the same sequence"


@dataclass(slots=True)
class StepPlan:
    """What is known about one kind of step. Its costs are there from the beginning, its sequence once it was solved.

    A plan from a file has no `spec` until its first step comes: a file cannot name objects. For a captured model it
    never has a `cut`, since TorchDynamo captures the graph only while that step runs.
    """

    source: Source
    measurement: Measurement
    budget: Budget
    spec: StepSpec | None
    cut: Cut | None
    file: Plan | None = None
    sequence: Sequence | None = None
    agreed: Sequence | None = None
    """the sequence that all processes that train together have agreed upon"""
    last_resort: Sequence | None = None
    """the sequence to go on with, beyond the limit, where an optimizer that came late leaves no room for any plan"""
    solved_with: tuple[float | str | None, int] | None = None
    """`Settings.solved_with` when the sequence was found"""
    found: Sequence | None = None
    """the sequence that was found; another one in use is one that the user set"""
    most_in_flight: int = 1
    """the most forwards that were in flight at once when one of them followed this plan"""
    order: BackwardOrder = field(default_factory=BackwardOrder)
    """in which order backwards have come"""
    fresh_gradients: bool = False
    """whether gradients are freed between steps"""
    watched: Sequence | None = None
    """the sequence of the last step that was watched to its end"""
    prediction_holds: bool | None = None
    """whether the first step has taken what was predicted; None where nothing was, or no step has been watched"""
    asked: int = 0
    """in how many forwards processes could ask each other whether the prediction holds"""
    overruns: int = 0
    """how many steps were found to take more than the limit"""
    reduced: tuple[float | str | None, int] | None = None
    """the limit that was set when the device ran out of memory, and the bytes that are left of it since"""
    ways: tuple[MeasuredCut, ...] = ()
    """the ways to run its stages, if there is a choice: some compiled, all compiled, all plain; `cut` is one of them"""
    outgrown: bool = False
    """whether the graph was compiled as a whole for more room than there was when it was solved last"""
    guard_bytes: int | None = None
    """bytes of the budget for undoing what runs out of memory; None where nothing is undone"""
    _effects: tuple[GraphEffects, ...] = field(init=False, repr=False)
    _way_names: tuple[Measurement, tuple[tuple[str, ...], ...]] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._effects = tuple(recall_effects(function) for function in self.functions)

    @classmethod
    def adopted(cls, file: Plan, source: Source) -> StepPlan:
        """The plan that a file says. PlanMismatchError if it was made for another model."""
        costs = file.costs
        cut = source.adopt(file)
        return cls(
            source,
            costs.measurement,
            costs.budget,
            spec=None,
            cut=cut,
            file=file,
            sequence=file.sequence,
            fresh_gradients=file.fresh_grads,
        )

    def compare_with_file(self, spec: StepSpec, value: Any, model: TrainedModel) -> None:
        """PlanMismatchError if a step on `value` is not the file's. Only what has changed is looked at again."""
        assert self.file is not None
        known = self.spec
        if known is None or known.model != spec.model:
            self.file.refuse_other(model=model_fingerprint(model.core))
            self.cut = self.source.adopt(self.file)
        if known is None or not self.source.covers(known.input, value):
            self.file.refuse_other(value=input_fingerprint(value, model.device_of(spec.input)))
            known = spec
        self.spec = StepSpec(spec.model, known.input)

    @property
    def state(self) -> PlanState:
        """How far the plan is made."""
        if self.sequence is None:
            return PlanState.MEASURED
        return PlanState.AGREED if self.agreed is self.sequence else PlanState.SOLVED

    @property
    def names(self) -> list[str]:
        """The names of the stages."""
        return list(self.measurement.names)

    @property
    def functions(self) -> list[nn.Module]:
        """The stages; none where the cut is not known."""
        return [] if self.cut is None else [function for _, function in self.cut.stages]

    @property
    def way_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the ways to store each stage (`Measurement.way_names`), which every step asks for."""
        if self._way_names is None or self._way_names[0] is not self.measurement:
            self._way_names = self.measurement, self.measurement.way_names
        return self._way_names[1]

    @property
    def compiled(self) -> list[str]:
        """The names of the stages that run compiled."""
        if self.cut is not None:
            return [name for name, function in self.cut.stages if is_compiled(function)]
        return [] if self.file is None or self.file.compiled is None else self.file.compiled.stages

    @property
    def input_spec(self) -> Any:
        """The spec of the input; None where it is not known."""
        return None if self.spec is None else self.spec.input

    def unlimited(self, settings: Settings) -> bool:
        """Whether there is no limit: a strategy by hand needs none, and none was given."""
        by_hand = settings.by_hand is not None if self.file is None else not self.file.limited
        return by_hand and settings.mem_limit is None

    def found_for(self, settings: Settings) -> bool:
        """Whether the best sequence was found for it, rather than given by hand, by a file, or by the user."""
        return self.file is None and settings.by_hand is None and self.sequence is self.found

    def is_for(self, spec: StepSpec) -> bool:
        """Whether it was measured for such steps. What a plan from a file is for, its file says."""
        return self.file is None and self.spec is not None and self.spec.same_step(spec)

    def is_just_for(self, spec: StepSpec) -> bool:
        """Whether it was measured for the very same step, as far as that shows at once."""
        return self.file is None and self.spec is not None and self.spec.equals_at_sight(spec)

    def is_replaced_by(self, other: StepPlan) -> bool:
        """Whether `other` was measured for such steps, too, and on the same graph."""
        return other.spec is not None and self.is_for(other.spec) and self.source.same_graph(other.source)

    def restore_effects(self) -> None:
        """Have remembered of each layer what was found out for this plan."""
        # Plans share layers, and another kind of step may have shown something else of them.
        for function, effects in zip(self.functions, self._effects, strict=True):
            remember_effects(function, effects)

    def count_optimizer(self, cost: OptimizerCost) -> None:
        """Count an optimizer that nothing was known about."""
        self.budget = self.budget.with_optimizer(cost)

    def budget_of(self, way: MeasuredCut) -> Budget:
        """The budget of the step with its stages run in this way."""
        found = self._measurement_of(way)
        budget = self.budget.with_found(found, 0, fresh_gradients=self.fresh_gradients)
        if self.guard_bytes is None:
            return replace(budget, snapshot_bytes=found.snapshot_bytes)
        buffers = budget.fixed.buffers + _guard_bytes(way) - self.guard_bytes
        return replace(budget, fixed=replace(budget.fixed, buffers=buffers))

    def budgets(self) -> list[tuple[Budget, Measurement]]:
        """Of each way to run the stages the budget, and what it was measured to cost."""
        found = [(self.budget_of(way), self._measurement_of(way)) for way in self.ways]
        return found or [(self.budget, self.measurement)]

    def turn_to(self, way: MeasuredCut) -> None:
        """Run the stages in this way from the next forward on."""
        if self.cut is way.cut:
            return
        self.budget, self.measurement, self.cut = self.budget_of(way), self._measurement_of(way), way.cut
        if self.guard_bytes is not None:
            self.guard_bytes = _guard_bytes(way)
        self.source.follow(way.cut)
        self._effects = tuple(recall_effects(function) for function in self.functions)

    @contextmanager
    def without_budget(self) -> Iterator[None]:
        """Inside, what is compiled saves what the compiler would save without a limit."""
        assert self.cut is not None
        stages = tuple((name, partitioned_freely(stage)) for name, stage in self.cut.stages)
        self.source.follow(replace(self.cut, stages=stages))
        try:
            yield
        finally:
            self.source.follow(self.cut)

    def _measurement_of(self, way: MeasuredCut) -> Measurement:
        """What was measured, with what steps have shown of the loss since."""
        return replace(way.measurement, loss=self.measurement.loss)

    def solve_again(self) -> None:
        """Give the sequence up, but go on with it if no other is found."""
        # Two optimizers may come before the next forward: the second finds no sequence, and the first's is to stay.
        if self.sequence is not None:
            self.last_resort, self.sequence = self.sequence, None


def _guard_bytes(way: MeasuredCut) -> int:
    """Bytes for undoing what runs out of memory where stages run in this way; see `out_of_memory.guarded_budget`."""
    return way.measurement.snapshot_bytes + undo_bytes(function for _, function in way.cut.stages)
