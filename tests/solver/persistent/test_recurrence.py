"""The plain recurrence, which is where one begins to read, says what the solver finds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, min_bytes, simulate, solve, store_all
from rotor_solver.persistent.program import optimum
from tests.solver.naive import naive_optimum
from tests.solver.strategies import rich_chains, unit_chain


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=6), st.data())
def test_the_plain_recurrence_is_what_solve_attains(chain: Chain, data: st.DataObject) -> None:
    least = min_bytes(chain)
    limit = data.draw(st.integers(least, max(least, simulate(chain, store_all(chain)).peak)), label="limit")
    best = optimum(chain, limit)
    assert best == pytest.approx(naive_optimum(chain, limit))
    assert simulate(chain, solve(chain, limit)).makespan == pytest.approx(best)
    assert optimum(chain, least - 1) == math.inf


def test_ten_stages_in_six_bytes() -> None:
    chain = unit_chain(10)
    assert optimum(chain, 6) == simulate(chain, solve(chain, 6)).makespan
