"""The persistent program against its twins: the plain recurrence, searches over all sequences, the published loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import published_plan
from rotor_solver import Chain, InfeasibleError, Sequence, min_bytes, recompute_all, simulate, solve, store_all
from rotor_solver.persistent import recurrence
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.recurrence import THOROUGH, Effort, coarse_chain, fine_sequence, optimum
from rotor_solver.persistent.table import Table
from rotor_solver.segments import even_segments
from tests.solver.long_chains import limit_between, random_chain, repeated_chain
from tests.solver.naive import exhaustive_optimum, naive_optimum
from tests.solver.strategies import plain_chains, rich_chains


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=6), st.data())
def test_the_plain_recurrence_is_what_solve_attains(chain: Chain, data: st.DataObject) -> None:
    least = min_bytes(chain)
    limit = data.draw(st.integers(least, max(least, simulate(chain, store_all(chain)).peak)), label="limit")
    best = optimum(chain, limit)
    assert best == pytest.approx(naive_optimum(chain, limit))
    assert simulate(chain, solve(chain, limit)).makespan == pytest.approx(best)
    assert optimum(chain, least - 1) == math.inf


def solved(chain: Chain, limit: int) -> float:
    """The makespan of the plan, once its peak and its bound are checked; infinite where there is no plan."""
    try:
        sequence = solve(chain, limit)
    except InfeasibleError:
        return math.inf
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.lower_bound == pytest.approx(result.makespan)  # one byte per slot: nothing is rounded
    return result.makespan


def a_limit(data: st.DataObject, chain: Chain) -> int:
    return data.draw(st.integers(0, simulate(chain, store_all(chain)).peak + 2), label="limit")


@settings(max_examples=150, deadline=None)
@given(plain_chains(), st.data())
def test_plans_are_as_fast_as_the_best_of_all_persistent_sequences(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    assert solved(chain, limit) == exhaustive_optimum(chain, limit, persistent=True)


def test_an_input_made_for_later_is_a_checkpoint_to_the_search_too() -> None:
    """CF_0, Fn_1, CF_0, Fn_2 … Fn_1 would keep a_1 without counting as a checkpoint of it."""
    chain = Chain.from_arrays([9, 1, 1, 1], [0] * 5, [0, 1, 3, 6, 1], [2, 4, 6, 4], [12, 0, 0, 0], [0] * 5)
    assert math.isinf(exhaustive_optimum(chain, 18, persistent=True))
    assert exhaustive_optimum(chain, 18, persistent=False) == 24
    assert min_bytes(chain) == 19


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(rich_chains(), st.data())
def test_plans_are_as_fast_as_the_recurrence_says(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    assert solved(chain, limit) == naive_optimum(chain, limit)


@settings(max_examples=150, deadline=None)
@given(rich_chains())
def test_the_least_limit_works_and_one_byte_less_does_not(chain: Chain) -> None:
    least = min_bytes(chain)
    assert math.isfinite(naive_optimum(chain, least))
    assert math.isinf(naive_optimum(chain, least - 1))
    assert simulate(chain, solve(chain, least)).peak == least
    assert simulate(chain, recompute_all(chain)).peak == least


@settings(max_examples=100, deadline=None)
@given(rich_chains(max_stages=4))
def test_more_memory_is_never_slower(chain: Chain) -> None:
    limits = range(min_bytes(chain), simulate(chain, store_all(chain)).peak + 2)
    makespans = [solved(chain, limit) for limit in limits]
    assert makespans == sorted(makespans, reverse=True)


@settings(max_examples=100, deadline=None)
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


ENTRIES = json.loads((Path(__file__).resolve().parents[2] / "data" / "chains.json").read_text())
SMALL = [entry for entry in ENTRIES if len(entry["forward_time"]) <= 12]


@pytest.mark.parametrize("entry", SMALL, ids=range(len(SMALL)))
def test_plans_are_as_fast_as_those_of_rotor(entry: dict[str, Any]) -> None:
    names = ("forward_time", "backward_time", "activation", "forward_temp", "backward_temp")
    chain = Chain.from_arrays(**{name: entry[name] for name in names}, saved=entry["saved"][1:])
    for point in entry["points"]:
        plan = published_plan(chain, point["limit"], slots=point["limit"])
        if point["rotor_makespan"] is None:
            assert plan is None
        else:
            assert isinstance(plan, Sequence)
            assert simulate(chain, plan).makespan == point["rotor_makespan"]


def test_published_conditions_are_too_loose_and_plans_pass_their_limit() -> None:
    """The example of docs/solver.md: while Fe_0 runs again, δ_2 is in memory, and not δ_1."""
    chain = Chain.from_arrays([1] * 3, [1] * 3 + [0], [2, 3, 5, 4], [5, 7, 4], [14, 0, 8], [0] * 4)
    plan = published_plan(chain, 24)
    assert str(plan) == "CF_0, Fn_1, Fe_2, L, B_2, Fe_0, Fe_1, B_1, B_0"
    assert plan is not None
    assert simulate(chain, plan).peak == 2 + 5 + 5 + 14
    assert str(solve(chain, 24)) == "CF_0, CF_1, Fe_2, L, B_2, Fe_1, B_1, Fe_0, B_0"
    assert simulate(chain, solve(chain, 24)).peak == 24


def test_published_conditions_are_too_strict_and_refuse_what_fits() -> None:
    chain = Chain.from_arrays([1], [1, 0], [1, 4], [4], [10], [0, 0])
    assert simulate(chain, solve(chain, 15)).peak == 15
    assert published_plan(chain, 18) is None
    assert published_plan(chain, 19) is not None


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.6])
@pytest.mark.parametrize("length", [30, 150])
def test_the_certified_gap_is_below_half_a_percent(length: int, fraction: float) -> None:
    chain = random_chain(length)
    limit = limit_between(chain, fraction)
    sequence = solve(chain, limit)
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.lower_bound is not None
    assert sequence.lower_bound <= result.makespan <= sequence.lower_bound * 1.005


@pytest.mark.parametrize("gradient", [0, 10**7])
@pytest.mark.parametrize("fraction", [0.02, 0.5])
@pytest.mark.parametrize("period", [1, 3])
def test_shared_rows_change_no_number(period: int, fraction: float, gradient: int) -> None:
    """The same table, with rows shared and with every row computed. Gradients make the later stages different."""
    plain = repeated_chain(100, period)
    stages = tuple(type(stage)(stage.activation, stage.options, gradient=gradient) for stage in plain.stages)
    chain = Chain(stages, plain.input_bytes, plain.loss_time)
    problem, room = Problem.of(chain), limit_between(chain, fraction) - chain.input_bytes
    scale = simulate(chain, problem.least_sequence()).makespan - problem.stored
    shared = Table.of(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    assert (shared.owner != np.arange(len(shared.owner))).any() == (gradient == 0)
    shared.fill()
    alone = Table.of(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    alone.owner = np.arange(len(alone.owner))
    sizes = np.maximum(0, alone.rows.high - alone.rows.begin) + 1
    position = np.cumsum(sizes) - sizes - alone.rows.begin
    alone.rows, alone.size = alone.rows._replace(position=position), int(sizes.sum())
    alone.fill()
    assert shared.later() == pytest.approx(alone.later(), rel=1e-9)
    for less in (0, room // 7, room // 3):
        assert shared.lower_bound(room - less) == pytest.approx(alone.lower_bound(room - less), rel=1e-9)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.8])
def test_repeated_blocks_are_planned_as_closely_as_others(fraction: float) -> None:
    chain = repeated_chain(120)
    limit = limit_between(chain, fraction)
    sequence = solve(chain, limit)
    assert sequence.lower_bound is not None
    assert simulate(chain, sequence).peak <= limit
    assert simulate(chain, sequence).makespan <= sequence.lower_bound * 1.005


def test_a_table_that_would_be_too_large_is_made_coarser_and_the_bound_still_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = random_chain(50)
    limit = limit_between(chain, 0.3)
    close = solve(chain, limit)
    monkeypatch.setattr(recurrence, "THOROUGH", Effort(THOROUGH.close, pairs=1e6, numbers=2**18))
    coarse = solve(chain, limit)
    assert close.lower_bound is not None
    assert coarse.lower_bound is not None
    assert simulate(chain, coarse).peak <= limit
    assert coarse.lower_bound <= close.lower_bound * (1 + 1e-9)
    assert simulate(chain, coarse).makespan >= close.lower_bound


def test_groups_of_stages_only_make_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(70)
    limit = limit_between(chain, 0.2)
    grouped = solve(chain, limit)
    monkeypatch.setattr(recurrence, "_GROUP", 1000)
    alone = solve(chain, limit)
    assert simulate(chain, alone).makespan == pytest.approx(simulate(chain, grouped).makespan, rel=0.005)
    assert alone.lower_bound is not None
    assert grouped.lower_bound is not None
    assert math.isclose(alone.lower_bound, grouped.lower_bound, rel_tol=0.005)
