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
#     input; processes compare their sequences. → agreed
#  9. A forward arrives while others are in flight, more than the plan has room for. It follows a sequence of its own if
#     one fits beside them, else that of the plan, and a warning says what the step takes. As soon as none is in flight,
#     a sequence is found that leaves room for so many; if there is none, training goes on beyond the limit, and a
#     warning says so. Several processes only warn: they cannot know what is in flight in the others.
# 10. The device runs out of memory in a forward or backward that follows a plan, and the user wants another one
#     (`on_oom="replan"`). The plan gets a sequence within a smaller limit, by which what was under way runs again. That
#     limit counts for steps of this kind until the user sets one. → solved
# 11. The model is copied. The copy takes the plan in use along if it can serve there. Plans that wait stay behind.
# 12. A forward is called by `torch.compile` around the model. Plans are given up, since they are for other stages than
#     those that are compiled. → unmeasured
#
# The model is in training mode in events 1 and 5, and when a file is made of a plan: the caller sees to it. In all
# threads of a process, one planner at a time measures or solves (`planning_lock`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling import UnknownOptimizerError, optimizer_cost, tensors_in
from rotor_py.compiled.options import without_cuda_graphs
from rotor_py.errors import OtherDataError, PlanMismatchError, UnsupportedModelError
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.planning_lock import planning
from rotor_py.plan.input_spec import describe
from rotor_py.plan.noticed.forwards import Forwards
from rotor_py.plan.noticed.kept_gradients import KeptGradients
from rotor_py.plan.noticed.optimizers import noticed_cost, wait_for_optimizers
from rotor_py.plan.noticed.watched_steps import WatchedSteps
from rotor_py.plan.out_of_memory.guarded_budget import guarded
from rotor_py.plan.out_of_memory.replanner import Replanner, refuse_several_processes
from rotor_py.plan.refusals import Refusals
from rotor_py.plan.saved.fingerprint import model_fingerprint
from rotor_py.plan.saved.plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.plan.solving import (
    agree,
    count_optimizer_beside_file,
    make_room_for_forwards,
    make_room_for_optimizer,
    solve,
)
from rotor_py.plan.sources import source_of
from rotor_py.plan.step_plan import PlanState, StepPlan
from rotor_py.plan.step_plans import StepPlans
from rotor_py.plan.step_spec import ModelState, StepSpec
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.plan.ways import fastest_stored
from rotor_py.report.progress import progress_bar
from rotor_solver import Algorithm, InfeasibleError, Sequence

_log = logging.getLogger("rotor_py")
_MOST_PLANS = 16
"""Plans for larger and larger inputs, until the user is asked for the largest. A guess: each takes seconds."""


