"""Expose the settings of a model with a planner, and the plan that its steps follow."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rotor_profiling.backends import prediction
from rotor_py.errors import InvalidValueError
from rotor_py.measure.budget import Budget
from rotor_py.measure.measurement import Measurement
from rotor_py.plan.oom_replanning import unguarded
from rotor_py.plan.planner import Planner
from rotor_py.plan.saved_plan import CompiledStages, Plan, PlanCosts
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import ModelState, input_fingerprint, model_fingerprint
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.report import Report
from rotor_py.stage.forward_state import recall_effects
from rotor_py.transparent import Transparent, in_training
from rotor_solver import Chain, Sequence
from rotor_solver.memory_timeline import PlanMemory, plan_memory
from rotor_solver.watching import Progress

T = TypeVar("T")


class Setting(Generic[T]):
    """Descriptor that reads and sets the setting with the attribute's name. Invalid values raise ValueError."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: PlannedModel, owner: type | None = None) -> T:
        found: T = getattr(instance._planner.settings, self._name)
        return found

    def __set__(self, instance: PlannedModel, value: T) -> None:
        settings = instance._planner.settings
        given: dict[str, Any] = {self._name: value}
        replace(settings, **given)  # raises if the value is invalid
        setattr(settings, self._name, value)


class PlannedModel(Transparent):
    """A wrapped model, its settings and its plan. Reading the plan may solve for a sequence, but measures nothing."""

    _planner: Planner

    mem_limit = Setting[float | str | None]()
    mem_slots = Setting[int]()
    verbosity = Setting[int]()
    preserve_rng_state = Setting[bool]()
    loss_tmp_memory_usage = Setting[int]()
    fresh_grads = Setting[bool]()
    progress = Setting[Progress | bool | None]()
    forwards_in_flight = Setting[int]()
    backward_order = Setting[str | None]()
    watch = Setting[bool | None]()

    # Properties of the plan that steps follow; None or empty before anything has been measured.

    @property
    def sequence(self) -> Sequence | None:
        """The forwards and backwards that steps run, in order. You may set another, even one that exceeds the limit.

        If forwards in flight follow different sequences, this is the first forward's, and its `beside` holds the
        others'. With several processes, the next forward replaces a sequence that you set: all have to agree on one.

        Setting it raises ValueError before anything has been measured.
        """
        return None if (plan := self._planner.plans.in_use) is None else plan.sequence

    @sequence.setter
    def sequence(self, sequence: Sequence | None) -> None:
        plan = self._planner.in_use
        if sequence is not None:  # event 3 in `planner.py`
            self._planner.model.reserve(plan.budget, sequence)
        plan.sequence = sequence

    @property
    def budget(self) -> Budget | None:
        """The fixed memory of a step (parameters, gradients, optimizer state), and the measured costs of its stages."""
        return None if (plan := self._planner.plans.in_use) is None else plan.budget

    @property
    def chain(self) -> Chain | None:
        """The measured costs of the stages, in seconds and bytes, from which solvers find sequences."""
        return None if self.budget is None else self.budget.chain

    @property
    def inspection_values(self) -> Measurement | None:
        """The measurements of the stages and the loss."""
        return None if (plan := self._planner.plans.in_use) is None else plan.measurement

    @property
    def names(self) -> list[str]:
        """The names of the stages."""
        return [] if (plan := self._planner.plans.in_use) is None else list(plan.measurement.names)

    @property
    def step_in_backward(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps parameters in the backward, as given to `Checkpointable`, or None."""
        return self._planner.settings.step_in_backward

    @property
    def compiled(self) -> list[str]:
        """The names of the stages that run as compiled code."""
        return [] if (plan := self._planner.plans.in_use) is None else plan.compiled

    def compiled_without_budget(self) -> AbstractContextManager[None]:
        """Inside the context, compiled stages save the tensors that the compiler chooses, even beyond the limit.

        Raises ValueError before anything has been measured.
        """
        return self._planner.in_use.without_budget()

    @property
    def functions(self) -> list[nn.Module]:
        """The stages, as modules."""
        return [] if (plan := self._planner.plans.in_use) is None else plan.functions

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph; the layers of an `nn.Sequential` need no capture."""
        return self._planner.plans.blank.captured

    @property
    def device(self) -> torch.device:
        """The device that the model trains on, and whose memory is limited.

        Raises UnsupportedModelError if the model is on several.
        """
        return self._planner.device

    def plan(self) -> Plan:
        """Return the plan that steps follow, as an object that can be saved to a file.

        Raises ValueError if nothing has been measured, if the model has since been changed for another kind of step, or
        if `compile` has options that a file cannot hold.
        """
        with in_training(self):
            return _plan_for_file(self._planner.solved(), self._planner.model)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan that steps follow to a file, to give as `plan=`. Raises what `plan()` raises, and OSError."""
        self.plan().save(path)

    def memory(self) -> PlanMemory:
        """Return, for each stage, the bytes stored when the loss begins, and those that only plain training stores.

        Raises ValueError before anything has been measured.
        """
        plan = self._planner.solved()
        return plan_memory(plan.budget.chain, plan.followed, sum(each.nbytes for each in plan.measurement.carried))

    def report(self) -> Report:
        """Return a report of the plan that steps follow, to print, to show in a notebook, or to write by `to_html`.

        Raises ValueError before anything has been measured, which the first step does.
        """
        plan, model = self._planner.solved(), self._planner.model
        return Report(
            title=model.name,
            device=str(model.device_of(plan.input_spec)),
            mem_limit=None if plan.unlimited(model.settings) else model.limit_bytes(model.device_of(plan.input_spec)),
            budget=plan.budget,
            measurement=plan.measurement,
            sequence=plan.followed,
            compiled=plan.compiled if plan.compiled or model.settings.inductor is not None else None,
        )

    def summary(self) -> str:
        """Return one line about the plan that steps follow: limit, fixed memory, least limit, peak and extra time.

        Raises ValueError before anything has been measured.
        """
        return self._planner.solved().summary(self._planner.model)


def plan_of(network: PlannedModel) -> StepPlan:
    """Return the plan that steps of `network` follow. Raises ValueError before anything has been measured."""
    return network._planner.in_use


def _plan_for_file(plan: StepPlan, model: TrainedModel) -> Plan:
    """Return a solved plan in the format of plan files, for `PlannedModel.plan`. The model must be in training mode."""
    sequence, settings, device = plan.followed, model.settings, model.device_of(plan.input_spec)
    # Leave out the bytes that `on_oom="replan"` adds: a file does not record `on_oom`, which the user gives again.
    fresh, unlimited = settings.fresh_grads if plan.file is None else plan.file.fresh_grads, plan.unlimited(settings)
    budget = unguarded(plan, fresh_gradients=fresh)
    costs, peak = PlanCosts(plan.measurement, budget), budget.peak_bytes(sequence)
    if plan.file is not None:
        # Take fingerprint, cut and traits from the file: if no step has run yet, they are unknown here.
        if sequence == plan.file.sequence and budget == plan.file.costs.budget:
            return plan.file
        limit = plan.file.mem_limit if unlimited else model.limit_bytes(device)
        return replace(
            plan.file, sequence=sequence, mem_limit=limit, peak_bytes=peak, costs=costs, limited=not unlimited
        )
    # The file stores the fingerprint of the model as it is now, which must be the model that was measured.
    if plan.spec is not None and not ModelState.of(model.core).looks_like(plan.spec.model):
        text = "save the plan before requires_grad, modes, dtypes or devices change: it is not for the changed model"
        raise InvalidValueError(text, kind="plan_for_other_step")
    assert plan.cut is not None
    predicted = prediction()
    return Plan(
        model=model_fingerprint(model.core),
        input=input_fingerprint(plan.input_spec, device),
        prefix=[name for name, _ in plan.cut.prefix],
        stages=plan.cut.groups(),
        answers=list(plan.source.answers or ()),
        traits=[recall_effects(function) for function in plan.functions],
        sequence=sequence,
        mem_limit=model.limit_bytes(device),
        peak_bytes=peak,
        fresh_grads=settings.fresh_grads,
        costs=costs,
        limited=not unlimited,
        compiled=None if settings.inductor is None else CompiledStages.of(plan.cut, settings.inductor),
        predicted_for=None if predicted is None else predicted.all_names,
        step_in_backward=model.stepping(),
    )
