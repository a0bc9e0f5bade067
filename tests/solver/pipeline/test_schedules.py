"""Schedules against torch's own, what they keep in flight, buffers, and the timeline of a step."""

from dataclasses import replace
from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules as theirs

from rotor_solver import Chain, plan_pipeline
from rotor_solver.pipeline import PipelinePlan, Schedule, equal_cuts
from rotor_solver.pipeline.schedules import InFlight, in_flight
from tests.solver.pipeline.test_plan import uniform


def rounds_of_torch(ranks: int, microbatches: int, parts: int, rank: int, zero_bubble: bool) -> list[str]:
    """What ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble compute for a rank."""
    in_round = microbatches // max(1, microbatches // ranks)
    ahead = theirs._get_warmup_ops(rank, parts, in_round, ranks, microbatches, 1 if zero_bubble else 2)
    total = parts * microbatches

    def forward(step: int) -> int:
        return step // in_round % parts * ranks + rank

    def backward(step: int) -> int:
        return (parts - 1 - (step - ahead) // in_round % parts) * ranks + rank

    found = theirs._get_1f1b_rank_ops(
        parts, ranks, ahead, total - ahead, ahead, rank, forward, backward, rank, enable_zero_bubble=zero_bubble
    )
    return [str(each) for each in found if each is not None]


@pytest.mark.parametrize(("ranks", "microbatches", "parts"), [(4, 8, 2), (2, 6, 3), (4, 4, 2), (3, 2, 2), (4, 10, 2)])
def test_interleaved_is_what_torch_does(ranks: int, microbatches: int, parts: int) -> None:
    schedule = Schedule("interleaved", ranks, microbatches, parts)
    for rank in range(ranks):
        assert [str(each) for each in schedule.order(rank)] == rounds_of_torch(ranks, microbatches, parts, rank, False)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (3, 9), (4, 4), (4, 2), (1, 3)])
def test_zero_bubble_is_what_torch_does_and_whole_backwards_come_where_those_for_the_inputs_do(ranks, microbatches):
    for rank in range(ranks):
        expected = rounds_of_torch(ranks, microbatches, 1, rank, True)
        whole = [each.replace("I", "B") for each in expected if "W" not in each]
        # On rank 0, each backward for the weights comes right after that for the inputs: they are one.
        for name, order in (("zero-bubble", expected if rank else whole), ("zero-bubble-whole", whole)):
            assert [str(each) for each in Schedule(name, ranks, microbatches).order(rank)] == order


@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_what_is_in_flight_is_what_the_formulas_say(microbatches: int) -> None:
    ranks = 4

    def counts(name: str) -> list[InFlight]:
        return in_flight(Schedule(name, ranks, microbatches))

    assert counts("gpipe") == [InFlight(microbatches)] * ranks
    assert counts("1f1b") == [InFlight(min(microbatches, ranks - r)) for r in range(ranks)]
    assert counts("zero-bubble-whole") == counts("1f1b")
    for rank, found in enumerate(counts("zero-bubble")):
        assert found.forwards == min(microbatches, ranks - rank)
        assert found.weights <= rank
        assert found.split == (rank > 0)
    if microbatches >= 2 * ranks:  # then the steady state is long enough for all of them
        assert [each.weights for each in counts("zero-bubble")] == [0, 1, 2, 3]


AMPLE = 10**6
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
    in_flight_besides = 7 if schedule == "gpipe" else 0  # the loss of each keeps its scratch
    plan = plan_pipeline(replace(CHAIN, loss_temp=7), 2, 2**50, 8, schedule, buffers=True)
    assert plan.parts[1].fixed_bytes == last + 7 * in_flight_besides


def times(plan: PipelinePlan, rank: int) -> str:
    events = [event for event in plan.timeline.events if event.rank == rank]
    return " ".join(f"{event.action.kind}{event.action.microbatch}@{event.begin:g}" for event in events)


@pytest.mark.parametrize(
    ("schedule", "makespan", "first", "second"),
    [
        # A forward takes 1 second, a backward 2: (M + P - 1) · 3 seconds, of which each rank works 2 · 3.
        ("1f1b", 12, "F0@0 F1@1 B0@4 F2@6 B1@7 B2@10", "F0@1 B0@2 F1@4 B1@5 F2@7 B2@8"),
        ("gpipe", 12, "F0@0 F1@1 F2@2 B0@6 B1@8 B2@10", "F0@1 F1@2 F2@3 B0@4 B1@6 B2@8"),
        # The backward for the inputs takes 1 of the 2 seconds: rank 0 need not wait for the other one.
        ("zero-bubble", 10, "F0@0 F1@1 B0@3 F2@5 B1@6 B2@8", "F0@1 I0@2 F1@3 I1@4 W0@5 F2@6 I2@7 W1@8 W2@9"),
    ],
)
def test_a_step_of_two_equal_parts_by_hand(schedule: str, makespan: float, first: str, second: str) -> None:
    plan = plan_pipeline(uniform(2), 2, AMPLE, 3, schedule)
    assert [times(plan, rank) for rank in range(2)] == [first, second]
    assert (plan.timeline.makespan, plan.timeline.busy) == (makespan, (9, 9))
    assert plan.timeline.bubble == pytest.approx(1 - 9 / makespan)


def test_interleaved_has_half_the_bubble_and_recomputation_bytes_and_the_pace_of_the_slowest_rank_by_hand() -> None:
    interleaved, plan = (plan_pipeline(uniform(4), 2, AMPLE, 2, schedule) for schedule in ("interleaved", "1f1b"))
    assert [part.rank for part in interleaved.parts] == [0, 1, 0, 1]
    assert (interleaved.timeline.makespan, plan.timeline.makespan) == (15, 18)
    again = next(each for each in equal_cuts(uniform(4), plan) if each.policy == "recompute everything").plan
    assert again.parts[0].microbatch.forward_seconds == 2
    assert again.parts[0].microbatch.backward_seconds == 2 + 4
    assert again.timeline.makespan == (2 + 1) * 8
    # Rank 0 keeps input and ā of two microbatches, 4 + 8 each; the output lies in ā. A backward holds one more input
    # and output: the gradients.
    plan = plan_pipeline(uniform(2), 2, AMPLE, 2, fixed=(1000, 2000))
    assert plan.timeline.peaks == (1000 + 12 + (12 + 4 + 4), 2000 + (12 + 4 + 4))
    events = [event for event in plan.timeline.events if event.rank == 0]
    assert [event.peak_bytes - 1000 for event in events] == [12, 24, 32, 20]
    # The slowest rank sets the pace: the steady state takes as long as it does for each further microbatch.
    chain = Chain.from_arrays([1, 3], [2, 6, 0], [1, 1, 1], [1, 1], [0, 0], [0, 0, 0])
    spans = [plan_pipeline(chain, 2, AMPLE, count).timeline.makespan for count in (4, 5, 6)]
    assert [b - a for a, b in pairwise(spans)] == [9, 9]
