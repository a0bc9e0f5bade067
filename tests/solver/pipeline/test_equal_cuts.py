"""Equal cuts under one policy: what a plan is compared with."""

from __future__ import annotations

import pytest

from rotor_solver import plan_pipeline
from rotor_solver.pipeline import equal_cuts
from tests.solver.pipeline.test_plan import EXACT, uniform


def test_the_policies_run_what_they_say() -> None:
    chain = uniform(4)
    found = {each.policy: each.plan for each in equal_cuts(chain, plan_pipeline(chain, 2, 10**6, 2))}
    first = {policy: str(plan.parts[0].sequence) for policy, plan in found.items()}
    assert first == {
        "keep everything": "Fe_0, Fe_1, L, B_1, B_0",
        "recompute segments of 1 stages": "CF_0, CF_1, L, Fe_1, B_1, Fe_0, B_0",
        "recompute everything": "CF_0, Fn_1, L, Fe_0, Fe_1, B_1, B_0",
        "recompute the first 1 stages": "CF_0, Fe_1, L, B_1, Fe_0, B_0",
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_plan_is_never_slower_than_a_policy_that_fits(schedule: str) -> None:
    chain = uniform(18)
    for limit in (150, 200, 300, 500, 1000):
        plan = plan_pipeline(chain, 3, limit, 6, schedule, slots=EXACT)
        others = equal_cuts(chain, plan)
        assert [each.plan.slowest_seconds for each in others] == sorted(each.plan.slowest_seconds for each in others)
        for other in others:
            assert other.plan.cuts == (6, 12)
            if other.fits:
                assert plan.slowest_seconds <= other.plan.slowest_seconds


def test_fixed_bytes_count_for_policies_too() -> None:
    chain = uniform(4)
    plan = plan_pipeline(chain, 2, 1000, 2)
    assert equal_cuts(chain, plan)[0].fits
    assert not equal_cuts(chain, plan, fixed=[500] * 4)[0].fits
