"""Checkpoints at regular distances, and √L of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Algorithm, Chain, simulate, store_all
from rotor_solver.inputs_only.periodic import Periodic, Sqrt
from tests.solver.classical import forwards, least_limit, limits, makespan
from tests.solver.naive import naive_optimum
from tests.solver.strategies import rich_chains, unit_chain

PLENTY = 10**6
COUNTS = st.none() | st.integers(1, 6)
ALGORITHMS = st.builds(Periodic, COUNTS, COUNTS) | st.just(Sqrt())


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (Periodic(3), "CF_0, Fn_1, Fn_2, Fe_3, Fe_4, L, B_4, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0"),
        (Periodic(2, 2), "CF_0, Fn_1, Fe_2, Fe_3, Fe_4, L, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        (Sqrt(), "CF_0, Fn_1, Fe_2, Fe_3, Fe_4, L, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        (Periodic(2), "CF_0, Fn_1, CF_2, Fn_3, Fe_4, L, B_4, Fe_2, Fe_3, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
    ],
)
def test_what_the_schedules_look_like(algorithm: Algorithm, text: str) -> None:
    assert str(algorithm.solve(unit_chain(5), PLENTY)) == text


@pytest.mark.parametrize("algorithm", [Periodic(99), Periodic(1, 1), Periodic()])
def test_one_segment_is_storing_everything(algorithm: Algorithm) -> None:
    assert algorithm.solve(unit_chain(5), PLENTY) == store_all(unit_chain(5))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 50, 100, 101])
def test_sqrt_runs_all_but_the_last_of_about_sqrt_segments_twice(length: int) -> None:
    chain, segments = unit_chain(length), round(math.sqrt(length))
    sequence = Sqrt().solve(chain, PLENTY)
    last = math.ceil(length / segments)
    assert forwards(sequence) == 2 * length - last
    # the other checkpoints, the segment, and at its last backward two gradients
    assert simulate(chain, sequence).peak <= segments + last + 3


def test_the_distance_is_the_fastest_that_fits() -> None:
    chain = unit_chain(12)
    each = {n: simulate(chain, Periodic(n).solve(chain, PLENTY)) for n in range(1, 13)}
    least = min(result.peak for result in each.values())
    for limit in range(least, 20):
        fitting = [result.makespan for result in each.values() if result.peak <= limit]
        assert makespan(Periodic(), chain, limit) == min(fitting)
    assert least_limit(Periodic(), chain) == least


def test_chains_of_one_stage_and_of_none() -> None:
    for algorithm in (Periodic(), Periodic(1), Periodic(1, 1), Sqrt()):
        assert str(algorithm.solve(unit_chain(0), 2)) == "L"
        assert str(algorithm.solve(unit_chain(1), 4)) == "Fe_0, L, B_0"


@settings(max_examples=75, deadline=None)
@given(rich_chains(max_stages=6), ALGORITHMS, st.data())
def test_the_limit_is_kept_and_the_optimum_not_beaten(chain: Chain, algorithm: Algorithm, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    assert makespan(algorithm, chain, limit) >= naive_optimum(chain, limit)


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=7), ALGORITHMS)
def test_the_least_limit_is_exact(chain: Chain, algorithm: Algorithm) -> None:
    least_limit(algorithm, chain)


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=6), COUNTS, st.data())
def test_without_a_distance_it_is_the_fastest_of_all_that_fit(
    chain: Chain, most: int | None, data: st.DataObject
) -> None:
    limit = data.draw(limits(chain), label="limit")
    each = [makespan(Periodic(n, most), chain, limit) for n in range(1, len(chain) + 2)]
    assert makespan(Periodic(max_checkpoints=most), chain, limit) == min(each)


@pytest.mark.parametrize("bad", [0, -3, False, 1.5, "2"])
def test_bad_fields_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=f"every is {bad!r}; it has to be a whole number of stages, one or more"):
        Periodic(every=bad)
    with pytest.raises(ValueError, match=f"max_checkpoints is {bad!r}; it has to be a whole number of checkpoints"):
        Periodic(max_checkpoints=bad)
