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
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling import UnknownOptimizerError, tensors_in, torch_compat
from rotor_py.compile.stage_code import Compile, config_of
from rotor_py.distributed.processes import alone_in_a_prediction
from rotor_py.errors import (
    InvalidValueError,
    OtherDataError,
    PlanMismatchError,
    UnsupportedModelError,
    fields_of,
    record_fields,
)
from rotor_py.execute.in_flight import in_backward
from rotor_py.measure.budget import Budget
from rotor_py.measure.device import limit_bytes
from rotor_py.plan.measuring import measured_plan
from rotor_py.plan.observers.forwards_in_flight import Flying, Forwards, make_room_for_forwards
from rotor_py.plan.observers.limit_overrun import disproved
from rotor_py.plan.observers.observer import Observer, PlannedForward
from rotor_py.plan.observers.outer_checkpoint_regions import NestedRecompute, anything_around, outer_regions_aside
from rotor_py.plan.observers.undeclared_memory import KeptGradients, noticed_cost, wait_for_optimizers
from rotor_py.plan.observers.watched_steps import WatchedSteps
from rotor_py.plan.offloading import prepare_for_file, reserve
from rotor_py.plan.oom_replanning import Replanner, guarded
from rotor_py.plan.plan_file import config_beside
from rotor_py.plan.saved_plan import Plan, model_fingerprint
from rotor_py.plan.settings import Settings, one_process_only, refuse_excluded
from rotor_py.plan.solving import agree, count_optimizer_beside_file, make_room_for_optimizer, solve
from rotor_py.plan.sources.source import Following
from rotor_py.plan.sources.source_of import source_of
from rotor_py.plan.step_in_backward import Stepper
from rotor_py.plan.step_plan import PlanState, Refusals, StepPlan, StepPlans
from rotor_py.plan.step_spec import StepSpec, describe
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import Algorithm, InfeasibleError, Sequence

_log = logging.getLogger("rotor_py")
_MOST_PLANS = 16
"""Plans for larger and larger inputs, until the user is asked for the largest. A guess: each takes seconds."""


