"""The published program that the benchmark runs against: its own recurrence, and what rotor itself answered."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import arrays, published_plan, tables
from rotor_solver import Chain, Sequence, simulate, solve
from tests.solver.strategies import SCRATCH, SIZES, TIMES

ENTRIES = json.loads((Path(__file__).resolve().parents[2] / "data" / "chains.json").read_text())
SMALL = [entry for entry in ENTRIES if len(entry["forward_time"]) <= 12]


@st.composite
def classical_chains(draw: st.DrawFn, max_stages: int = 6) -> Chain:
    length = draw(st.integers(0, max_stages))

    def several(values: st.SearchStrategy[Any], extra: int = 0) -> list[Any]:
        return draw(st.lists(values, min_size=length + extra, max_size=length + extra))

    return Chain.from_arrays(
        several(TIMES), several(TIMES, 1), several(SIZES, 1), several(SIZES), several(SCRATCH), several(SCRATCH, 1)
    )


def recursion(chain: Chain, unit: int, slots: int) -> np.ndarray:
    """The recurrence once more, as a memoised recursion: Opt by (m, i, l), infinite for i > l."""
    length = len(chain)

    def slots_of(sizes: tuple[int, ...]) -> list[int]:
        return [math.ceil(size / unit) for size in (*sizes, 0)]

    size, saved = slots_of(chain.activation), slots_of(chain.saved)
    forward_temp, backward_temp = slots_of(chain.forward_temp), slots_of(chain.backward_temp)
    forward = (*chain.forward_time, 0.0)

    @cache
    def best(i: int, last: int, m: int) -> float:
        if m < 0:
            return math.inf
        if i == last:
            needs = (
                size[i + 1] + saved[i] + forward_temp[i],
                size[i] + size[i + 1] + saved[i] + backward_temp[i],
            )
            return forward[i] + chain.backward_time[i] if m >= max(needs) else math.inf
        for k in range(i, last):
            if m < size[last + 1] + (size[k] if k > i else 0) + size[k + 1] + forward_temp[k]:
                return math.inf
        return min(
            best(i, i, m) + best(i + 1, last, m - saved[i]),
            *(sum(forward[i:j]) + best(j, last, m - size[j]) + best(i, j - 1, m) for j in range(i + 1, last + 1)),
        )

    table = np.full((slots + 1, length + 1, length + 1), np.inf)
    for m, i, last in np.ndindex(table.shape):
        if i <= last:
            table[m, i, last] = best(i, last, m)
    return table


@settings(max_examples=40, deadline=None)
@given(classical_chains(), st.integers(1, 3), st.integers(0, 40))
def test_the_loop_fills_the_table_of_its_recurrence(chain: Chain, unit: int, slots: int) -> None:
    times, _ = tables(slots, *arrays(chain, unit))
    upper = np.triu(np.ones(times.shape[1:], bool))
    assert np.array_equal(times[:, upper], recursion(chain, unit, slots)[:, upper])


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
