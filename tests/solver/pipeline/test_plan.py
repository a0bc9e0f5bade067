"""Plans for pipelines, against all cuts with all sequences, and their promise: no rank passes its limit."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, plan_pipeline, simulate, store_all
from rotor_solver.pipeline import SCHEDULES, Schedule
from rotor_solver.pipeline.cuts import _WORKING
from rotor_solver.pipeline.plan import DividedLimits
from rotor_solver.pipeline.schedules import in_flight
from tests.fields import raises
from tests.solver.pipeline import naive
from tests.solver.strategies import plain_chains

EXACT = 10**6


def uniform(length: int, size: int = 4, seconds: float = 1.0) -> Chain:
    """Stages that take `seconds` forward and twice as long backward, and keep two outputs."""
    lists = [seconds] * length, [2 * seconds] * length + [0.0], [size] * (length + 1), [2 * size] * length
    return Chain.from_arrays(*lists, [0] * length, [0] * (length + 1))


def best_of_all(chain: Chain, limits: tuple[int, ...], counts: list[int], fixed: list[int], left: bool) -> float:
    best = math.inf
    for cuts in naive.all_cuts(len(chain), len(limits)):
        seconds = []
        for (begin, end), limit, count in zip(cuts, limits, counts, strict=True):
            part = naive.cut_off(chain, begin, end)
            beside = sum(fixed[begin:end]) + (sum(part.gradient) if left else 0)
            seconds.append(naive.fastest(part, limit - beside, count))
        best = min(best, max(seconds))
    return best


FEW = st.integers(1, 3)
NAMES, FIXED = st.sampled_from(("gpipe", "1f1b")), st.tuples(*[st.integers(0, 5)] * 5)
SHARES = st.tuples(*[st.floats(0.2, 1.2)] * 3)


@settings(deadline=None, max_examples=12)
@given(plain_chains(4), NAMES, FEW, st.integers(1, 4), FIXED, SHARES, st.booleans())
def test_no_cuts_and_no_sequences_are_better(chain, name, ranks, microbatches, fixed, shares, gradients) -> None:
    assume(len(chain) >= ranks)
    if gradients:
        chain = replace(chain, stages=tuple(replace(each, gradient=2) for each in chain.stages))
    fixed = fixed[: len(chain)]
    full = simulate(chain, store_all(chain)).peak + sum(fixed)
    limits = tuple(int(share * full) for share in shares[:ranks])
    counts = [each.forwards for each in in_flight(Schedule(name, ranks, microbatches))]
    best = best_of_all(chain, limits, counts, fixed, microbatches > 1)
    try:
        plan = plan_pipeline(chain, ranks, limits, microbatches, name, fixed=fixed, slots=EXACT)
    except InfeasibleError as error:
        assert best == math.inf
        more = error.min_bytes - error.mem_limit
        assert more > 0
        enough = tuple(limit + more for limit in limits)
        assert plan_pipeline(chain, ranks, enough, microbatches, name, fixed=fixed).fits
        assert best_of_all(chain, tuple(each - 1 for each in enough), counts, fixed, microbatches > 1) == math.inf
        return
    assert plan.slowest_seconds == pytest.approx(best)
    assert plan.lower_bound == pytest.approx(best)
    assert plan.fits


WAYS = [("interleaved", 2), ("interleaved", 3), *((name, 1) for name in SCHEDULES if name != "interleaved")]


@settings(deadline=None, max_examples=10)
@given(plain_chains(8), st.sampled_from(WAYS), FEW, FEW, st.floats(0.1, 2.0), st.booleans(), st.integers(1, 40))
def test_no_rank_of_the_simulated_step_passes_its_limit(chain, way, ranks, rounds, share, buffers, slots) -> None:
    name, virtual = way
    assume(len(chain) >= ranks * virtual)
    limit = int(share * simulate(chain, store_all(chain)).peak * ranks)
    fixed = [each % 3 for each in range(len(chain))]
    arguments = (rounds * ranks, name)
    more = {"fixed": fixed, "virtual_stages": virtual, "buffers": buffers, "slots": slots}
    try:
        plan = plan_pipeline(chain, ranks, limit, *arguments, **more)
    except InfeasibleError as error:
        plan = plan_pipeline(chain, ranks, error.min_bytes, *arguments, **more)
    assert [(part.begin, part.end) for part in plan.parts] == [*pairwise((0, *plan.cuts, len(chain)))]
    assert [part.rank for part in plan.parts] == [number % ranks for number in range(ranks * virtual)]
    assert plan.fits
    for rank in range(ranks):
        assert plan.timeline.peaks[rank] <= sum(part.peak_bytes for part in plan.parts_of(rank))


def test_later_ranks_get_more_stages_where_memory_is_short_within_their_limits_and_parts_begin_where_they_may() -> None:
    """They keep fewer microbatches in flight, and so recompute less."""
    plan = plan_pipeline(uniform(24), 4, 160, 8, slots=EXACT)
    lengths = [part.end - part.begin for part in plan.parts]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert plan.timeline.peaks == tuple(part.peak_bytes for part in plan.parts)
    assert plan_pipeline(uniform(24), 4, 10**6, 8).cuts == (6, 12, 18)
    plan = plan_pipeline(uniform(12), 2, (60, 10**4), 4, slots=EXACT)
    assert plan.cuts[0] < 6
    assert plan.timeline.peaks[0] <= 60
    chain = uniform(12)
    assert plan_pipeline(chain, 3, 10**6, 3, boundaries=(2, 3, 11)).cuts == (3, 11)
    skip = list(chain.stages)  # stage 8 leaves the gradient of what stage 2 made
    skip[8], skip[2] = replace(skip[8], gradient=4), replace(skip[2], gradient=-4)
    cuts = plan_pipeline(replace(chain, stages=tuple(skip)), 2, 10**6, 2).cuts
    assert cuts in ((2,), (9,))


def test_what_waits_for_the_weights_and_gradients_that_the_first_microbatch_leaves_are_counted() -> None:
    """Rank 1 of zero-bubble keeps all that a microbatch saved until the backward for the weights."""
    chain = uniform(4)
    first, second = plan_pipeline(chain, 2, 10**6, 4, "zero-bubble").parts
    assert not first.flying.split
    # Two inputs of stages and their ā, and the gradients of two outputs.
    assert second.waiting_bytes == 4 + 2 * 8 + 2 * 4
    assert second.peak_bytes == second.microbatch.peak_bytes + second.waiting_bytes
    chain = replace(chain, stages=tuple(replace(each, gradient=100) for each in chain.stages))
    alone, several = (plan_pipeline(chain, 2, 10**6, count).parts[0] for count in (1, 2))
    assert (alone.left_bytes, several.left_bytes) == (0, 200)


@settings(deadline=None, max_examples=6)
@given(plain_chains(max_stages=6), st.floats(0.3, 1.5))
def test_where_a_rank_has_several_parts_the_slowest_part_is_as_fast_as_its_share_allows(chain, share) -> None:
    assume(len(chain) >= 4)
    limit = int(share * simulate(chain, store_all(chain)).peak)
    schedule = Schedule("interleaved", 2, 2, 2)
    best = []
    for working in _WORKING:
        budget = DividedLimits(schedule, (limit, limit), (0,) * len(chain), working=working)
        shares, rooms = ([each(number) for number in range(4)] for each in (budget.share, budget.room))
        assert all(shares[rank] + shares[rank + 2] + rooms[rank] <= limit for rank in range(2))
        best.append(math.inf)
        for cuts in naive.all_cuts(len(chain), 4):
            seconds = [
                naive.fastest_with_room(naive.cut_off(chain, *cut), shares[number] // flying.forwards, rooms[number])
                for number, (cut, flying) in enumerate(zip(cuts, budget.flying, strict=True))
            ]
            best[-1] = min(best[-1], max(seconds))
    if min(best) == math.inf:
        with pytest.raises(InfeasibleError):
            plan_pipeline(chain, 2, limit, 2, "interleaved")
        return
    plan = plan_pipeline(chain, 2, limit, 2, "interleaved", slots=EXACT)
    assert max(part.microbatch.seconds for part in plan.parts) in [pytest.approx(each, rel=0.01) for each in best]


@pytest.mark.parametrize(
    ("arguments", "more", "kind", "name"),
    [
        ((4, 100, 4), {}, "too_few_stages", None),
        ((2, 100, 4, "interleaved"), {}, "too_few_stages", None),
        ((3, 100, 4), {"boundaries": [1]}, "too_few_stages", None),
        ((2, 100, 4, "dualpipe"), {}, "unknown_value", "schedule"),
        ((0, 100, 2), {}, "not_a_count", "ranks"),
        ((2, 100, True), {}, "not_a_count", "microbatches"),
        ((2, 100, 2, "1f1b"), {"virtual_stages": 2}, "one_part_per_rank", "virtual_stages"),
        ((4, 100, 9, "interleaved"), {}, "not_divisible", "microbatches"),
        ((2, (100, 100, 100), 4), {}, "wrong_length", "limits"),
        ((2, -1, 4), {}, "negative", "mem_limit"),
        ((2, 100, 4), {"fixed": [1]}, "wrong_length", "fixed"),
        ((2, 100, 4), {"boundaries": [7]}, "no_such_stage", "boundaries"),
        ((2, 100, 4), {"slots": 0}, "not_a_count", "slots"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: tuple, more: dict, kind: str, name: str | None) -> None:
    with raises(ValueError, kind, name=name):
        plan_pipeline(uniform(3), *arguments, **more)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_least_limit_is_a_matter_of_bytes_and_not_of_times(schedule: str) -> None:
    sizes = [3, 5, 2, 6, 4, 3], [6, 4, 9, 5, 8], [1, 0, 2, 0, 1], [0, 1, 0, 2, 0, 1]
    times = ([1.0] * 5, [2.0] * 6), ([9.0, 1.0, 0.1, 4.0, 2.0], [0.0, 7.0, 1.0, 0.2, 3.0, 1.0])
    chains = [Chain.from_arrays(*each, *sizes) for each in times]
    found = set()
    for chain in chains:
        with raises(InfeasibleError, "limit_too_small", mem_limit=1) as caught:
            plan_pipeline(chain, 2, 1, 4, schedule, fixed=[4, 0, 3, 1, 2])
        found.add(caught.value.min_bytes)
    (least,) = found
    for chain in chains:
        assert plan_pipeline(chain, 2, least, 4, schedule, fixed=[4, 0, 3, 1, 2]).fits
        with pytest.raises(InfeasibleError):
            plan_pipeline(chain, 2, least - 1, 4, schedule, fixed=[4, 0, 3, 1, 2])
