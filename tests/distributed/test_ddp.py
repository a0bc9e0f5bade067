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


ORDERS = ["outside", "inside"]
KINDS = ["chain", "captured"]
CROSSED = [("chain", "inside"), ("captured", "outside")]
"""Each order and each kind once: that they go together in all ways is seen by the first test."""


@pytest.mark.parametrize("order", [*ORDERS, "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_plain_training_and_all_ranks_follow_one_sequence(
    processes: Processes, kind: str, order: str
) -> None:
    found = processes.run(training.same_as_plain, kind, order, limit_of(processes, kind))
    assert [different for _, different in found] == [[]] * len(found)
    (sequence,) = {sequence for sequence, _ in found}
    assert re.search(NOT_WHOLE, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes_train_together(four_processes: Processes, kind: str) -> None:
    limit = limit_of(four_processes, kind)
    found = four_processes.run(training.same_as_plain, kind, "outside", limit, 2)
    assert [different for _, different in found] == [[]] * 4
    assert len({sequence for sequence, _ in found}) == 1
    limits = [limit + rank * 10**6 for rank in (2, 1, 0, 3)]
    for (_, predicted, measured), own in zip(
        four_processes.run(training.peaks, kind, "outside", limits), limits, strict=True
    ):
        assert predicted <= limit
        assert 0.98 * predicted <= measured <= own


@pytest.mark.parametrize(
    ("kind", "order", "accumulated", "options"),
    [
        *((*crossed, 2, {}) for crossed in CROSSED),  # without being sent
        ("chain", "outside", 1, {"static_graph": True}),
        ("captured", "outside", 1, {"static_graph": True}),
        ("chain", "outside", 1, {"gradient_as_bucket_view": True}),
        ("partly chain", "outside", 1, {"find_unused_parameters": True}),
        ("partly captured", "outside", 1, {"find_unused_parameters": True}),
    ],
    ids=str,
)
def test_so_they_are_where_gradients_accumulate_and_with_options_of_ddp(
    processes: Processes, kind: str, order: str, accumulated: int, options: dict[str, Any]
) -> None:
    found = processes.run(training.same_as_plain, kind, order, limit_of(processes, kind), accumulated, options)
    assert [different for _, different in found] == [[]] * len(found)


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


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_steps_that_were_measured_take_turns(processes: Processes, kind: str) -> None:
    found = processes.run(training.in_turn, kind)
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


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_sent_while_stages_are_still_run_again(processes: Processes, kind: str) -> None:
    for events in processes.run(training.order_of_events, kind):
        assert events.count("bucket") > 2
        after_the_first = events[events.index("bucket") :]
        assert any(event != "bucket" for event in after_the_first), events
