"""Limits, certificates, bad questions, several solves at once, and which files know the algorithms."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Persistent, min_bytes, recompute_all, simulate, solve, store_all
from rotor_solver.segments import RecomputeAll, StoreAll
from tests.fields import raises
from tests.solver.naive import naive_optimum
from tests.solver.plans import makespan
from tests.solver.strategies import limited, rich_chains, unit_chain

ROOT = Path(__file__).resolve().parents[2]


@settings(max_examples=40, deadline=None)
@given(limited(rich_chains(max_stages=6)), st.integers(1, 12))
def test_coarse_slots_never_break_the_limit_and_the_bound_holds(case: tuple[Chain, int], slots: int) -> None:
    optimum = naive_optimum(*case)
    assert optimum <= makespan(Persistent(slots), *case)
    if math.isfinite(optimum):
        assert solve(*case, slots=slots).lower_bound <= optimum


@settings(max_examples=30, deadline=None)
@given(rich_chains(max_stages=7), st.integers(10**6, 10**9), st.data())
def test_sizes_that_no_slot_divides(chain: Chain, factor: int, data: st.DataObject) -> None:
    """Sizes in real bytes: the plan fits, and what is lost to slots is bounded by the certificate."""
    length, times = len(chain), (chain.forward_time, chain.backward_time)
    sizes = data.draw(st.lists(st.integers(0, factor), min_size=length + 1, max_size=length + 1))
    saved, backward_temp = [size + factor // 3 for size in sizes[1:]], [factor // 5] * length + [3]
    real = Chain.from_arrays(*times, sizes, saved, [factor // 7] * length, backward_temp)
    limit = data.draw(limited(st.just(real), below=0))[1]
    optimum = naive_optimum(real, limit)
    assert solve(real, limit).lower_bound <= optimum * (1 + 1e-9)
    assert makespan(Persistent(), real, limit) <= optimum * 1.02 + 1e-9


@settings(max_examples=40, deadline=None)
@given(rich_chains(), st.integers(0, 3))
def test_where_storing_everything_fits_exactly_it_is_what_comes_out(chain: Chain, more: int) -> None:
    stored = store_all(chain)
    assert solve(chain, simulate(chain, stored).peak + more) == stored


def test_chains_of_one_stage_of_none_and_with_one_larger_than_the_limit_have_a_least_limit() -> None:
    one = Chain.from_arrays([1], [2, 3], [10, 20], [25], [1], [2, 0])
    # B_0 needs a_0, ā_1, δ_1, δ_0 and its scratch
    assert min_bytes(one) == 10 + 25 + 20 + 10 + 2
    assert str(solve(one, min_bytes(one))) == "Fe_0, L, B_0"
    none = Chain.from_arrays([], [3], [10], [], [], [4])
    assert min_bytes(none) == 10 + 10 + 4
    assert str(solve(none, 24)) == "L"
    with pytest.raises(InfeasibleError):
        solve(none, 23)
    chain = Chain.from_arrays([1] * 3, [1] * 4, [1] * 4, [1, 1000, 1], [0] * 3, [0] * 4)
    with raises(InfeasibleError, "limit_too_small", min_bytes=1004, mem_limit=500):
        solve(chain, 500)
    assert simulate(chain, solve(chain, 1004)).peak == 1004


def test_known_values_of_uniform_chains() -> None:
    for length in (2, 10, 40):
        chain = unit_chain(length)
        assert min_bytes(chain) == 5  # a_0 and, at B_i, a_i, ā_{i+1}, δ_{i+1}, δ_i
        # every stage again from the input, L(L+1)/2 forwards, but for the first two, which are stored together
        assert simulate(chain, solve(chain, 5)).makespan == length * (length + 1) / 2 - 1 + length + 1


def test_algorithms_by_name_and_as_objects() -> None:
    chain = unit_chain(6)
    assert solve(chain, 100, "store-all") == solve(chain, 100, StoreAll()) == store_all(chain)
    assert solve(chain, 5, "recompute-all") == solve(chain, 5, RecomputeAll()) == recompute_all(chain)
    assert solve(chain, 6, Persistent(slots=7)) == solve(chain, 6.9, slots=7)  # bytes are rounded down
    with raises(InfeasibleError, "limit_too_small", min_bytes=simulate(chain, store_all(chain)).peak):
        solve(chain, 5, "store-all")
    with pytest.raises(InfeasibleError):
        solve(chain, min_bytes(chain) - 1, "recompute-all")


@pytest.mark.parametrize(
    ("limit", "options", "kind", "name"),
    [
        (-1, {}, "negative", "mem_limit"),
        *((bad, {}, "not_bytes", "mem_limit") for bad in (math.nan, math.inf, "4GB", True, None)),
        (10, {"slots": 0}, "not_a_count", "slots"),
        (10, {"slots": 2.5}, "not_a_count", "slots"),
        (10, {"algorithm": "best"}, "unknown_value", "algorithm"),
    ],
)
def test_bad_questions_are_refused_in_words(limit, options, kind: str, name: str) -> None:
    with raises(ValueError, kind, name=name):
        solve(unit_chain(3), limit, **options)


def run(script: str, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    script = f"import sys; from tests.solver.strategies import unit_chain; from rotor_solver import *; {script}"
    command, environment = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_plans_are_the_same_without_the_compiler_and_torch_is_never_imported() -> None:
    script = "print(solve(unit_chain(9), 6), 'torch' in sys.modules, sep=';')"
    assert run(script, NUMBA_DISABLE_JIT="1") == f"{solve(unit_chain(9), 6)};False"
