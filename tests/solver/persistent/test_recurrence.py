"""The persistent program against its twins: the plain recurrence, and searches over all sequences."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, Persistent, min_bytes, recompute_all, simulate, solve, store_all
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.recurrence import Effort, coarse_chain, fine_sequence, optimum
from rotor_solver.persistent.table import Table
from rotor_solver.segments import even_segments
from tests.solver.long_chains import limit_between, random_chain, repeated_chain
from tests.solver.naive import exhaustive_optimum, naive_optimum
from tests.solver.plans import least_limit, makespan
from tests.solver.strategies import limited, plain_chains, rich_chains


@settings(max_examples=40, deadline=None)
@given(limited(plain_chains()))
def test_plans_are_as_fast_as_the_best_of_all_persistent_sequences(case: tuple[Chain, int]) -> None:
    assert makespan(Persistent(), *case) == exhaustive_optimum(*case, persistent=True)


@settings(max_examples=60, deadline=None)
@given(limited(rich_chains(max_stages=6)))
def test_plans_bounds_and_the_least_limit_are_what_the_recurrence_says(case: tuple[Chain, int]) -> None:
    chain, found = case[0], makespan(Persistent(), *case)
    assert found == naive_optimum(*case)
    assert optimum(*case) == pytest.approx(found)
    if math.isfinite(found):  # one byte per slot: nothing is rounded
        assert solve(*case).lower_bound == pytest.approx(found)
    least = least_limit(Persistent(), chain)
    assert least == min_bytes(chain) == simulate(chain, recompute_all(chain)).peak
    assert math.isinf(naive_optimum(chain, least - 1))


@settings(max_examples=30, deadline=None)
@given(rich_chains(max_stages=8), st.integers(1, 8), st.integers(0, 60))
def test_a_coarse_sequence_fits_whenever_it_seems_to(chain: Chain, count: int, more: int) -> None:
    groups = even_segments(len(chain), count)
    coarse = coarse_chain(chain, groups)
    least = recompute_all(coarse)
    middle = solve(coarse, simulate(coarse, least).peak + more)
    for sequence in (store_all(coarse), least, middle):
        seeming, true = simulate(coarse, sequence), simulate(chain, fine_sequence(chain, groups, sequence))
        assert true.peak <= seeming.peak
        assert abs(true.makespan - seeming.makespan) < 1e-9


RUNS = Chain(tuple(stage for stage in random_chain(3, seed=4).stages for _ in range(40)), 10**7)


@pytest.mark.parametrize("fraction", [0.0, 0.003, 0.1, 0.6])
@pytest.mark.parametrize("chain", [random_chain(30), random_chain(120), repeated_chain(120), RUNS])
def test_the_certified_gap_is_below_half_a_percent(chain: Chain, fraction: float) -> None:
    limit = limit_between(chain, fraction)
    assert makespan(Persistent(), chain, limit) <= solve(chain, limit).lower_bound * 1.005


@pytest.mark.parametrize(("period", "fraction", "gradient"), [(1, 0.02, 0), (3, 0.5, 0), (3, 0.02, 10**7)])
def test_shared_rows_change_no_number(period: int, fraction: float, gradient: int) -> None:
    """The same table, with rows shared and with every row computed. Gradients make the later stages different."""
    plain = repeated_chain(100, period)
    stages = [replace(stage, gradient=gradient) for stage in plain.stages]
    stages[4] = replace(stages[4], nograd_time=7.0)  # another kind, of the same sizes
    chain = replace(plain, stages=tuple(stages))
    problem, room = Problem(chain), limit_between(chain, fraction) - chain.input_bytes
    scale = simulate(chain, problem.least_sequence()).makespan - problem.stored
    shared = Table(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    assert (shared.owner != np.arange(len(shared.owner))).any() == (gradient == 0)
    shared.fill()
    alone = Table(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    alone.owner = np.arange(len(alone.owner))
    sizes = np.maximum(0, alone.rows.high - alone.rows.begin) + 1
    position = np.cumsum(sizes) - sizes - alone.rows.begin
    alone.rows, alone.size = alone.rows._replace(position=position), int(sizes.sum())
    alone.fill()
    assert shared.later() == pytest.approx(alone.later(), rel=1e-9)
    for less in (0, room // 7, room // 3):
        assert shared.lower_bound(room - less) == pytest.approx(alone.lower_bound(room - less), rel=1e-9)


def test_smaller_tables_lose_time_but_not_the_bound() -> None:
    chain = random_chain(70)
    limit = limit_between(chain, 0.3)
    close, quick = Persistent(), Persistent(effort=Effort(0.0, pairs=1e6, numbers=2**18))
    best = makespan(close, chain, limit)
    assert quick.solve(chain, limit).lower_bound <= best
    assert makespan(quick, chain, limit) <= 1.05 * best
