"""Forwards by plans, and what they show beside that. Events 5, 7, 9 and 10 of the Note in `planner.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rotor_profiling import tensors_in
from rotor_py.errors import OtherDataError, PlanMismatchError, UnsupportedModelError
from rotor_py.execute.graph_task import in_backward
from rotor_py.plan.conflicts.several_processes import refuse_several_processes
from rotor_py.plan.inputs.input_spec import describe
from rotor_py.plan.noticed.callers_hooks import anything_around, callers_regions_aside
from rotor_py.plan.noticed.forwards import Forwards
from rotor_py.plan.noticed.kept_gradients import KeptGradients
from rotor_py.plan.noticed.second_runs import SecondRuns
from rotor_py.plan.noticed.watched_steps import WatchedSteps
from rotor_py.plan.out_of_memory.replanner import Replanner
from rotor_py.plan.plan_maker import PlanMaker
from rotor_py.plan.solving import agree
from rotor_py.plan.sources.source import Following
from rotor_py.plan.stepping.stepper import Stepper
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_solver import InfeasibleError, Sequence


class PlannedForwards:
    """Runs the model by the plans that `maker` has, and notices what a step shows beside that."""

    def __init__(self, maker: PlanMaker) -> None:
        self._maker, self._model, self._settings = maker, maker.model, maker.settings
        self._forwards = Forwards()
        self._second_runs = SecondRuns()
        self._gradients = KeptGradients(maker.model)
        self._steps = WatchedSteps(maker.model)
        self._stepper: Stepper | None = None

    def wait_for_steps(self) -> None:
        """Have the optimizer's steps noticed, where it is to step in the backward."""
        if self._settings.step_in_backward is not None:
            self._stepper = Stepper(self._model, self._settings.step_in_backward)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Event 5: run the model forward, so that its backward follows the plan; as it is where nothing trains.

        UnsupportedModelError for a model or an input that cannot be planned for, InfeasibleError if no plan fits,
        PlanMismatchError if the plan is from a file and was made for something else.
        """
        if torch._C._functorch.maybe_current_level() is not None:
            raise UnsupportedModelError(
                "no plan can be followed inside of a function that torch.func transforms (grad, vmap, jvp, ...), since "
                "its tensors have no memory of their own; call the model itself there, the attribute `model`",
                kind="function_transform",
            )
        if not anything_around():  # as in most steps
            return self._run(args, kwargs, self._run_planned)
        with callers_regions_aside() as second:
            return self._run(args, kwargs, self._run_second if second else self._run_planned)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], by_plan: Callable[[Any], Any]) -> Any:
        first = by_plan == self._run_planned
        if self._stepper is not None and first:
            self._stepper.take_spent_away()
        value = self._maker.blank.input_of(args, kwargs)
        spec = self._model.step_on(value)
        if not spec.model.trains and not any(tensor.requires_grad for tensor in tensors_in(value)):
            return self._model.core.forward(*args, **kwargs)
        refuse_several_processes(self._model)
        in_flight = bool(self._forwards.in_flight())
        if self._stepper is not None and first and self._stepper.before_forward(in_flight=in_flight):
            self._forget_plans()
        self._maker.make_ready(spec, value, in_flight=in_flight or not first)
        # Where others are in flight, or in a backward (of a reentrant region), some gradients may be of this step.
        if first and not self._forwards.in_flight() and not in_backward():
            self._gradients.notice(self._maker.in_use, spec.model, partial(self._maker.plan_for_kept_gradients, value))
        try:
            return by_plan(value)
        except PlanMismatchError as error:
            if self._maker.in_use.file is not None or not self._maker.blank.captured:
                raise
            answers = error.answers if isinstance(error, OtherDataError) else None
        # Not in the `except`: there, the error's traceback would keep what the first attempt has made.
        if answers is not None:
            self._turn_to_answers(answers, value)
            with suppress(PlanMismatchError):  # for its shape, the model may take another way, too
                return by_plan(value)
        return self._run_other_way(value, by_plan)

    def _forget_plans(self) -> None:
        """The optimizer of `step_in_backward` has got other parameters. PlanMismatchError for a plan from a file."""
        plan = self._maker.plans.in_use
        if plan is not None and plan.file is not None:
            plan.file.refuse_other_steps(self._model.stepping())
        self._maker.begin_anew()

    def _turn_to_answers(self, answers: tuple[bool, ...], value: Any) -> None:
        """Have a plan for batches whose data answer as these do: one that waits, or a new one.

        UnsupportedModelError in one of several processes: others may have other batches.
        """
        if not self._model.alone:
            raise UnsupportedModelError(
                "the plan was made before this process was one of several, and for batches that are masked otherwise; "
                "call measure() again in all of them",
                kind="no_plan_for_input",
                name="mask",
            )
        spec = replace(self._model.step_on(value), answers=answers)
        self._maker.make_ready(spec, value, in_flight=bool(self._forwards.in_flight()))

    def _run_other_way(self, value: Any, by_plan: Callable[[Any], Any]) -> Any:
        """The model takes another way than the one that the plan in use is for, for another shape for example."""
        spec = replace(
            self._model.step_on(value), answers=self._maker.in_use.source.answers
        )  # data answered as it expected
        for plan in self._maker.plans.for_other_ways(spec, self._maker.covers(value), self._maker.revive):
            try:
                agree(plan, self._model)
                return by_plan(value)
            except (InfeasibleError, PlanMismatchError):
                continue
        known = self._maker.in_use.input_spec
        if not self._model.alone and not self._maker.blank.covers(spec.input, known):
            raise UnsupportedModelError(
                f"for {describe(spec.input)} the model does something else than for {describe(known)}, for which there "
                "is a plan, and processes that train together cannot each make one; call measure() in all of them with "
                "both inputs",
                kind="no_plan_for_input",
                name="graph",
            )
        self._maker.plan_for(spec, value)
        return by_plan(value)

    def _run_planned(self, value: Any) -> Any:
        plan = self._maker.in_use
        assert plan.sequence is not None
        flying = self._forwards.in_flight()
        sequence = self._forwards.sequence_beside(flying, plan, self._model) if flying else plan.sequence
        with self._steps.watched(plan, value, in_flight=len(flying)) as forward_returned:
            output = self._follow(sequence, plan, value, len(flying) + 1)
            forward_returned(output)
        self._forwards.watch(output, plan, sequence, self._model)
        if self._stepper is not None:
            self._stepper.watch(output)
        return output

    def _run_second(self, value: Any) -> Any:
        """A region of the caller is run again. Nobody goes backward through it, so nothing is noticed of it."""
        plan = self._maker.in_use
        sequence = self._second_runs.sequence(plan, self._forwards.held_bytes(self._model), self._model)
        return self._follow(sequence, plan, value, len(self._forwards.in_flight()) + 1)

    def _follow(self, sequence: Sequence, plan: StepPlan, value: Any, number: int) -> Any:
        """Run the model forward by this sequence for the stages of `plan`, as so many-th forward in flight."""
        smaller = Replanner(plan, self._model, number) if self._settings.replans else None
        tier = None if sequence.moves is None or self._model.offload is None else self._model.offload.tier
        rng, ways = self._settings.preserve_rng_state, plan.way_names
        with nullcontext() if smaller is None else smaller.telling_of_the_rest():
            how = Following(sequence, rng, ways, self._settings.keepers, smaller, tier)
            return plan.source.run(plan.cut, value, how)
