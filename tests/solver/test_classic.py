"""Strategies of the literature: Revolve's closed form, distances, and the best schedule against a slow twin."""

import json
import math
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Algorithm, Chain, simulate
from rotor_solver.classic import GriewankHeterogeneous, Periodic, Revolve, Sqrt, forward_steps
from rotor_solver.floating import Floating
from tests.fields import raises
from tests.solver.naive import naive_optimum
from tests.solver.plans import forwards, least_limit, makespan, stores_only_inputs
from tests.solver.strategies import limited, plain_chains, rich_chains, unit_chain

ROWS = json.loads((Path(__file__).resolve().parents[1] / "data" / "revolve.json").read_text())["rows"]
PLENTY = 10**6
COUNTS = st.none() | st.integers(1, 6)
ALGORITHMS = st.builds(Periodic, COUNTS, COUNTS) | st.just(Sqrt()) | st.builds(Revolve, COUNTS)
HETEROGENEOUS = (GriewankHeterogeneous(), GriewankHeterogeneous(attached=True))
BOTH = pytest.mark.parametrize("attached", [False, True], ids=["inputs", "attached"])


@cache
def fewest(steps: int, snapshots: int) -> float:
    """Griewank & Walther's recurrence, forwards with a graph included."""
    if steps == 1:
        return 1
    if snapshots == 0:
        return math.inf
    return min(j + fewest(steps - j, snapshots - 1) + fewest(j, snapshots) for j in range(1, steps))


def test_forwards_are_as_many_as_published_and_as_few_as_can_be() -> None:
    for row in ROWS:
        found = forwards(Revolve(row["s"]).solve(unit_chain(row["n"]), PLENTY))
        assert found == forward_steps(row["n"], row["s"]) == row["closed_form_total"] == row["revolve_total"]
    for snapshots, steps in product((1, 2, 3, 100), range(1, 30)):
        sequence = Revolve(snapshots).solve(unit_chain(steps), PLENTY)
        assert stores_only_inputs(sequence)
        assert forwards(sequence) == forward_steps(steps, snapshots) == fewest(steps, snapshots)
    assert forward_steps(0, 3) == 0


@pytest.mark.parametrize("snapshots", [1, 3, 8])
def test_memory_is_the_snapshots_and_what_one_backward_needs(snapshots: int) -> None:
    assert least_limit(Revolve(snapshots), unit_chain(40)) == snapshots + 4
    assert Revolve().solve(unit_chain(40), snapshots + 4) == Revolve(snapshots).solve(unit_chain(40), PLENTY)


@settings(max_examples=24, deadline=None)
@given(limited(rich_chains(max_stages=6)), COUNTS, ALGORITHMS)
def test_without_a_number_it_is_the_fastest_that_fits_and_beats_no_optimum_nor_the_least(case, most, algorithm) -> None:
    (chain, limit), counts = case, range(1, len(case[0]) + 2)
    least_limit(algorithm, chain)
    assert makespan(algorithm, chain, limit) >= naive_optimum(chain, limit)
    assert makespan(Revolve(), chain, limit) == min(makespan(Revolve(count), chain, limit) for count in counts)
    best = min(makespan(Periodic(count, most), chain, limit) for count in counts)
    assert makespan(Periodic(max_checkpoints=most), chain, limit) == best


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "3"])
def test_bad_numbers_are_refused(bad: object) -> None:
    made = {"snapshots": [Revolve, partial(forward_steps, 3)], "slots": [GriewankHeterogeneous, Floating]}
    made |= {"every": [Periodic], "max_checkpoints": [partial(Periodic, None)]}
    for name, makers in made.items():
        for make in makers:
            with raises(ValueError, "not_a_count", name=name):
                make(bad)


