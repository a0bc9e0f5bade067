"""The simulator of steps that move, and when they wait and fetch."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Option, Sequence, Stage, recompute_all, simulate, store_all
from rotor_solver.offload import Link, Moves, plan_moves, simulate_moves
from tests.fields import raises
from tests.solver.moving.twins import LINKS, all_sequences, best_timetable, moving_chains, possible_trips, tiny_chains

STAGE = Stage(1, (Option(1.0, 2.0, 10), Option(1.0, 2.0, 2, moved=8)))
CHAIN = Chain((STAGE,) * 3, 1, loss_time=1.0)
TEXT = "Fe_0^1, Fe_1^1, Fe_2, L, B_2, B_1, B_0"


def moves(out: dict[int, tuple[int, ...]], back: dict[int, tuple[int, ...]], operations: int = 7) -> Moves:
    places = range(operations)
    return Moves(tuple(out.get(place, ()) for place in places), tuple(back.get(place, ()) for place in places))


@settings(deadline=None, max_examples=16)
@given(moving_chains(), LINKS)
def test_where_nothing_moves_it_is_the_simulator_and_all_bytes_are_saved(chain: Chain, link: Link) -> None:
    kept = [tuple(replace(each, saved=each.kept, moved=0) for each in stage.options) for stage in chain.stages]
    stages = (replace(stage, options=options) for stage, options in zip(chain.stages, kept, strict=True))
    stays = replace(chain, stages=tuple(stages))
    for sequence, same in ((store_all(chain), store_all(stays)), (recompute_all(chain), recompute_all(stays))):
        plain, moved = (
            simulate(chain, sequence),
            simulate_moves(chain, sequence, Moves(((),) * len(sequence), ((),) * len(sequence)), link),
        )
        assert sequence == same
        assert plain == simulate(stays, sequence)
        assert (moved.makespan, moved.peak, moved.during) == (plain.makespan, plain.peak, plain.during)
        assert moved.waiting == moved.moved == 0


def test_copies_of_one_direction_queue_and_those_of_the_other_do_not() -> None:
    sequence = Sequence.parse(TEXT)
    # Out: 0 from 1 to 5 s, 1 from 5 to 9 s; the loss waits for it, and is over at 10. Back: each takes a second.
    found = simulate_moves(CHAIN, sequence, moves({2: (0,), 3: (1,)}, {4: (1, 0)}), Link(2.0, 8.0))
    assert found.begin == (0.0, 1.0, 5.0, 9.0, 10.0, 12.0, 14.0)
    assert found.makespan == 16.0
    assert found.waiting == 3.0 + 3.0
    assert found.moved == 16
    # a_0 1; ā_1 10; while ā_2 is made, 8 of ā_1 are on their way; then both are out; then back, beside δ_3 and δ_2.
    assert found.during == (11, 21, 1 + 2 + 10 + 10, 1 + 2 + 2 + 10 + 1, 1 + 10 + 10 + 10 + 2, 1 + 10 + 10 + 2, 13)


@pytest.mark.parametrize(
    ("out", "back", "kind", "stage"),
    [
        ({0: (0,)}, {6: (0,)}, "wrong_wait", 0),
        ({2: (2,)}, {4: (2,)}, "wrong_wait", 2),
        ({5: (0,)}, {6: (0,)}, "wrong_wait", 0),
        ({2: (0,)}, {3: (0,)}, "wrong_fetch", 0),
        ({}, {6: (0,)}, "wrong_fetch", 0),
        ({2: (1,)}, {6: (1,)}, "wrong_fetch", 1),
        ({2: (0,)}, {}, "not_fetched", 0),
    ],
)
def test_moves_that_break_a_rule_are_refused(out, back, kind: str, stage: int) -> None:
    with raises(ValueError, kind, stage=stage):
        simulate_moves(CHAIN, Sequence.parse(TEXT), moves(out, back), Link(1.0, 1.0))


def test_moves_of_another_sequence_and_links_without_a_speed_are_refused() -> None:
    with raises(ValueError, "wrong_length", name="moves", needs=7):
        simulate_moves(CHAIN, Sequence.parse(TEXT), Moves(((),) * 6, ((),) * 6), Link(1.0, 1.0))
    for rates in ((0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))):
        with raises(ValueError, "not_a_rate"):
            Link(*rates)


def a_limit(data: st.DataObject, chain: Chain, sequence: Sequence) -> int:
    """From what the sequence needs if all that may move is moved, one at a time, to what it needs if all stays."""
    most = simulate(chain, sequence).peak
    try:
        plan_moves(chain, sequence, Link(1.0, 1.0), 0)
    except InfeasibleError as error:
        return data.draw(st.integers(error.min_bytes, most))
    return most


@settings(deadline=None, max_examples=16)
@given(st.data(), tiny_chains(3), LINKS)
def test_no_timetable_of_the_same_trips_is_faster_and_none_of_fewer_trips_as_fast(data, chain, link) -> None:
    sequence = data.draw(st.sampled_from(list(all_sequences(chain))))
    limit = a_limit(data, chain, sequence)
    moves = plan_moves(chain, sequence, link, limit)
    trips = [trip for trip in possible_trips(chain, sequence) if sequence[trip[0]].stage in moves.stages]
    seconds = simulate_moves(chain, sequence, moves, link).makespan
    assert seconds == pytest.approx(best_timetable(chain, sequence, trips, limit, link))
    for trip in trips:
        assert best_timetable(chain, sequence, [each for each in trips if each != trip], limit, link) > seconds


def test_nothing_moves_where_all_fits_stages_far_from_the_loss_move_first_and_what_was_slow_to_keep_stays() -> None:
    chain, link = Chain((STAGE,) * 4, 1), Link(8.0, 8.0)
    sequence = Sequence.parse("Fe_0^1, Fe_1^1, Fe_2^1, Fe_3, L, B_3, B_2, B_1, B_0")
    assert not plan_moves(chain, sequence, link, 43).stages
    moves = plan_moves(chain, sequence, link, 36)
    assert moves.stages == {0}
    assert moves.wait_out[3] == (0,), "as late as possible: before the fourth stage makes its 10 bytes"
    assert moves.fetch[6] == (0,), "as early as possible: once the last stage has gone backward"
    assert simulate_moves(chain, sequence, moves, link).makespan == 12.0
    with raises(InfeasibleError, "limit_too_small", min_bytes=19, mem_limit=18):
        plan_moves(chain, sequence, link, 18)
    # Activation, seconds forward and backward, and bytes that move. With the last stages' bytes on the link as well,
    # it took 27.75 s where stage 1 moved, and 27.5 s where it stayed.
    costs = [(2, 1.0, 0.0, 4), (0, 2.0, 1.0, 1), (0, 0.0, 2.0, 8), (2, 0.5, 3.0, 1), (0, 0.0, 0.0, 3)]
    stages = [Stage(kept, (Option(there, back, kept, moved=moved),)) for kept, there, back, moved in costs]
    chain, link = Chain(tuple(stages), 3), Link(4.0, 0.5)
    sequence = store_all(chain)
    moves = plan_moves(chain, sequence, link, 18)
    assert 1 not in moves.stages
    assert simulate_moves(chain, sequence, moves, link).makespan <= 27.5
