"""How much slower than the best plan a plan can be, because of times that are not known well.

# Note [What is certified]
#
# For given times t, a memory-persistent sequence p takes
#
#     T(p, t) = W(t) + X(p, t),
#
# where W is what all of them take: the loss, and forward and backward of every stage once, stored whole. X is what p
# takes beside that: runs without a graph, how much longer stages take that are stored in another way, less the outputs
# that are skipped. Every part of X has an interval; let `least` and `most` be the times at those ends that make X least
# and most. The sequence p is the best one for the times that were found, and q is the best one for the true times t.
# If these are in their intervals, whatever W(t) is,
#
#     T(p, t) - T(q, t) = X(p, t) - X(q, t) <= X(p, most) - X(q, least) <= T(p, most) - min over all q of T(q, least),
#
# since `most` and `least` have the same W. The minimum has a lower bound that the solver certifies. So one more solve,
# with times at the ends of their intervals, bounds what better times could save.
#
# The assumption is the intervals: each time is the least of its runs, and wrong by what an exponential delay leaves of
# them on average, at most. And a stage that is stored in another way takes no less time than one stored whole. Of
# these ways, it is about those that plans are made of: not about one that needed more bytes and more time than another.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

from rotor_py.measure.budget import Budget
from rotor_py.measure.certified.possible_times import PossibleTimes, possible_times
from rotor_py.measure.measurement import Measurement
from rotor_solver import InfeasibleError, Persistent, Sequence, simulate

GOOD_ENOUGH = 0.02
"""A plan is good enough if no other one saves more than this, as a part of the step."""
MOST_STAGES = 100
"""Longer chains take longer to solve than to time once more."""


def most_regret(times: PossibleTimes, budget: Budget, mem_limit: int, algorithm: Persistent) -> float:
    """By how much the plan for the times that were found can be slower than the best one, as a part of its time.

    `budget` is that of `times.found`, for one forward at a time, and nothing moves. Infinite if that is not known, and
    zero if no plan fits into `mem_limit` bytes: then times do not matter.
    """
    try:
        sequence = budget.solve(mem_limit, algorithm)
    except InfeasibleError:
        return 0.0
    return _regret_of(sequence, times, budget, mem_limit, algorithm)


def known_regret(sequence: Sequence, found: Measurement, budget: Budget, mem_limit: int) -> float | None:
    """By how much a plan can be slower than the best one, as a part of its time; None where nobody can say.

    That is so if the intervals of the times that were `found` are not known, if `budget` has the costs of other
    processes as well, for several forwards in flight, and if something moves.
    """
    alone = budget.forwards == 1 and budget.link is None and len(found.stages) <= MOST_STAGES
    if not (alone and found.intervals and _with(budget, found).chain == budget.chain):
        return None
    regret = _regret_of(sequence, possible_times(found), budget, mem_limit, Persistent())
    return regret if isfinite(regret) else None


def _regret_of(
    sequence: Sequence, times: PossibleTimes, budget: Budget, mem_limit: int, algorithm: Persistent
) -> float:
    bound = _with(budget, times.least).solve(mem_limit, algorithm).lower_bound
    seconds = budget.makespan(sequence)
    if bound is None or not seconds:
        return inf
    return max(0.0, simulate(_with(budget, times.most).chain, sequence).makespan - bound) / seconds


def _with(budget: Budget, measurement: Measurement) -> Budget:
    # The chain has each stage's gradient where gradients are fresh, and these do not depend on times.
    stages = measurement.chain(fresh_gradients=True).stages
    gradients = [stage.gradient for stage in budget.chain.stages]
    stages = tuple(replace(stage, gradient=size) for stage, size in zip(stages, gradients, strict=True))
    return replace(budget, chain=replace(budget.chain, stages=stages))