class Planner:
    """The plans for the steps of one model, and its forwards by them.

    `whole` is what is called, `core` what of it can be cut into stages.
    """

    def __init__(self, whole: nn.Module, core: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.model = TrainedModel(whole, core, settings)
        self._warned_of_torch_compile = False
        self._alone_only = settings.offload is not None or one_process_only(settings) is not None
        self._replans = settings.replans
        self._grown = 0
        """how often a plan was made for an input that no plan covered"""
        self._refusals = Refusals()
        self._forwards = Forwards()
        self._second_runs = NestedRecompute()
        self._gradients = KeptGradients(self.model)
        self._observers: list[Observer] = [WatchedSteps(self.model), self._forwards]
        self._stepper: Stepper | None = None
        self._begin_anew()
        self.wait_for_optimizers()

    def _begin_anew(self) -> None:
        """Give up all plans: what the settings say of compiling has changed."""
        self.plans = StepPlans()
        self.blank = source_of(self.model.core, self.settings.granularity, self.settings.inductor)
        """a source of stages that are for no input yet"""

    def wait_for_optimizers(self) -> None:
        """Have the optimizers noticed that train the model (event 6), unless the user has named one."""
        if self.settings.optimizer is None:
            wait_for_optimizers(self)
        if self.settings.step_in_backward is not None:
            self._observers = [each for each in self._observers if each is not self._stepper]
            self._stepper = Stepper(self.model, self.settings.step_in_backward)
            self._observers.append(self._stepper)

    def parameters(self) -> list[nn.Parameter]:
        """Those that an optimizer may train."""
        return list(self.model.core.parameters())

    def optimizer_noticed(self) -> None:
        """Event 6: count the optimizers that train the model; see `solving.make_room_for_optimizer`."""
        cost = noticed_cost(self)
        if cost is not None:
            make_room_for_optimizer(self.plans, self.model, cost)

    # What is known.

    @property
    def in_use(self) -> StepPlan:
        """The step plan in use. ValueError if nothing has been measured."""
        if self.plans.in_use is None:
            raise InvalidValueError(
                "nothing has been measured yet; call measure(input), or train one step", kind="not_measured"
            )
        return self.plans.in_use

    @property
    def state(self) -> PlanState:
        """How far the plan in use is made."""
        return PlanState.UNMEASURED if self.plans.in_use is None else self.plans.in_use.state

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph."""
        return self.blank.captured

    @property
    def device(self) -> torch.device:
        """The device that the model trains on. UnsupportedModelError if there are several."""
        return self.model.device_of(None if self.plans.in_use is None else self.plans.in_use.input_spec)

    # What the user asks for.

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, closely: bool = False) -> None:
        """Event 1: cut the model into stages, and measure them with these arguments; times more `closely` if asked.

        Parameters, gradients, buffers, random state and mode are afterwards what they were. UnsupportedModelError if
        the model cannot be cut.
        """
        with self.plans.kept_on_error():
            value = self.blank.input_of(args, kwargs)
            self._measure(self.model.step_on(value), value, closely=closely)

    def refuse_what_cannot_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """InfeasibleError if a step on these arguments is above the limit by what is known before measuring."""
        value = self.blank.input_of(args, kwargs)
        self._refuse_what_cannot_fit(self.model.step_on(value), value)

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
            self._begin_anew()
        plan = StepPlan.adopted(file, self.blank)
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
        refuse_excluded(self.settings, compile="compile()")
        if self.plans.in_use is not None and self.plans.in_use.file is not None:
            _log.warning(
                "compile() compiles nothing, since the plan is from a file; the step is planned",
                extra=record_fields("compile_ignored", name="plan"),
            )
            return
        self.settings.inductor = config_of(compile)
        self._begin_anew()

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
        twin.plans = self.plans.copied(twin.blank)
        return twin

    # A plan for the next step: one that there is, or a new one.

    def _make_ready(self, spec: StepSpec, value: Any, *, in_flight: bool) -> None:
        """Have a plan in use that serves a step on `value`, and a sequence. Other forwards may be `in_flight`."""
        plan = self.plans.in_use
        if plan is not None and plan.file is not None and not self._is_disproved(plan, spec, in_flight):
            plan.compare_with_file(spec, value, self.model)
            agree(plan, self.model)
            return
        # Most steps are as the one before: nothing waits that would serve better than the plan in use.
        if plan is None or not plan.matches(spec):
            known = self.plans.turn_to(spec, self._covers(spec.input), self._revive)
            if not known or not self.blank.covers(self.in_use.input_spec, spec.input):
                self._plan_for(spec, value)
                return
        plan = self.plans.in_use
        assert plan is not None
        try:
            agree(plan, self.model)
            if not in_flight:
                make_room_for_forwards(plan, self.model)
        except InfeasibleError as error:
            # It was measured on a larger input, with `measure()` for example. What this one needs may fit.
            assert plan.spec is not None
            self._refusals.remember(plan.spec, error)
            if not self.model.alone or self.blank.covers(spec.input, plan.input_spec):
                raise
        else:
            # A late optimizer, or a smaller limit: the graph is compiled for the room that it leaves.
            if in_flight or not plan.compiled_for_larger_budget or plan.sequence is not plan.found:
                return
            plan.compiled_for_larger_budget = False
        self._plan_for(spec, value)

    def _is_disproved(self, plan: StepPlan, spec: StepSpec, in_flight: bool) -> bool:
        """Whether the costs of a plan's file were predicted, do not hold, and can be measured in this forward."""
        as_large = not in_flight and plan.spec is not None and self.blank.covers(spec.input, plan.input_spec)
        return disproved(plan, self.model, as_large=as_large)

    def _plan_for(self, spec: StepSpec, value: Any) -> None:
        """Measure and solve for a step on `value`. If that fails, the plans that there are stay."""
        known = None if self.plans.in_use is None else self.plans.in_use.spec
        grows = known is None or (known.model == spec.model and not self.blank.covers(known.input, value))
        with self.plans.kept_on_error():
            self._measure_again(spec, value)
            try:
                agree(self.in_use, self.model)
            except InfeasibleError as error:
                self._refusals.remember(replace(spec, answers=self.in_use.source.answers), error)
                raise
            self.in_use.compiled_for_larger_budget = False  # it was compiled for this very budget
        self._grown += grows

    def _measure_again(self, spec: StepSpec, value: Any) -> None:
        """Plan for a first or larger input, or another kind of step; UnsupportedModelError if there is no end to it."""
        self._refusals.raise_if_refused(spec, self.model.limit_bytes(self.model.device_of(spec.input)), self.blank)
        plan = self.plans.in_use
        known = None if plan is None else plan.spec
        # Another state of the model is another kind of step, of which there may be many: only inputs are counted.
        if self._grown == _MOST_PLANS and (known is None or known.model == spec.model):
            raise UnsupportedModelError(
                f"the model has been planned {_MOST_PLANS} times, and its input has changed again; call measure() once "
                "with the largest input there will be",
                kind="too_many_plans",
                plans=_MOST_PLANS,
            )
        if plan is not None:
            if not self.model.alone and not self.blank.covers(plan.input_spec, value):
                raise UnsupportedModelError(
                    f"the input is {describe(spec.input)}, for which there is no plan, and processes that train "
                    "together cannot each make one; call measure() in all of them with the largest input there will be",
                    kind="no_plan_for_input",
                    name="input",
                )
            why, cause = (
                ("planning again", "input") if plan.is_for(spec) else ("planning for another kind of step", "step")
            )
            if plan.spec is not None and spec.answers not in (None, plan.spec.answers):
                why, cause = "planning for batches that are masked otherwise (with or without padding)", "mask"
            _log.warning(
                "%s: the input is %s", why, describe(spec.input), extra=record_fields("planning_again", cause=cause)
            )
        self._refuse_what_cannot_fit(spec, value)
        self._measure(spec, value)

    def _measure(self, spec: StepSpec, value: Any, *, closely: bool = False) -> None:
        """Event 1: cut the model into stages and measure them; see `measured_plan`."""
        self.model.refuse_several_processes()
        noticed = partial(noticed_cost, self)
        plan = measured_plan(self.model, self.blank, spec, value, noticed, closely=closely)
        assert plan.spec is not None
        self.plans.take_up(guarded(plan) if self.settings.replans else plan, plan.spec.model)

    def _refuse_what_cannot_fit(self, spec: StepSpec, value: Any) -> None:
        """InfeasibleError, before anything is run, if parameters, state and batch alone are above the limit.

        One of several processes only warns: others may go on, and wait for it when they measure.
        """
        error = self.model.static_infeasibility(value, self.model.device_of(spec.input), noticed_cost(self))
        if error is None:
            return
        if self.model.alone or alone_in_a_prediction():
            raise error
        _log.warning("%s", error, extra=fields_of(error))

    def _plan_for_kept_gradients(self, value: Any) -> None:
        """Measure and solve for gradients that are kept between steps; InfeasibleError if no plan has room for them."""
        self.settings.fresh_grads = False
        self.plans.keep_only_in_use()
        spec = replace(self.model.step_on(value), answers=self.in_use.source.answers)
        with self.plans.kept_on_error():
            self._measure(spec, value)
            agree(self.in_use, self.model)

    def _covers(self, value: Any) -> Callable[[StepPlan], bool]:
        """Whether a step plan was made for an input at least as large as `value`."""
        return lambda plan: self.blank.covers(plan.input_spec, value)

    def _revive(self, plan: StepPlan) -> None:
        """A plan that waited is in use again: it is solved again if anything has changed that it depends on."""
        grown = self.model.with_gradients_left_over(plan.budget, self.model.device_of(plan.input_spec))
        if plan.solved_with != self.settings.solved_with or grown != plan.budget:
            plan.budget, plan.sequence = grown, None

    # Forwards by plans.

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Event 5: run the model forward, so that its backward follows the plan; as it is where nothing trains.

        UnsupportedModelError for a model or an input that cannot be planned for, InfeasibleError if no plan fits,
        PlanMismatchError if the plan is from a file and was made for something else.
        """
        if torch_compat.maybe_current_level() is not None:
            raise UnsupportedModelError(
                "no plan can be followed inside of a function that torch.func transforms (grad, vmap, jvp, ...), since "
                "its tensors have no memory of their own; call the model itself there, the attribute `model`",
                kind="function_transform",
            )
        if not anything_around():  # as in most steps
            return self._run(args, kwargs, second=False)
        with outer_regions_aside() as second:
            return self._run(args, kwargs, second=second)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, second: bool) -> Any:
        """Run a forward, or the `second` one where a region of the caller runs again, which shows nothing new."""
        model, stepper = self.model, None if second else self._stepper
        if stepper is not None:
            stepper.take_consumed_away()
        value = self.blank.input_of(args, kwargs)
        spec = model.step_on(value)
        if True not in spec.model.trained and not any(tensor.requires_grad for tensor in tensors_in(value)):
            return model.core.forward(*args, **kwargs)
        if self._alone_only:
            model.refuse_several_processes()
        flying = self._forwards.in_flight()
        if stepper is not None and stepper.before_forward(in_flight=bool(flying)):
            self._forget_plans()
        self._make_ready(spec, value, in_flight=second or bool(flying))
        # Where others are in flight, or in a backward (of a reentrant region), some gradients may be of this step.
        if spec.model.has_gradients and not (second or flying or in_backward()):
            self._gradients.notice(self.in_use, partial(self._plan_for_kept_gradients, value))
        by_plan = self._run_second if second else self._run_planned
        try:
            return by_plan(value, flying)
        except PlanMismatchError as error:
            if self.in_use.file is not None or not self.blank.captured:
                raise
            answers = error.answers if isinstance(error, OtherDataError) else None
        # Not in the `except`: there, the error's traceback would keep what the first attempt has made.
        if answers is not None:
            self._turn_to_answers(answers, value)
            with suppress(PlanMismatchError):  # for its shape, the model may take another way, too
                return by_plan(value, self._forwards.in_flight())
        return self._run_other_way(value, by_plan)

    def _forget_plans(self) -> None:
        """The optimizer of `step_in_backward` has got other parameters. PlanMismatchError for a plan from a file."""
        plan = self.plans.in_use
        if plan is not None and plan.file is not None:
            plan.file.refuse_other_steps(self.model.stepping())
        self._begin_anew()

    def _turn_to_answers(self, answers: tuple[bool, ...], value: Any) -> None:
        """Have a plan for batches whose data answer as these do: one that waits, or a new one.

        UnsupportedModelError in one of several processes: others may have other batches.
        """
        if not self.model.alone:
            raise UnsupportedModelError(
                "the plan was made before this process was one of several, and for batches that are masked otherwise; "
                "call measure() again in all of them",
                kind="no_plan_for_input",
                name="mask",
            )
        spec = replace(self.model.step_on(value), answers=answers)
        self._make_ready(spec, value, in_flight=bool(self._forwards.in_flight()))

    def _run_other_way(self, value: Any, by_plan: Callable[[Any, Flying], Any]) -> Any:
        """The model takes another way than the one that the plan in use is for, for another shape for example."""
        answers = self.in_use.source.answers  # data answered as it expected
        spec = replace(self.model.step_on(value), answers=answers)
        for plan in self.plans.for_other_ways(spec, self._covers(value), self._revive):
            try:
                agree(plan, self.model)
                return by_plan(value, self._forwards.in_flight())
            except (InfeasibleError, PlanMismatchError):
                continue
        known = self.in_use.input_spec
        if not self.model.alone and not self.blank.covers(spec.input, known):
            raise UnsupportedModelError(
                f"for {describe(spec.input)} the model does something else than for {describe(known)}, for which there "
                "is a plan, and processes that train together cannot each make one; call measure() in all of them with "
                "both inputs",
                kind="no_plan_for_input",
                name="graph",
            )
        self._plan_for(spec, value)
        return by_plan(value, self._forwards.in_flight())

    def _run_planned(self, value: Any, flying: Flying) -> Any:
        """Run a forward beside those that are `flying`, and have its step observed."""
        plan = self.plans.in_use
        assert plan is not None
        assert plan.sequence is not None
        sequence = self._forwards.sequence_beside(flying, plan, self.model) if flying else plan.sequence
        forward = PlannedForward(self.model, plan, sequence, value, len(flying))
        for each in self._observers:
            each.forward_begins(forward)
        try:
            output = self._follow(sequence, plan, value, len(flying) + 1)
        except BaseException:
            for each in self._observers:
                each.forward_failed(forward)
            raise
        for each in self._observers:
            each.forward_returned(forward, output)
        return output

    def _run_second(self, value: Any, flying: Flying) -> Any:
        """A region of the caller is run again. Nobody goes backward through it, so nothing is noticed of it."""
        plan = self.in_use
        sequence = self._second_runs.sequence(plan, self._forwards.held_bytes(self.model), self.model)
        return self._follow(sequence, plan, value, len(flying) + 1)

    def _follow(self, sequence: Sequence, plan: StepPlan, value: Any, number: int) -> Any:
        """Run the model forward by this sequence for the stages of `plan`, as so many-th forward in flight."""
        smaller = Replanner(plan, self.model, number) if self._replans else None
        tier = None if sequence.moves is None or self.model.offload is None else self.model.offload.tier
        rng, ways = self.settings.preserve_rng_state, plan.way_names
        with nullcontext() if smaller is None else smaller.telling_of_the_rest():
            how = Following(sequence, rng, ways, self.settings.keepers, smaller, tier)
            return plan.source.run(plan.cut, value, how)
