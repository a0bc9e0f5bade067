"""Keep a plan for each kind of step that a model takes in turn, and choose or make the plan for the next step.

Kinds of steps alternate, for example, if a GAN trains its discriminator in every other step, or if adapters switch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

from rotor_py.distributed.processes import alone_in_a_prediction, gather_objects, refuse_other_ranks
from rotor_py.errors import UnsupportedModelError, fields_of, record_fields
from rotor_py.plan.measuring import measured_plan
from rotor_py.plan.observers.forwards_in_flight import make_room_for_forwards
from rotor_py.plan.observers.watched_steps import disproved
from rotor_py.plan.oom_replanning import guarded
from rotor_py.plan.solving import count_optimizer_beside_file, solve, warn_beyond_the_limit
from rotor_py.plan.source import source_of
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import ModelState, StepSpec, describe, same_kind
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import InfeasibleError

_log = logging.getLogger("rotor_py")
# Maximum number of waiting plans. Beyond it, the one that waited longest is dropped. A guess: a GAN has two or three.
_MOST_WAITING = 8
_MOST_PLANS = 16  # Number of plans for ever larger inputs after which a warning is logged. A guess: each takes seconds.
# Maximum number of steps remembered because no plan fits them. A guess: few shapes in a data set are too large.
_MOST_REFUSED = 16


class StepPlans:
    """The plan that steps follow (`in_use`), and plans that wait for other kinds of steps. Events: see `planner.py`."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model
        # steps for which no plan fits the limit, and their errors: later steps as large are refused without measuring
        self._refused: list[tuple[StepSpec, InfeasibleError]] = []
        self._grown = 0  # number of plans made for an input that no plan covered
        self.begin_anew()

    def begin_anew(self) -> None:
        settings = self.model.settings
        self.in_use: StepPlan | None = None
        self._waiting: list[StepPlan] = []
        # source of the model's stages, without measurements
        self.blank = source_of(self.model.core, settings.granularity, settings.inductor)

    @contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """After an error inside the context, restore the plans from before it, which still serve other steps."""
        in_use, waiting = self.in_use, list(self._waiting)
        try:
            yield
        except BaseException:
            self.in_use, self._waiting = in_use, waiting
            if in_use is not None:
                in_use.restore_effects()
            raise

    def measure(self, spec: StepSpec, value: Any, *, closely: bool = False) -> StepPlan:
        """Event 1: measure a step on `value`, return its plan, now in use. The old plan waits, unless replaced."""
        self.model.refuse_several_processes()
        plan = measured_plan(self.model, self.blank, spec, value, closely=closely)
        plan = guarded(plan) if self.model.settings.on_oom == "replan" else plan
        if self.in_use is not None and self.in_use.file is None:  # store the stages that the plan before had to store
            measured = self.in_use.measurement
            plan.changed = {*self.in_use.changed, *(measured.names[stage] for stage in measured.unrepeatable)}
            plan.store_changed(self.model.settings)
        assert plan.spec is not None
        waiting = [each for each in (*self._waiting, self.in_use) if each is not None and each.file is None]
        kept = [each for each in waiting if not (each.is_for(plan.spec) and each.source.same_graph(plan.source))]
        self._keep(kept, plan.spec.model)
        self.in_use = plan
        return plan

    def refuse_what_cannot_fit(self, spec: StepSpec, value: Any) -> None:
        """Raise InfeasibleError if model, optimizer state and batch exceed the limit. With several processes, warn."""
        error = self.model.static_infeasibility(value, self.model.device_of(spec.input))
        if error is None:
            return
        if self.model.alone or alone_in_a_prediction():
            try:
                raise error
            finally:
                del error  # an error in a frame of its own traceback holds the batch until a garbage collection
        _log.warning("%s", error, extra=fields_of(error))

    def make_ready(self, spec: StepSpec, value: Any, *, in_flight: bool) -> None:
        """Event 5: use a solved plan for a step on `value`. `in_flight`: whether other forwards are in flight."""
        plan = self.in_use
        if plan is not None and plan.file is not None:
            as_large = not in_flight and plan.spec is not None and self.blank.covers(spec.input, plan.input_spec)
            if not disproved(plan, self.model, as_large=as_large):
                plan.compare_with_file(spec, value, self.model)
                agree(plan, self.model)
                return
        # Look for another plan only if this step differs from the one before.
        if plan is None or plan.file is not None or plan.spec is None or not plan.spec.identical(spec):
            plan = self._turn_to(spec)
            if plan is None or not self.blank.covers(plan.input_spec, spec.input):
                self.plan_for(spec, value)
                return
        if plan.changed and not in_flight:
            plan.store_changed(self.model.settings)
        try:
            agree(plan, self.model)
            if not in_flight:
                make_room_for_forwards(plan, self.model)
        except InfeasibleError as error:
            assert plan.spec is not None
            self._remember_refused(plan.spec, error)
            if not self.model.alone or self.blank.covers(spec.input, plan.input_spec):
                raise
        else:
            # If an optimizer or a smaller limit has left fewer bytes than the graph was compiled for, compile it again.
            if in_flight or not plan.compiled_for_larger_budget or plan.sequence is not plan.found:
                return
            plan.compiled_for_larger_budget = False
        self.plan_for(spec, value)

    def plan_for(self, spec: StepSpec, value: Any) -> None:
        """Measure and solve for a step on `value`. If that raises, the earlier plans stay."""
        known = None if self.in_use is None else self.in_use.spec
        grows = known is None or (known.model == spec.model and not self.blank.covers(known.input, value))
        with self.kept_on_error():
            plan = self._measure_again(spec, value)
            try:
                agree(plan, self.model)
            except InfeasibleError as error:
                self._remember_refused(replace(spec, answers=plan.source.answers), error)
                raise
            plan.compiled_for_larger_budget = False  # the graph was just compiled for this budget
        self._grown += grows

    def plan_for_kept_gradients(self, plan: StepPlan, value: Any) -> None:
        """Event 7: measure and solve for gradients kept between steps; InfeasibleError if no plan has room for them."""
        self.model.settings.fresh_grads = False
        self._waiting = []  # these plans, too, assume that gradients are freed
        spec = replace(StepSpec.of(self.model.core, value), answers=plan.source.answers)
        with self.kept_on_error():
            agree(self.measure(spec, value), self.model)

    def for_other_graphs(self, spec: StepSpec) -> Iterator[StepPlan]:
        """Put each waiting plan that may serve a step like `spec` in use, one after the other, and yield it."""
        for each in list(self._waiting):
            if each.is_for(spec) and self.blank.covers(each.input_spec, spec.input):
                self._put_in_use(each, spec.model)
                yield each

    def optimizer_detected(self) -> None:
        """Event 6: count undeclared optimizers in all plans; solve again if they do not fit; warn if no plan does."""
        model, plan, cost = self.model, self.in_use, self.model.counted_optimizer()
        # Plans of a strategy by hand have no limit.
        spec = None if plan is None else plan.input_spec
        limit = None if model.settings.by_hand is not None else model.limit_bytes(model.device_of(spec))
        for each in self._waiting:
            each.count_optimizer(cost)
            if each.sequence is None or limit is None:
                continue
            # Solve agreed plans again even if they fit here: they may not fit in another process, and all must solve.
            if each.agreed is not None or each.budget.peak_bytes(each.sequence) > limit:
                each.solve_again()
        if plan is None:  # a later plan counts the optimizers when it is made
            return
        if plan.file is not None:
            count_optimizer_beside_file(plan, model)
            return
        plan.count_optimizer(cost)
        if limit is None:
            return
        if plan.agreed is not None:  # at the next step, when all processes have detected theirs, they solve together
            plan.solve_again()
        elif plan.sequence is not None and plan.budget.peak_bytes(plan.sequence) > limit:
            try:
                solve(plan, model)
            except InfeasibleError as error:
                warn_beyond_the_limit(error)

    def take_along(self, plan: StepPlan | None) -> None:
        """Event 11: for a copied model, use the original's `plan`, unless its graph holds the original's parameters."""
        # `spec` is for the original's modules, so the copy's first step is compared with the file again, or measured.
        if plan is not None and not self.blank.captured:
            self.in_use = replace(plan, source=self.blank)
        elif plan is not None and plan.file is not None:
            # The original's budget also counts optimizers detected since the plan was loaded.
            adopted = StepPlan.adopted(plan.file, self.blank)
            self.in_use = replace(adopted, budget=plan.budget, guard_bytes=plan.guard_bytes)

    def _measure_again(self, spec: StepSpec, value: Any) -> StepPlan:
        """Measure a step that no plan covers, and log why: a larger input, other data, or another kind of step."""
        self._raise_if_refused(spec)
        plan = self.in_use
        known = None if plan is None else plan.spec
        # Do not warn if the model's state differs: many plans for many states are no sign of growing inputs.
        if self._grown == _MOST_PLANS and (known is None or known.model == spec.model):
            _log.warning(
                f"call measure() once with the largest input to come: planning takes time, and {_MOST_PLANS} plans "
                "have been made, each for an input that is larger than those before, or has other tensors",
                extra=record_fields("many_plans", plans=_MOST_PLANS),
            )
        if plan is not None:
            if not self.model.alone and not self.blank.covers(plan.input_spec, value):
                text = f"call measure() in all processes with the largest input: no plan covers {describe(spec.input)}"
                raise UnsupportedModelError(text, kind="no_plan_for_input", name="input")
            why, cause = "planning for another kind of step", "step"
            if plan.is_for(spec):
                why, cause = "planning again", "input"
            if plan.spec is not None and spec.answers not in (None, plan.spec.answers):
                why, cause = "planning for batches with another kind of mask (with or without padding)", "mask"
            record = record_fields("planning_again", cause=cause)
            _log.warning("%s: the input is %s", why, describe(spec.input), extra=record)
        self.refuse_what_cannot_fit(spec, value)
        return self.measure(spec, value)

    def _remember_refused(self, spec: StepSpec, error: InfeasibleError) -> None:
        # Copy the error: the copy lacks the traceback, which would hold the step's frames and their tensors.
        self._refused = [*self._refused, (spec, copy(error))][-_MOST_REFUSED:]

    def _raise_if_refused(self, spec: StepSpec) -> None:
        limit = self.model.limit_bytes(self.model.device_of(spec.input))
        for refused, error in self._refused:
            alike = refused.model == spec.model and self.blank.covers(spec.input, refused.input)
            if not alike or not same_kind(spec.input, refused.input) or limit > error.mem_limit:
                continue
            if all(refused.answers or ()) or refused.answers == spec.answers:  # without a mask: least memory
                raise copy(error)

    def _turn_to(self, spec: StepSpec) -> StepPlan | None:
        """Put a plan for this kind of step in use, if possible one that covers its input; return it, or None."""
        known = self._waiting if self.in_use is None else [self.in_use, *self._waiting]
        found = [each for each in known if each.is_for(spec)]
        if not found:
            return None
        # `max` returns the first of equals: the plan in use.
        best = max(
            found,
            key=lambda each: (self.blank.covers(each.input_spec, spec.input), same_kind(each.input_spec, spec.input)),
        )
        self._put_in_use(best, spec.model)
        return best

    def _put_in_use(self, plan: StepPlan, present: ModelState) -> None:
        """Put a waiting plan in use again; have it solved again if limit, slots or present gradients differ."""
        if plan is self.in_use:
            return
        waiting = [*self._waiting, *([] if self.in_use is None else [self.in_use])]
        self._keep([each for each in waiting if each is not plan], present)
        plan.restore_effects()
        self.in_use = plan
        model, settings = self.model, self.model.settings
        device, stepped = model.device_of(plan.input_spec), model.stepped()
        # Gradients that steps of other kinds have left in `.grad` count in this plan's budget, too.
        grown = plan.budget.with_gradients_of(model.core, device, fresh=settings.fresh_grads, stepped=stepped)
        if plan.solved_with != settings.solved_with or grown != plan.budget:
            plan.budget, plan.sequence = grown, None

    def _keep(self, waiting: list[StepPlan], present: ModelState) -> None:
        """Have these plans wait, except those with modules that the model has lost, whose memory they would hold."""
        same = present.modules, present.parameters
        specs = [(each, each.spec.model) for each in waiting if each.spec is not None]
        self._waiting = [each for each, model in specs if (model.modules, model.parameters) == same][-_MOST_WAITING:]


