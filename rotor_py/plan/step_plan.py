"""The plan for one kind of step, and the plans for several kinds that a model takes in turn.

A discriminator is trained in one step, and gets gradients for its input in the next; adapters are switched; layers are
frozen and trained again. Each kind of step has its own graph, costs and sequence. They are found when such a step comes
for the first time, and kept while others train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement
from rotor_py.plan.saved.fingerprint import input_fingerprint, model_fingerprint
from rotor_py.plan.saved.plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.plan.sources import Source
from rotor_py.plan.step_spec import ModelState, StepSpec
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.graph_effects import GraphEffects, recall_effects, remember_effects
from rotor_solver import Sequence

_MOST_WAITING = 8
"""Step plans that wait beside the one in use; the one that has waited longest goes first. A guess: a GAN has two or
three, and TorchDynamo takes no more than eight values of a keyword."""


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
    solved_with: tuple[int | str | None, int] | None = None
    """`Settings.solved_with` when the sequence was found"""
    _effects: tuple[GraphEffects, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._effects = tuple(recall_effects(function) for function in self.functions)

    @classmethod
    def adopted(cls, file: Plan, source: Source) -> StepPlan:
        """The plan that a file says. PlanMismatchError if it was made for another model."""
        costs = file.costs
        cut = source.adopt(file)
        return cls(source, costs.measurement, costs.budget, spec=None, cut=cut, file=file, sequence=file.sequence)

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
    def input_spec(self) -> Any:
        """The spec of the input; None where it is not known."""
        return None if self.spec is None else self.spec.input

    def unlimited(self, settings: Settings) -> bool:
        """Whether there is no limit: a strategy by hand needs none, and none was given."""
        by_hand = settings.by_hand is not None if self.file is None else not self.file.limited
        return by_hand and settings.mem_limit is None

    def is_for(self, spec: StepSpec) -> bool:
        """Whether it was measured for such steps. What a plan from a file is for, its file says."""
        return self.file is None and self.spec is not None and self.spec.same_step(spec)

    def restore_effects(self) -> None:
        """Have remembered of each layer what was found out for this plan."""
        # Plans share layers, and another kind of step may have shown something else of them.
        for function, effects in zip(self.functions, self._effects, strict=True):
            remember_effects(function, effects)

    def count_optimizer(self, cost: OptimizerCost) -> None:
        """Count an optimizer that nothing was known about."""
        self.budget = self.budget.with_optimizer(cost)

    def solve_again(self) -> None:
        """Give the sequence up, but go on with it if no other is found."""
        # Two optimizers may come before the next forward: the second finds no sequence, and the first's is to stay.
        if self.sequence is not None:
            self.last_resort, self.sequence = self.sequence, None


class StepPlans:
    """The step plan in use, and those that wait for their step to come again."""

    def __init__(self) -> None:
        self.in_use: StepPlan | None = None
        self._waiting: list[StepPlan] = []

    def make_room(self, spec: StepSpec) -> None:
        """Have no plan in use, and none for steps like `spec`. A plan in use for other steps waits from now on.

        A plan from a file does not: it is for whatever its file says, and is given up.
        """
        if self.in_use is not None and self.in_use.file is None and not self.in_use.is_for(spec):
            self._put_aside(spec.model)
        self.in_use = None
        self._forget(spec)

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

    def turn_to(self, spec: StepSpec, revived: Callable[[StepPlan], None]) -> bool:
        """Have the plan for steps like `spec` in use; False if there is none. `revived` is called with one that waited.

        While it waited, the limit may have been changed, and gradients may be left over from other steps.
        """
        if self.in_use is not None and self.in_use.is_for(spec):
            return True
        found = next((each for each in self._waiting if each.is_for(spec)), None)
        if found is None:
            return False
        self._forget(spec)  # first, so that it takes no place from those that wait
        self._put_aside(spec.model)
        found.restore_effects()
        self.in_use = found
        revived(found)
        return True

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
            twin.in_use = replace(StepPlan.adopted(self.in_use.file, source), budget=self.in_use.budget)
        return twin

    def _put_aside(self, present: ModelState) -> None:
        """Let the plan in use wait. Forget plans for layers that the model has no more, as `present` says.

        Nobody else would let go of such layers, and no budget counts their memory.
        """
        if self.in_use is not None and self.in_use.spec is not None:
            self._forget(self.in_use.spec)
            self._waiting.append(self.in_use)
        kept = [each for each in self._waiting if each.spec is not None and each.spec.model.same_layers(present)]
        self._waiting = kept[-_MOST_WAITING:]

    def _forget(self, spec: StepSpec) -> None:
        self._waiting = [each for each in self._waiting if not each.is_for(spec)]
