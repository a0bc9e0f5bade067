"""Keep one plan, with its costs and sequence, for each kind of step that a model takes in turn.

A GAN's discriminator trains in one step and only passes gradients in the next; adapters switch; layers freeze. Each
kind of step has its own graph, costs and sequence, found at its first step and kept while others train. Some sizes of
the input may change the graph within one kind, which shows only when the model runs.

A step that no plan fits is remembered: a later one as large is refused without measuring.

A plan remembers the order of the backwards of forwards in flight. For a sum of losses, autograd runs the last forward's
backward first. Plans for that order are faster than plans for any order (`rotor_solver.solve_in_flight`), but may
exceed the limit in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py.compile.compiled_stage import is_compiled, partitioned_freely
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stages import MeasuredCut
from rotor_py.plan.saved_plan import Plan, input_fingerprint, model_fingerprint
from rotor_py.plan.settings import Settings
from rotor_py.plan.sources.source import Source
from rotor_py.plan.step_spec import ModelState, StepSpec
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.runner import undo_bytes
from rotor_py.stage.side_effects import GraphEffects, recall_effects, remember_effects
from rotor_solver import InfeasibleError, Sequence

_MOST = 16
"""Refusals to remember; the oldest goes first. A guess: a data set has few shapes that are too large. Others are
measured again."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    spec: StepSpec
    error: InfeasibleError


class Refusals:
    """Remembers steps that no plan fits, since measuring them again takes seconds each."""

    def __init__(self) -> None:
        self._known: list[_Refusal] = []

    def remember(self, spec: StepSpec, error: InfeasibleError) -> None:
        """Remember that no plan fits steps like `spec`."""
        # A copy has no traceback, which would keep the frames of the step, and their tensors.
        self._known = [*self._known, _Refusal(spec, copy(error))][-_MOST:]

    def raise_if_refused(self, spec: StepSpec, limit_bytes: int, source: Source) -> None:
        """Raise InfeasibleError for a step that needs at least as much as one refused for as large a limit."""
        for each in self._known:
            alike = each.spec.model == spec.model and source.covers(spec.input, each.spec.input)
            if alike and _least(each.spec, spec) and limit_bytes <= each.error.mem_limit:
                raise copy(each.error)


def _least(refused: StepSpec, spec: StepSpec) -> bool:
    """Whether the data of `spec` need no less than the refused ones. A batch that masks nothing needs least."""
    return all(refused.answers or ()) or refused.answers == spec.answers


_ENOUGH = 3
"""Steps in reverse, after which reverse order is planned for. A guess: more steps delay the faster plan; fewer risk a
wrong order, which takes more memory than the limit."""


@dataclass(slots=True)
class BackwardOrder:
    """Observed order of the backwards in the steps by one plan."""

    in_reverse: int = 0
    """steps with as many forwards in flight as planned for, whose last one went backward first"""
    otherwise: bool = False
    """whether a backward has come while a later forward was in flight"""

    def to_plan_for(self, settings: Settings, *, alone: bool) -> str:
        """Return the order to plan for, one of `rotor_solver.in_flight.ORDERS`; processes use the declared one."""
        told = settings.backward_order
        if not alone:
            return told or "any"
        if self.otherwise:
            return "any"
        seen = "reverse" if self.in_reverse >= _ENOUGH and settings.watch is not False else "any"
        return told or seen


class PlanState(Enum):
    """The state of a plan. The Note in `planner.py` describes the transitions."""

    UNMEASURED = "nothing is known about the step"
    MEASURED = "costs are known, and no sequence"
    SOLVED = "there is a sequence, which this process may follow"
    AGREED = "all processes that train together follow the same sequence"


