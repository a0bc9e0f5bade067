"""The plans for several kinds of steps that a model takes in turn.

A discriminator is trained in one step, and gets gradients for its input in the next; adapters are switched; layers are
frozen and trained again. Each kind of step has its own graph, costs and sequence. They are found when such a step comes
for the first time, and kept while others train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rotor_profiling import OptimizerCost
from rotor_py.plan.sources import Source
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import ModelState, StepSpec

_MOST_WAITING = 8
"""Step plans that wait beside the one in use; the one that has waited longest goes first. A guess: a GAN has two or
three, and TorchDynamo takes no more than eight values of a keyword."""


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
            twin.in_use = replace(
                StepPlan.adopted(self.in_use.file, source),
                budget=self.in_use.budget,
                guard_bytes=self.in_use.guard_bytes,
            )
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
