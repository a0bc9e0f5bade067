"""The best batch, by branch and bound: against solving for every batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_py.batch.relaxed import relaxed
from rotor_py.batch.search import TOLERANCE, Rate, Search
from tests.batch.chains import STAGES, costs_of, law_of

DISTURBED = st.tuples(*[st.sampled_from([1.0, 1.0, 0.8, 1.3])] * 4)


def brute_force(search: Search, candidates: range) -> float:
    """The least seconds for each sample: every batch has its chain interpolated, and a plan solved for."""
    found = math.inf
    for batch in candidates:
        costs = search.law.of(batch)
        assert costs is not None
        sequence = costs.plan(search.mem_limit, search.slots)
        if sequence is not None:
            found = min(found, search.rate.per_sample(costs.seconds_of(sequence), batch))
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
def test_it_is_what_solving_for_every_batch_finds_and_the_bound_is_below_all(
    stages, disturbed, optimizer_seconds, effective_batch, room, candidates
):
    law = law_of(stages, dict(zip((2, 4, 13, 40), disturbed, strict=True)))
    least, most = costs_of(stages, candidates[0]).least_bytes, costs_of(stages, 40).stored_bytes
    search = Search(law, int(least + room * (most - least)), Rate(float(optimizer_seconds), effective_batch))
    found = search.best(candidates)
    expected = brute_force(search, candidates)
    assert found.bound <= expected * (1 + 1e-9)
    assert found.bound <= found.seconds_per_sample
    # The program's own gap on top: a range is bounded by what it has proved.
    assert expected * (1 - 1e-9) <= found.seconds_per_sample <= expected * (1 + 2.5 * TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(STAGES, DISTURBED, st.data())
def test_no_batch_of_a_range_is_faster_for_each_sample_than_the_bound(stages, disturbed, data):
    search = Search(law_of(stages, dict(zip((2, 4, 13, 40), disturbed, strict=True))), 0, Rate(7.0))
    first = data.draw(st.integers(1, 40))
    last = data.draw(st.integers(first, 40))
    within = data.draw(st.integers(first, last))
    costs = search.law.of(within)
    assert costs is not None
    search.mem_limit = data.draw(st.integers(costs.least_bytes, costs.stored_bytes))
    sequence = costs.plan(search.mem_limit, 500)
    assert sequence is not None
    assert search.bound(first, last) <= search.rate.per_sample(costs.seconds_of(sequence), within) * (1 + 1e-9)


def test_few_batches_of_many_are_solved_for():
    stages = [{"launch": 5, "work": 2, "output": 3, "kept": 8, "weights": 4, "scratch": 1, "in_part": 0}] * 5
    law = law_of(stages, {2: 1.0, 4: 1.0, 3000: 1.0})
    search = Search(law, costs_of(stages, 2000).stored_bytes, Rate(500.0))
    found = search.best(range(1, 3001))
    assert found.seconds_per_sample / found.bound - 1 <= 2 * TOLERANCE
    assert len(search.planned) < 60


def test_the_optimizer_step_makes_larger_batches_pay_and_accumulation_takes_that_away():
    stages = [{"launch": 0, "work": 2, "output": 3, "kept": 8, "weights": 4, "scratch": 1, "in_part": 0}] * 4
    law, limit = law_of(stages, {2: 1.0, 4: 1.0, 64: 1.0}), costs_of(stages, 20).stored_bytes
    assert Search(law, limit, Rate(1000.0)).best(range(1, 25)).batch > 20
    # Once in 480 samples, whatever the batch: nothing is gained by recomputing for a larger one.
    assert Search(law, limit, Rate(1000.0, 480)).best(range(1, 25)).batch <= 20


def test_stages_that_were_cut_otherwise_have_no_costs_between_them():
    stages = [{"launch": 1, "work": 2, "output": 3, "kept": 8, "weights": 0, "scratch": 1, "in_part": 0}] * 3
    law = law_of(stages, {2: 1.0, 4: 1.0})
    law.measured[32] = costs_of(stages[:2], 32)
    law.batches.append(32)
    near, far = law.of(8), law.of(31)
    assert near is not None
    assert near.stored_bytes == costs_of(stages, 8).stored_bytes, "on the line of those that are alike"
    assert far is None
    chains = [law.measured[batch].chain for batch in (4, 32)]
    assert relaxed(chains, (4, 32)) is None


def test_a_range_in_which_something_held_shrinks_is_not_bounded_by_its_ends():
    stages = [{"launch": 1, "work": 2, "output": 3, "kept": 8, "weights": 0, "scratch": 1, "in_part": 0}] * 3
    small, large = costs_of(stages, 4).chain, costs_of(stages, 8).chain
    shrunk = replace(large.stages[2], activation=small.stages[2].activation - 2)
    assert relaxed([small, large], (4, 8)) is not None
    assert relaxed([small, replace(large, stages=(*large.stages[:2], shrunk))], (4, 8)) is None


def test_times_that_vary_give_costs_beyond_the_measured_batches():
    stages = [{"launch": 1, "work": 2, "output": 3, "kept": 8, "weights": 0, "scratch": 1, "in_part": 1}] * 3
    law = law_of(stages, {4: 1.0, 5: 5.0})
    one, many = law.of(1), law.of(40)
    assert one is not None
    assert many is not None
    assert one.stored_seconds == pytest.approx(law.measured[4].stored_seconds / 4)
    assert many.stored_seconds == pytest.approx(8 * law.measured[5].stored_seconds)


@pytest.mark.parametrize("batch", [1, 3, 9, 100])
def test_affine_costs_come_out_as_they_are(batch):
    stages = [{"launch": 2, "work": 3, "output": 4, "kept": 5, "weights": 6, "scratch": 1, "in_part": 1}] * 3
    found, expected = law_of(stages, {2: 1.0, 4: 1.0, 40: 1.0}).of(batch), costs_of(stages, batch)
    assert found is not None
    assert found.least_bytes == expected.least_bytes
    assert found.stored_bytes == expected.stored_bytes
    inside = 2 <= batch <= 40
    assert found.stored_seconds == pytest.approx(expected.stored_seconds) or not inside
    assert found.stored_seconds >= expected.stored_seconds * (0.5 if batch < 2 else 1 - 1e-9)
