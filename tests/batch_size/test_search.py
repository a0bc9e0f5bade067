"""The largest and the best batch from few measurements: against trying every batch."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_py.batch_size.search import Curve, Largest, StepCosts, interpolated, largest
from rotor_py.measure.budget import Budget
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_solver import Chain, Option, Stage
from rotor_solver.offload import Link

NUMBERS = {"launch": (0, 9), "work": (1, 5), "output": (1, 6), "kept": (0, 12), "weights": (0, 20), "scratch": (0, 6)}
DRAWN = {name: st.integers(*ends) for name, ends in NUMBERS.items()}
ANY_STAGE = st.fixed_dictionaries({**DRAWN, "in_part": st.booleans(), "elsewhere": st.booleans()})
LINK = Link(3.0, 2.0)
STAGES = st.lists(ANY_STAGE, min_size=1, max_size=5)


def costs_of(stages: list[dict[str, int]], batch: int, disturbed: float = 1.0) -> StepCosts:
    """A step of `batch` samples, whose measured seconds are `disturbed` by a factor. Offloads over `LINK`."""

    def seconds(launch: float, work: float) -> float:
        return disturbed * (launch + work * batch)

    def option(each: dict[str, int], kept: int, slower: float) -> Option:
        output = each["output"] * batch
        return Option(
            forward_time=seconds(each["launch"], each["work"]),
            backward_time=slower * seconds(2 * each["launch"], 2 * each["work"]),
            saved=output + kept * batch,
            forward_temp=each["scratch"] * batch + each["weights"],
            # As where the output's gradient is not there at once with all that is saved: below zero, and falling.
            backward_temp=each["weights"] - min(each["weights"], 1) * batch,
        )

    made = []
    incoming = 2 * batch
    for each in stages:
        ways = [option(each, each["kept"], 1.0)]
        output, rest = each["output"] * batch, {"input_released": incoming // 2, "name": "stage"}
        if each["in_part"]:
            ways.append(replace(option(each, each["kept"] // 2, 1.3), name="in part"))
        if each.get("elsewhere"):
            ways.append(replace(ways[0], saved=output, moved=each["kept"] * batch, name="elsewhere"))
        rest["nograd_time"] = seconds(each["launch"], 0.9 * each["work"])
        rest["skipped_output_time"] = disturbed * 0.05 * each["work"] * batch
        made.append(Stage(output, tuple(ways), nograd_temp=each["scratch"] * batch, **rest))
        incoming = output
    chain = Chain(tuple(made), 2 * batch, loss_time=seconds(1, 0.1), loss_temp=batch, output_held=True)
    link = LINK if any(each.get("elsewhere") for each in stages) else None
    budget = Budget(FixedMemory(parameters=50, batch=batch), chain, link=link)
    return StepCosts(budget, before_chain_seconds=seconds(1, 0.2))


def measured(stages: list[dict[str, int]], *batches: int) -> dict[int, StepCosts]:
    return {batch: costs_of(stages, batch) for batch in batches}


STAGE = {"launch": 5, "work": 2, "output": 3, "kept": 8, "weights": 4, "scratch": 1, "in_part": 0}
DISTURBED = st.tuples(*[st.sampled_from([1.0, 1.0, 0.8, 1.3])] * 4)


def brute_force(curve: Curve, candidates: range) -> float:
    """The least seconds for each sample: every batch has its chain interpolated, and a plan solved for."""
    costs = {batch: interpolated(curve.measured, batch) for batch in candidates}
    seconds = {batch: each.seconds_within(curve.mem_limit, curve.slots) for batch, each in costs.items()}
    return min(curve.with_optimizer(each, batch) for batch, each in seconds.items())


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(STAGES, DISTURBED, st.integers(0, 100), st.sampled_from([None, 480]), st.floats(0, 1), st.sampled_from([1, 4]))
def test_the_best_batch_is_within_two_percent_of_solving_for_all(stages, disturbed, seconds, effective, room, step):
    candidates = range(step, 41, step)
    costs = {batch: costs_of(stages, batch, by) for batch, by in zip((2, 4, 13, 40), disturbed, strict=True)}
    least, most = costs_of(stages, candidates[0]).least_bytes, costs_of(stages, 40).stored_bytes
    curve = Curve(costs, int(least + room * (most - least)), float(seconds), effective)
    best = curve.best(candidates)
    assert brute_force(curve, candidates) * (1 - 1e-9) <= curve.per_sample(best)
    assert curve.per_sample(best) <= brute_force(curve, candidates) * 1.02


def test_few_batches_of_many_are_solved_for():
    stages = [STAGE] * 5
    curve = Curve(measured(stages, 2, 4, 3000), costs_of(stages, 2000).stored_bytes, 500.0)
    best = curve.best(range(1, 3001))
    around = min(map(curve.per_sample, range(best - 40, best + 40)))
    assert len(curve.planned) < 60 + 80
    assert curve.per_sample(best) <= around * 1.005


def test_the_optimizer_step_makes_larger_batches_pay_and_accumulation_takes_that_away():
    stages = [{**STAGE, "launch": 0}] * 4
    costs, limit = measured(stages, 2, 4, 64), costs_of(stages, 20).stored_bytes
    assert Curve(costs, limit, 1000.0).best(range(1, 25)) > 20
    # Once in 480 samples, whatever the batch: nothing is gained by recomputing for a larger one.
    assert Curve(costs, limit, 1000.0, 480).best(range(1, 25)) <= 20


def test_the_curve_has_the_measured_batches_and_tells_where_everything_can_be_stored():
    stages = [STAGE] * 4
    curve = Curve(measured(stages, 2, 4, 64), costs_of(stages, 20).stored_bytes, 10.0)
    points = {point.batch: point for point in curve.points(range(1, 100), 30, {20, 21})}
    assert {1, 2, 4, 20, 21, 30} <= points.keys()
    assert max(points) == 30
    assert [batch for batch, point in points.items() if point.measured] == [2, 4]
    assert points[20].stored_per_second == pytest.approx(points[20].samples_per_second)
    assert points[21].stored_per_second is None
    assert len(points) < 30


def test_stages_that_were_cut_otherwise_have_no_costs_between_them_and_times_that_vary_give_some_beyond():
    stages = [{**STAGE, "launch": 1, "weights": 0, "in_part": 1}] * 3
    costs = measured(stages, 2, 4) | {32: costs_of(stages[:2], 32)}
    assert interpolated(costs, 8).stored_bytes == costs_of(stages, 8).stored_bytes, "on the line of those alike"
    assert interpolated(costs, 31) is None
    costs = {4: costs_of(stages, 4), 5: costs_of(stages, 5, 5.0)}
    one, many = interpolated(costs, 1), interpolated(costs, 40)
    assert one.stored_seconds == pytest.approx(costs[4].stored_seconds / 4)
    assert many.stored_seconds == pytest.approx(8 * costs[5].stored_seconds)


@pytest.mark.parametrize("batch", [1, 3, 9, 100])
def test_affine_costs_come_out_as_they_are(batch):
    stages = [{"launch": 2, "work": 3, "output": 4, "kept": 5, "weights": 6, "scratch": 1, "in_part": 1}] * 3
    found, expected = interpolated(measured(stages, 2, 4, 40), batch), costs_of(stages, batch)
    assert (found.least_bytes, found.stored_bytes) == (expected.least_bytes, expected.stored_bytes)
    inside = 2 <= batch <= 40
    assert found.stored_seconds == pytest.approx(expected.stored_seconds) or not inside
    assert found.stored_seconds >= expected.stored_seconds * (0.5 if batch < 2 else 1 - 1e-9)


LINES = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), min_size=1, max_size=4)
"""A step needs the largest of sums, each with a constant part and one per sample."""


def find(candidates: Sequence[int], needs: list[int], limit: int) -> tuple[Largest | None, list[int]]:
    """The result of `largest` if a batch needs `needs[batch]` bytes, and the batches that it measured."""
    asked: list[int] = []

    def measure(batch: int) -> int:
        asked.append(batch)
        return needs[batch]

    return largest(candidates, measure, {2: needs[2], 4: needs[4]}, limit), asked


@given(LINES, st.integers(1, 3000), st.sampled_from([range(1, 65), range(8, 65, 8), [1, 2, 3, 4, 6, 12, 24, 48]]))
def test_it_is_what_trying_every_batch_finds(lines, limit, candidates):
    needs = [max(fixed + each * batch for fixed, each in lines) for batch in range(65)]
    fitting = [batch for batch in candidates if needs[batch] <= limit]
    found, asked = find(candidates, needs, limit)
    if not fitting:
        assert found is None
        return
    assert (found.batch, found.needs) == (max(fitting), needs[max(fitting)])
    larger = [batch for batch in candidates if batch > max(fitting)]
    assert found.beyond == (larger[0] if larger else None)
    assert not larger or limit < found.beyond_bytes <= needs[larger[0]]
    assert len(asked) <= 12


@given(st.lists(st.integers(0, 40), min_size=65, max_size=65), st.integers(40, 1500))
def test_bytes_that_only_grow_are_followed_to_a_batch_that_fits_and_whose_next_was_seen_not_to(steps, limit):
    needs = [sum(steps[: batch + 1]) for batch in range(65)]
    found, _ = find(range(1, 65), needs, limit)
    if found is not None:
        assert needs[found.batch] <= limit
        assert not found.beyond_measured or needs[found.batch + 1] > limit


def test_a_law_is_measured_where_it_leads_step_by_step_so_that_a_bend_shows_and_within_the_rounding_of_an_allocator():
    found, asked = find(range(1, 1000), [100 + 7 * batch for batch in range(1000)], 100 + 7 * 14)
    assert (found, asked) == (Largest(14, 198, 15, 205), [14])
    assert find([8, 16], [100 * batch for batch in range(20)], 799) == (None, []), "none fits by the law"
    needs = [10 * batch for batch in range(100)] + [1000 * batch for batch in range(100, 1000)]
    found, asked = find(range(1, 1000), needs, 5000)
    assert (found.batch, found.beyond_measured) == (99, True)
    assert max(asked) <= 256
    needs = [-(-(1000 * batch) // 512) * 512 for batch in range(100)]
    found = largest(range(1, 100), needs.__getitem__, {batch: needs[batch] for batch in (2, 4)}, 10_240, slack=2048)
    assert (found.batch, found.beyond_measured) == (10, True)
