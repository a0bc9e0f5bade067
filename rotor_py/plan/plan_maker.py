"""Having a plan for the next step: one that there is, or a new one. Events 1, 5 and 6 of the Note in `planner.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rotor_profiling.backends import allocate_workspaces, prediction
from rotor_profiling.step import give_way
from rotor_py.distributed.processes import alone_in_a_prediction
from rotor_py.errors import InvalidValueError, UnsupportedModelError, fields_of, record_fields
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.planning_lock import freeze_gc, planning
from rotor_py.plan.conflicts.several_processes import refuse_several_processes
from rotor_py.plan.inputs.input_spec import describe
from rotor_py.plan.noticed.callers_hooks import callers_hooks_aside
from rotor_py.plan.noticed.optimizers import noticed_cost, wait_for_optimizers
from rotor_py.plan.noticed.predictions import disproved
from rotor_py.plan.noticed.room_for_forwards import make_room_for_forwards
from rotor_py.plan.out_of_memory.guarded_budget import guarded
from rotor_py.plan.refusals import Refusals
from rotor_py.plan.room import StepRoom
from rotor_py.plan.settings import Settings
from rotor_py.plan.solving import agree, make_room_for_optimizer
from rotor_py.plan.sources.source import Measuring, Rooms
from rotor_py.plan.sources.source_of import source_of
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.steps.step_plans import StepPlans
from rotor_py.plan.steps.step_spec import ModelState, StepSpec
from rotor_py.plan.telling import telling
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.plan.ways import fastest_stored
from rotor_py.stage.restored.other_streams import streams_kept
from rotor_solver import InfeasibleError

_log = logging.getLogger("rotor_py")
_MOST_PLANS = 16
"""Plans for larger and larger inputs, until the user is asked for the largest. A guess: each takes seconds."""


class PlanMaker:
    """Makes the `plans` for the steps of a model, and finds among them."""

    def __init__(self, model: TrainedModel, settings: Settings) -> None:
        self.settings = settings
        self.model = model
        self.begin_anew()
        self._refusals = Refusals()
        self._grown = 0
        """how often a plan was made for an input that no plan covered"""

    def begin_anew(self) -> None:
        """Give up all plans: what the settings say of compiling has changed."""
        self.plans = StepPlans()
        self.blank = source_of(self.model.core, self.settings.granularity, self.settings.inductor)
        """a source of stages that are for no input yet"""

    def wait_for_optimizers(self) -> None:
        """Have the optimizers noticed that train the model, unless the user has named one."""
        if self.settings.optimizer is None:
            wait_for_optimizers(self)

    def parameters(self) -> list[nn.Parameter]:
        """Those that an optimizer may train."""
        return list(self.model.core.parameters())

    def optimizer_noticed(self) -> None:
        """Event 6: count the optimizers that train the model; see `solving.make_room_for_optimizer`."""
        cost = noticed_cost(self)
        if cost is not None:
            make_room_for_optimizer(self.plans, self.model, cost)

    @property
    def in_use(self) -> StepPlan:
        """The step plan in use. ValueError if nothing has been measured."""
        if self.plans.in_use is None:
            raise InvalidValueError(
                "nothing has been measured yet; call measure(input), or train one step", kind="not_measured"
            )
        return self.plans.in_use

    def covers(self, value: Any) -> Callable[[StepPlan], bool]:
        """Whether a step plan was made for an input at least as large as `value`."""
        return lambda plan: self.blank.covers(plan.input_spec, value)

    def measure(self, spec: StepSpec, value: Any, *, closely: bool = False) -> None:
        """Event 1: cut the model into stages and measure them. UnsupportedModelError if it cannot be cut.

        Times are measured more `closely` for a limit that is read off the curve of all plans.
        """
        refuse_several_processes(self.model)
        # Each plan has a source of its own: an earlier one may wait, or be in use again if this one comes to nothing.
        source = self.blank.renewed()
        device = self.model.device_of(spec.input)
        if device.type == "cpu":
            _tell_of_a_profiler()
        with (
            planning,
            freeze_gc(),
            callers_hooks_aside(),
            streams_kept(self.model.core),
            torch.enable_grad(),
            telling(self.settings, type(self.model.core).__name__) as progress,
        ):
            rooms = None if self.settings.inductor is None else self._rooms(device)
            allocate_workspaces(self.model.core, device)
            measured = source.measure(value, Measuring(device, self.settings, progress, rooms, closely))
        budget = self.model.budget(measured.plain.measurement, measured.sample, device, noticed_cost(self))
        # Capturing may have changed the model: buffers and modules that its first forward makes.
        spec = replace(spec, model=ModelState.of(self.model.core), answers=source.answers)
        plan = StepPlan(
            source,
            measured.plain.measurement,
            budget,
            spec=spec,
            cut=measured.plain.cut,
            ways=() if self.settings.inductor is None else tuple(measured.ways),
            fresh_gradients=self.settings.fresh_grads,
        )
        if plan.ways:
            plan.turn_to(fastest_stored(plan.ways))
        self.plans.take_up(guarded(plan) if self.settings.replans else plan, spec.model)

    def refuse_what_cannot_fit(self, spec: StepSpec, value: Any) -> None:
        """InfeasibleError, before anything is run, if parameters, state and batch alone are above the limit.

        One of several processes only warns: others may go on, and wait for it when they measure.
        """
        error = self.model.static_infeasibility(value, self.model.device_of(spec.input), noticed_cost(self))
        if error is None:
            return
        if self.model.alone or alone_in_a_prediction():
            raise error
        _log.warning("%s", error, extra=fields_of(error))

    def _rooms(self, device: torch.device) -> Rooms | None:
        """What steps leave for a graph that is compiled whole. None for a strategy by hand, which is about stages."""
        if self.settings.by_hand is not None:
            return None

        def room(measurement: Measurement, sample: Any) -> StepRoom:
            budget = self.model.budget(measurement, sample, device, noticed_cost(self))
            budget = self.model.with_communication(budget)
            return StepRoom(budget, self.model.limit_bytes(device), self.settings.fresh_grads)

        return room

    def make_ready(self, spec: StepSpec, value: Any, *, in_flight: bool) -> None:
        """Have a plan in use that serves a step on `value`, and a sequence. Other forwards may be `in_flight`."""
        plan = self.plans.in_use
        if plan is not None and plan.file is not None and not self._is_disproved(plan, spec, in_flight):
            plan.compare_with_file(spec, value, self.model)
            agree(plan, self.model)
            return
        # Most steps are as the one before: nothing waits that would serve better than the plan in use.
        if plan is None or not plan.is_just_for(spec):
            known = self.plans.turn_to(spec, self.covers(spec.input), self.revive)
            if not known or not self.blank.covers(self.in_use.input_spec, spec.input):
                self.plan_for(spec, value)
                return
        plan = self.in_use
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
            if in_flight or not plan.outgrown or plan.sequence is not plan.found:
                return
            plan.outgrown = False
        self.plan_for(spec, value)

    def _is_disproved(self, plan: StepPlan, spec: StepSpec, in_flight: bool) -> bool:
        """Whether the costs of a plan's file were predicted, do not hold, and can be measured in this forward."""
        as_large = not in_flight and plan.spec is not None and self.blank.covers(spec.input, plan.input_spec)
        return disproved(plan, self.model, as_large=as_large)

    def plan_for(self, spec: StepSpec, value: Any) -> None:
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
            self.in_use.outgrown = False  # it was compiled for this very room: there is no other to compile it for
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
        self.refuse_what_cannot_fit(spec, value)
        self.measure(spec, value)

    def plan_for_kept_gradients(self, value: Any) -> None:
        """Measure and solve for gradients that are kept between steps; InfeasibleError if no plan has room for them."""
        self.settings.fresh_grads = False
        self.plans.keep_only_in_use()
        spec = replace(self.model.step_on(value), answers=self.in_use.source.answers)
        with self.plans.kept_on_error():
            self.measure(spec, value)
            agree(self.in_use, self.model)

    def revive(self, plan: StepPlan) -> None:
        """A plan that waited is in use again: it is solved again if anything has changed that it depends on."""
        grown = self.model.with_gradients_left_over(plan.budget, self.model.device_of(plan.input_spec))
        if plan.solved_with != self.settings.solved_with or grown != plan.budget:
            plan.budget, plan.sequence = grown, None


def _tell_of_a_profiler() -> None:
    """A warning if the user's profiler is on: measuring bytes on the CPU needs PyTorch's only one, and ends it."""
    give_way()  # else it may be our own
    if prediction() is None and torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # private
        _log.warning(
            "a profiler is on while the model is measured, which takes PyTorch's profiler for itself: what it has seen "
            "so far, and the rest of this step, is lost. Call measure(), or take a step, before it starts.",
            extra=record_fields("profiler_lost"),
        )
