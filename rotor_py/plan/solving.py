"""Solve for a sequence within the limit, in one process or in several together; warn if an optimizer does not fit.

A recomputed stage repeats its collectives, which all processes must reach in the same order. So rank 0 solves, with the
largest costs that each stage has in any process and the least memory of any, and the others follow its sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rotor_py.compile.compiled_stage import CompiledStage
from rotor_py.distributed.processes import alone_in_a_prediction, gather_objects, refuse_other_ranks, sending_from
from rotor_py.errors import InvalidStateError, record_fields
from rotor_py.measure.budget import Budget
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.measurement import costliest
from rotor_py.measure.planning_lock import planning
from rotor_py.measure.stage_measurer import MeasuredCut
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import exact_bytes
from rotor_solver import Algorithm, InfeasibleError, Persistent, Sequence
from rotor_solver.offload import Link

_log = logging.getLogger("rotor_py")


def agreed_sequence(
    budget: Budget, mem_limit: int, algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device
) -> Sequence:
    """Return the sequence that rank 0 finds for the largest costs and fewest bytes of any process. All call this."""
    own = mem_limit - budget.fixed.total - budget.snapshot_bytes  # bytes left for the chain
    chains, rooms, links = zip(*gather_objects((budget.chain, own, budget.link), group, device), strict=True)
    # Compare stages before solving: rank 0's sequence is valid only for as many stages as rank 0 has.
    refuse_other_ranks("the stages of the model", [[stage.name for stage in chain.stages] for chain in chains])
    found: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            link = None if None in links else Link.slowest(links)
            all_of_them = replace(budget, chain=costliest(chains), link=link)
            # The limit from which `solve`, subtracting this process's fixed memory, gets the fewest bytes of any.
            found = [all_of_them.solve(mem_limit - own + min(rooms), algorithm)]
        except InfeasibleError as error:
            found = [error.with_traceback(None)]  # sent instead of a sequence, for which the other processes wait
        except Exception as error:
            found = [f"rank 0 could not solve: {type(error).__name__}: {error}"]
    with sending_from(device):
        if not alone_in_a_prediction():
            dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    sequence: Sequence | InfeasibleError | str = found[0]
    if isinstance(sequence, InfeasibleError):
        raise InfeasibleError(f"rank 0: {sequence}", min_bytes=sequence.min_bytes, mem_limit=sequence.mem_limit)
    if isinstance(sequence, str):
        raise InvalidStateError(sequence, kind="rank_0_failed")
    # Compare peaks of whole steps with the limits, too: the optimizer's step, which is not in the chain, may not fit.
    peaks = gather_objects((budget.peak_bytes(sequence), mem_limit), group, device)
    # All processes see all peaks, so that all raise and none is left waiting in a collective.
    rank, (peak, limit) = max(enumerate(peaks), key=lambda each: each[1][0] - each[1][1])
    if peak > limit:
        raise InfeasibleError(
            f"the plan of rank 0 would need {exact_bytes(peak)} on rank {rank}, whose limit is {exact_bytes(limit)}, "
            "so it would run out of memory. Give all processes batches of the same shape, or this rank a larger limit.",
            min_bytes=peak,
            mem_limit=limit,
            kind="limit_too_small_on_rank",
        )
    return sequence


def choose_variant(
    plan: StepPlan, solve: Callable[[Budget], Sequence], group: dist.ProcessGroup | None, device: torch.device
) -> Sequence:
    """Solve for each variant of stages (some, all or none compiled), set the fastest in `plan`, return its sequence."""
    ways = list(plan.ways)
    if group is not None and ways:
        # Use only variants that all processes have, in one order: each kept those that it measured as faster.
        by_kind = {tuple((name, isinstance(each, CompiledStage)) for name, each in way.cut.stages): way for way in ways}
        first, *others = gather_objects(list(by_kind), group, device)
        ways = [by_kind[kind] for kind in first if all(kind in other for other in others)]
    if not ways:
        return solve(plan.budget)
    plan.compiled_for_larger_budget = False
    # Try the graph compiled as a whole first: it is a variant only if it was no slower than the uncompiled graph, and
    # its time cannot be compared with the sum of the times of single stages.
    refused: list[InfeasibleError] = []
    try:
        for whole in (True, False):
            refused.clear()
            found: list[tuple[float, MeasuredCut, Sequence]] = []
            for way in (each for each in ways if (each.cut.members is not None) == whole):
                budget = plan.budget_of(way)
                try:
                    sequence = solve(budget)
                except InfeasibleError as error:  # with several processes, all of them raise it
                    # If it is the graph compiled as a whole, it was compiled for more bytes than the budget leaves now.
                    plan.compiled_for_larger_budget |= whole
                    refused.append(error)
                else:
                    seconds = budget.makespan(sequence)
                    if group is not None:  # use the slowest process's seconds, so that all choose the same variant
                        seconds = max(gather_objects(seconds, group, device))
                    found.append((seconds, way, sequence))
            if found:
                _, best, sequence = min(found, key=lambda each: each[0])
                plan.turn_to(best)
                return sequence
        raise min(refused, key=lambda error: error.min_bytes)
    finally:
        refused.clear()  # break reference cycles: the errors' tracebacks hold this frame, which holds the errors


def solve(
    plan: StepPlan,
    model: TrainedModel,
    limit: float | str | None = None,
    *,
    slots: int | None = None,
    algorithm: Algorithm | None = None,
) -> Sequence:
    """Find, set and return a sequence of `plan` within `limit` (None: `mem_limit`), which becomes `mem_limit`."""
    settings, group, device = model.settings, model.group, model.device_of(plan.input_spec)
    given = settings.mem_limit if limit is None else limit
    with planning:
        if algorithm is None and settings.by_hand is not None:
            # Without `mem_limit`, a strategy by hand has no limit, whereas a solver gets the device's memory as limit.
            most = None if given is None else limit_bytes(given, device)
            by_hand = partial(settings.by_hand.sequence, model.core, mem_limit=most)
            sequence = choose_variant(plan, by_hand, group, device)
        else:
            algorithm = algorithm or Persistent(slots=settings.mem_slots if slots is None else slots)
            most = limit_bytes(given, device)
            if limit is None and plan.reduced is not None and plan.reduced[0] == given:
                most = min(most, max(plan.reduced[1], plan.budget.least_bytes()))
            found = partial(Budget.solve, mem_limit=most, algorithm=algorithm)
            if group is not None:
                found = partial(agreed_sequence, mem_limit=most, algorithm=algorithm, group=group, device=device)
            try:
                sequence = choose_variant(plan, found, group, device)
            except InfeasibleError as error:
                _tell_of_fresh_gradients(error, plan, model, most)
                raise
    if plan.budget.link is not None and plan.budget.forwards > 1:
        _log.warning(
            "with %d forwards in flight at once, offload= has no effect: call backward() after each forward",
            plan.budget.forwards,
            extra=record_fields("moves_nothing", forwards=plan.budget.forwards),
        )
    # `reserve` is collective. All processes follow the sequence, so all of them call it, or none does.
    model.reserve(plan.budget, sequence, group)
    plan.sequence = plan.found = sequence
    plan.agreed = None if group is None else sequence
    settings.mem_limit = given  # only now: a limit that no plan fits must not be set
    plan.solved_with = settings.solved_with
    if settings.verbosity:
        _log.warning("%s", plan.summary(model), extra=record_fields("summary"))
    return sequence


def _tell_of_fresh_gradients(error: InfeasibleError, plan: StepPlan, model: TrainedModel, limit: int) -> None:
    """Raise InfeasibleError with advice to set fresh_grads=True, if that lowers the least limit; else return.

    Puts the raised error in no variable: its traceback holds this frame, so they would keep the caller's tensors.
    """
    if plan.fresh_gradients:
        return
    device, budgets, group = model.device_of(plan.input_spec), plan.budgets(), model.group
    tightest = min((budget for budget, _ in budgets), key=Budget.least_bytes)
    held = tightest.least_bytes()
    least = min(model.with_fresh_gradients(*each, device).least_bytes() for each in budgets)
    if group is not None:
        # All processes got the error, so all call this. They report the bytes of the process that lacks most.
        all_of_them = gather_objects((least, held, limit), group, device)
        least, held, limit = max(all_of_them, key=lambda each: each[0] - each[2])
    if not least < held > limit:
        return
    more = (
        "If your loop frees gradients between steps (optimizer.zero_grad()), declare it: with fresh_grads=True "
        f"(--fresh-grads) the least limit is {exact_bytes(least)}, "
        f"{'and a plan fits' if least <= limit else 'still above the limit'}."
    )
    if group is None:
        raise tightest.refuse(limit, more) from error
    # With several processes, the bytes in `more` may be those of another process than `min_bytes`.
    raise InfeasibleError(
        f"{error} {more}", min_bytes=error.min_bytes, mem_limit=error.mem_limit, stage=error.stage
    ) from error


def count_optimizer_beside_file(plan: StepPlan, model: TrainedModel) -> None:
    before = plan.budget
    plan.count_optimizer(model.counted_optimizer())
    if plan.unlimited(model.settings) or plan.budget == before:
        return
    peak, limit = plan.budget.peak_bytes(plan.followed), model.limit_bytes(model.device_of(plan.input_spec))
    if peak > limit:
        _log.warning(
            f"plan again with optimizer= given: the plan was made for another optimizer, or for none, and with this "
            f"one a step needs {exact_bytes(peak)}, beyond the limit of {exact_bytes(limit)}",
            extra=record_fields("late_optimizer", peak_bytes=peak, mem_limit=limit),
        )


def warn_beyond_the_limit(error: InfeasibleError) -> None:
    _log.warning(
        f"give the optimizer as optimizer=: the plan did not count it, and training goes on beyond the limit: {error}",
        extra=record_fields("late_optimizer", min_bytes=error.min_bytes, mem_limit=error.mem_limit),
    )
