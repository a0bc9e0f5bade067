"""What is made of several runs of a stage."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest

from rotor_profiling.stage.seconds import (
    MANY,
    StageRun,
    cautious,
    error_of_node,
    error_of_ways,
    error_of_whole,
    estimate,
    estimate_at,
    spread_of,
)
from rotor_profiling.timing import error_of, error_of_middle, middle

pytestmark = pytest.mark.timed


def run(first: float = 1.0, forward: float = 1.0, backward: float = 2.0, again: float = 3.0) -> StageRun:
    return StageRun(((forward, backward),), (first, again))


def test_a_backward_that_runs_the_stage_again_may_skip_its_output() -> None:
    (found,) = estimate([run(forward=1.0, backward=2.0, again=2.7)])
    assert found.skipped_output_seconds == pytest.approx(0.3)
    assert found.nograd_seconds == 1.0


def test_what_it_takes_more_than_forward_and_backward_counts_with_the_run_without_a_graph() -> None:
    (found,) = estimate([run(first=0.5, forward=1.0, backward=2.0, again=3.2)])
    assert found.skipped_output_seconds == 0.0
    assert found.nograd_seconds == pytest.approx(0.7)


def test_no_more_is_skipped_than_a_forward_takes() -> None:
    (found,) = estimate([run(first=0.5, forward=1.0, again=0.2)])  # noise: not even the backward takes so little
    assert found.skipped_output_seconds == 0.5


def test_what_plans_choose_by_takes_as_long_as_it_may() -> None:
    runs = [
        StageRun(((1.0, 2.0), (1.1, 2.4)), (1.0, 2.8)),
        StageRun(((1.0, 2.2), (1.3, 2.8)), (1.2, 2.9)),
        StageRun(((1.0, 2.4), (1.2, 3.0)), (1.4, 3.3)),
    ]
    (whole, in_part), (first, other) = estimate(runs), cautious(runs)
    assert (first.forward_seconds, first.backward_seconds) == (whole.forward_seconds, whole.backward_seconds)
    longer, later = other.forward_seconds - in_part.forward_seconds, other.backward_seconds - in_part.backward_seconds
    assert min(longer, later) > 0
    assert error_of_ways(runs) == pytest.approx(longer + later)
    # What it saves to skip is known by the backwards of nodes, beside those of the stage; and a node has a forward.
    assert whole.skipped_output_seconds == pytest.approx(3.0 - 2.8)
    of_backwards = min(hypot(error_of([2.8, 2.9, 3.3]), error_of([3.0, 3.2, 3.4])), error_of_middle([-0.2, -0.3, -0.1]))
    wrong = hypot(of_backwards, error_of([1.0, 1.2, 1.4]))
    assert wrong > 0
    assert first.skipped_output_seconds == pytest.approx(max(0.0, 0.2 - wrong))
    assert first.nograd_seconds - first.skipped_output_seconds == pytest.approx(1.0 - 0.2 + wrong)
    # At the other end, all of it takes as little as it may.
    least, _ = estimate_at(runs, -1)
    assert least.nograd_seconds == 1.0
    assert least.skipped_output_seconds == pytest.approx(0.2 + wrong)
    assert cautious(runs[:1]) == estimate(runs[:1]) == estimate_at(runs[:1], -1)


def test_no_way_takes_less_than_storing_the_stage_whole() -> None:
    runs = [StageRun(((1.0, 2.0), (0.8, 2.1)), (1.0, 3.0)), StageRun(((1.4, 2.0), (1.0, 3.5)), (1.0, 3.0))]
    for end in (-1, 0, 1):
        whole, in_part = estimate_at(runs, end)
        assert in_part.forward_seconds >= whole.forward_seconds
        assert in_part.backward_seconds >= whole.backward_seconds


def test_other_ways_are_compared_inside_of_a_run() -> None:
    # The second run was three times as slow altogether: what the other way takes longer is known from each.
    runs = [StageRun(((1.0, 2.0), (1.1, 2.4)), (1.0, 3.0)), StageRun(((3.0, 6.0), (3.1, 6.4)), (3.0, 9.0))]
    whole, in_part = estimate(runs)
    assert in_part.forward_seconds - whole.forward_seconds == pytest.approx(0.1)
    assert in_part.backward_seconds - whole.backward_seconds == pytest.approx(0.4)
    assert spread_of(runs) == pytest.approx(0.5)


def test_running_again_is_compared_inside_of_a_run() -> None:
    runs = [StageRun(((1.0, 2.0),)), StageRun(((3.0, 6.0),), (3.0, 9.5))]
    (found,) = estimate(runs)
    assert found.nograd_seconds == pytest.approx(3.5)
    # Timed once, it is known no better than the stage, of which one run took three times as long.
    assert cautious(runs)[0].nograd_seconds == pytest.approx(3.5 + error_of([3.0, 9.0]))


def test_a_way_that_one_run_has_is_known_no_better_than_the_stage() -> None:
    runs = [StageRun(((1.0, 2.0), (1.5, 2.25)), (1.0, 3.0)), StageRun(((3.0, 6.0),), (3.0, 9.0))]
    for several in (runs, runs[::-1]):
        whole, in_part = estimate(several)
        assert in_part.forward_seconds - whole.forward_seconds == pytest.approx(0.5)
        assert in_part.backward_seconds - whole.backward_seconds == pytest.approx(0.25)
        assert error_of_ways(several) > 1.5
    assert error_of_ways([replace(each, ways=each.ways[:1]) for each in runs]) == 0  # in every plan, whatever it is
    twice = [runs[0], replace(runs[1], ways=(*runs[1].ways, (3.5, 6.25)))]
    assert error_of_ways(twice) == 0


def test_a_way_is_compared_in_runs_with_cold_caches_if_there_are_any() -> None:
    warm = StageRun(((1.0, 2.0), (1.1, 2.1)), (1.0, 3.0))
    cold = StageRun(((1.2, 2.2), (1.5, 2.9)), (1.0, 3.0), cold=True)
    found = estimate([warm, cold])
    assert found[1].forward_seconds - found[0].forward_seconds == pytest.approx(0.3)
    assert found[1].backward_seconds - found[0].backward_seconds == pytest.approx(0.7)


def test_a_way_that_one_run_has_is_compared_with_the_least_of_all_runs() -> None:
    """That run is often the first of all, slow at its beginning, where the stage is stored whole."""
    first, later = StageRun(((3.0, 4.0), (3.0, 4.0))), StageRun(((2.0, 3.0),), (2.0, 5.0))
    whole, other = estimate([first, later])
    assert (whole.forward_seconds, whole.backward_seconds) == (2.0, 3.0)
    assert (other.forward_seconds, other.backward_seconds) == (3.0, 4.0)
    # Two runs that have it are enough to compare within them.
    both = estimate([first, StageRun(((2.0, 3.0), (2.5, 3.25))), StageRun(((1.5, 2.5),), (2.0, 4.0))])
    assert (both[1].forward_seconds, both[1].backward_seconds) == (2.0, 2.75)


def test_of_many_runs_the_middle_counts_and_no_accident() -> None:
    """Beside other programs, a machine is now slow and now fast; what takes longer does so in each run."""
    slow = [1.0, 1.1, 1.3, 1.2, 1.4, 1.0, 1.2, 1.1]
    assert len(slow) == MANY
    runs = [StageRun(((each, 2 * each), (each + 0.1, 2 * each + 0.4)), (each, 3 * each + 0.5)) for each in slow]
    # One run has a way that was lucky, another a node that was: the least would believe them.
    lucky = [
        replace(runs[0], ways=(runs[0].ways[0], (0.2, 1.0))),
        replace(runs[1], node=(0.3, 0.4)),
        *runs[2:],
    ]
    for several in (runs, lucky):
        whole, other = estimate(several)
        assert whole.forward_seconds == pytest.approx(middle(slow))
        assert whole.backward_seconds == pytest.approx(2 * middle(slow))
        assert other.forward_seconds - whole.forward_seconds == pytest.approx(0.1)
        assert other.backward_seconds - whole.backward_seconds == pytest.approx(0.4)
        assert whole.nograd_seconds - whole.skipped_output_seconds == pytest.approx(middle(slow) + 0.5, abs=0.05)
        assert error_of_ways(several) == pytest.approx(0.0, abs=1e-12)
    assert error_of_node(runs) == pytest.approx(error_of_middle(slow) / 2)
    assert error_of_whole(runs) == pytest.approx(error_of_middle(slow) / 2 / middle(slow))
    few = estimate(lucky[: MANY - 1])
    assert few[0].forward_seconds == 1.0
    assert few[1].forward_seconds == few[0].forward_seconds  # it seems to take less
