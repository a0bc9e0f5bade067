"""Solve for a sequence within the limit, alone or with all processes, and make room for late optimizers.

Stages may run plain, compiled one by one, or compiled as a whole: the solver takes the variant with the fastest plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist

from rotor_py.compile.compiled_stage import is_compiled
from rotor_py.distributed.processes import size_of
from rotor_py.errors import record_fields
from rotor_py.measure.budget import Budget
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.planning_lock import planning
from rotor_py.measure.stage_measurer import MeasuredCut
from rotor_py.plan.agreement import agreed_sequence, gather_objects, refuse_other_plans, slowest
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes
from rotor_solver import Algorithm, InfeasibleError, Persistent, Sequence

_log = logging.getLogger("rotor_py")


def choose_variant(
    plan: StepPlan,
    solve: Callable[[Budget], Sequence],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Sequence:
    """Turn `plan` to the variant (a way to run the stages) with the fastest sequence by `solve`; return that sequence.

    The plain stages are among the variants, so compiling never makes a plan worse. If no variant has a sequence, raises
    the InfeasibleError of the one that needs least.
    """
    several = group if group is not None and size_of(group) > 1 else None
    ways = list(plan.ways)
    if several is not None and ways:
        # Those that all processes have, in one order: each measures which are faster or fit.
        by_kind = {_kind(way): way for way in ways}
        first, *others = gather_objects(list(by_kind), several, device)
        ways = [by_kind[kind] for kind in first if all(kind in other for other in others)]
    if not ways:
        return solve(plan.budget)
    plan.compiled_for_larger_budget = False
    # A whole graph exists only if it is not slower than plain. Its time is not comparable with that of stages, which
    # were measured one by one.
    for whole in (True, False):
        alike = [way for way in ways if (way.cut.members is not None) == whole]
        found: list[tuple[float, MeasuredCut, Sequence]] = []
        refused: list[InfeasibleError] = []
        for way in alike:
            budget = plan.budget_of(way)
            try:
                sequence = solve(budget)
            except InfeasibleError as error:  # with several processes, it comes in all of them
                # A graph compiled as a whole was compiled for the room that existed then.
                plan.compiled_for_larger_budget |= whole
                refused.append(error)
            else:
                seconds = budget.makespan(sequence)
                # With several processes, the slowest counts, so that all choose alike.
                found.append((seconds if several is None else slowest(seconds, several, device), way, sequence))
        if found:
            _, best, sequence = min(found, key=lambda each: each[0])
            plan.turn_to(best)
            return sequence
    raise min(refused, key=lambda error: error.min_bytes)


def fastest_stored(ways: Iterable[MeasuredCut]) -> MeasuredCut:
    """Return the variant that is fastest without recompute: the first choice, before there is a limit."""
    found = list(ways)
    return min(
        [way for way in found if way.cut.members is not None] or found,
        key=lambda way: sum(each.forward_seconds + each.backward_seconds for each in way.measurement.stages),
    )


def _kind(way: MeasuredCut) -> tuple[tuple[str, bool], ...]:
    """Return a key of a variant that is equal in all processes: its stages, and which of them are compiled."""
    return tuple((name, is_compiled(stage)) for name, stage in way.cut.stages)


def solve(
    plan: StepPlan,
    model: TrainedModel,
    limit: float | str | None = None,
    *,
    slots: int | None = None,
    algorithm: Algorithm | None = None,
) -> Sequence:
    """Find the sequence of `plan` within `limit`, or else within the limit that is set."""
    settings, group, device = model.settings, model.group, model.device_of(plan.input_spec)
    given = settings.mem_limit if limit is None else limit
    with planning:
        if algorithm is None and settings.by_hand is not None:
            # Without a set limit, a strategy by hand has none; a solver takes what the device can give.
            most = None if given is None else limit_bytes(given, device)
            by_hand = partial(settings.by_hand.sequence, model.core, mem_limit=most)
            sequence = choose_variant(plan, by_hand, group, device)
        else:
            algorithm = algorithm or Persistent(slots=settings.mem_slots if slots is None else slots)
            most = limit_bytes(given, device)
            if limit is None and plan.reduced is not None and plan.reduced[0] == given:
                most = min(most, max(plan.reduced[1], plan.budget.least_bytes()))
            if group is not None and size_of(group) > 1:
                found = partial(agreed_sequence, mem_limit=most, algorithm=algorithm, group=group, device=device)
            else:
                found = partial(Budget.solve, mem_limit=most, algorithm=algorithm)
            try:
                sequence = choose_variant(plan, found, group, device)
            except InfeasibleError as error:
                raise _telling_of_fresh_gradients(error, plan, model, most) from error
    if plan.budget.link is not None and plan.budget.forwards > 1:
        _log.warning(
            "%d forwards are in flight at once, and plans for several forwards move nothing to another tier: what has "
            "no room is computed again. Go backward after each forward to have offload= count.",
            plan.budget.forwards,
            extra=record_fields("moves_nothing", forwards=plan.budget.forwards),
        )
    # Agreed on, it offloads in all processes or in none.
    model.reserve(plan.budget, sequence, group if size_of(group) > 1 else None)
    plan.sequence, plan.agreed = sequence, sequence if size_of(group) > 1 else None
    plan.found = sequence
    settings.mem_limit = given  # only now: a limit that fails must not count
    plan.solved_with = settings.solved_with
    if settings.verbosity:
        _log.warning("%s", plan.summary(model), extra=record_fields("summary"))
    return sequence


def _telling_of_fresh_gradients(
    error: InfeasibleError, plan: StepPlan, model: TrainedModel, limit: int
) -> InfeasibleError:
    """Extend the error by the step's need with gradients freed between steps, where that is less."""
    if plan.fresh_gradients:
        return error
    device, budgets, group = model.device_of(plan.input_spec), plan.budgets(), model.group
    tightest = min((budget for budget, _ in budgets), key=Budget.least_bytes)
    held = tightest.least_bytes()
    least = min(model.with_fresh_gradients(*each, device).least_bytes() for each in budgets)
    if group is not None and size_of(group) > 1:
        # All raise, so all come here; all give the numbers of the one with the least room to spare.
        all_of_them = gather_objects((least, held, limit), group, device)
        least, held, limit = max(all_of_them, key=lambda each: each[0] - each[2])
    if not least < held > limit:
        return error
    needed, says = f"{format_bytes(least)} ({least} bytes)", "fresh_grads=True (--fresh-grads)"
    if least <= limit:
        more = (
            f"If your loop frees gradients between steps (optimizer.zero_grad()), say so: with {says} the least limit "
            f"is {needed}, and a plan fits."
        )
    else:
        more = f"In a loop that frees gradients between steps, with {says}, it is {needed}, still above the limit."
    if model.alone:
        return tightest.refuse(limit, more)
    # With several processes, the numbers may be another one's.
    return InfeasibleError(f"{error} {more}", min_bytes=error.min_bytes, mem_limit=error.mem_limit, stage=error.stage)


