"""The simulated step, by hand: times, bubbles and bytes of two ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rotor_solver import Chain, plan_pipeline
from rotor_solver.pipeline import PipelinePlan, equal_cuts
from tests.solver.pipeline.test_plan import uniform

AMPLE = 10**6


def times(plan: PipelinePlan, rank: int) -> str:
    events = [event for event in plan.timeline.events if event.rank == rank]
    return " ".join(f"{event.action.kind}{event.action.microbatch}@{event.begin:g}" for event in events)


def test_1f1b_of_equal_cuts_by_hand() -> None:
    """A forward takes 1 second, a backward 2: (M + P - 1) · 3 seconds, of which each rank works 2 · 3."""
    plan = plan_pipeline(uniform(2), 2, AMPLE, 2)
    assert plan.cuts == (1,)
    assert times(plan, 0) == "F0@0 F1@1 B0@4 B1@7"
    assert times(plan, 1) == "F0@1 B0@2 F1@4 B1@5"
    assert plan.timeline.makespan == 9
    assert plan.timeline.busy == (6, 6)
    assert plan.timeline.bubble == pytest.approx(1 / 3)


def test_gpipe_of_equal_cuts_by_hand() -> None:
    plan = plan_pipeline(uniform(2), 2, AMPLE, 2, "gpipe")
    assert times(plan, 0) == "F0@0 F1@1 B0@5 B1@7"
    assert times(plan, 1) == "F0@1 F1@2 B0@3 B1@5"
    assert plan.timeline.makespan == 9


def test_zero_bubble_fills_the_bubble_with_weights() -> None:
    """The backward for the inputs takes 1 of the 2 seconds: rank 0 need not wait for the other one."""
    plan = plan_pipeline(uniform(2), 2, AMPLE, 2, "zero-bubble")
    assert times(plan, 1) == "F0@1 I0@2 F1@3 I1@4 W0@5 W1@6"
    assert times(plan, 0) == "F0@0 F1@1 B0@3 B1@5"
    assert plan.timeline.makespan == 7


def test_interleaved_by_hand() -> None:
    """Four parts of one stage on two ranks: the bubble is half of that of 1F1B with parts of two stages."""
    interleaved = plan_pipeline(uniform(4), 2, AMPLE, 2, "interleaved")
    plain = plan_pipeline(uniform(4), 2, AMPLE, 2)
    assert [part.rank for part in interleaved.parts] == [0, 1, 0, 1]
    assert plain.timeline.makespan == 18
    assert interleaved.timeline.makespan == 15


def test_bytes_by_hand() -> None:
    """Rank 0 keeps input and ā of two microbatches, 4 + 8 each; the output lies in ā. A backward holds one more input
    and output: the gradients."""
    plan = plan_pipeline(uniform(2), 2, AMPLE, 2, fixed=(1000, 2000))
    first, second = plan.timeline.peaks
    assert first == 1000 + 12 + (12 + 4 + 4)
    assert second == 2000 + (12 + 4 + 4)
    events = [event for event in plan.timeline.events if event.rank == 0]
    assert [event.after_bytes - 1000 for event in events] == [12, 24, 12, 0]


def test_recomputation_is_work_of_the_backward() -> None:
    chain = uniform(4)
    plan = plan_pipeline(chain, 2, AMPLE, 2)
    again = next(each for each in equal_cuts(chain, plan) if each.policy == "recompute everything").plan
    assert again.parts[0].microbatch.forward_seconds == 2
    assert again.parts[0].microbatch.backward_seconds == 2 + 4
    assert again.timeline.makespan == (2 + 1) * 8


def test_the_slowest_rank_sets_the_pace() -> None:
    """The steady state takes as long as the slowest rank for each further microbatch."""
    chain = Chain.from_arrays([1, 3], [2, 6, 0], [1, 1, 1], [1, 1], [0, 0], [0, 0, 0])
    spans = [plan_pipeline(chain, 2, AMPLE, count).timeline.makespan for count in (4, 5, 6)]
    assert [b - a for a, b in pairwise(spans)] == [9, 9]
