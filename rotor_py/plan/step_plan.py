"""The plans for the kinds of steps that a model takes in turn: each with its costs and its sequence.

A discriminator is trained in one step, and gets gradients for its input in the next; adapters are switched; layers are
frozen and trained again. Each kind of step has its own graph, costs and sequence. They are found when such a step comes
for the first time, and kept while others train.

A model may also take another way for some sizes of its input, in a step of the same kind: it has another graph there.
Which one shows only when the model runs.

Steps that no plan fits are remembered: a later one that is as large is refused at once, and not measured again.

A plan remembers the order in which the backwards of forwards in flight come. A sum of losses goes backward through the
last forward first. So does whatever autograd is given at once. Plans for that order are faster than those for any order
(`rotor_solver.solve_in_flight`), and do not hold in another one.
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
"""Refusals that are remembered, the oldest going first. A guess: a data set has few shapes that are too large."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    spec: StepSpec
    error: InfeasibleError


class Refusals:
    """Measuring takes seconds. A data set with a few batches that are too large is not to pay them each time."""

    def __init__(self) -> None:
        self._known: list[_Refusal] = []

    def remember(self, spec: StepSpec, error: InfeasibleError) -> None:
        """No plan fits for steps like `spec`."""
        # A copy has no traceback, which would keep the frames of the step, and their tensors.
        self._known = [*self._known, _Refusal(spec, copy(error))][-_MOST:]

    def raise_if_refused(self, spec: StepSpec, limit_bytes: int, source: Source) -> None:
        """InfeasibleError for a step that needs at least as much as one that was refused for as large a limit."""
        for each in self._known:
            alike = each.spec.model == spec.model and source.covers(spec.input, each.spec.input)
            if alike and _least(each.spec, spec) and limit_bytes <= each.error.mem_limit:
                raise copy(each.error)


def _least(refused: StepSpec, spec: StepSpec) -> bool:
    """Whether the data of `spec` need no less than those that were refused. A batch that masks nothing needs least."""
    return all(refused.answers or ()) or refused.answers == spec.answers


_ENOUGH = 3
"""Steps in reverse, after which those to come are taken to be so, too. A guess: each takes a little longer than it has
to, and a plan for the wrong order takes more memory than it may."""


@dataclass(slots=True)
class BackwardOrder:
    """What the steps by one plan have shown."""

    in_reverse: int = 0
    """steps with as many forwards in flight as were planned for, whose last one went backward first"""
    otherwise: bool = False
    """whether a backward has come while a later forward was in flight"""

    def to_plan_for(self, settings: Settings, *, alone: bool) -> str:
        """The order to plan for, one of `rotor_solver.in_flight.ORDERS`; several processes (not `alone`) are told."""
        told = settings.backward_order
        if not alone:
            return told or "any"
        if self.otherwise:
            return "any"
        seen = "reverse" if self.in_reverse >= _ENOUGH and settings.watch is not False else "any"
        return told or seen


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
    compiled_for_larger_budget: bool = False
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

    def matches(self, spec: StepSpec) -> bool:
        """Whether it was measured for the very same step, as far as that shows at once."""
        return self.file is None and self.spec is not None and self.spec.identical(spec)

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


_MOST_WAITING = 8
"""Step plans that wait beside the one in use; the one that has waited longest goes first. A guess: a GAN has two or
three."""


class StepPlans:
    """The step plan in use, and those that wait for their step to come again."""

    def __init__(self) -> None:
        self.in_use: StepPlan | None = None
        self._waiting: list[StepPlan] = []

    def take_up(self, plan: StepPlan, present: ModelState) -> None:
        """Have a new plan in use, and forget others for the same graph in steps of its kind. The one in use may wait.

        A plan from a file does not: it is for whatever its file says, and is given up. `present` says which layers the
        model has.
        """
        before, self.in_use = self.in_use, plan
        waiting = [each for each in (*self._waiting, before) if each is not None and each.file is None]
        self._keep([each for each in waiting if not each.is_replaced_by(plan)], present)

    @contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Have the plans that there are now again after an error: it is about one step, and they are about others."""
        in_use, waiting = self.in_use, list(self._waiting)
        try:
            yield
        except BaseException:
            self.in_use, self._waiting = in_use, waiting
            if in_use is not None:
                in_use.restore_effects()
            raise

    def keep_only_in_use(self) -> None:
        """Forget the plans that wait: what they were made with is not so."""
        self._waiting = []

    def turn_to(self, spec: StepSpec, covers: Callable[[StepPlan], bool], revived: Callable[[StepPlan], None]) -> bool:
        """Have a plan for steps like `spec` in use, one that `covers` its input if possible; False if there is none.

        `revived` is called with a plan that waited: the limit may have been changed in the meantime, and gradients may
        be left over from other steps.
        """
        found = [each for each in self._all() if each.is_for(spec)]
        if not found:
            return False
        if len(found) > 1:  # every step comes here, mostly with one
            found.sort(key=covers, reverse=True)  # of equals the first: the one in use
        self._put_in_use(found[0], spec.model, revived)
        return True

    def for_other_ways(
        self, spec: StepSpec, covers: Callable[[StepPlan], bool], revived: Callable[[StepPlan], None]
    ) -> Iterator[StepPlan]:
        """Have each of the plans in use, in turn, that the one in use is not, and that may serve a step like `spec`."""
        for each in [each for each in self._waiting if each.is_for(spec) and covers(each)]:
            self._put_in_use(each, spec.model, revived)
            yield each

    def count_optimizer(self, cost: OptimizerCost, limit_bytes: int | None) -> None:
        """Count an optimizer for the plans that wait; one that leaves no room for it is solved again in its turn.

        Without a limit, because they were made by hand, plans stay as they are.
        """
        for each in self._waiting:
            each.count_optimizer(cost)
            if each.sequence is None or limit_bytes is None:
                continue
            # Agreed plans even where there is room: other processes may have none, and all have to solve together.
            if each.agreed is not None or each.budget.peak_bytes(each.sequence) > limit_bytes:
                each.solve_again()

    def copied(self, source: Source) -> StepPlans:
        """For a copy of the model, whose stages come from `source`: the plan in use, if it can serve there.

        Graphs are bound to the parameters that they were captured with. A copy captures its own, at its first step.
        """
        twin = StepPlans()
        # Layers are copied along with the plan. Its `spec` names those of the original, so the copy's first step is
        # compared with the file again, or measured; until then the plan can be looked at.
        if self.in_use is not None and not source.captured:
            twin.in_use = replace(self.in_use, source=source)
        elif self.in_use is not None and self.in_use.file is not None:
            # Optimizers that have come since count in the copy as well.
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
        """Let these wait, but for layers that the model has no more: nobody else would let go of their memory."""
        kept = [each for each in waiting if each.spec is not None and each.spec.model.same_layers(present)]
        self._waiting = kept[-_MOST_WAITING:]
