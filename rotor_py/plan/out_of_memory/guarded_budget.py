"""The memory of a step whose stages may be run again at any time, and of what is left of it in the backward."""

from __future__ import annotations

from dataclasses import replace

from rotor_py.measure.budget import Budget, in_nodes
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.stage.undo import undo_bytes
from rotor_solver import Chain


def guarded(plan: StepPlan) -> StepPlan:
    """The plan with the budget of steps on a `GuardedTape`, which cost more than those on a `Tape`.

    Every stage is a node, so the backward of a stored stage takes what that of one that was run again takes. And copies
    of the buffers that move are kept by every plan, not only where it computes something twice, with those that undo
    the forward of one stage; of all buffers where the stages are not known yet.
    """
    budget, fixed = plan.budget, plan.budget.fixed
    copies = budget.snapshot_bytes + (undo_bytes(plan.functions) if plan.functions else fixed.buffers)
    fixed = replace(fixed, buffers=fixed.buffers + copies)
    budget = replace(budget, chain=in_nodes(budget.chain), in_nodes=True, snapshot_bytes=0, fixed=fixed)
    return replace(plan, budget=budget, guard_bytes=copies)


def unguarded(plan: StepPlan, *, fresh_gradients: bool) -> Budget:
    """The budget of the same steps on a `Tape`."""
    if plan.guard_bytes is None:
        return plan.budget
    budget, measurement = plan.budget, plan.measurement
    fixed = replace(budget.fixed, buffers=budget.fixed.buffers - plan.guard_bytes)
    chain = measurement.chain(fresh_gradients=fresh_gradients, forwards=budget.forwards)
    snapshot = measurement.snapshot_bytes
    return replace(budget, chain=chain, in_nodes=False, snapshot_bytes=snapshot, fixed=fixed)


def forward_and_backward(budget: Budget) -> Budget:
    """The budget of forward and backward alone: what the optimizer's step needs is no matter of the plan."""
    return replace(budget, before_bytes=0, stepping_bytes=0, step_bytes=None)


def rest_of_backward(budget: Budget, count: int) -> Budget:
    """The budget of the first `count` stages, run again from the chain's input while their output's gradient is there.

    An upper bound: that gradient counts from the beginning, and once more where the chain has it.
    """
    chain = budget.chain
    first, later = chain.stages[:count], chain.stages[count:]
    left = sum(stage.gradient for stage in later)
    held = chain.activation[-1] if chain.output_held else 0
    beside = chain.activation[count] + held + left
    # A stage may free a gradient that a later one has left, and no stage of a chain frees what none has left.
    missing, lowest = 0, 0
    for stage in reversed(first):
        missing += stage.gradient
        lowest = min(lowest, missing)
    first = (*first[:-1], replace(first[-1], gradient=first[-1].gradient - lowest))
    return replace(
        forward_and_backward(budget),
        chain=Chain(first, chain.input_bytes),
        fixed=replace(budget.fixed, other=budget.fixed.other + beside),
    )
