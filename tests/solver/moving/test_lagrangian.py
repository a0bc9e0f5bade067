"""What is moved, and the bound, against all sequences with all timetables there are."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Option, Stage, min_bytes, simulate, solve, store_all
from rotor_solver.offload import Link, lower_bound, priced, simulate_moves, solve_moving
from tests.fields import raises
from tests.solver.moving.twins import LINKS, exhaustive_moving_optimum, moving_chains, tiny_chains
from tests.solver.naive import naive_optimum

SLOW = Link(1e-9, 1e-9)


def a_limit(data: st.DataObject, chain: Chain) -> int:
    """From what is needed if all that may move is moved, to what storing everything takes."""
    return data.draw(st.integers(min_bytes(priced(chain, 0.0)), simulate(chain, store_all(chain)).peak))


@settings(max_examples=16, deadline=None)  # all sequences with all timetables
@given(st.data(), tiny_chains(3), LINKS)
def test_the_bound_is_below_every_step_and_the_plan_near_the_best(data, chain: Chain, link: Link) -> None:
    limit = a_limit(data, chain)
    plan, best = solve_moving(chain, limit, link), exhaustive_moving_optimum(chain, limit, link)
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert best <= plan.seconds * (1 + 1e-9)
    assert plan.seconds <= best * 1.25 + 1e-9
    # The bound that a plan shows is never above its own seconds. This one might be.
    prices = [part * link.seconds_per_byte for part in (0.0, 0.1, 0.3, 0.6, 1.0)]
    found = [(price, naive_optimum(priced(chain, price), limit)) for price in prices]
    assert lower_bound(chain, link, found)[1] <= best * (1 + 1e-9)


def test_the_bound_is_met_where_copies_out_take_longer_than_the_forward() -> None:
    """The first stage moves 8 bytes, in 8 s; meanwhile the second computes for 4 s. Then its backward, for 4 s."""
    moving = Stage(0, (Option(0.0, 0.0, 0, moved=8),), nograd_temp=100)
    chain = Chain((moving, Stage(0, (Option(4.0, 4.0, 2),), nograd_time=0.0)), 0, loss_temp=10)
    link = Link(1.0, 64.0)
    assert exhaustive_moving_optimum(chain, 12, link) == solve_moving(chain, 12, link).seconds == 12.0
    assert lower_bound(chain, link, [(1.0, 16.0), (0.5, 12.0)])[1] == pytest.approx(12.0)


@settings(max_examples=16, deadline=None)
@given(st.data(), moving_chains(4), LINKS, LINKS)
def test_what_was_planned_happens_inside_the_limit_and_is_no_slower_than_moving_none(data, chain, link, real) -> None:
    limit = a_limit(data, chain)
    plan = solve_moving(chain, limit, link)
    assert simulate_moves(chain, plan.sequence, plan.moves, link).makespan == plan.seconds
    assert plan.sequence.lower_bound == plan.lower_bound <= plan.seconds
    for other in (link, real, SLOW, Link(1e12, 1e12)):
        assert simulate_moves(chain, plan.sequence, plan.moves, other).peak <= limit
    if limit >= min_bytes(chain):
        still = simulate(chain, solve(chain, limit)).makespan
        assert plan.seconds <= still
        slow = solve_moving(chain, limit, SLOW)
        assert slow.seconds == still
        assert not slow.moves.stages
    least = min_bytes(priced(chain, 0.0))
    solve_moving(chain, least, link)
    if least > 0:
        with raises(InfeasibleError, "limit_too_small", min_bytes=least):
            solve_moving(chain, least - 1, link)


def test_moving_makes_limits_possible_that_recomputing_cannot_reach_and_saves_its_time() -> None:
    options = (Option(1.0, 2.0, 10, backward_temp=1), Option(1.0, 2.0, 1, backward_temp=1, moved=9))
    chain, link = Chain((Stage(1, options, nograd_temp=20),) * 4, 1), Link(9.0, 9.0)
    assert min_bytes(chain) > 18
    plan = solve_moving(chain, 18, link)
    assert plan.moves.stages
    assert simulate_moves(chain, plan.sequence, plan.moves, link).peak <= 18
    # A fast link moves for nothing what would be computed again.
    stage = Stage(1, (Option(1.0, 2.0, 10), Option(1.0, 2.0, 1, moved=9)))
    chain = Chain((stage,) * 12, 1)
    stored = simulate(chain, store_all(chain))
    limit = stored.peak // 3
    again = simulate(chain, solve(chain, limit)).makespan
    assert again > 1.2 * stored.makespan
    fast, slower = (solve_moving(chain, limit, Link(rate, rate)) for rate in (9.0, 3.0))
    assert fast.seconds == stored.makespan == fast.lower_bound < slower.seconds < again


def test_a_chain_without_stages_and_limits_that_are_none() -> None:
    chain, link = Chain((), 4, 1.0), Link(1.0, 1.0)
    plan = solve_moving(chain, 8, link)
    assert (str(plan.sequence), plan.seconds, plan.gap) == ("L", 1.0, 0.0)
    for limit, kind in ((-1, "negative"), (math.nan, "not_bytes"), ("4GB", "not_bytes")):
        with raises(ValueError, kind, name="mem_limit"):
            solve_moving(chain, limit, link)
