"""Describe a solved step plan: as a file, a report, a summary line, and the memory it keeps."""

from __future__ import annotations

from dataclasses import replace

from rotor_profiling.backends import prediction
from rotor_py.errors import InvalidValueError
from rotor_py.plan.oom_replanning import unguarded
from rotor_py.plan.plan_file import CompiledStages, PlanCosts
from rotor_py.plan.saved_plan import Plan, input_fingerprint, model_fingerprint
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import ModelState
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.report import Report
from rotor_py.stage.side_effects import recall_effects
from rotor_py.units import format_bytes
from rotor_solver import Sequence, store_all
from rotor_solver.memory_timeline import PlanMemory, plan_memory


def file_of(plan: StepPlan, model: TrainedModel) -> Plan:
    """Return the plan for a file. The model has to be in training mode, as it was when the plan was made.

    Raises ValueError if the model has been changed for another kind of step since, or if a file cannot hold Inductor's
    options.
    """
    sequence = _sequence(plan)
    # A file does not record `on_oom`: it is given anew on loading.
    budget = unguarded(plan, fresh_gradients=model.settings.fresh_grads if plan.file is None else plan.file.fresh_grads)
    costs = PlanCosts(plan.measurement, budget)
    unlimited = plan.unlimited(model.settings)
    if plan.file is not None:
        # Fingerprint, cut and traits come from the file: no step may have come yet.
        if sequence == plan.file.sequence and budget == plan.file.costs.budget:
            return plan.file
        return replace(
            plan.file,
            sequence=sequence,
            mem_limit=plan.file.mem_limit if unlimited else _limit_bytes(plan, model),
            peak_bytes=budget.peak_bytes(sequence),
            costs=costs,
            limited=not unlimited,
        )
    assert plan.cut is not None
    _refuse_another_step(plan, model)
    inductor, predicted = model.settings.inductor, prediction()
    return Plan(
        model=model_fingerprint(model.core),
        input=input_fingerprint(plan.input_spec, model.device_of(plan.input_spec)),
        prefix=[name for name, _ in plan.cut.prefix],
        stages=plan.cut.groups(),
        answers=list(plan.source.answers or ()),
        traits=[recall_effects(function) for function in plan.functions],
        sequence=sequence,
        mem_limit=_limit_bytes(plan, model),
        peak_bytes=budget.peak_bytes(sequence),
        fresh_grads=model.settings.fresh_grads,
        costs=costs,
        limited=not unlimited,
        compiled=None if inductor is None else CompiledStages.of(plan.cut, inductor),
        predicted_for=None if predicted is None else predicted.all_names,
        step_in_backward=model.stepping(),
    )


def memory_of(plan: StepPlan) -> PlanMemory:
    """Return the memory that the plan keeps for the backward when the loss runs, by stage."""
    sequence = _sequence(plan)
    return plan_memory(plan.budget.chain, sequence, sum(each.nbytes for each in plan.measurement.carried))


def report_of(plan: StepPlan, model: TrainedModel) -> Report:
    """Return the plan as a report."""
    sequence = _sequence(plan)
    return Report(
        title=type(model.core).__name__,
        device=str(model.device_of(plan.input_spec)),
        mem_limit=None if plan.unlimited(model.settings) else _limit_bytes(plan, model),
        budget=plan.budget,
        measurement=plan.measurement,
        sequence=sequence,
        compiled=plan.compiled if plan.compiled or model.settings.inductor is not None else None,
    )


def summary_of(plan: StepPlan, model: TrainedModel) -> str:
    """Return one line: limit, fixed part, least possible, planned peak and overhead."""
    sequence = _sequence(plan)
    budget, stored = plan.budget, store_all(plan.budget.chain)
    plain, planned = budget.makespan(stored), budget.makespan(sequence)
    overhead = planned / plain - 1 if plain else 0.0
    unlimited = plan.unlimited(model.settings)
    compiled = len(plan.compiled)
    limit = "no limit" if unlimited else f"limit {format_bytes(_limit_bytes(plan, model))}"
    return (
        f"{limit}; {budget.split()}; least possible "
        f"{format_bytes(budget.least_bytes())}; predicted peak {format_bytes(budget.peak_bytes(sequence))}, "
        f"{overhead:.1%} more time than storing all ({format_bytes(budget.peak_bytes(stored))})"
        + (f"; {moved}" if (moved := budget.moved_in_words(sequence)) else "")
        + (f"; {compiled} of {len(plan.names)} stages compiled" if compiled else "")
    )


def _sequence(plan: StepPlan) -> Sequence:
    assert plan.sequence is not None
    return plan.sequence


def _limit_bytes(plan: StepPlan, model: TrainedModel) -> int:
    return model.limit_bytes(model.device_of(plan.input_spec))


def _refuse_another_step(plan: StepPlan, model: TrainedModel) -> None:
    """Raise ValueError if the model has changed since the plan in use was made.

    The file takes its fingerprint from the model as it is now, so it would name a step that it was not made for.
    """
    if plan.spec is not None and not ModelState.of(model.core).looks_like(plan.spec.model):
        raise InvalidValueError(
            "the plan in use is for a step in which other parameters were trained, or modes or dtypes were others; "
            "save it before the model is changed for the next kind of step",
            kind="plan_for_other_step",
        )
