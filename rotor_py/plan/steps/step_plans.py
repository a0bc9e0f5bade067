"""The plans for several kinds of steps that a model takes in turn.

A discriminator is trained in one step, and gets gradients for its input in the next; adapters are switched; layers are
frozen and trained again. Each kind of step has its own graph, costs and sequence. They are found when such a step comes
for the first time, and kept while others train.

A model may also take another way for some sizes of its input, in a step of the same kind: it has another graph there.
Which one shows only when the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rotor_profiling import OptimizerCost
from rotor_py.plan.sources.source import Source
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.steps.step_spec import ModelState, StepSpec

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
