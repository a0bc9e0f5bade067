"""The fastest sequence with several microbatches in flight, against all sequences one by one."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Option, Stage, simulate, solve, store_all
from rotor_solver.pipeline.sequences import Microbatch, bound_in_flight, fastest_in_flight, least_in_flight
from tests.fields import raises
from tests.solver.pipeline import naive
from tests.solver.strategies import plain_chains, rich_chains

EXACT = 10**6  # so many slots that each is one byte


def in_flight(chain: Chain, sequence, count: int) -> int:
    one = Microbatch.of(chain, sequence)
    return (count - 1) * one.kept_bytes + one.peak_bytes


@settings(deadline=None, max_examples=30)
@given(plain_chains(4) | rich_chains(3), st.integers(2, 4), st.floats(0, 1), st.integers(1, 12))
def test_no_sequence_is_faster_none_fits_into_less_and_with_few_slots_bounds_hold(chain, count, share, slots) -> None:
    least, at_least = least_in_flight(chain, count)
    assert least == naive.least_bytes(chain, count) == in_flight(chain, at_least, count)
    limit = least + max(0, int(share * (in_flight(chain, store_all(chain), count) - least)))
    best = naive.fastest(chain, limit, count)
    exact, coarse = (fastest_in_flight(chain, limit, count, each) for each in (EXACT, slots))
    assert (simulate(chain, exact).makespan, exact.lower_bound) == pytest.approx((best, best))
    assert max(in_flight(chain, each, count) for each in (exact, coarse)) <= limit
    assert max(coarse.lower_bound, bound_in_flight(chain, limit, count, slots)) <= best + 1e-9
    if least:
        assert bound_in_flight(chain, least - 1, count, slots) == math.inf
        with raises(InfeasibleError, "limit_too_small", min_bytes=least, mem_limit=least - 1):
            fastest_in_flight(chain, least - 1, count, slots)


def test_with_many_in_flight_little_is_kept_and_much_is_used_in_the_backward() -> None:
    """The fastest sequence within the same bytes for one microbatch alone keeps as much as it can, which is worse."""
    chain = Chain.from_arrays([1] * 4, [2] * 4 + [0], [1] * 5, [6] * 4, [0] * 4, [0] * 5)
    limit, count = 45, 5
    sequence = fastest_in_flight(chain, limit, count, EXACT)
    assert str(sequence).startswith("CF_0, Fn_1, Fn_2, Fn_3, L, Fe_0, Fe_1, Fe_2, Fe_3, B_3")
    within = (solve(chain, each) for each in range(limit, 0, -1) if each >= least_in_flight(chain, 1)[0])
    alone = next(each for each in within if in_flight(chain, each, count) <= limit)
    assert simulate(chain, alone).makespan > simulate(chain, sequence).makespan


def test_more_may_be_there_before_the_loss_than_is_kept() -> None:
    """The second stage frees what the first one saved, and saves nothing: then nothing is kept, after one byte was."""
    first, second = Stage(1, (Option(0, 0, 1),)), Stage(1, (Option(0, 0, 0),), input_released=1)
    chain = Chain((first, second), 0)
    for limit in range(naive.least_bytes(chain, 2), 6):
        best = naive.fastest(chain, limit, 2)
        assert simulate(chain, fastest_in_flight(chain, limit, 2, EXACT)).makespan == best
