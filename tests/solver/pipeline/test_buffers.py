"""The buffers of torch.distributed.pipelining, in units of one input and one output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rotor_solver import Chain, plan_pipeline

INPUT, BETWEEN, OUTPUT = 10**3, 10**6, 10**9
CHAIN = Chain.from_arrays([1, 1], [1, 1, 0], [INPUT, BETWEEN, OUTPUT], [BETWEEN, OUTPUT], [0, 0], [0, 0, 0])


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        # All are in flight. The first part has 8 buffers for gradients. The last one sends gradients, which are smaller
        # than the outputs of those that are done with.
        ("gpipe", 8 * BETWEEN, BETWEEN),
        # 2 are in flight on the first part, 1 on the last: 6 and 7 more inputs, 7 more outputs of the last. An output
        # and a gradient that are sent.
        ("1f1b", 6 * INPUT + (8 + 1) * BETWEEN, 7 * (BETWEEN + OUTPUT) + BETWEEN),
        # All that is sent is held to the end of the step: 6 more outputs of the first part.
        ("zero-bubble-whole", 6 * INPUT + (8 + 6) * BETWEEN, 7 * (BETWEEN + OUTPUT) + 8 * BETWEEN),
    ],
)
def test_what_is_received_sent_and_returned_counts(schedule: str, first: int, last: int) -> None:
    plan = plan_pipeline(CHAIN, 2, 2**50, 8, schedule, buffers=True)
    assert [part.fixed_bytes for part in plan.parts] == [first, last]
    assert [part.fixed_bytes for part in plan_pipeline(CHAIN, 2, 2**50, 8, schedule).parts] == [0, 0]


def test_what_the_loss_keeps_of_those_in_flight_counts() -> None:
    chain = replace(CHAIN, loss_temp=7)
    more = plan_pipeline(chain, 2, 2**50, 8, "gpipe", buffers=True).parts[1].fixed_bytes
    assert more == plan_pipeline(CHAIN, 2, 2**50, 8, "gpipe", buffers=True).parts[1].fixed_bytes + 7 * 7