class Planner:
    """The plans for the steps of one model: `whole` is what is called, `core` what of it can be cut into stages."""

    def __init__(self, whole: nn.Module, core: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.model = TrainedModel(whole, core, settings)
        self.plans = StepPlans()
        self._blank = source_of(core, settings.granularity, settings.inductor)
        self._refusals = Refusals()
        self._forwards = Forwards()
        self._gradients = KeptGradients(self.model)
        self._steps = WatchedSteps(self.model)
        self._asked_to_compile = False
        self._grown = 0
        """how often a plan was made for an input that no plan covered"""
        self.wait_for_optimizers()

    def wait_for_optimizers(self) -> None:
        """Have the optimizers noticed that train the model, unless the user has named one."""
        if self.settings.optimizer is None:
            wait_for_optimizers(self)

    def parameters(self) -> list[nn.Parameter]:
        """Those that an optimizer may train."""
        return list(self.model.core.parameters())

    @property
    def state(self) -> PlanState:
        """How far the plan in use is made."""
        return PlanState.UNMEASURED if self.plans.in_use is None else self.plans.in_use.state

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph."""
        return self._blank.captured

    @property
    def device(self) -> torch.device:
        """The device that the model trains on. UnsupportedModelError if there are several."""
        return self.model.device_of(None if self.plans.in_use is None else self.plans.in_use.input_spec)

    @property
    def in_use(self) -> StepPlan:
        """The step plan in use. ValueError if nothing has been measured."""
        if self.plans.in_use is None:
            raise ValueError("nothing has been measured yet; call measure(input), or train one step")
        return self.plans.in_use

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Event 1: cut the model into stages, and measure them with these arguments.

        Parameters, gradients, buffers, random state and mode are afterwards what they were. UnsupportedModelError if
        the model cannot be cut.
        """
        with self.plans.kept_on_error():
            value = self._blank.input_of(args, kwargs)
            self._measure(self.model.step_on(value), value)

    def _measure(self, spec: StepSpec, value: Any) -> None:
        # Each plan has a source of its own: an earlier one may wait, or be in use again if this one comes to nothing.
        source = self._blank.renewed()
        device = self.model.device_of(spec.input)
        given = self.settings.progress
        with planning, torch.enable_grad(), nullcontext(given) if given else progress_bar() as progress:
            measured = source.measure(value, device, self.settings, progress)
        budget = self.model.budget(measured, device, noticed_cost(self))
        # Capturing may have changed the model: buffers and modules that its first forward makes.
        spec = replace(spec, model=ModelState.of(self.model.core), answers=source.answers)
        plan = StepPlan(
            source,
            measured.ways[0].measurement,
            budget,
            spec=spec,
            cut=measured.ways[0].cut,
            ways=() if self.settings.inductor is None else tuple(measured.ways),
            fresh_gradients=self.settings.fresh_grads,
        )
        if plan.ways:
            plan.turn_to(fastest_stored(plan.ways))
        self.plans.take_up(guarded(plan) if self.settings.replans else plan, spec.model)

    def solve(
        self, limit: int | str | None = None, *, slots: int | None = None, algorithm: Algorithm | None = None
    ) -> Sequence:
        """Event 2: find the sequence to train by; see `solving.solve`. ValueError if nothing has been measured."""
        return solve(self.in_use, self.model, limit, slots=slots, algorithm=algorithm)

    def solved(self) -> StepPlan:
        """The step plan in use, with a sequence. ValueError if nothing has been measured, errors of `solve`."""
        if self.in_use.sequence is None:
            self.solve()
        return self.in_use

    def follow(self, sequence: Sequence | None) -> None:
        """Event 3: follow this sequence; None to have one found. ValueError if nothing has been measured."""
        self.in_use.sequence = sequence

    def set_limit(self, limit: int | str) -> None:
        """Event 4: look for sequences within this limit from now on. ValueError if it is not one."""
        limit_bytes(limit, self.device)  # before it is set: one that is refused is not to count
        self.settings.mem_limit = limit

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Event 5: run the model forward, so that its backward follows the plan; as it is where nothing trains.

        UnsupportedModelError for a model or an input that cannot be planned for, InfeasibleError if no plan fits,
        PlanMismatchError if the plan is from a file and was made for something else.
        """
        value = self._blank.input_of(args, kwargs)
        spec = self.model.step_on(value)
        if not spec.model.trains and not any(tensor.requires_grad for tensor in tensors_in(value)):
            return self.model.core.forward(*args, **kwargs)
        if self.settings.replans:
            refuse_several_processes(self.model)
        self._make_ready(spec, value)
        # Beside several forwards, gradients count in any case: the first backward leaves them for the others.
        if self.in_use.budget.forwards == 1 and not self._forwards.in_flight():
            self._gradients.notice(self.in_use, partial(self._plan_for_kept_gradients, value))
        try:
            return self._run_planned(value)
        except PlanMismatchError as error:
            if self.in_use.file is not None or not self.captured:
                raise
            answers = error.answers if isinstance(error, OtherDataError) else None
        # Not in the `except`: there, the error's traceback would keep what the first attempt has made.
        if answers is not None:
            self._turn_to_answers(answers, value)
            with suppress(PlanMismatchError):  # for its shape, the model may take another way, too
                return self._run_planned(value)
        return self._run_other_way(value)

    def _turn_to_answers(self, answers: tuple[bool, ...], value: Any) -> None:
        """Have a plan for batches whose data answer as these do: one that waits, or a new one.

        UnsupportedModelError in one of several processes: others may have other batches.
        """
        if not self.model.alone:
            raise UnsupportedModelError(
                "the plan was made before this process was one of several, and for batches that are masked otherwise; "
                "call measure() again in all of them"
            )
        self._make_ready(replace(self.model.step_on(value), answers=answers), value)

    def _run_other_way(self, value: Any) -> Any:
        """The model takes another way than the one that the plan in use is for, for another shape for example."""
        spec = replace(self.model.step_on(value), answers=self.in_use.source.answers)  # data answered as it expected
        for plan in self.plans.for_other_ways(spec, self._covers(value), self._revive):
            try:
                agree(plan, self.model)
                return self._run_planned(value)
            except (InfeasibleError, PlanMismatchError):
                continue
        known = self.in_use.input_spec
        if not self.model.alone and not self._blank.covers(spec.input, known):
            raise UnsupportedModelError(
                f"for {describe(spec.input)} the model does something else than for {describe(known)}, for which there "
                "is a plan, and processes that train together cannot each make one; call measure() in all of them with "
                "both inputs"
            )
        self._plan_for(spec, value)
        return self._run_planned(value)

    def _covers(self, value: Any) -> Callable[[StepPlan], bool]:
        """Whether a step plan was made for an input at least as large as `value`."""
        return lambda plan: self._blank.covers(plan.input_spec, value)

    def _run_planned(self, value: Any) -> Any:
        plan = self.in_use
        assert plan.sequence is not None
        flying = self._forwards.in_flight()
        sequence = self._forwards.sequence_beside(flying, plan, self.model) if flying else plan.sequence
        smaller = Replanner(plan, self.model) if self.settings.replans else None
        rng = self.settings.preserve_rng_state
        telling = nullcontext() if smaller is None else smaller.telling_of_the_rest()
        with telling, self._steps.watched(plan, value, in_flight=bool(flying)) as forward_returned:
            output = plan.source.run(plan.cut, sequence, value, preserve_rng_state=rng, smaller=smaller)
            forward_returned(output)
        self._forwards.watch(output, plan, sequence, self.model)
        return output

    def _make_ready(self, spec: StepSpec, value: Any) -> None:
        """Have a plan in use that serves a step on `value`, and a sequence."""
        plan = self.plans.in_use
        if plan is not None and plan.file is not None:
            plan.compare_with_file(spec, value, self.model)
            agree(plan, self.model)
            return
        known = self.plans.turn_to(spec, self._covers(value), self._revive)
        if not known or not self._blank.covers(self.in_use.input_spec, value):
            self._plan_for(spec, value)
            return
        plan = self.in_use
        try:
            agree(plan, self.model)
            self._make_room_for_forwards(plan)
        except InfeasibleError as error:
            # It was measured on a larger input, with `measure()` for example. What this one needs may fit.
            assert plan.spec is not None
            self._refusals.remember(plan.spec, error)
            if not self.model.alone or self._blank.covers(spec.input, plan.input_spec):
                raise
        else:
            return
        self._plan_for(spec, value)

    def _make_room_for_forwards(self, plan: StepPlan) -> None:
        """Event 9. Where several processes have to plan together, they do so for as many forwards as they were told."""
        more = plan.most_in_flight > plan.budget.forwards and plan.found_for(self.settings) and self.model.alone
        if more and not self._forwards.in_flight():
            make_room_for_forwards(plan, self.model)

    def _plan_for(self, spec: StepSpec, value: Any) -> None:
        """Measure and solve for a step on `value`. If that fails, the plans that there are stay."""
        known = None if self.plans.in_use is None else self.plans.in_use.spec
        grows = known is None or (known.model == spec.model and not self._blank.covers(known.input, value))
        with self.plans.kept_on_error():
            self._measure_again(spec, value)
            try:
                agree(self.in_use, self.model)
            except InfeasibleError as error:
                self._refusals.remember(replace(spec, answers=self.in_use.source.answers), error)
                raise
        self._grown += grows

    def _measure_again(self, spec: StepSpec, value: Any) -> None:
        """Plan for a first or larger input, or another kind of step; UnsupportedModelError if there is no end to it."""
        self._refusals.raise_if_refused(spec, self.model.limit_bytes(self.model.device_of(spec.input)), self._blank)
        plan = self.plans.in_use
        known = None if plan is None else plan.spec
        # Another state of the model is another kind of step, of which there may be many: only inputs are counted.
        if self._grown == _MOST_PLANS and (known is None or known.model == spec.model):
            raise UnsupportedModelError(
                f"the model has been planned {_MOST_PLANS} times, and its input has changed again; call measure() once "
                "with the largest input there will be"
            )
        if plan is not None:
            if not self.model.alone and not self._blank.covers(plan.input_spec, value):
                raise UnsupportedModelError(
                    f"the input is {describe(spec.input)}, for which there is no plan, and processes that train "
                    "together cannot each make one; call measure() in all of them with the largest input there will be"
                )
            why = "planning again" if plan.is_for(spec) else "planning for another kind of step"
            if plan.spec is not None and spec.answers not in (None, plan.spec.answers):
                why = "planning for batches that are masked otherwise (with or without padding)"
            _log.warning("%s: the input is %s", why, describe(spec.input))
        self._measure(spec, value)

    def _plan_for_kept_gradients(self, value: Any) -> None:
        """Measure and solve for gradients that are kept between steps; InfeasibleError if no plan has room for them."""
        self.settings.fresh_grads = False
        self.plans.keep_only_in_use()
        spec = replace(self.model.step_on(value), answers=self.in_use.source.answers)
        with self.plans.kept_on_error():
            self._measure(spec, value)
            agree(self.in_use, self.model)

    def _revive(self, plan: StepPlan) -> None:
        """A plan that waited is in use again: it is solved again if anything has changed that it depends on."""
        grown = self.model.with_gradients_left_over(plan.budget, self.model.device_of(plan.input_spec))
        if plan.solved_with != self.settings.solved_with or grown != plan.budget:
            plan.budget, plan.sequence = grown, None

    def optimizer_noticed(self) -> None:
        """Event 6: count the optimizers that train the model; see `solving.make_room_for_optimizer`."""
        cost = noticed_cost(self)
        if cost is not None:
            make_room_for_optimizer(self.plans, self.model, cost)

    def adopt(self, file: Plan) -> None:
        """Event 8: follow a plan from a file. PlanMismatchError if it was made for another model."""
        file.refuse_other(model=model_fingerprint(self.model.core))
        plan = StepPlan.adopted(file, self._blank)
        self.plans.in_use = guarded(plan) if self.settings.replans else plan
        if self.settings.mem_limit is None and file.limited:
            self.settings.mem_limit = file.mem_limit
        if self.settings.optimizer is not None:
            try:
                count_optimizer_beside_file(self.in_use, self.model, optimizer_cost(self.settings.optimizer))
            except UnknownOptimizerError as error:
                _log.warning("%s", error)

    def compile_by(self, compiler: torch._TorchCompileInductorWrapper) -> None:
        """Event 12: plan anew with compiled stages, by this backend of a `torch.compile` around the model.

        ValueError if it asks for CUDA graphs. A warning says so where stages cannot be compiled.
        """
        self._asked_to_compile = True
        obstacles = {
            "its plan is from a file": self.plans.in_use is not None and self.plans.in_use.file is not None,
            "on_oom='replan' is set": self.settings.replans,
            "fully_shard was applied to it": self.model.sharded,
        }
        for reason, holds in obstacles.items():
            if holds:
                _log.warning("torch.compile around the model compiles nothing, since %s; the step is planned", reason)
                return
        self.settings.inductor = without_cuda_graphs(compiler.config, "torch.compile around the model")
        if compiler.dynamic:
            _log.warning("dynamic=True has no part in a planned step: stages are compiled for one shape at a time")
        self._blank = source_of(self.model.core, self.settings.granularity, self.settings.inductor)
        self.plans = StepPlans()

    @property
    def may_compile(self) -> bool:
        """Whether nobody has said yet that stages are to be compiled."""
        return self.settings.inductor is None and not self._asked_to_compile

    def copied(self) -> Planner:
        """Event 11: a planner for a copy of the model. It refers to this model until that is copied along with it."""
        twin = Planner(self.model.whole, self.model.core, replace(self.settings))
        twin.plans = self.plans.copied(twin._blank)
        return twin