@dataclass(slots=True)
class StepPlan:
    """The plan for one kind of step. Its costs are known from the beginning, its sequence once it is solved.

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
    """the sequence to continue with, beyond the limit, if a late optimizer leaves no room for any plan"""
    solved_with: tuple[float | str | None, int] | None = None
    """`Settings.solved_with` when the sequence was found"""
    found: Sequence | None = None
    """the solved sequence; any other one in use was set by the user"""
    most_in_flight: int = 1
    """the most forwards in flight at once while one of them followed this plan"""
    order: BackwardOrder = field(default_factory=BackwardOrder)
    """the order in which backwards have come"""
    fresh_gradients: bool = False
    """whether gradients are freed between steps"""
    watched: Sequence | None = None
    """the sequence of the last step that was watched to its end"""
    prediction_holds: bool | None = None
    """whether the first step has confirmed the prediction; None without a prediction or a watched step"""
    asked: int = 0
    """number of forwards in which processes could exchange whether the prediction holds"""
    overruns: int = 0
    """number of steps over the limit"""
    reduced: tuple[float | str | None, int] | None = None
    """the limit that was set when the device ran out of memory, and the reduced limit in bytes"""
    ways: tuple[MeasuredCut, ...] = ()
    """variants of its stages, if there are several: some compiled, all compiled, all plain; `cut` is one of theirs"""
    compiled_for_larger_budget: bool = False
    """whether the graph was compiled as a whole for more room than the last solve had"""
    guard_bytes: int | None = None
    """bytes of the budget for undoing stages that run out of memory; None where nothing is undone"""
    _effects: tuple[GraphEffects, ...] = field(init=False, repr=False)
    _way_names: tuple[Measurement, tuple[tuple[str, ...], ...]] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._effects = tuple(recall_effects(function) for function in self.functions)

    @classmethod
    def adopted(cls, file: Plan, source: Source) -> StepPlan:
        """Make the plan of a file. Raises PlanMismatchError if it was made for another model."""
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
        """Raise PlanMismatchError if a step on `value` is not the file's. Compares only what has changed."""
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
        """The state of the plan."""
        if self.sequence is None:
            return PlanState.MEASURED
        return PlanState.AGREED if self.agreed is self.sequence else PlanState.SOLVED

    @property
    def names(self) -> list[str]:
        """The names of the stages."""
        return list(self.measurement.names)

    @property
    def functions(self) -> list[nn.Module]:
        """The stages; empty if the cut is unknown."""
        return [] if self.cut is None else [function for _, function in self.cut.stages]

    @property
    def way_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of each stage's storage modes (`Measurement.way_names`), cached since every step reads them."""
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
        """The spec of the input; None if unknown."""
        return None if self.spec is None else self.spec.input

    def unlimited(self, settings: Settings) -> bool:
        """Whether there is no limit: none was given, and a strategy by hand needs none."""
        by_hand = settings.by_hand is not None if self.file is None else not self.file.limited
        return by_hand and settings.mem_limit is None

    def found_for(self, settings: Settings) -> bool:
        """Whether its sequence comes from solving, and not from a strategy by hand, a file, or the user."""
        return self.file is None and settings.by_hand is None and self.sequence is self.found

    def is_for(self, spec: StepSpec) -> bool:
        """Whether it was measured for such steps. A plan from a file is compared with its file instead."""
        return self.file is None and self.spec is not None and self.spec.same_step(spec)

    def matches(self, spec: StepSpec) -> bool:
        """Whether it was measured for an identical step, as far as a cheap comparison shows."""
        return self.file is None and self.spec is not None and self.spec.identical(spec)

    def is_replaced_by(self, other: StepPlan) -> bool:
        """Whether `other` was measured for such steps, too, and on the same graph."""
        return other.spec is not None and self.is_for(other.spec) and self.source.same_graph(other.source)

    def restore_effects(self) -> None:
        """Restore the side effects of each layer as found for this plan."""
        # Plans share layers, and another kind of step may have found other effects.
        for function, effects in zip(self.functions, self._effects, strict=True):
            remember_effects(function, effects)

    def count_optimizer(self, cost: OptimizerCost) -> None:
        """Count an undeclared optimizer."""
        self.budget = self.budget.with_optimizer(cost)

    def budget_of(self, way: MeasuredCut) -> Budget:
        """Return the budget of the step with its stages run as this variant."""
        found = self._measurement_of(way)
        budget = self.budget.with_found(found, 0, fresh_gradients=self.fresh_gradients)
        if self.guard_bytes is None:
            return replace(budget, snapshot_bytes=found.snapshot_bytes)
        buffers = budget.fixed.buffers + _guard_bytes(way) - self.guard_bytes
        return replace(budget, fixed=replace(budget.fixed, buffers=buffers))

    def budgets(self) -> list[tuple[Budget, Measurement]]:
        """Return budget and measurement of each variant."""
        found = [(self.budget_of(way), self._measurement_of(way)) for way in self.ways]
        return found or [(self.budget, self.measurement)]

    def turn_to(self, way: MeasuredCut) -> None:
        """Run the stages as this variant from the next forward on."""
        if self.cut is way.cut:
            return
        self.budget, self.measurement, self.cut = self.budget_of(way), self._measurement_of(way), way.cut
        if self.guard_bytes is not None:
            self.guard_bytes = _guard_bytes(way)
        self.source.follow(way.cut)
        self._effects = tuple(recall_effects(function) for function in self.functions)

    @contextmanager
    def without_budget(self) -> Iterator[None]:
        """Inside the context, compiled stages save what the compiler saves without a limit."""
        assert self.cut is not None
        stages = tuple((name, partitioned_freely(stage)) for name, stage in self.cut.stages)
        self.source.follow(replace(self.cut, stages=stages))
        try:
            yield
        finally:
            self.source.follow(self.cut)

    def _measurement_of(self, way: MeasuredCut) -> Measurement:
        """Return the variant's measurement, with the loss as observed in steps since."""
        return replace(way.measurement, loss=self.measurement.loss)

    def solve_again(self) -> None:
        """Drop the sequence, but continue with it if no other is found."""
        # Two optimizers may come before the next forward: the second finds no sequence, and must not replace the
        # first's.
        if self.sequence is not None:
            self.last_resort, self.sequence = self.sequence, None


