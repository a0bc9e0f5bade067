"""The compiled program against its slow twins, and against the simulator."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, min_bytes, recompute_all, simulate, solve, store_all
from tests.solver.naive import exhaustive_optimum, naive_optimum
from tests.solver.strategies import plain_chains, rich_chains


def solved(chain: Chain, limit: int) -> float:
    """The makespan of the plan, once its peak and its bound are checked; infinite where there is no plan."""
    try:
        sequence = solve(chain, limit)
    except InfeasibleError:
        return math.inf
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.lower_bound == pytest.approx(result.makespan)  # one byte per slot: nothing is rounded
    return result.makespan


def a_limit(data: st.DataObject, chain: Chain) -> int:
    return data.draw(st.integers(0, simulate(chain, store_all(chain)).peak + 2), label="limit")


@settings(max_examples=150, deadline=None)
@given(plain_chains(), st.data())
def test_plans_are_as_fast_as_the_best_of_all_persistent_sequences(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    assert solved(chain, limit) == exhaustive_optimum(chain, limit, persistent=True)


def test_an_input_made_for_later_is_a_checkpoint_to_the_search_too() -> None:
    """CF_0, Fn_1, CF_0, Fn_2 … Fn_1 would keep a_1 without counting as a checkpoint of it."""
    chain = Chain.from_arrays([9, 1, 1, 1], [0] * 5, [0, 1, 3, 6, 1], [2, 4, 6, 4], [12, 0, 0, 0], [0] * 5)
    assert math.isinf(exhaustive_optimum(chain, 18, persistent=True))
    assert exhaustive_optimum(chain, 18, persistent=False) == 24
    assert min_bytes(chain) == 19


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(rich_chains(), st.data())
def test_plans_are_as_fast_as_the_recurrence_says(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    assert solved(chain, limit) == naive_optimum(chain, limit)


@settings(max_examples=150, deadline=None)
@given(rich_chains())
def test_the_least_limit_works_and_one_byte_less_does_not(chain: Chain) -> None:
    least = min_bytes(chain)
    assert math.isfinite(naive_optimum(chain, least))
    assert math.isinf(naive_optimum(chain, least - 1))
    assert simulate(chain, solve(chain, least)).peak == least
    assert simulate(chain, recompute_all(chain)).peak == least


@settings(max_examples=100, deadline=None)
@given(rich_chains(max_stages=4))
def test_more_memory_is_never_slower(chain: Chain) -> None:
    limits = range(min_bytes(chain), simulate(chain, store_all(chain)).peak + 2)
    makespans = [solved(chain, limit) for limit in limits]
    assert makespans == sorted(makespans, reverse=True)
