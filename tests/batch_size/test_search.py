"""The best batch, by costs interpolated between measured ones: against solving for every batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_py.batch_size.search import Curve, Rate
from rotor_py.batch_size.step_costs import interpolated
from tests.batch_size.chains import STAGES, costs_of, measured

STAGE = {"launch": 5, "work": 2, "output": 3, "kept": 8, "weights": 4, "scratch": 1, "in_part": 0}
DISTURBED = st.tuples(*[st.sampled_from([1.0, 1.0, 0.8, 1.3])] * 4)


def brute_force(curve: Curve, candidates: range) -> float:
    """The least seconds for each sample: every batch has its chain interpolated, and a plan solved for."""
    found = math.inf
    for batch in candidates:
        costs = interpolated(curve.measured, batch)
        assert costs is not None
        sequence = costs.plan(curve.mem_limit, curve.slots)
        if sequence is not None:
            found = min(found, curve.rate.per_sample(costs.seconds_of(sequence), batch))
    return found


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    STAGES,
    DISTURBED,
    st.integers(0, 100),
    st.sampled_from([None, 480]),
    st.floats(0.0, 1.0),
    st.sampled_from([range(1, 41), range(4, 41, 4)]),
)
def test_the_best_batch_is_within_two_percent_of_solving_for_every_batch(
    stages, disturbed, optimizer_seconds, effective_batch, room, candidates
):
    costs = measured(stages, dict(zip((2, 4, 13, 40), disturbed, strict=True)))
    least, most = costs_of(stages, candidates[0]).least_bytes, costs_of(stages, 40).stored_bytes
    curve = Curve(costs, int(least + room * (most - least)), Rate(float(optimizer_seconds), effective_batch))
    best = curve.best(candidates)
    assert brute_force(curve, candidates) * (1 - 1e-9) <= curve.per_sample(best)
    assert curve.per_sample(best) <= brute_force(curve, candidates) * 1.02


def test_few_batches_of_many_are_solved_for():
    stages = [STAGE] * 5
    curve = Curve(measured(stages, {2: 1.0, 4: 1.0, 3000: 1.0}), costs_of(stages, 2000).stored_bytes, Rate(500.0))
    best = curve.best(range(1, 3001))
    around = min(map(curve.per_sample, range(best - 40, best + 40)))
    assert len(curve.planned) < 60 + 80
    assert curve.per_sample(best) <= around * 1.005


def test_the_optimizer_step_makes_larger_batches_pay_and_accumulation_takes_that_away():
    stages = [{**STAGE, "launch": 0}] * 4
    costs, limit = measured(stages, {2: 1.0, 4: 1.0, 64: 1.0}), costs_of(stages, 20).stored_bytes
    assert Curve(costs, limit, Rate(1000.0)).best(range(1, 25)) > 20
    # Once in 480 samples, whatever the batch: nothing is gained by recomputing for a larger one.
    assert Curve(costs, limit, Rate(1000.0, 480)).best(range(1, 25)) <= 20


def test_the_curve_has_the_measured_batches_and_tells_where_everything_can_be_stored():
    stages = [STAGE] * 4
    curve = Curve(measured(stages, {2: 1.0, 4: 1.0, 64: 1.0}), costs_of(stages, 20).stored_bytes, Rate(10.0))
    points = {point.batch: point for point in curve.points(range(1, 100), 30, {20, 21})}
    assert {1, 2, 4, 20, 21, 30} <= points.keys()
    assert max(points) == 30
    assert [batch for batch, point in points.items() if point.measured] == [2, 4]
    assert points[20].stored_per_second == pytest.approx(points[20].samples_per_second)
    assert points[21].stored_per_second is None
    assert len(points) < 30


def test_stages_that_were_cut_otherwise_have_no_costs_between_them():
    stages = [{**STAGE, "launch": 1, "weights": 0}] * 3
    costs = measured(stages, {2: 1.0, 4: 1.0}) | {32: costs_of(stages[:2], 32)}
    near = interpolated(costs, 8)
    assert near is not None
    assert near.stored_bytes == costs_of(stages, 8).stored_bytes, "on the line of those that are alike"
    assert interpolated(costs, 31) is None


def test_times_that_vary_give_costs_beyond_the_measured_batches():
    stages = [{**STAGE, "launch": 1, "weights": 0, "in_part": 1}] * 3
    costs = measured(stages, {4: 1.0, 5: 5.0})
    one, many = interpolated(costs, 1), interpolated(costs, 40)
    assert one is not None
    assert many is not None
    assert one.stored_seconds == pytest.approx(costs[4].stored_seconds / 4)
    assert many.stored_seconds == pytest.approx(8 * costs[5].stored_seconds)


@pytest.mark.parametrize("batch", [1, 3, 9, 100])
def test_affine_costs_come_out_as_they_are(batch):
    stages = [{"launch": 2, "work": 3, "output": 4, "kept": 5, "weights": 6, "scratch": 1, "in_part": 1}] * 3
    found, expected = interpolated(measured(stages, {2: 1.0, 4: 1.0, 40: 1.0}), batch), costs_of(stages, batch)
    assert found is not None
    assert found.least_bytes == expected.least_bytes
    assert found.stored_bytes == expected.stored_bytes
    inside = 2 <= batch <= 40
    assert found.stored_seconds == pytest.approx(expected.stored_seconds) or not inside
    assert found.stored_seconds >= expected.stored_seconds * (0.5 if batch < 2 else 1 - 1e-9)
