"""DistributedDataParallel around a plan and inside one, on two and on four processes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from tests.distributed import training
from tests.distributed.processes import NOT_WHOLE, Processes


@cache
def limit_of(processes: Processes, kind: str) -> int:
    return processes.run(training.halfway, kind)[0]


CROSSED = [("chain", "inside"), ("captured", "outside")]
"""Each order and each kind of model once."""


def assert_same(found: list[tuple[str, list[str]]]) -> None:
    assert [different for _, different in found] == [[]] * len(found)
    (sequence,) = {sequence for sequence, _ in found}
    assert re.search(NOT_WHOLE, sequence)


@pytest.mark.parametrize(
    ("kind", "order", "accumulated", "options"),
    [
        *((*crossed, 1, {}) for crossed in CROSSED),
        ("captured", "in place", 1, {}),
        ("chain", "outside", 2, {"gradient_as_bucket_view": True}),  # accumulated without being sent
        ("captured", "inside", 1, {"static_graph": True}),
        ("partly chain", "outside", 1, {"find_unused_parameters": True}),
    ],
    ids=str,
)
def test_numbers_are_those_of_plain_training_and_all_ranks_follow_one_sequence(
    processes: Processes, kind: str, order: str, accumulated: int, options: dict[str, Any]
) -> None:
    assert_same(processes.run(training.same_as_plain, kind, order, limit_of(processes, kind), accumulated, options))


@pytest.mark.parametrize(("kind", "order"), CROSSED)
def test_the_plan_fits_the_smallest_of_different_limits(processes: Processes, kind: str, order: str) -> None:
    limit = limit_of(processes, kind)
    limits = [limit + 10**6] * len(processes.processes)
    limits[-1] = limit
    found = processes.run(training.peaks, kind, order, limits)
    assert len({sequence for sequence, _, _ in found}) == 1
    for (_, predicted, measured), own in zip(found, limits, strict=True):
        assert predicted <= own
        assert 0.98 * predicted <= measured <= own


def test_a_process_alone_has_buckets_as_well(one_process: Processes) -> None:
    for order in ("outside", "inside"):
        ((communication, gradients),) = one_process.run(training.bucket_bytes, order)
        assert communication == gradients > 0


def test_kinds_of_steps_that_were_measured_take_turns(processes: Processes) -> None:
    found = processes.run(training.in_turn, "captured")
    for sequences, measured, different in found:
        assert sequences == found[0][0]
        assert all(re.search(NOT_WHOLE, sequence) for sequence in sequences)
        assert (measured, different) == ([], [])


def test_a_limit_that_is_too_small_on_one_rank_is_refused_on_all(processes: Processes) -> None:
    limits = [10**9] * len(processes.processes)
    limits[-1] = 10**5  # in all, and not beside what is there already
    (said,) = set(processes.run(training.refusal, "chain", limits))
    who = "rank 0: " if len(limits) > 1 else ""
    # Beside what a CUDA device has, that is less than there is before anything is measured.
    assert re.match(rf"InfeasibleError: {who}(before measuring: )?a training step needs at least", said)


def test_gradients_are_sent_while_stages_are_still_run_again(processes: Processes) -> None:
    for events in processes.run(training.order_of_events, "captured"):
        assert events.count("bucket") > 2
        after_the_first = events[events.index("bucket") :]
        assert any(event != "bucket" for event in after_the_first), events
