"""Timetables of copies: inside the limit at any speed, and the best there are for what moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Option, Sequence, Stage, simulate, store_all
from rotor_solver.moving import Link, plan_moves, simulate_moves
from tests.solver.moving.chains import LINKS, moving_chains, tiny_chains
from tests.solver.moving.naive import all_sequences, best_timetable, possible_trips

EVEN_STAGE = Stage(1, (Option(1.0, 2.0, 10), Option(1.0, 2.0, 2, moved=8)))
EVEN_CHAIN = Chain((EVEN_STAGE,) * 4, 1)
SEQUENCE = Sequence.parse("Fe_0^1, Fe_1^1, Fe_2^1, Fe_3, L, B_3, B_2, B_1, B_0")


def a_limit(data: st.DataObject, chain: Chain, sequence: Sequence) -> int:
    """From what the sequence needs if all that may move is moved, one at a time, to what it needs if all stays."""
    most = simulate(chain, sequence).peak
    try:
        plan_moves(chain, sequence, Link(1.0, 1.0), 0)
    except InfeasibleError as error:
        return data.draw(st.integers(error.min_bytes, most))
    return most


@settings(deadline=None)
@given(st.data(), moving_chains(4), LINKS, LINKS)
def test_the_limit_holds_at_any_speed(data: st.DataObject, chain: Chain, planned: Link, real: Link) -> None:
    sequence = data.draw(st.sampled_from(list(all_sequences(chain))[:50]))
    limit = a_limit(data, chain, sequence)
    moves = plan_moves(chain, sequence, planned, limit)
    for link in (planned, real, Link(1e-9, 1e-9), Link(1e12, 1e12)):
        assert simulate_moves(chain, sequence, moves, link).peak <= limit


@settings(deadline=None)
@given(st.data(), tiny_chains(3), LINKS)
def test_no_timetable_of_the_same_trips_is_faster(data: st.DataObject, chain: Chain, link: Link) -> None:
    sequence = data.draw(st.sampled_from(list(all_sequences(chain))))
    limit = a_limit(data, chain, sequence)
    moves = plan_moves(chain, sequence, link, limit)
    trips = [trip for trip in possible_trips(chain, sequence) if sequence[trip[0]].stage in moves.stages]
    seconds = simulate_moves(chain, sequence, moves, link).makespan
    assert seconds == pytest.approx(best_timetable(chain, sequence, trips, limit, link))


@settings(deadline=None)
@given(st.data(), tiny_chains(3), LINKS)
def test_what_moves_cannot_stay_without_loss(data: st.DataObject, chain: Chain, link: Link) -> None:
    sequence = data.draw(st.sampled_from(list(all_sequences(chain))))
    limit = a_limit(data, chain, sequence)
    moves = plan_moves(chain, sequence, link, limit)
    trips = [trip for trip in possible_trips(chain, sequence) if sequence[trip[0]].stage in moves.stages]
    seconds = simulate_moves(chain, sequence, moves, link).makespan
    for trip in trips:
        assert best_timetable(chain, sequence, [each for each in trips if each != trip], limit, link) > seconds


def test_what_was_slow_to_keep_stays_once_the_link_has_less_to_carry() -> None:
    # Activation, seconds forward and backward, and bytes that move. With the last stages' bytes on the link as well,
    # it took 27.75 s where stage 1 moved, and 27.5 s where it stayed.
    costs = [(2, 1.0, 0.0, 4), (0, 2.0, 1.0, 1), (0, 0.0, 2.0, 8), (2, 0.5, 3.0, 1), (0, 0.0, 0.0, 3)]
    stages = [Stage(kept, (Option(there, back, kept, moved=moved),)) for kept, there, back, moved in costs]
    chain, link = Chain(tuple(stages), 3), Link(4.0, 0.5)
    sequence = store_all(chain)
    moves = plan_moves(chain, sequence, link, 18)
    assert 1 not in moves.stages
    assert simulate_moves(chain, sequence, moves, link).makespan <= 27.5


def test_nothing_moves_where_all_fits() -> None:
    moves = plan_moves(EVEN_CHAIN, SEQUENCE, Link(8.0, 8.0), 43)
    assert not moves.stages
    assert simulate_moves(EVEN_CHAIN, SEQUENCE, moves, Link(8.0, 8.0)).peak == 43


def test_stages_far_from_the_loss_move_first() -> None:
    moves = plan_moves(EVEN_CHAIN, SEQUENCE, Link(8.0, 8.0), 36)
    assert moves.stages == {0}
    assert moves.wait_out[3] == (0,), "as late as possible: before the fourth stage makes its 10 bytes"
    assert moves.fetch[6] == (0,), "as early as possible: once the last stage has gone backward"
    assert simulate_moves(EVEN_CHAIN, SEQUENCE, moves, Link(8.0, 8.0)).makespan == 12.0


def test_a_sequence_that_needs_more_is_refused_with_what_it_needs() -> None:
    with pytest.raises(
        InfeasibleError, match="the sequence needs 19 bytes, whatever it moves; the limit is 18"
    ) as info:
        plan_moves(EVEN_CHAIN, SEQUENCE, Link(1.0, 1.0), 18)
    assert info.value.min_bytes == 19
