"""From a model and an input to a plan with costs: stages are cut and measured, and the limit is divided."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rotor_profiling import OptimizerCost
from rotor_profiling.instruments import prediction
from rotor_profiling.step.watch import give_way
from rotor_profiling.step.workspaces import allocate_workspaces
from rotor_py.errors import record_fields
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.planning_lock import old_objects_aside, planning
from rotor_py.plan.noticed.callers_hooks import callers_hooks_aside
from rotor_py.plan.room import StepRoom
from rotor_py.plan.sources.source import Measuring, Rooms, Source
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.steps.step_spec import ModelState, StepSpec
from rotor_py.plan.telling import telling
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.plan.ways import fastest_stored
from rotor_py.stage.restored.other_streams import streams_kept

_log = logging.getLogger("rotor_py")


def measured_plan(
    model: TrainedModel,
    blank: Source,
    spec: StepSpec,
    value: Any,
    noticed: Callable[[], OptimizerCost | None],
    *,
    closely: bool = False,
) -> StepPlan:
    """Cut the model into stages and measure them on `value`. UnsupportedModelError if it cannot be cut.

    The plan has no sequence yet. Times are measured more `closely` for a limit that is read off the curve of all plans.
    `noticed` says what optimizers cost that nobody named.
    """
    settings, core = model.settings, model.core
    # Each plan has a source of its own: an earlier one may wait, or be in use again if this one comes to nothing.
    source = blank.renewed()
    device = model.device_of(spec.input)
    if device.type == "cpu":
        _tell_of_a_profiler()
    with (
        planning,
        old_objects_aside(),
        callers_hooks_aside(),
        streams_kept(core),
        torch.enable_grad(),
        telling(settings, type(core).__name__) as progress,
    ):
        rooms = None if settings.inductor is None else _rooms(model, device, noticed)
        allocate_workspaces(core, device)
        measured = source.measure(value, Measuring(device, settings, progress, rooms, closely))
    budget = model.budget(measured.plain.measurement, measured.sample, device, noticed())
    plan = StepPlan(
        source,
        measured.plain.measurement,
        budget,
        # Capturing may have changed the model: buffers and modules that its first forward makes.
        spec=replace(spec, model=ModelState.of(core), answers=source.answers),
        cut=measured.plain.cut,
        ways=() if settings.inductor is None else tuple(measured.ways),
        fresh_gradients=settings.fresh_grads,
    )
    if plan.ways:
        plan.turn_to(fastest_stored(plan.ways))
    return plan


def _rooms(model: TrainedModel, device: torch.device, noticed: Callable[[], OptimizerCost | None]) -> Rooms | None:
    """What steps leave for a graph that is compiled whole. None for a strategy by hand, which is about stages."""
    if model.settings.by_hand is not None:
        return None

    def room(measurement: Measurement, sample: Any) -> StepRoom:
        budget = model.with_communication(model.budget(measurement, sample, device, noticed()))
        return StepRoom(budget, model.limit_bytes(device), model.settings.fresh_grads)

    return room


def _tell_of_a_profiler() -> None:
    """A warning if the user's profiler is on: measuring bytes on the CPU needs PyTorch's only one, and ends it."""
    give_way()  # else it may be our own
    if prediction() is None and torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # private
        _log.warning(
            "a profiler is on while the model is measured, which takes PyTorch's profiler for itself: what it has seen "
            "so far, and the rest of this step, is lost. Call measure(), or take a step, before it starts.",
            extra=record_fields("profiler_lost"),
        )