def agree(plan: StepPlan, model: TrainedModel) -> None:
    """Put a sequence in use that all processes follow; solve unless all of them have already."""
    alone = model.alone
    # Compared as objects: a sequence set since is not agreed upon, even if equal.
    group = None if alone else model.group
    open_question = group is not None and size_of(group) > 1 and plan.agreed is not plan.sequence
    if plan.file is not None:
        if group is not None and open_question:
            assert plan.sequence is not None
            text = "; ".join(map(str, (plan.sequence, *plan.sequence.beside)))
            refuse_other_plans(text, group, model.device_of(plan.input_spec))
            plan.agreed = plan.sequence
        return
    grown = model.with_communication(plan.budget) if dist.is_initialized() else plan.budget
    forwards = model.settings.forwards_in_flight
    if forwards > grown.forwards:  # checked in every step, and finding the device takes longer
        grown = model.with_forwards(grown, plan.measurement, model.device_of(plan.input_spec), forwards)
    if not alone:
        grown = grown.with_backward_order(plan.order.to_plan_for(model.settings, alone=False))
    if grown is not plan.budget and grown != plan.budget:
        plan.budget, plan.sequence = grown, None
    if plan.sequence is None or open_question:
        try:
            solve(plan, model)
        except InfeasibleError as error:
            if plan.last_resort is None:
                raise
            warn_beyond_the_limit(error)
            # With several processes, the error came in all of them (`agreed_sequence`), so all go on together.
            plan.sequence = plan.agreed = plan.last_resort
        plan.last_resort = None


def count_optimizer_beside_file(plan: StepPlan, model: TrainedModel) -> None:
    """Count an optimizer in a plan from a file. Warns if the plan has too little room for it."""
    assert plan.file is not None
    before = plan.budget
    plan.count_optimizer(model.counted_optimizer())
    if plan.unlimited(model.settings) or plan.budget == before:
        return
    peak, limit = plan.budget.peak_bytes(plan.file.sequence), model.limit_bytes(model.device_of(plan.input_spec))
    if peak > limit:
        _log.warning(
            "the plan was made for another optimizer, or for none: with this one a step needs %s (%d bytes), and the "
            "limit is %s (%d bytes); training goes on, beyond the limit. Plan again with the optimizer given.",
            format_bytes(peak), peak, format_bytes(limit), limit,
            extra=record_fields("late_optimizer", peak_bytes=peak, mem_limit=limit),
        )  # fmt: skip


def warn_beyond_the_limit(error: InfeasibleError) -> None:
    """Warn that training goes on although a late optimizer leaves no room for any plan."""
    _log.warning(
        "the optimizer was not known when the model was planned; training goes on, beyond the limit: %s Given as "
        "optimizer=, it counts from the start.",
        error,
        extra=record_fields("late_optimizer", min_bytes=error.min_bytes, mem_limit=error.mem_limit),
    )
