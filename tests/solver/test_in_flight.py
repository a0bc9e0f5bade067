"""Plans for several forwards in flight, against all plans there are, and against the simulator in every order."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import (
    Chain,
    InfeasibleError,
    Option,
    Stage,
    least_in_flight,
    recompute_all,
    simulate,
    simulate_forwards,
    solve,
    solve_in_flight,
    store_all,
)
from rotor_solver.in_flight import Footprint, apart, nested_chain, peaks_of
from tests.fields import raises
from tests.solver.naive import all_sequences
from tests.solver.strategies import plain_chains, rich_chains


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Chains of up to three stages, whose gradients are there before the step."""
    chain = draw(st.one_of(plain_chains(max_stages=3), rich_chains(max_stages=3)).filter(len))
    stages = tuple(replace(stage, gradient=0, options=stage.options[:2]) for stage in chain.stages)
    return replace(chain, stages=stages)


@settings(max_examples=20, deadline=None)
@given(chains(), st.integers(1, 3), st.sampled_from(("any", "reverse")), st.floats(0, 1))
def test_no_joint_plan_beats_the_bound_or_needs_less(chain: Chain, forwards: int, order: str, share: float) -> None:
    footprints = {Footprint.of(chain, each) for each in all_sequences(chain)}
    if len(footprints) > 6:
        forwards = min(forwards, 2)
    joined = [list(each) for each in product(footprints, repeat=forwards)]
    peaks = [max(peaks_of(each, order)) for each in joined]
    least = least_in_flight(chain, forwards, order)
    if order == "any":
        assert least == min(peaks)
    assert min(peaks) <= least
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
        with pytest.raises(InfeasibleError) as refused:
            solve_in_flight(chain, least - 1, forwards, order)
        assert refused.value.min_bytes == least


@settings(max_examples=25, deadline=None)
@given(chains(), st.data())
def test_the_peak_holds_in_every_order(chain: Chain, data: st.DataObject) -> None:
    sequences = list(all_sequences(chain))
    chosen = [data.draw(st.sampled_from(sequences)) for _ in range(2)]
    footprints = [Footprint.of(chain, each) for each in chosen]
    orders = set(permutations([0, 0, 0, 1, 1, 1]))
    assert max(simulate_forwards(chain, chosen, order).peak for order in orders) <= max(peaks_of(footprints, "any"))
    # In reverse: the second forward is over before the backward of the first begins. Losses may come at any time.
    nested = [each for each in orders if each[0] == each[-1] == 0]
    assert max(simulate_forwards(chain, chosen, order).peak for order in nested) <= max(peaks_of(footprints, "reverse"))


@settings(max_examples=25, deadline=None)
@given(chains(), st.integers(2, 3), st.floats(0, 1))
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


def even_chain(stages: int) -> Chain:
    return Chain((Stage(10, (Option(1.0, 2.0, 40, 0, 10),)),) * stages, 10, output_held=True)


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
    assert any_order.peak <= limit
    assert reverse.peak <= limit


def test_in_reverse_the_first_forward_keeps_least() -> None:
    chain = even_chain(12)
    plan = solve_in_flight(chain, least_in_flight(chain, 3, "reverse") * 2, 3, "reverse")
    kept = [Footprint.of(chain, each).kept for each in plan.sequences]
    assert max(kept[:-1]) < kept[-1]


def test_what_is_no_question_is_refused() -> None:
    chain = even_chain(2)
    with raises(ValueError, "not_a_count", name="forwards"):
        solve_in_flight(chain, 1000, 0)
    with raises(ValueError, "unknown_value", name="order"):
        solve_in_flight(chain, 1000, 2, "forward")
    with raises(ValueError, "wrong_order", name="order"):
        simulate_forwards(chain, [store_all(chain)] * 2, [0, 1, 1, 0])
