"""Turn a model and an input into a plan with costs: cut the stages, measure them, divide the limit.

Measuring is logged, since the first step takes a while and is otherwise silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rotor_profiling import OptimizerCost, torch_compat
from rotor_profiling.backends import allocate_workspaces, prediction
from rotor_profiling.step import give_way
from rotor_py.errors import record_fields
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.planning_lock import freeze_gc, planning
from rotor_py.plan.observers.outer_checkpoint_regions import outer_hooks_aside
from rotor_py.plan.settings import Settings
from rotor_py.plan.solving import fastest_stored
from rotor_py.plan.sources.source import Measuring, Rooms, Source
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import ModelState, StepSpec
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.report.progress import progress_bar
from rotor_py.stage.replayed_routing import streams_kept
from rotor_py.units import format_seconds
from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import CompileBudget

_log = logging.getLogger("rotor_py")


_LONGER = 3.0
"""How much longer all passes through a model take than the first. A guess: it only sets a logged duration."""


@contextmanager
def telling(settings: Settings, model: str) -> Iterator[Progress]:
    """Yield a progress callback (stages done, all stages, name of the next) for measuring the class `model`.

    Log lines are information; with `verbosity` or `progress=True` they are warnings, which show without logging set up.
    """
    given = settings.progress
    around = progress_bar() if given is None or given is True else nullcontext(given or None)
    level = logging.WARNING if settings.verbosity or given is True else logging.INFO
    _log.log(level, "planning for a step of %s", model, extra=record_fields("planning", name=model))
    with around as shown:
        lines = _Lines(level, shown)
        yield lines
        lines.end()


class _Lines:
    def __init__(self, level: int, shown: Progress | None) -> None:
        self._level, self._shown = level, shown
        self._created = time.monotonic()
        self._began: float | None = None
        self._stages = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if done == 1 and not self._stages:  # by now, every stage has run
            self._stages = total
            _log.log(
                self._level, "measuring %d stages, about %s", total, format_seconds(_LONGER * (now - self._began)),
                extra=record_fields("measuring", stages=total),
            )  # fmt: skip
        if self._shown is not None:
            self._shown(done, total, name)

    def end(self) -> None:
        if self._began is not None:
            now = time.monotonic()
            took, whole = format_seconds(now - self._began), format_seconds(now - self._created)
            _log.log(
                self._level, "measured %d stages in %s, %s in all", self._stages, took, whole,
                extra=record_fields("measured", stages=self._stages, seconds=now - self._began),
            )  # fmt: skip


def measured_plan(
    model: TrainedModel,
    blank: Source,
    spec: StepSpec,
    value: Any,
    noticed: Callable[[], OptimizerCost | None],
    *,
    closely: bool = False,
) -> StepPlan:
    """Cut the model into stages and measure them on `value`. The plan has no sequence yet.

    Times are measured more `closely` for a limit that is read off the curve of all plans. `noticed` returns the cost of
    undeclared optimizers. Raises UnsupportedModelError if the model cannot be cut.
    """
    settings, core = model.settings, model.core
    # Each plan has its own source: an earlier plan may wait, or be used again if this one fails.
    source = blank.renewed()
    device = model.device_of(spec.input)
    if device.type == "cpu":
        _tell_of_a_profiler()
    with (
        planning,
        freeze_gc(),
        outer_hooks_aside(),
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
        # Capturing may have changed the model: its first forward may make buffers and modules.
        spec=replace(spec, model=ModelState.of(core), answers=source.answers),
        cut=measured.plain.cut,
        ways=() if settings.inductor is None else tuple(measured.ways),
        fresh_gradients=settings.fresh_grads,
    )
    if plan.ways:
        plan.turn_to(fastest_stored(plan.ways))
    return plan


def _rooms(model: TrainedModel, device: torch.device, noticed: Callable[[], OptimizerCost | None]) -> Rooms | None:
    """Return the budget for graphs compiled whole. None for a strategy by hand, which is about stages."""
    if model.settings.by_hand is not None:
        return None
    # Imported late: it imports TorchDynamo, which takes as long as the rest of torch.
    from rotor_py.capture.whole_graph import CompileBudget

    def room(measurement: Measurement, sample: Any) -> CompileBudget:
        budget = model.with_communication(model.budget(measurement, sample, device, noticed()))
        return CompileBudget(budget, model.limit_bytes(device), model.settings.fresh_grads)

    return room


def _tell_of_a_profiler() -> None:
    """Warn if the user's profiler is on: measuring bytes on the CPU needs PyTorch's only one, and ends it."""
    give_way()  # else it may be our own
    if prediction() is None and torch_compat.profiler_enabled():
        _log.warning(
            "a profiler is on while the model is measured, which takes PyTorch's profiler for itself: what it has seen "
            "so far, and the rest of this step, is lost. Call measure(), or take a step, before it starts.",
            extra=record_fields("profiler_lost"),
        )
