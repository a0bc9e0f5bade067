"""The buffers of torch.distributed.pipelining, in units of one input and one output."""

from __future__ import annotations

import pytest

from rotor_solver import Chain, plan_pipeline

INPUT, BETWEEN, OUTPUT = 10**3, 10**6, 10**9
CHAIN = Chain.from_arrays([1, 1], [1, 1, 0], [INPUT, BETWEEN, OUTPUT], [BETWEEN, OUTPUT], [0, 0], [0, 0, 0])


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        # All are in flight. The first part has 8 buffers for gradients; the last one holds 8 gradients that it sends.
        ("gpipe", 8 * BETWEEN, 8 * BETWEEN),
        # 2 are in flight on the first part, 1 on the last: 6 and 7 more inputs, 7 more outputs of the last. A gradient
        # that is sent.
        ("1f1b", 6 * INPUT + 8 * BETWEEN, 7 * (BETWEEN + OUTPUT) + BETWEEN),
        # All that is sent is held to the end of the step: 6 more outputs of the first part.
        ("zero-bubble-whole", 6 * INPUT + (8 + 6) * BETWEEN, 7 * (BETWEEN + OUTPUT) + 8 * BETWEEN),
    ],
)
def test_what_is_received_sent_and_returned_counts(schedule: str, first: int, last: int) -> None:
    plan = plan_pipeline(CHAIN, 2, 2**50, 8, schedule, buffers=True)
    assert [part.fixed_bytes for part in plan.parts] == [first, last]
    assert [part.fixed_bytes for part in plan_pipeline(CHAIN, 2, 2**50, 8, schedule).parts] == [0, 0]
