"""Make a plan without a sequence: cut a model into stages, measure their time and memory, and compute the budget."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rotor_profiling import tensors_in, torch_compat
from rotor_profiling.attributes import advanced_generators
from rotor_profiling.backends import allocate_workspaces, prediction
from rotor_profiling.contents import LARGEST, Values, advanced, as_it_was, contents_of, write_back, written
from rotor_profiling.isolate import undoing
from rotor_profiling.step import give_way
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.errors import UnsupportedModelError, record_fields
from rotor_py.execute.tape import single_stage_node
from rotor_py.measure.fixed_memory import stepped_parameters
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.planning_lock import freeze_gc, planning
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions
from rotor_py.plan.settings import Settings
from rotor_py.plan.source import Source
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import ModelState, StepSpec
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.report.progress import progress_bar
from rotor_py.stage.named_state import locations_in
from rotor_py.stage.saved_tensors import hooks_aside
from rotor_py.stage.user_state import user_state_kept
from rotor_py.units import format_seconds
from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rotor_py.capture.variants import CompileBudget

_log = logging.getLogger("rotor_py")

# Seconds of all measuring, divided by those of its first pass through the stages. A guess, used only in a log line.
_LONGER = 3.0


@contextmanager
def telling(settings: Settings, model: str) -> Iterator[Progress]:
    """Yield the progress function. Log measuring: as WARNING with `verbosity` or `progress=True`, otherwise as INFO."""
    given, created = settings.progress, time.monotonic()
    level = logging.WARNING if settings.verbosity or given is True else logging.INFO
    began: list[float] = []
    stages = 0

    def progress(done: int, total: int, name: str) -> None:
        nonlocal stages
        if not began:
            began.append(time.monotonic())
        if done == 1 and not stages:  # the first pass has run every stage
            stages, about = total, format_seconds(_LONGER * (time.monotonic() - began[0]))
            record = record_fields("measuring", stages=stages)
            _log.log(level, "measuring %d stages takes about %s", stages, about, extra=record)
        if shown is not None:
            shown(done, total, name)

    _log.log(level, "planning for a step of %s", model, extra=record_fields("planning", name=model))
    with progress_bar() if given is None or given is True else nullcontext(given or None) as shown:
        yield progress
    if began:
        now = time.monotonic()
        _log.log(
            level, "measured %d stages in %s, %s in all", stages, format_seconds(now - began[0]),
            format_seconds(now - created), extra=record_fields("measured", stages=stages, seconds=now - began[0]),
        )  # fmt: skip


@contextmanager
def _inputs_watched(core: torch.nn.Module, source: Source, value: Any) -> Iterator[None]:
    """On exit, restore small tensors in the model's input; raise UnsupportedModelError if anything stays changed."""
    arguments = value if source.captured else ((value,), {})
    before = []
    for name, given in inspect.signature(core.forward).bind(*arguments[0], **arguments[1]).arguments.items():
        shared = [pair for at in locations_in(given) for pair in contents_of(at.get(), set(), copies=True)]
        tensors = [each for each in tensors_in(given) if source.captured and not each.is_inference()]
        copies = [each.detach().clone() if each.nbytes <= LARGEST else None for each in tensors]
        values = [(each, Values(each._version, copy)) for each, copy in zip(tensors, copies, strict=True)]
        before.append((name, shared, values))
    interrupted = False
    try:
        yield
    except BaseException as error:
        interrupted = not isinstance(error, Exception)  # other errors may come from what is used up
        raise
    finally:
        for name, shared, values in before:
            write_back([pair for pair in values if not as_it_was(*pair)])
            lost = any(each.copy is None for each in written(values))
            if (lost or advanced(shared)) and not interrupted:
                what = "pass a tensor that nothing writes to" if lost else "pass a list instead of a generator"
                text = f"{what} in {name!r}: measuring has changed it, and cannot put it back"
                raise UnsupportedModelError(text, kind="input_changed", name=name)
            if not source.captured and any(each.copy.nbytes > LARGEST for each in written(shared)):
                _log.warning(
                    f"pass a tensor instead of the array in {name!r}: a layer writes to it, and so do recomputations, "
                    f"as they restore only arrays of at most {LARGEST} bytes",
                    extra=record_fields("input_changed", name=name),
                )


