"""Plans for several forwards in flight, against all plans there are, and against the simulator in every order."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Option, Stage, simulate, solve, solve_in_flight
from rotor_solver.in_flight import Footprint, apart, least_in_flight, nested_chain, peaks_of, simulate_forwards
from rotor_solver.segments import recompute_all, store_all
from tests.fields import raises
from tests.solver.naive import all_sequences
from tests.solver.strategies import plain_chains, rich_chains


def small(chain: Chain) -> Chain:
    """Its gradients are there before the step."""
    stages = tuple(replace(stage, gradient=0, options=stage.options[:2]) for stage in chain.stages)
    return replace(chain, stages=stages)


CHAINS = (plain_chains(3) | rich_chains(3)).filter(len).map(small)


@settings(max_examples=12, deadline=None)
@given(CHAINS, st.integers(1, 3), st.sampled_from(("any", "reverse")), st.floats(0, 1))
def test_no_joint_plan_beats_the_bound_or_needs_less(chain: Chain, forwards: int, order: str, share: float) -> None:
    footprints = {Footprint.of(chain, each) for each in all_sequences(chain)}
    if len(footprints) > 6:
        forwards = min(forwards, 2)
    joined = [list(each) for each in product(footprints, repeat=forwards)]
    peaks = [max(peaks_of(each, order)) for each in joined]
    least = least_in_flight(chain, forwards, order)
    assert (min(peaks) == least) if order == "any" else (min(peaks) <= least)
    limit = least + int(share * (max(peaks) - least))
    best = min(sum(each.makespan for each in one) for one, peak in zip(joined, peaks, strict=True) if peak <= limit)
    plan = solve_in_flight(chain, limit, forwards, order)
    assert max(peaks_of([Footprint.of(chain, each) for each in plan.sequences], order)) <= plan.peak <= limit
    assert plan.makespan == sum(simulate(chain, each).makespan for each in plan.sequences)
    assert plan.lower_bound <= best + 1e-9
    assert best <= plan.makespan + 1e-9
    if order == "reverse":
        assert plan.makespan == pytest.approx(best)
    else:
        assert len(set(plan.sequences)) == 1
    if least:
        with raises(InfeasibleError, "limit_too_small", min_bytes=least):
            solve_in_flight(chain, least - 1, forwards, order)


@settings(max_examples=16, deadline=None)
@given(CHAINS, st.data())
def test_the_peak_holds_in_every_order(chain: Chain, data: st.DataObject) -> None:
    sequences = list(all_sequences(chain))
    chosen = [data.draw(st.sampled_from(sequences)) for _ in range(2)]
    footprints = [Footprint.of(chain, each) for each in chosen]
    orders = set(permutations([0, 0, 0, 1, 1, 1]))
    assert max(simulate_forwards(chain, chosen, order).peak for order in orders) <= max(peaks_of(footprints, "any"))
    # In reverse: the second forward is over before the backward of the first begins. Losses may come at any time.
    nested = [each for each in orders if each[0] == each[-1] == 0]
    assert max(simulate_forwards(chain, chosen, order).peak for order in nested) <= max(peaks_of(footprints, "reverse"))


@settings(max_examples=16, deadline=None)
@given(CHAINS, st.integers(2, 3), st.floats(0, 1))
def test_the_nested_chain_counts_what_forwards_in_reverse_hold(chain: Chain, forwards: int, share: float) -> None:
    little, much = (nested_chain(chain, forwards, at_most=most) for most in (False, True))
    least, whole = (simulate(little, each(little)).peak for each in (recompute_all, store_all))
    sequence = solve(little, int(least + share * (whole - least)))
    there = range(forwards)
    back = there[::-1]
    # Each loss right before its backward, or right after its forward: then the gradient of its output waits, too.
    orders = [*there, *(each for each in back for _ in range(2))], [*(each for each in there for _ in range(2)), *back]
    parts = apart(sequence, len(chain), forwards)
    taken = max(simulate_forwards(chain, parts, order).peak for order in orders)
    # `peaks_of` takes every loss to wait as long as it may, as plans do.
    assert simulate(little, sequence).peak <= max(peaks_of([Footprint.of(chain, part) for part in parts], "reverse"))
    assert taken <= simulate(much, sequence).peak


def test_room_above_what_storing_everything_takes_serves_scratch_of_forwards_without_a_graph() -> None:
    stage = Stage(2, (Option(1.0, 1.0, saved=19, forward_temp=4, backward_temp=7),), nograd_temp=42)
    chain = Chain((stage,), input_bytes=2, loss_temp=2)
    least = least_in_flight(chain, 3)
    assert least == 58  # 74 with room for no more than that
    assert solve_in_flight(chain, least, 3).peak <= least


def even_chain(stages: int) -> Chain:
    sizes = [10] * (stages + 1), [40] * stages, [0] * stages, [10] * stages + [0]
    return replace(Chain.from_arrays([1] * stages, [2] * stages + [0], *sizes), output_held=True)


@pytest.mark.parametrize(("forwards", "share"), [(2, 0.1), (3, 0.4), (8, 0.8)])
def test_a_long_chain_is_planned_close_to_the_bound(forwards: int, share: float) -> None:
    chain = even_chain(24)
    least = least_in_flight(chain, forwards)
    whole = max(peaks_of([Footprint.of(chain, store_all(chain))] * forwards, "any"))
    limit = int(least + share * (whole - least))
    any_order, reverse = (solve_in_flight(chain, limit, forwards, order) for order in ("any", "reverse"))
    assert reverse.gap < 0.01
    assert any_order.gap < 0.06
    assert reverse.lower_bound <= any_order.lower_bound + 1e-9
    assert max(any_order.peak, reverse.peak) <= limit
    kept = [Footprint.of(chain, each).kept for each in reverse.sequences]
    assert kept[0] == min(kept) < kept[-1], "in reverse the first forward keeps least"


def test_what_is_no_question_is_refused() -> None:
    chain = even_chain(2)
    with raises(ValueError, "not_a_count", name="forwards"):
        solve_in_flight(chain, 1000, 0)
    with raises(ValueError, "unknown_value", name="order"):
        solve_in_flight(chain, 1000, 2, "forward")
    with raises(ValueError, "wrong_order", name="order"):
        simulate_forwards(chain, [store_all(chain)] * 2, [0, 1, 1, 0])
