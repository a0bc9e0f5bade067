"""Limits, certificates, bad questions, several solves at once, and which files know the algorithms."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import (
    Chain,
    InfeasibleError,
    Persistent,
    RecomputeAll,
    Sequence,
    StoreAll,
    min_bytes,
    recompute_all,
    simulate,
    solve,
    store_all,
)
from tests.fields import raises
from tests.solver.naive import exhaustive_optimum, naive_optimum
from tests.solver.strategies import plain_chains, rich_chains, unit_chain

ROOT = Path(__file__).resolve().parents[2]


@settings(max_examples=80, deadline=None)
@given(rich_chains(max_stages=6), st.integers(1, 12), st.data())
def test_coarse_slots_never_break_the_limit_and_the_bound_holds(chain: Chain, slots: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(min_bytes(chain), simulate(chain, store_all(chain)).peak), label="limit")
    sequence = solve(chain, limit, slots=slots)
    result = simulate(chain, sequence)
    optimum = naive_optimum(chain, limit)
    assert result.peak <= limit
    assert sequence.lower_bound is not None
    assert sequence.lower_bound <= optimum <= result.makespan


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=7), st.integers(10**6, 10**9), st.data())
def test_sizes_that_no_slot_divides(chain: Chain, factor: int, data: st.DataObject) -> None:
    """Sizes in real bytes: the plan fits, and what is lost to slots is bounded by the certificate."""
    sizes = data.draw(st.lists(st.integers(0, factor), min_size=len(chain) + 1, max_size=len(chain) + 1))
    real = Chain.from_arrays(
        forward_time=chain.forward_time,
        backward_time=chain.backward_time,
        activation=sizes,
        saved=[size + factor // 3 for size in sizes[1:]],
        forward_temp=[factor // 7] * len(chain),
        backward_temp=[factor // 5] * len(chain) + [3],
    )
    low, high = min_bytes(real), simulate(real, store_all(real)).peak
    limit = data.draw(st.integers(low, high), label="limit")
    sequence = solve(real, limit)
    result = simulate(real, sequence)
    assert low <= result.peak <= limit
    assert sequence.lower_bound is not None
    optimum = naive_optimum(real, limit)
    assert sequence.lower_bound <= optimum * (1 + 1e-9)
    assert result.makespan <= optimum * 1.02 + 1e-9


@settings(max_examples=100, deadline=None)
@given(rich_chains(), st.integers(0, 3))
def test_where_storing_everything_fits_exactly_it_is_what_comes_out(chain: Chain, more: int) -> None:
    stored = store_all(chain)
    assert solve(chain, simulate(chain, stored).peak + more) == stored


@settings(max_examples=25, deadline=None)
@given(plain_chains(max_stages=3), st.data())
def test_no_schedule_at_all_beats_the_certified_bound_by_dropping_checkpoints_early(
    chain: Chain, data: st.DataObject
) -> None:
    """What may drop anything at any time is never slower; that it can be faster is known, and rare."""
    limit = data.draw(st.integers(min_bytes(chain), simulate(chain, store_all(chain)).peak), label="limit")
    free = exhaustive_optimum(chain, limit, persistent=False)
    assert free <= simulate(chain, solve(chain, limit)).makespan


def test_a_chain_of_one_stage_and_of_none() -> None:
    one = Chain.from_arrays([1], [2, 3], [10, 20], [25], [1], [2, 0])
    # B_0 needs a_0, ā_1, δ_1, δ_0 and its scratch
    assert min_bytes(one) == 10 + 25 + 20 + 10 + 2
    assert str(solve(one, min_bytes(one))) == "Fe_0, L, B_0"
    none = Chain.from_arrays([], [3], [10], [], [], [4])
    assert min_bytes(none) == 10 + 10 + 4
    assert str(solve(none, 24)) == "L"
    with pytest.raises(InfeasibleError):
        solve(none, 23)


def test_a_stage_larger_than_the_limit_is_refused_with_the_least_limit() -> None:
    chain = Chain.from_arrays([1] * 3, [1] * 4, [1] * 4, [1, 1000, 1], [0] * 3, [0] * 4)
    with raises(InfeasibleError, "limit_too_small", min_bytes=1004, mem_limit=500) as caught:
        solve(chain, 500)
    assert (caught.value.min_bytes, caught.value.mem_limit) == (1004, 500)
    assert simulate(chain, solve(chain, 1004)).peak == 1004


@pytest.mark.parametrize("length", [2, 10, 40])
def test_known_values_of_uniform_chains(length: int) -> None:
    chain = unit_chain(length)
    least = min_bytes(chain)
    assert least == 5  # a_0 and, at B_i, a_i, ā_{i+1}, δ_{i+1}, δ_i
    # every stage again from the input, L(L+1)/2 forwards, but for the first two, which are stored together
    assert simulate(chain, solve(chain, least)).makespan == length * (length + 1) / 2 - 1 + length + 1


def test_algorithms_by_name_and_as_objects() -> None:
    chain = unit_chain(6)
    assert solve(chain, 100, "store-all") == solve(chain, 100, StoreAll()) == store_all(chain)
    assert solve(chain, 5, "recompute-all") == solve(chain, 5, RecomputeAll()) == recompute_all(chain)
    assert solve(chain, 6, Persistent(slots=7)) == solve(chain, 6, slots=7)
    with pytest.raises(InfeasibleError) as caught:
        solve(chain, 5, "store-all")
    assert caught.value.min_bytes == simulate(chain, store_all(chain)).peak
    with pytest.raises(InfeasibleError):
        solve(chain, min_bytes(chain) - 1, "recompute-all")


@pytest.mark.parametrize(
    ("limit", "options", "kind", "name"),
    [
        (-1, {}, "negative", "mem_limit"),
        (math.nan, {}, "not_bytes", "mem_limit"),
        (math.inf, {}, "not_bytes", "mem_limit"),
        ("4GB", {}, "not_bytes", "mem_limit"),
        (True, {}, "not_bytes", "mem_limit"),
        (None, {}, "not_bytes", "mem_limit"),
        (10, {"slots": 0}, "not_a_count", "slots"),
        (10, {"slots": 2.5}, "not_a_count", "slots"),
        (10, {"algorithm": "best"}, "unknown_value", "algorithm"),
    ],
)
def test_bad_questions_are_refused_in_words(limit, options, kind: str, name: str) -> None:
    with raises(ValueError, kind, name=name):
        solve(unit_chain(3), limit, **options)


def test_floats_of_bytes_are_rounded_down() -> None:
    chain = unit_chain(5)
    assert solve(chain, 5.9) == solve(chain, 5)


def run(script: str, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_programs_mean_the_same_without_the_compiler() -> None:
    chain = unit_chain(9)
    script = (
        "from tests.solver.strategies import unit_chain; from rotor_solver import solve; print(solve(unit_chain(9), 6))"
    )
    assert Sequence.parse(run(script, NUMBA_DISABLE_JIT="1")) == solve(chain, 6)


def test_the_solver_never_imports_torch() -> None:
    script = "import sys; from tests.solver.strategies import unit_chain; from rotor_solver import solve; "
    assert run(script + "solve(unit_chain(9), 6); print('torch' in sys.modules)") == "False"
