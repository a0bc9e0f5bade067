"""Plan within smaller limits after an out-of-memory error, at most three times for a forward and its backward.

Each retry lowers the limit by the bytes of the failed allocation, or by an eighth of the limit if that is more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from rotor_py.errors import record_fields
from rotor_py.execute.oom_retry_tape import undo_bytes
from rotor_py.measure.budget import Budget, in_nodes
from rotor_py.measure.device import allocated_bytes
from rotor_py.measure.planning_lock import planning
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.error_context import add_note, asked_bytes, is_out_of_memory
from rotor_py.units import exact_bytes, format_bytes
from rotor_solver import Chain, InfeasibleError, Persistent, Sequence

_log = logging.getLogger("rotor_py")


def guarded(plan: StepPlan) -> StepPlan:
    """Return the plan with a budget for steps on an `OOMRetryTape`, which need more memory than those on a `Tape`.

    They run every stage as a node. Even if they recompute nothing, they hold copies of the buffers that forwards
    change, and those with which `Undo` restores one stage, counted as all buffers until the stages are known.
    """
    budget, fixed = plan.budget, plan.budget.fixed
    copies = budget.snapshot_bytes + (undo_bytes(plan.functions) if plan.functions else fixed.buffers)
    fixed = replace(fixed, buffers=fixed.buffers + copies)
    budget = replace(budget, chain=in_nodes(budget.chain), in_nodes=True, snapshot_bytes=0, fixed=fixed)
    return replace(plan, budget=budget, guard_bytes=copies)


def unguarded(plan: StepPlan, *, fresh_gradients: bool) -> Budget:
    if plan.guard_bytes is None:
        return plan.budget
    budget, measurement = plan.budget, plan.measurement
    fixed = replace(budget.fixed, buffers=budget.fixed.buffers - plan.guard_bytes)
    chain = measurement.chain(fresh_gradients=fresh_gradients, forwards=budget.forwards)
    return replace(budget, chain=chain, in_nodes=False, snapshot_bytes=measurement.snapshot_bytes, fixed=fixed)


def rest_of_backward(budget: Budget, count: int) -> Budget:
    """Return the budget, an upper bound, of a backward that recomputes the first `count` stages from the input."""
    # Count the gradient of the last of these stages' output throughout, though the chain counts it while it is used.
    chain = budget.chain
    first, later = chain.stages[:count], chain.stages[count:]
    left = sum(stage.gradient for stage in later)
    held = chain.activation[-1] if chain.output_held else 0
    beside = chain.activation[count] + held + left
    # A stage with negative `gradient` frees what a later stage has made: if that is cut off, the last stage makes it.
    missing, lowest = 0, 0
    for stage in reversed(first):
        missing += stage.gradient
        lowest = min(lowest, missing)
    first = (*first[:-1], replace(first[-1], gradient=first[-1].gradient - lowest))
    return replace(
        budget,
        chain=Chain(first, chain.input_bytes),
        fixed=replace(budget.fixed, other=budget.fixed.other + beside),
    )


_NOT_AGAIN = "on_oom='replan' has not run this again"
_TRIES = 3  # Maximum number of retries of a forward and its backward. The last one has the least limit that works.
# Smallest share of the limit by which a retry lowers it. A guess: a failed request of a few kilobytes does not show how
# many bytes are missing. With too large a share, stages are recomputed that could have been stored.
_SHARE = 1 / 8


class Replanner:
    """Makes plans with less memory after out-of-memory errors in the `number`-th forward in flight or its backward."""

    def __init__(self, plan: StepPlan, model: TrainedModel, number: int = 1) -> None:
        self._plan = plan
        self._model = model
        self._number = number
        self._sequence = plan.followed
        self._cut = plan.cut  # the variant that this forward runs: later ones may run another
        self._budget = replace(plan.budget, before_bytes=0, stepping_bytes=0, step_bytes=None)  # forward and backward
        self._tries = 0
        self._final = False  # whether an error has a note that says why it was not retried

    @cached_property
    def _limit(self) -> int:
        return self._budget.peak_bytes(self._sequence)  # computed on demand, since most steps have no retry

    def whole(self, error: BaseException, inexact: str | None) -> Sequence | None:
        return self._own(self._sequence) if self._reduce(error, "forward", inexact) else None

    def rest(self, error: BaseException, inexact: str | None, stages: int) -> Sequence | None:
        doing = f"backward of stage {self._plan.measurement.names[stages - 1]!r}"
        return self.rest_as_before(stages) if self._reduce(error, doing, inexact) else None

    def rest_as_before(self, stages: int) -> Sequence:
        budget = rest_of_backward(self._budget, stages)
        try:
            return self._own(self._solve(budget, self._limit))
        except InfeasibleError as error:
            return self._own(self._solve(budget, error.min_bytes))

    def _own(self, sequence: Sequence) -> Sequence:
        return sequence.of_forwards(self._number)[-1]

    @contextmanager
    def explaining_other_errors(self) -> Iterator[None]:
        """Inside the context, add a note to an out-of-memory error that no stage has raised: it was not retried."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error) and not self._final:
                add_note(error, f"{_NOT_AGAIN}: the error came from outside of the planned stages")
            raise

    def _reduce(self, error: BaseException, doing: str, inexact: str | None) -> bool:
        """Solve for a lower limit, return True; if no retry is possible, add a note to `error` why, return False."""
        least, before, why = self._budget.least_bytes(), self._limit, inexact
        if why is None and before <= least:
            why = f"no plan needs less memory than the one in use, {exact_bytes(before)}"
        elif why is None and self._tries == _TRIES:
            why = f"it has made {_TRIES} tries in this step, the last one within {exact_bytes(before)}"
        if why is not None:
            add_note(error, f"{_NOT_AGAIN}: {why}")
            self._final = True
            return False
        self._tries += 1
        asked, allocated = asked_bytes(error), allocated_bytes(self._model.device_of(self._plan.input_spec))
        smaller = before - max(asked, int(before * _SHARE))
        if allocated is not None:  # counts all tensors of the step, which the error's traceback still holds
            smaller = min(smaller, allocated)
        self._limit = least if self._tries == _TRIES else max(least, smaller)
        self._sequence = self._solve(self._budget, self._limit)
        # If the plan now runs another variant of the stages than this forward, let the next forward solve for it.
        self._plan.sequence = self._sequence if self._plan.cut is self._cut else None
        self._plan.reduced = self._model.settings.mem_limit, self._limit
        _log.warning(
            f"out of memory in the {doing} of {self._model.name}"
            f"{f', which asked for {format_bytes(asked)}' if asked else ''}: try {self._tries} of {_TRIES} recomputes "
            f"it within {exact_bytes(self._limit)}, instead of {exact_bytes(before)}",
            extra=record_fields("out_of_memory", name=doing, limit=self._limit, needed=before, tries=self._tries),
        )
        return True

    def _solve(self, budget: Budget, limit: int) -> Sequence:
        with planning:
            return budget.solve(limit, Persistent(slots=self._model.settings.mem_slots))
