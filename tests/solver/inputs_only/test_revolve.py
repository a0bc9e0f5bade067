"""Revolve: its closed form, and that it keeps its word on chains that it was not made for."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, simulate
from rotor_solver.inputs_only.revolve import Revolve, forward_steps
from tests.solver.classical import forwards, least_limit, limits, makespan, stores_only_inputs
from tests.solver.naive import naive_optimum
from tests.solver.strategies import rich_chains, unit_chain

ROWS = json.loads((Path(__file__).resolve().parents[2] / "data" / "revolve.json").read_text())["rows"]
PLENTY = 10**6


@cache
def fewest(steps: int, snapshots: int) -> float:
    """Griewank & Walther's recurrence, forwards with a graph included."""
    if steps == 1:
        return 1
    if snapshots == 0:
        return math.inf
    return min(j + fewest(steps - j, snapshots - 1) + fewest(j, snapshots) for j in range(1, steps))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['n']}-{row['s']}")
def test_published_numbers_of_forwards(row: dict[str, int]) -> None:
    sequence = Revolve(row["s"]).solve(unit_chain(row["n"]), PLENTY)
    assert forwards(sequence) == forward_steps(row["n"], row["s"]) == row["closed_form_total"] == row["revolve_total"]


@pytest.mark.parametrize("snapshots", range(1, 14))
def test_no_schedule_has_fewer_forwards(snapshots: int) -> None:
    for steps in range(1, 60):
        sequence = Revolve(snapshots).solve(unit_chain(steps), PLENTY)
        assert stores_only_inputs(sequence)
        assert forwards(sequence) == forward_steps(steps, snapshots) == fewest(steps, snapshots)


def test_a_schedule_that_can_be_checked_by_hand() -> None:
    text = "CF_0, Fn_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
    sequence = Revolve(2).solve(unit_chain(4), 6)
    assert str(sequence) == text
    # a_0, a_2, a_3, and ā_4, δ_4, δ_3 at B_3
    assert simulate(unit_chain(4), sequence).peak == 6


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 8])
def test_memory_is_the_snapshots_and_what_one_backward_needs(snapshots: int) -> None:
    assert least_limit(Revolve(snapshots), unit_chain(40)) == snapshots + 4
    assert Revolve().solve(unit_chain(40), snapshots + 4) == Revolve(snapshots).solve(unit_chain(40), PLENTY)


def test_steps_beyond_all_snapshots_and_none() -> None:
    assert forward_steps(0, 3) == 0
    assert str(Revolve().solve(unit_chain(0), 2)) == "L"
    assert str(Revolve(7).solve(unit_chain(1), 5)) == "Fe_0, L, B_0"
    assert forwards(Revolve(100).solve(unit_chain(5), PLENTY)) == 9


@settings(max_examples=60, deadline=None)
@given(rich_chains(), st.none() | st.integers(1, 6), st.data())
def test_the_limit_is_kept_and_the_optimum_not_beaten(chain: Chain, snapshots: int | None, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    assert makespan(Revolve(snapshots), chain, limit) >= naive_optimum(chain, limit)


@settings(max_examples=60, deadline=None)
@given(rich_chains(), st.none() | st.integers(1, 6))
def test_the_least_limit_is_exact(chain: Chain, snapshots: int | None) -> None:
    least_limit(Revolve(snapshots), chain)


@settings(max_examples=60, deadline=None)
@given(rich_chains(), st.data())
def test_without_a_number_it_is_the_fastest_of_all_numbers_that_fit(chain: Chain, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    each = [makespan(Revolve(count), chain, limit) for count in range(1, len(chain) + 2)]
    assert makespan(Revolve(), chain, limit) == min(each)


def test_more_snapshots_may_need_less_memory_where_stages_differ() -> None:
    """a_2 and a_3 are large: with two snapshots a_2 is held at the wrong time, with three it is not."""
    peaks = []
    chain = Chain.from_arrays([1] * 5, [1] * 6, [1, 1, 9, 9, 1, 1], [1, 9, 9, 1, 1], [0] * 5, [0] * 6)
    for snapshots in range(1, 5):
        with pytest.raises(InfeasibleError) as caught:
            Revolve(snapshots).solve(chain, 0)
        peaks.append(caught.value.min_bytes)
    assert peaks == [37, 38, 37, 38]


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "3"])
def test_bad_numbers_of_snapshots_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=f"snapshots is {bad!r}; it has to be a whole number of stored inputs"):
        Revolve(bad)
    with pytest.raises(ValueError, match="snapshots is"):
        forward_steps(3, bad)
