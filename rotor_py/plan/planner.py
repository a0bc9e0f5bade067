"""What to do for which step: the events in the life of a plan, and what follows from each.

# Note [The life of a plan]
#
# A planner is in one of four states (`PlanState`): unmeasured, measured, solved, agreed. It is the state of the step
# plan in use; without one, the planner is unmeasured. These are the events:
#
#  1. Measure. The planner forgets what it knew about steps of this kind, and cuts and measures the stages. Plans for
#     other kinds of steps wait. A plan from a file is given up. → measured. After an error, all is as it was.
#  2. Solve. The planner finds a sequence for the limit. Where several processes train the model, they find it together,
#     and all of them have to come to this point; a strategy by hand is the same in each. → agreed, or solved where the
#     process is alone
#  3. Another sequence is given. The planner follows it, whatever memory it takes. → solved. Where several processes
#     train the model, it does not last: they have not agreed on it, so they solve together at the next forward.
#  4. A limit is set. It counts when the next sequence is found: the plan in use stays.
#  5. A forward arrives. If the plan in use was made for such steps, and for an input at least as large, the forward
#     follows it. If a plan that waits was made for such steps, that one is put in use; it is solved again if the limit
#     has changed, or if gradients of other steps are left over. If there is no plan for such steps, or the input is
#     larger, the planner measures (event 1) and solves (event 2). A captured model may then run another graph than the
#     one that was measured; it is measured and run once more. If that is because of what is in the batch, such as
#     padding, it is another kind of step, which shows late; a plan for it may wait. If no plan fits, or anything else
#     goes wrong on the way, the plans that there were stay: one batch that is too large costs nothing. It is
#     remembered, and a batch as large is refused at once, unless it may mask less. Two things are refused. Several
#     processes take no input that none of their plans covers: each would plan for itself. And a model is not measured
#     for larger and larger inputs without end.
#  6. An optimizer is noticed. It counts in every budget. A sequence that leaves no room for it is given up, and another
#     one is found. If there is none, training goes on with the old one, beyond the limit, and a warning says so. Where
#     several processes train the model, each notices its own optimizer, so they solve together at the next forward.
#     Sequences by hand stay, and so do those from a file.
#  7. A step shows more than was known (`noticed`). Gradients that are there when a forward begins, although they were
#     said to be freed, are planned for before it runs: event 1 and 2. What the loss takes, or anything else outside of
#     the model, shows when a watched step is over. It counts in the budget; where the limit has no room for it, another
#     sequence is found, once for each plan, and a line in the log says so. As with an optimizer, training goes on
#     beyond the limit, with a warning, if there is none. So it does where processes train together, or where sequences
#     are by hand or from a file.
#  8. A plan file is adopted, if it was made for such a model. Costs and sequence are those of the file. → solved. The
#     first forward compares model and input with the file, as does a forward after a change of the model or on a larger
#     input; processes compare their sequences. → agreed. If the costs of the file were predicted, for a device that was
#     not there, the first watched step is compared with them; where its peak differs by more than a margin, the next
#     forward gives the file up and measures (event 1 and 2). Several processes ask each other, and measure together.
#  9. A forward arrives while others are in flight. It follows the sequence that the plan has for so many. If they are
#     more than the plan has room for, it follows another one that fits beside them, if there is any, else that of the
#     plan, and a warning says what the step takes. As soon as none is in flight, a sequence is found that leaves room
#     for so many; if there is none, training goes on beyond the limit, and a warning says so. Or a backward begins
#     while several are in flight: the last of them goes first (in reverse), or another one. After some steps in
#     reverse, a faster plan for that is found, unless the user has said which order comes; after one in another order,
#     a plan for any order, with a warning if that step goes over the limit. Several processes only warn: they cannot
#     know what is in flight in the others.
# 10. The device runs out of memory in a forward or backward that follows a plan, and the user wants another one
#     (`on_oom="replan"`). The plan gets a sequence within a smaller limit, by which what was under way runs again. That
#     limit counts for steps of this kind until the user sets one. → solved
# 11. The model is copied. The copy takes the plan in use along if it can serve there. Plans that wait stay behind.
# 12. `.compile()` asks for compiled stages. Plans are given up, since they are for other stages. → unmeasured
#
# The model is in training mode in events 1 and 5, and when a file is made of a plan: the caller sees to it. In all
# threads of a process, one planner at a time measures or solves (`planning_lock`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rotor_profiling import UnknownOptimizerError
from rotor_py.compiled.options import Compile, config_of
from rotor_py.errors import fields_of, record_fields
from rotor_py.measure.budget import Budget
from rotor_py.measure.device import limit_bytes
from rotor_py.plan.conflicts.offload import refuse_compiled
from rotor_py.plan.offloading import prepare_for_file, reserve
from rotor_py.plan.out_of_memory.guarded_budget import guarded
from rotor_py.plan.plan_maker import PlanMaker
from rotor_py.plan.planned_forwards import PlannedForwards
from rotor_py.plan.saved.compiled_stages import config_beside
from rotor_py.plan.saved.fingerprint import model_fingerprint
from rotor_py.plan.saved.plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.plan.solving import count_optimizer_beside_file, solve
from rotor_py.plan.steps.step_plan import PlanState, StepPlan
from rotor_py.plan.steps.step_plans import StepPlans
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import Algorithm, Sequence

_log = logging.getLogger("rotor_py")


class Planner:
    """The plans for the steps of one model: `whole` is what is called, `core` what of it can be cut into stages."""

    def __init__(self, whole: nn.Module, core: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.model = TrainedModel(whole, core, settings)
        self._maker = PlanMaker(self.model, settings)
        self._planned = PlannedForwards(self._maker)
        self._warned_of_torch_compile = False
        self.wait_for_optimizers()

    def wait_for_optimizers(self) -> None:
        """Have the optimizers noticed that train the model (event 6), unless the user has named one."""
        self._maker.wait_for_optimizers()
        self._planned.wait_for_steps()

    @property
    def plans(self) -> StepPlans:
        """The step plan in use, and those that wait."""
        return self._maker.plans

    @property
    def in_use(self) -> StepPlan:
        """The step plan in use. ValueError if nothing has been measured."""
        return self._maker.in_use

    @property
    def state(self) -> PlanState:
        """How far the plan in use is made."""
        return PlanState.UNMEASURED if self.plans.in_use is None else self.plans.in_use.state

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph."""
        return self._maker.blank.captured

    @property
    def device(self) -> torch.device:
        """The device that the model trains on. UnsupportedModelError if there are several."""
        return self.model.device_of(None if self.plans.in_use is None else self.plans.in_use.input_spec)

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, closely: bool = False) -> None:
        """Event 1: cut the model into stages, and measure them with these arguments; times more `closely` if asked.

        Parameters, gradients, buffers, random state and mode are afterwards what they were. UnsupportedModelError if
        the model cannot be cut.
        """
        with self.plans.kept_on_error():
            value = self._maker.blank.input_of(args, kwargs)
            self._maker.measure(self.model.step_on(value), value, closely=closely)

    def refuse_what_cannot_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """InfeasibleError if a step on these arguments is above the limit by what is known before measuring."""
        value = self._maker.blank.input_of(args, kwargs)
        self._maker.refuse_what_cannot_fit(self.model.step_on(value), value)

    def solve(
        self, limit: float | str | None = None, *, slots: int | None = None, algorithm: Algorithm | None = None
    ) -> Sequence:
        """Event 2: find the sequence to train by; see `solving.solve`. ValueError if nothing has been measured."""
        return solve(self.in_use, self.model, limit, slots=slots, algorithm=algorithm)

    def solved(self) -> StepPlan:
        """The step plan in use, with a sequence. ValueError if nothing has been measured, errors of `solve`."""
        if self.in_use.sequence is None:
            self.solve()
        return self.in_use

    def follow(self, sequence: Sequence | None) -> None:
        """Event 3: follow this sequence; None to have one found. ValueError if nothing has been measured.

        OffloadError if the tier has no room for what it moves.
        """
        if sequence is not None and self.model.offload is not None:
            reserve(self.model.offload, self.in_use.budget, sequence)
        self.in_use.sequence = sequence

    def divide(self, budget: Budget) -> None:
        """Have the limit divided in this way from now on. ValueError if nothing has been measured."""
        self.in_use.budget, self.in_use.sequence = budget, None

    def set_limit(self, limit: float | str) -> None:
        """Event 4: look for sequences within this limit from now on. ValueError if it is not one."""
        limit_bytes(limit, self.device)  # before it is set: one that is refused is not to count
        self.settings.mem_limit = limit

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Event 5: run the model forward; see `PlannedForwards.run`."""
        return self._planned.run(*args, **kwargs)

    def adopt(self, file: Plan) -> None:
        """Event 8: follow a plan from a file.

        PlanMismatchError if it was made for another model, `compile=` or `keep=`; ValueError if it moves activations,
        and nobody has said where.
        """
        file.refuse_other(model=model_fingerprint(self.model.core))
        file.refuse_other_steps(self.model.stepping())
        file.refuse_fewer_bits(self.settings.keep)
        prepare_for_file(self.model.offload, file.costs.budget, file.sequence)
        if (config := config_beside(file.compiled, self.settings.inductor)) != self.settings.inductor:
            self.settings.inductor = config
            self._maker.begin_anew()
        plan = StepPlan.adopted(file, self._maker.blank)
        self.plans.in_use = guarded(plan) if self.settings.replans else plan
        if self.settings.mem_limit is None and file.limited:
            self.settings.mem_limit = file.mem_limit
        if self.settings.optimizer is not None:
            try:
                count_optimizer_beside_file(self.in_use, self.model, self.model.optimizer_cost(self.settings.optimizer))
            except UnknownOptimizerError as error:
                _log.warning("%s", error, extra=fields_of(error))

    def compile_with(self, compile: Compile) -> None:
        """Event 12: plan anew with compiled stages.

        ValueError if `compile` asks for CUDA graphs, or where plans may move activations. A warning says so where the
        plan is from a file, whose stages are not compiled.
        """
        refuse_compiled(self.model.offload)
        if self.plans.in_use is not None and self.plans.in_use.file is not None:
            _log.warning(
                "compile() compiles nothing, since the plan is from a file; the step is planned",
                extra=record_fields("compile_ignored", name="plan"),
            )
            return
        self.settings.inductor = config_of(compile)
        self._maker.begin_anew()

    def warn_of_torch_compile(self) -> None:
        """Say once that a `torch.compile` around the model compiles nothing."""
        if self.settings.inductor is None and not self._warned_of_torch_compile:
            self._warned_of_torch_compile = True
            _log.warning(
                "torch.compile around a Checkpointable compiles nothing: the step is planned; to compile what is "
                "planned, write Checkpointable(model, compile=True)",
                extra=record_fields("compile_ignored", name="torch.compile"),
            )

    def copied(self) -> Planner:
        """Event 11: a planner for a copy of the model. It refers to this model until that is copied along with it."""
        twin = Planner(self.model.whole, self.model.core, replace(self.settings))
        twin._maker.plans = self.plans.copied(twin._maker.blank)
        return twin