def agree(plan: StepPlan, model: TrainedModel) -> None:
    """Give `plan` a sequence that all processes follow: its own if they have agreed on it; otherwise solve for one."""
    group = model.group
    # Compare identities: a sequence that the user has set is not the agreed one, even if it is equal.
    disagreed = group is not None and plan.agreed is not plan.sequence
    if plan.file is not None:
        if group is not None and disagreed:
            text = "; ".join(map(str, (plan.followed, *plan.followed.beside)))
            refuse_other_ranks("the sequence", gather_objects(text, group, model.device_of(plan.input_spec)))
            plan.agreed = plan.sequence
        return
    grown = model.with_communication(plan.budget)
    forwards = model.settings.forwards_in_flight
    if forwards > grown.forwards:  # compared first, since every step does this, and finding the device takes longer
        grown = model.with_forwards(grown, plan.measurement, model.device_of(plan.input_spec), forwards)
    if group is not None:
        grown = replace(grown, backward_order=model.settings.backward_order or "any")
    if grown is not plan.budget and grown != plan.budget:
        plan.budget, plan.sequence = grown, None
    if plan.sequence is None or disagreed:
        try:
            solve(plan, model)
        except InfeasibleError as error:
            if plan.last_resort is None:
                raise
            warn_beyond_the_limit(error)
            # With several processes, all of them got the error (`agreed_sequence`), so all go on together.
            plan.sequence = plan.agreed = plan.last_resort
        plan.last_resort = None