@pytest.mark.parametrize(
    ("algorithm", "peak", "text"),
    [
        (Periodic(3), 6, "CF_0, Fn_1, Fn_2, Fe_3, L, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0"),
        (Periodic(1, 2), 7, "CF_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, Fe_0, B_0"),
        (Sqrt(), 6, "CF_0, Fn_1, Fe_2, Fe_3, L, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        # a_0, a_2, a_3, and ā_4, δ_4, δ_3 at B_3
        (Revolve(2), 6, "CF_0, Fn_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"),
        (HETEROGENEOUS[0], 7, "CF_0, CF_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0"),
        # at B_3: a_0, ā_1 with a_1 inside, a_3, ā_4, δ_4, δ_3
        (HETEROGENEOUS[1], 6, "Fe_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, B_0"),
    ],
    ids=repr,
)
def test_schedules_that_can_be_checked_by_hand(algorithm: Algorithm, peak: int, text: str) -> None:
    sequence = algorithm.solve(unit_chain(4), peak)
    assert (str(sequence), simulate(unit_chain(4), sequence).peak) == (text, peak)


@pytest.mark.parametrize("length", [1, 3, 16, 101])
def test_sqrt_runs_all_but_the_last_of_about_sqrt_segments_twice(length: int) -> None:
    chain, segments = unit_chain(length), round(math.sqrt(length))
    sequence, last = Sqrt().solve(chain, PLENTY), math.ceil(length / segments)
    assert forwards(sequence) == 2 * length - last
    # the other checkpoints, the segment, and at its last backward two gradients
    assert simulate(chain, sequence).peak <= segments + last + 3


@BOTH
@settings(max_examples=24, deadline=None)
@given(case=limited(rich_chains() | plain_chains()), slots=st.integers(1, 12))
def test_schedules_are_as_fast_as_the_recurrence_says(attached: bool, case: tuple[Chain, int], slots: int) -> None:
    best = naive_optimum(*case, attached)
    assert makespan(GriewankHeterogeneous(attached=attached), *case) == best >= naive_optimum(*case)
    coarse = makespan(GriewankHeterogeneous(slots, attached), *case)
    assert best <= coarse
    assert math.isinf(best) == math.isinf(coarse)
    if not attached:
        assert best <= makespan(Revolve(), *case)
        assert math.isinf(best) or stores_only_inputs(GriewankHeterogeneous().solve(*case))
    least = least_limit(GriewankHeterogeneous(attached=attached), case[0])
    assert math.isinf(naive_optimum(case[0], least - 1, attached))


@BOTH
def test_scratch_of_forwards_without_a_graph_counts_beside_gradients(attached: bool) -> None:
    """Chains in which little else decides; hypothesis seldom finds them."""
    draw = np.random.default_rng(3)
    for _ in range(25):
        length = int(draw.integers(3, 6))
        times, temps = ([draw.integers(0, most, length + more) for more in (0, 1)] for most in (6, 4))
        sizes = draw.integers(0, 7, length + 1)
        saved, scratch = sizes[1:] + draw.integers(0, 4, length), draw.choice([0, 0, 12], length)
        chain = Chain.from_arrays(*times, sizes, saved, *temps, nograd_temp=scratch)
        least = least_limit(GriewankHeterogeneous(attached=attached), chain)
        for limit in range(least - 1, least + 4):
            found = makespan(GriewankHeterogeneous(attached=attached), chain, limit)
            assert found == naive_optimum(chain, limit, attached)


@BOTH
def test_sizes_in_real_bytes(attached: bool) -> None:
    sizes = [(7919 * k * k) % 1_000_003 for k in range(1, 14)]
    chain = Chain.from_arrays([1.0] * 12, [2.0] * 13, sizes, [3 * size for size in sizes[1:]], [5] * 12, [7] * 13)
    least = least_limit(GriewankHeterogeneous(attached=attached), chain)
    for limit in range(least, 2 * least, least // 4):
        best = naive_optimum(chain, limit, attached)
        assert best <= makespan(GriewankHeterogeneous(attached=attached), chain, limit) <= 1.05 * best