def _guard_bytes(way: MeasuredCut) -> int:
    """Return the bytes for undoing stages that run out of memory, for this variant; see `oom_replanning.guarded`."""
    return way.measurement.snapshot_bytes + undo_bytes(function for _, function in way.cut.stages)


_MOST_WAITING = 8
"""Waiting step plans; the one that has waited longest goes first. A guess: a GAN has two or three. Dropped ones are
measured again."""


class StepPlans:
    """The step plan in use, and those that wait for their step to come again."""

    def __init__(self) -> None:
        self.in_use: StepPlan | None = None
        self._waiting: list[StepPlan] = []

    def take_up(self, plan: StepPlan, present: ModelState) -> None:
        """Put a new plan in use, and drop others for the same graph in steps of its kind. The one in use may wait.

        A plan from a file does not wait: it fits any step that its file covers, and is dropped. `present` is the
        model's state, with its present layers.
        """
        before, self.in_use = self.in_use, plan
        waiting = [each for each in (*self._waiting, before) if each is not None and each.file is None]
        self._keep([each for each in waiting if not each.is_replaced_by(plan)], present)

    @contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Restore the present plans after an error: it is about one step, and they are about others."""
        in_use, waiting = self.in_use, list(self._waiting)
        try:
            yield
        except BaseException:
            self.in_use, self._waiting = in_use, waiting
            if in_use is not None:
                in_use.restore_effects()
            raise

    def keep_only_in_use(self) -> None:
        """Drop the waiting plans: their premises have changed."""
        self._waiting = []

    def turn_to(self, spec: StepSpec, covers: Callable[[StepPlan], bool], revived: Callable[[StepPlan], None]) -> bool:
        """Put a plan for steps like `spec` in use, one that `covers` its input if possible; False if there is none.

        `revived` is called with a plan that waited: the limit may have changed, or other steps may have left gradients.
        """
        found = [each for each in self._all() if each.is_for(spec)]
        if not found:
            return False
        if len(found) > 1:  # every step comes here, mostly with one
            found.sort(key=covers, reverse=True)  # stable: among equals, the one in use is first
        self._put_in_use(found[0], spec.model, revived)
        return True

    def for_other_ways(
        self, spec: StepSpec, covers: Callable[[StepPlan], bool], revived: Callable[[StepPlan], None]
    ) -> Iterator[StepPlan]:
        """Put each waiting plan that may serve a step like `spec` in use, in turn."""
        for each in [each for each in self._waiting if each.is_for(spec) and covers(each)]:
            self._put_in_use(each, spec.model, revived)
            yield each

    def count_optimizer(self, cost: OptimizerCost, limit_bytes: int | None) -> None:
        """Count an optimizer for the waiting plans; one without room for it is solved again in its turn.

        Without a limit, for strategies by hand, plans stay as they are.
        """
        for each in self._waiting:
            each.count_optimizer(cost)
            if each.sequence is None or limit_bytes is None:
                continue
            # Agreed plans even where there is room: other processes may have none, and all have to solve together.
            if each.agreed is not None or each.budget.peak_bytes(each.sequence) > limit_bytes:
                each.solve_again()

    def copied(self, source: Source) -> StepPlans:
        """Return the plans for a copy of the model with stages from `source`: the plan in use, if it can serve there.

        Graphs are bound to the parameters that they were captured with. A copy captures its own, at its first step.
        """
        twin = StepPlans()
        # Layers are copied along with the plan. Its `spec` names those of the original, so the copy's first step is
        # compared with the file again, or measured; until then the plan can be inspected.
        if self.in_use is not None and not source.captured:
            twin.in_use = replace(self.in_use, source=source)
        elif self.in_use is not None and self.in_use.file is not None:
            # Optimizers detected since count in the copy as well.
            twin.in_use = replace(
                StepPlan.adopted(self.in_use.file, source),
                budget=self.in_use.budget,
                guard_bytes=self.in_use.guard_bytes,
            )
        return twin

    def _all(self) -> list[StepPlan]:
        return self._waiting if self.in_use is None else [self.in_use, *self._waiting]

    def _put_in_use(self, plan: StepPlan, present: ModelState, revived: Callable[[StepPlan], None]) -> None:
        if plan is self.in_use:
            return
        waiting = [*self._waiting, *([] if self.in_use is None else [self.in_use])]
        self._keep([each for each in waiting if each is not plan], present)
        plan.restore_effects()
        self.in_use = plan
        revived(plan)

    def _keep(self, waiting: list[StepPlan], present: ModelState) -> None:
        """Keep these waiting, except plans for removed layers: only the plan would hold their memory."""
        kept = [each for each in waiting if each.spec is not None and each.spec.model.same_layers(present)]
        self._waiting = kept[-_MOST_WAITING:]
