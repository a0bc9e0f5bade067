"""What is made of several runs of a stage."""

from __future__ import annotations

import pytest

from rotor_profiling.stage.seconds import StageRun, estimate, spread_of
from rotor_profiling.timing import lower_quartile

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


def test_no_way_takes_less_than_storing_the_stage_whole() -> None:
    runs = [StageRun(((1.0, 2.0), (0.8, 2.1)), (1.0, 3.0)), StageRun(((1.4, 2.0), (1.0, 3.5)), (1.0, 3.0))]
    whole, in_part = estimate(runs)
    assert in_part.forward_seconds >= whole.forward_seconds
    assert in_part.backward_seconds >= whole.backward_seconds


def test_ways_and_nodes_may_be_in_some_of_the_runs_alone() -> None:
    """The run that shows bytes has all ways and no node; it comes first, and is slow at its beginning."""
    first, later = StageRun(((3.0, 4.0), (3.5, 4.5))), StageRun(((2.0, 3.0),), (2.0, 5.5))
    whole, other = estimate([first, later])
    assert (whole.forward_seconds, whole.backward_seconds) == (2.25, 3.25)
    assert (other.forward_seconds, other.backward_seconds) == (3.5, 4.5)
    assert whole.nograd_seconds == other.nograd_seconds == 2.0
    assert whole.skipped_output_seconds == 0.0


@pytest.mark.parametrize("accident", [0.1, 900.0])
def test_no_accident_counts(accident: float) -> None:
    """Neither a run that was disturbed, nor one that seems to have taken hardly any time."""
    usual = StageRun(((1.0, 2.0), (1.1, 2.4)), (1.0, 3.5))
    odd = StageRun(((accident, accident),) * 2, (accident, accident))
    whole, other = estimate([odd, *[usual] * 4])
    assert (whole.forward_seconds, whole.backward_seconds, whole.nograd_seconds) == (1.0, 2.0, 1.5)
    assert (other.forward_seconds, other.backward_seconds) == (1.1, 2.4)


def test_the_spread_is_that_of_the_middle_half() -> None:
    runs = [run(forward=seconds, backward=2 * seconds) for seconds in (1.0, 1.1, 1.2, 1.3, 50.0)]
    assert spread_of(runs) == pytest.approx(0.2 / 1.2)
    assert spread_of(runs[:1]) == 0.0
    assert estimate(runs)[0].forward_seconds == lower_quartile([1.0, 1.1, 1.2, 1.3, 50.0]) == 1.1