def measured_plan(model: TrainedModel, blank: Source, spec: StepSpec, value: Any, *, closely: bool = False) -> StepPlan:
    """Cut the model into stages, measure these on `value`, and return the plan, which has no sequence yet."""
    settings, core = model.settings, model.core
    source = blank.renewed()  # not shared with an earlier plan, which may be used again
    device = model.device_of(spec.input)
    if device.type == "cpu":
        give_way()  # stop our own watch of a step, which runs a profiler: one that still runs is the user's
        if prediction() is None and torch_compat.profiler_enabled():
            _log.warning(
                "call measure(), or take a step, before a profiler starts: measuring uses the profiler itself, so the "
                "running one loses its records so far, and those of the rest of this step",
                extra=record_fields("profiler_lost"),
            )

    def room(measurement: Measurement, sample: Any) -> CompileBudget:
        from rotor_py.capture.variants import CompileBudget

        budget = model.with_communication(model.budget(measurement, sample, device))
        return CompileBudget(budget, model.limit_bytes(device), settings.fresh_grads)

    with (
        undoing(),
        planning,
        freeze_gc(),
        hooks_aside(),  # those of a checkpoint would recompute its region
        user_state_kept(core, value, settings.loss),
        _inputs_watched(core, source, value),
        torch.enable_grad(),
        telling(settings, model.name) as progress,
    ):
        allocate_workspaces(core, device)
        options = MeasuringOptions(
            loss=settings.loss,
            progress=progress,
            group=meeting_in_stages(core),
            preserve_rng_state=settings.preserve_rng_state,
            fresh_gradients=settings.fresh_grads,
            loss_temp_bytes=settings.loss_tmp_memory_usage,
            cache=settings.cache,
            keepers=settings.keepers,
            closely=closely,
            stepped=stepped_parameters(core, settings.step_in_backward),
            # With several processes, assume that callers hold outputs: a step shows it to its own process only.
            outputs_held=model.holds_outputs or not model.alone,
            # Time the Python code of nodes on a CPU only: on CUDA, it runs while kernels do, so it adds no time.
            as_node=single_stage_node if device.type == "cpu" and prediction() is None else None,
        )
        # A strategy by hand chooses stages to recompute, so it needs several: compile no graph as a single stage.
        whole = None if settings.inductor is None or settings.by_hand is not None else room
        ways, sample = source.measure(value, device, options, whole)
    plain = ways[-1]
    if found := [plain.measurement.names[stage] for stage in plain.measurement.unrepeatable]:
        others = f" and {len(found) - 1} others" if len(found) > 1 else ""
        _log.warning(
            f"every plan stores stage {found[0]!r}{others}: a second run from the same state gave another result (does "
            "it read a clock, a counter, or a random generator whose state cannot be restored?), it writes to its "
            "parameters, or it raises without a graph",
            extra=record_fields("not_reproducible", name=found[0], stages=len(found)),
        )
    for name in advanced_generators(core):
        _log.warning(
            "replace the generator in %r by an iterator that can be copied, such as itertools.count: measuring has "
            "advanced it, and recomputing its stage does, too",
            name,
            extra=record_fields("writes_elsewhere", name=name),
        )
    plan = StepPlan(
        source,
        plain.measurement,
        model.budget(plain.measurement, sample, device),
        # Read the state again: the model's first forward, which capturing runs, may make buffers and modules.
        spec=replace(spec, model=ModelState.of(core), answers=source.answers),
        cut=plain.cut,
        ways=() if settings.inductor is None else tuple(ways),
        fresh_gradients=settings.fresh_grads,
    )
    if plan.ways:  # until the plan is solved, choose the variant of the stages that is fastest without recomputing
        candidates = [way for way in plan.ways if way.cut.members is not None] or plan.ways

        def seconds(way: MeasuredCut) -> float:
            return sum(each.forward_seconds + each.backward_seconds for each in way.measurement.stages)

        plan.turn_to(min(candidates, key=seconds))
    return plan
