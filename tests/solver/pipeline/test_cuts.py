"""Cuts against all that there are, and equal cuts."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import plan_pipeline
from rotor_solver.pipeline import equal_cuts
from rotor_solver.pipeline.cuts import best_cuts
from tests.solver.pipeline.naive import all_cuts
from tests.solver.pipeline.test_plan import uniform


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_no_cuts_are_better_and_no_cost_is_computed_twice(seed: int, parts: int, more: int, some_fail: bool) -> None:
    length = parts + more
    random = np.random.default_rng(seed)
    costs = random.integers(1, 20, (parts, length + 1, length + 1)).astype(float)
    if some_fail:
        costs[random.random(costs.shape) < 0.4] = math.inf
    guesses = np.floor(np.minimum(costs, 20) * random.random(costs.shape))
    bounds = np.where(np.tri(length + 1, dtype=bool), math.inf, guesses * 0.5)
    asked = []

    def cost(part: int, i: int, j: int) -> float:
        asked.append((part, i, j))
        return float(costs[part, i, j])

    cuts, bottleneck = best_cuts(bounds, lambda *at: float(guesses[at]), cost)
    best = min(max(costs[p, i, j] for p, (i, j) in enumerate(each)) for each in all_cuts(length, parts))
    assert bottleneck == best
    assert len(asked) == len(set(asked))
    if best == math.inf:
        assert cuts == []
    else:
        assert (cuts[0], cuts[-1]) == (0, length)
        assert max(costs[p, i, j] for p, (i, j) in enumerate(pairwise(cuts))) == best
    if not some_fail:  # where the bounds are the costs, one look at each part is enough
        asked.clear()
        assert best_cuts(np.where(np.tri(length + 1, dtype=bool), math.inf, costs), cost)[1] == best
        assert len(asked) == parts


def test_the_policies_run_what_they_say_and_fixed_bytes_count_for_them_too() -> None:
    chain = uniform(4)
    plan = plan_pipeline(chain, 2, 1000, 2)
    found = {each.policy: each.plan for each in equal_cuts(chain, plan)}
    assert found["keep everything"].fits
    assert not equal_cuts(chain, plan, fixed=[500] * 4)[0].plan.fits
    first = {policy: str(plan.parts[0].sequence) for policy, plan in found.items()}
    assert first == {
        "keep everything": "Fe_0, Fe_1, L, B_1, B_0",
        "recompute segments of 1 stages": "CF_0, CF_1, L, Fe_1, B_1, Fe_0, B_0",
        "recompute everything": "CF_0, Fn_1, L, Fe_0, Fe_1, B_1, B_0",
        "recompute the first 1 stages": "CF_0, Fe_1, L, B_1, Fe_0, B_0",
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_plan_is_never_slower_than_a_policy_that_fits(schedule: str) -> None:
    chain = uniform(9)
    for limit in (150, 1000):
        plan = plan_pipeline(chain, 3, limit, 6, schedule, slots=100)
        others = equal_cuts(chain, plan)
        assert [each.plan.slowest_seconds for each in others] == sorted(each.plan.slowest_seconds for each in others)
        for other in others:
            assert other.plan.cuts == (3, 6)
            if other.plan.fits:
                assert plan.slowest_seconds <= other.plan.slowest_seconds
